"""Fixtures of the tests of benchmarks."""

from scripts import dry_run, precision

__all__ = ["dry_run", "precision"]
