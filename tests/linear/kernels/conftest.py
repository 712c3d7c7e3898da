"""Runs the kernels without a GPU, too."""

from kernel_support import compiled, gpu, interpreted, poisoned_memory, pytest_configure, uncomputed

__all__ = ["compiled", "gpu", "interpreted", "poisoned_memory", "pytest_configure", "uncomputed"]
