"""Runs the kernels without a GPU, too."""

from kernel_support import pytest_configure, quick_interpreter

__all__ = ["pytest_configure", "quick_interpreter"]
