"""Emitted source as modules: written to disk once, so that Triton finds what it has compiled, in this process or a later one."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..compiling import with_one_lane
from ..runtime import is_capturing
from ..sequence.layout import Layout
from . import templates, tile_templates
from .expressions import NotCovered, covering
from .joints import joints_source
from .kept import Source, key_of, module_name, put, recalled, remember
from .program import Program, program_of
from .text import module_text
from .tile_program import TileProgram
from .trace import TRACING, OneRow

#: Modules of a process, by their source.
_MOST_MODULES = 256
#: Lines of the source of a narrow step, forwards and backwards, from which on it is tried on tiles: the compiler would take minutes. (A GRU of
#: 4 numbers has 868 and 2,652, for which it takes five times as long as for one of 8 on tiles.)
_LONG_FORWARD, _LONG_BACKWARD = 1_500, 2_400
#: And those from which on there are none: what the compiler takes grows with their square, and is more than a minute here. In float64, whose
#: functions are long themselves, it is two for a GRU of 8 numbers with 3,506 and 10,662.
_ENDLESS = {torch.float32: (4_000, 12_000), torch.float64: (2_000, 6_000)}


class Kernels:
    """The kernels of a program, made when they are first asked for.

    Attributes:
        program: what they compute
        shapes: what is known of runs on tensors that lie alike
    """

    def __init__(self, program: Program | TileProgram):
        self.program = program
        self._frames: Any = tile_templates if program.parts.tiled else templates
        self._numbers: dict[torch.device, tuple[int, Tensor]] = {}  # and how many they are
        self._made: dict[str, Source] = {}  # by what they are remembered, once one of them is launched
        self.shapes: dict[tuple[Any, ...], Any] = {}

    @cached_property
    def _key(self) -> str:
        return key_of(self.program)

    @cached_property
    def forward_source(self) -> str:
        return self._source("forward", self._frames.roll)

    @cached_property
    def backward_source(self) -> str:
        return self._source("backward", self._frames.sweep)

    def _source(self, what: str, write: Callable[[Any], str]) -> str:
        """Written, or found where an earlier process has left it."""
        with TRACING:
            key, numbers = f"{self._key}_{what}", self.program.code.numbers
            found = recalled(key)
            if found is not None and found.numbers[: len(numbers)] == numbers:
                numbers[:] = found.numbers
                return found.text
            text = module_text(self.program.dtype, write(self.program))
            self._made[key] = Source(text, list(numbers))
            return text

    @cached_property
    def no_gradients(self) -> str | None:
        """Why there are none by kernels; None where there are."""
        try:
            self.backward_source  # noqa: B018 - which is made here
        except Exception as reason:
            return str(reason)
        return None

    @property
    def is_long(self) -> bool:
        """Whether those of a narrow step take long to compile."""
        parts = self.program.parts
        if parts.tiled or parts.elementwise:
            return False
        backward = 0 if self.no_gradients else self.backward_source.count("\n")
        return self.forward_source.count("\n") > _LONG_FORWARD or backward > _LONG_BACKWARD

    def refuse_endless(self) -> str | None:
        """Why they would take too long to compile; None where they do not. Those of gradients alone are left out."""
        if self.program.parts.tiled:
            return None
        forward, backward = _ENDLESS[self.program.dtype]
        if not self.no_gradients and (lines := self.backward_source.count("\n")) > backward:
            self.no_gradients = f"a backward pass of {lines:,} lines in one lane is not covered (up to {backward:,})"
        lines = self.forward_source.count("\n")
        too_long = f"a step of {lines:,} lines in one lane is not covered (up to {forward:,})"
        return too_long if lines > forward else None

    @cached_property
    def roll(self) -> Any:
        return self._marked(self._module(self.forward_source).roll)

    @cached_property
    def sweep(self) -> Any:
        return self._marked(self._module(self.backward_source).sweep)

    @cached_property
    def join(self) -> Any:
        return with_one_lane(module_of(joints_source(self.program.width, self.program.dtype)).join)

    def _module(self, text: str) -> ModuleType:
        for key in list(self._made):
            if (source := self._made.pop(key, None)) is not None:  # or another thread has just done it
                remember(key, source)
        return module_of(text)

    def _marked(self, kernel: Any) -> Any:
        return kernel if self.program.parts.tiled else with_one_lane(kernel)

    def numbers(self, device: torch.device) -> Tensor:
        """The numbers that the step holds, as the kernels read them. Ask after the source was made: derivatives bring more."""
        wanted = self.program.code.numbers
        count, found = self._numbers.get(device, (-1, None))
        if found is None or count < len(wanted):
            found = torch.tensor([*wanted, 0.0], dtype=self.program.dtype, device=device)  # never empty
            self._numbers[device] = len(wanted), found
        if is_capturing(device):
            _captured[id(found)] = found
        return found


def kernels_of(row: OneRow, layout: Layout) -> Kernels:
    """Those of a step on one row: on lanes where it is elementwise or narrow, and does not take long to compile; else on tiles.

    Raises:
        NotCovered: there are none, and why
    """
    kernels = _with_source(program_of(row, layout))
    if kernels.is_long:
        with suppress(NotCovered):
            shorter = _with_source(program_of(row, layout, narrow=0))
            if kernels.refuse_endless() or kernels.no_gradients or not shorter.no_gradients:
                return shorter
    refused = kernels.refuse_endless()
    if refused is not None:
        raise NotCovered(refused)
    return kernels


def _with_source(program: Program | TileProgram) -> Kernels:
    kernels = Kernels(program)
    with covering():
        kernels.forward_source  # noqa: B018 - which is made here
    return kernels


#: Numbers that graphs of callers read whenever they are replayed, whatever becomes of the step.
_captured: dict[int, Tensor] = {}


_IMPORTING = threading.Lock()


@lru_cache(maxsize=_MOST_MODULES)
def module_of(source: str) -> ModuleType:
    """The module with this source: of a process always the same one, as launches know a kernel by its ``id``."""
    name = module_name(source)
    with _IMPORTING:  # else a thread may find what another one has not read to its end
        return sys.modules.get(name) or _imported(name, put(f"{name}.py", source))


def _imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Triton looks for the globals of a kernel
    try:
        spec.loader.exec_module(module)
    except BaseException:  # an interruption, say: the next call is not to find a part of it
        del sys.modules[name]
        raise
    return module
