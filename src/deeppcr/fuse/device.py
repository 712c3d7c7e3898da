"""The functions that emitted source calls by name: libdevice's, or NumPy's where Triton's interpreter runs the kernel.

Triton's own ``exp`` and ``sqrt`` are quick approximations in float32; libdevice's functions are those that PyTorch is compiled
with. The interpreter knows no libdevice; its tensors hold arrays of NumPy.
"""

# Triton's annotations leave out what its interpreter does, and the names come from a table.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportUnsupportedDunderAll=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .expressions import FUNCTIONS


def _interpreted(function: Callable) -> Callable:
    """A function of NumPy as one of Triton's tensors, or of a number and one."""

    def apply(*arguments):
        from triton.runtime.interpreter import TensorHandle

        blocks = [each for each in arguments if isinstance(each, tl.tensor)]
        if len(blocks) == 2:
            blocks = arguments = tl.broadcast(*blocks)
        like = blocks[0]
        arrays = [
            each.handle.data if isinstance(each, tl.tensor) else like.handle.data.dtype.type(each) for each in arguments
        ]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*arrays), dtype=like.handle.data.dtype)
        return tl.tensor(TensorHandle(result, like.dtype.scalar), like.type)

    return apply


# The compiler looks a function of libdevice up by its name among those of the GPU at hand.
globals().update(
    {
        name: _interpreted(function) if triton.knobs.runtime.interpret else getattr(libdevice, name)
        for name, function in FUNCTIONS.items()
    }
)

__all__ = [*FUNCTIONS]
