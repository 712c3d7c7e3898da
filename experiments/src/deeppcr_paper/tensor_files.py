"""Tensors by name in a file of the safetensors format, which many programs read: eight bytes, a JSON header, the numbers.

It is simple enough to be written down here (https://github.com/huggingface/safetensors, "Format"), so nothing has to be
installed for it; the tests hold it against that package.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .store import PaperError, replacing

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ABOUT = "__metadata__"
#: The header is padded to a multiple of this, so that the numbers are aligned.
_ALIGNMENT = 8


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors, and texts about them, all or nothing: the file is replaced in one step, once all is on the disk."""
    header: dict[str, Any] = {_ABOUT: dict(about)} if about else {}
    kept, offset = [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        kept.append(tensor)
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in kept:
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b"")


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and the texts about them."""
    try:
        content = bytearray(path.read_bytes())
    except FileNotFoundError:
        raise PaperError(f"{path}: there is no such file") from None
    except OSError as error:
        raise PaperError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        begin = 8 + struct.unpack_from("<Q", content)[0]
        header = json.loads(content[8:begin].decode())
        about = header.pop(_ABOUT, {})
        whole = begin + max((each["data_offsets"][1] for each in header.values()), default=0)
        if len(content) != whole:
            raise ValueError(f"expected {whole:,} bytes, found {len(content):,}")
        tensors = {name: _tensor(content, begin, entry) for name, entry in header.items()}
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PaperError(f"{path}: cut short or no safetensors file ({error}); remove it and run again") from None
    return tensors, about


def _tensor(content: bytearray, begin: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"a tensor of {shape} takes no {end - start} bytes")
    if start == end:
        return torch.empty(shape, dtype=dtype)
    # A copy: the numbers of a tensor begin where its elements may, wherever they stand in the file.
    return torch.frombuffer(bytearray(content[begin + start : begin + end]), dtype=dtype).reshape(shape)
