"""What tests of networks share."""

from repeating import graphs

__all__ = ["graphs"]
