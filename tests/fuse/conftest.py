"""Runs the kernels without a GPU, too."""

from kernel_support import compiled, gpu, poisoned_memory, pytest_configure, quick_interpreter

__all__ = ["compiled", "gpu", "poisoned_memory", "pytest_configure", "quick_interpreter"]
