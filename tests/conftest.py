"""Fixtures of the tests of benchmarks, and the interpreter that runs kernels."""

from quicker import quick_interpreter
from scripts import dry_run, precision

__all__ = ["dry_run", "precision", "quick_interpreter"]
