"""Random problems against the plain loop: is every answer right, or is the caller told?"""
