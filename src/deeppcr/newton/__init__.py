"""Newton's method on all steps at once: its settings, guesses, the iteration, what keeps it safe, and its certificate."""

from .newton import USUAL, Jacobi, Loop, Newton, Picard

__all__ = ["USUAL", "Jacobi", "Loop", "Newton", "Picard"]
