"""Launching a kernel that was compiled before, without Triton's inspection of every argument.

That inspection takes longer than most kernels here. It is needed once for every way a kernel is compiled: for its
constants, for the kind of every pointer, and for the integers that it is specialised on. The first two do not change
between calls with the same constants (all tensors are float32 and begin at multiples of 16 bytes: see ``aligned``);
the integers are part of the key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST = 4096
_compiled: dict[tuple, Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple, constants: tuple, *, warps: int, integers: tuple = ()) -> None:
    """Launch so many programs of a kernel.

    Args:
        kernel: by ``triton.jit``
        arguments: tensors and numbers
        constants: the kernel's last parameters, all of them ``tl.constexpr``
        warps: of a program
        integers: those of the arguments that the kernel is specialised on
    """
    if programs == 0:
        return
    device = torch.cuda.current_device() if arguments[0].is_cuda else None
    key = (id(kernel), constants, warps, integers, device)  # a kernel's own hash is that of its source text
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*arguments, *constants)
        return
    found = kernel[(programs,)](*arguments, *constants, num_warps=warps)
    if found is not None:  # by the interpreter nothing is compiled
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = found


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
