"""What a loop is: a step, where it starts, its inputs; any of its steps at once; what it does, reaches and must not do."""

from .evaluate import StepError
from .layout import Layout
from .rows import Rowwise, rowwise
from .sequence import Sequence

__all__ = ["Layout", "Rowwise", "Sequence", "StepError", "rowwise"]
