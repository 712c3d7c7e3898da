"""Triton kernels, one file a structure. Imported only when used: nothing else needs Triton."""
