"""Launching kernels that were compiled before, without Triton's own launch, which takes longer than most kernels here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

_MOST = 4096
#: By all that a kernel is compiled for: see ``launch``.
_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple,
    constants: tuple,
    *,
    warps: int,
    integers: tuple = (),
    registers: int | None = None,
) -> None:
    """Launch so many programs of a kernel on the device of its first argument, the current one.

    Triton compiles a kernel for its constants and options, for the dtype of every tensor and whether it begins at a multiple
    of 16 bytes, and for what it finds out about an integer: is it 1, a multiple of 16, more than 32 bits. To find that out
    at every launch takes longer than most kernels here. So a caller says it: what may differ between launches with the same
    constants is in ``integers``.

    Args:
        kernel: by ``triton.jit``
        arguments: tensors and numbers, a tensor first; float32 and ``aligned`` as far as ``integers`` do not tell
        constants: the kernel's last parameters, all of them ``tl.constexpr``
        warps: of a program
        integers: those of the arguments that the kernel is specialised on, and whatever else it is compiled for
        registers: the most of a thread; None: as many as the compiler likes
    """
    if programs == 0:
        return
    device = arguments[0].get_device()
    # By its id: a kernel's own hash is that of its source text.
    key = (id(kernel), device, constants, warps, integers, registers)
    compiled = _compiled.get(key)
    if compiled is None:
        options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
        compiled = kernel[(programs,)](*arguments, *constants, **options)
        if compiled is not None:  # by the interpreter nothing is compiled
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = compiled
    elif is_watched():
        compiled[(programs, 1, 1)](*arguments, *constants)
    else:  # what that does, but for the hooks and what they are told
        stream, function, metadata = current_stream(device), compiled.function, compiled.packed_metadata
        compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants)


def kinds(arguments: tuple) -> tuple:
    """``integers`` for tensors of any dtype that begin anywhere: all that a kernel may be compiled for."""
    return tuple([each if type(each) is int else (each.dtype, each.data_ptr() % 16 == 0) for each in arguments])


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def is_watched() -> bool:
    """Whether a profiler wants to be told of every launch of Triton's."""
    hook: Any = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def cdiv(x: int, y: int) -> int:
    """Rounded up. As Triton's, which is made for kernels and takes ten times as long; so is the next."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest one from ``n`` on, which is positive."""
    return 1 << (n - 1).bit_length()
