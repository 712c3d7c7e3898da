"""Tensors by name in a file of the safetensors format, which many programs read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from .store import PaperError, write_bytes


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors, and texts about them, all or nothing."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, safetensors.torch.save(kept, dict(about) if about else None))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and the texts about them."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise PaperError(f"{path}: there is no such file") from None
    except OSError as error:
        raise PaperError(f"{path}: cannot be read: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        raise PaperError(f"{path}: cut short or no safetensors file ({error}); remove it and run again") from None
