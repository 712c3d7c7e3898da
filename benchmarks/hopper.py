"""What Triton compiles a kernel for, said without a device: an H200's compiler runs on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}


def source_for(kernel: Any, arguments: Sequence[Any]) -> ASTSource:
    """As Triton has it for these arguments: integers that are 1 become constants, multiples of 16 and what begins at one are known as such."""
    signature, constants, attributes = {}, {}, {}
    free = set(kernel.do_not_specialize or ())
    for at, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
        whole = isinstance(value, int) and name not in free
        if kernel.params[at].is_constexpr or (whole and value == 1):
            signature[name], constants[at,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[at,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if whole and value % 16 == 0:
                attributes[at,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)
