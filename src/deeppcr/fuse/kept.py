"""What was written of steps stays on the disk, beside what Triton compiled of it. A later process finds it by the graph of the step alone: to
derive tangents and cotangents, and to write them down, takes ten times as long as to read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..version import __version__
from .program import Program
from .tile_program import TileProgram

#: So many sources are remembered; then the half whose use is longest ago is forgotten. (A number that changes at every call makes one each.)
_MOST = 1024


class Source(NamedTuple):
    """The text of a module, and what its arguments ``n0``, ``n1``, ... are."""

    text: str
    numbers: list[float]


def module_name(text: str) -> str:
    return f"deeppcr_step_{_short(text.encode())}"


def key_of(program: Program | TileProgram) -> str:
    """Of all that its sources depend on: the graph with its numbers, how it was taken apart, and who writes."""
    parts, row, nodes = program.parts, program.parts.row, program.parts.row.nodes
    about = (
        _writer(), program.dtype, parts.elementwise, parts.tiled, row.states, row.inputs, row.has_rows, row.batch_dims,
        row.graph.graph.python_code("self").src,
        [(node.name, str(node.target), _values_of(node), _constant_of(row.graph, node)) for node in nodes],
    )  # fmt: skip
    return f"deeppcr_graph_{_short(repr(about).encode())}"


def recalled(key: str) -> Source | None:
    for folder in _folders():
        # It may not be there, or not whole.
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if not _is_ours(folder):
                continue
            path = folder / f"{key}.json"
            found = json.loads(path.read_text())
            text = (folder / f"{found['module']}.py").read_text()
            if module_name(text) == found["module"]:
                numbers = [float(number) for number in found["numbers"]]
                with suppress(OSError):  # on a disk that is only read nothing is forgotten
                    os.utime(path)
                return Source(text, numbers)
    return None


def remember(key: str, source: Source) -> None:
    with suppress(OSError):
        put(f"{module_name(source.text)}.py", source.text)
        path = put(f"{key}.json", json.dumps({"module": module_name(source.text), "numbers": source.numbers}))
        known = list(path.parent.glob("deeppcr_graph_*.json"))
        if len(known) > _MOST:
            for each in sorted(known, key=lambda each: each.stat().st_mtime)[: _MOST // 2]:
                each.unlink(missing_ok=True)


def put(name: str, text: str) -> Path:
    """Where a file with this text stands; written in one step, since other processes may do the same."""
    failure = OSError("there is no folder")
    for folder in _folders():
        path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(folder):
                raise PermissionError(f"{folder} belongs to another user, or others may write to it")
            if path.is_file() and path.read_bytes() == text.encode():
                return path
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            return path
        except OSError as error:
            failure = error
    raise failure


def _folders() -> Iterator[Path]:
    yield _folder()
    yield Path(tempfile.gettempdir()) / f"deeppcr-{os.getuid()}"


def _folder() -> Path:
    """Beside what Triton has compiled."""
    from triton import knobs

    return Path(knobs.cache.dir) / "deeppcr"


def _is_ours(folder: Path) -> bool:
    """Whether nobody else may change what is imported from there."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _writer() -> str:
    """Who writes: this code, by PyTorch's rules for derivatives."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return torch.__version__ + __version__ + _short(b"".join(path.read_bytes() for path in here))


def _values_of(node: fx.Node) -> list[Any]:
    return [
        (tuple(each.shape), each.dtype) if isinstance(each, Tensor) else repr(each)
        for each in pytree.tree_leaves(node.meta.get("val"))
    ]


def _constant_of(graph: fx.GraphModule, node: fx.Node) -> str:
    """Of what a graph holds itself."""
    if node.op != "get_attr":
        return ""
    found = attrgetter(str(node.target))(graph)
    if not isinstance(found, Tensor):
        return repr(found)
    return _short(found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _short(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:24]
