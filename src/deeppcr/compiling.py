"""Compiling kernels: side by side, and those of one lane a thread in a fraction of the time.

Triton's coalescing finds how many neighbouring numbers a thread is to take. Where each has one lane there is nothing to find, and yet for every
load the pass walks through all that has to do with it: nine tenths of what the compiler takes for a kernel of a thousand lines. Without it the same
instructions come out: ``tests/fuse/test_compiles.py`` holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

from triton import AsyncCompileMode
from triton.runtime import _async_compile

#: What Triton calls it, by how a kernel loads. A version that calls it otherwise does it as ever.
_PASSES = ("add_coalesce", "add_coalesce_async_copy")
_left_out: ContextVar[bool] = ContextVar("left_out", default=False)


class Asked(NamedTuple):
    """A kernel, and what it is to be compiled for: see ``launch.launch``."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    warps: int
    registers: int | None

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})

    def launch(self) -> Any:
        """Compiled, which by the interpreter nothing is, and launched."""
        with for_kernel(self.kernel):
            return self.kernel[(self.programs,)](*self.arguments, **self.options)

    def compile(self) -> None:
        with for_kernel(self.kernel):
            self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)


def with_one_lane(kernel: Any) -> Any:
    """The kernel, no thread of which has more than one lane."""
    kernel.one_lane_a_thread = True
    return kernel


def compile_side_by_side(every: Collection[Asked]) -> None:
    if len(every) < 2 or _async_compile.active_mode.get() is not None:
        return  # or the caller has kernels compiled side by side already: Triton takes one such mode at a time
    with (
        _Threads(min(len(every), os.cpu_count() or 1)) as threads,
        AsyncCompileMode(threads, ignore_errors=True),
    ):
        for asked in every:
            asked.compile()


class _Threads(ThreadPoolExecutor):
    """Threads that leave out what whoever asks them leaves out."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_compiled_without, _left_out.get(), partial(fn, *args, **kwargs))


def _compiled_without(left_out: bool, compiled: Callable[[], Any]) -> Any:
    _left_out.set(left_out)
    return compiled()


@contextmanager
def for_kernel(kernel: Any) -> Iterator[None]:
    """Inside, what is compiled is this kernel."""
    one_lane = getattr(kernel, "one_lane_a_thread", False)
    if one_lane:
        _make_optional()
    token = _left_out.set(one_lane)
    try:
        yield
    finally:
        _left_out.reset(token)


@cache
def _make_optional() -> None:
    """Have Triton ask each time before it adds one of the passes. (Where two threads do this at once, it asks twice.)"""
    from triton._C import libtriton

    known = getattr(getattr(libtriton, "passes", None), "ttgpuir", None)
    for name in _PASSES:
        add = getattr(known, name, None)
        if add is not None:
            setattr(known, name, partial(_unless_left_out, add))


def _unless_left_out(add: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return None if _left_out.get() else add(*given, **named)  # as others call it, too
