"""A step as a kernel: traced, and written as Triton source."""
