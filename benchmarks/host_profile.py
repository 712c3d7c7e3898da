"""What the host does in a warm call of ``solve`` by kernels, counted without a GPU: python benchmarks/host_profile.py [-v] [NAME ...]

Nothing is launched: what would be is taken for done at the second pass. Of each loop of ``loops.py``, with two rows at most: bytecodes,
functions of Python and functions of C before the first launch, beside the device, and after it is done; with -v by function. Counts are the
same on every machine, however busy it is. How long all of it takes, ``host_time.py`` and the part "host" of ``loops.py`` measure on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

import deeppcr
from deeppcr import launch, runtime
from deeppcr.fuse.bound import Notes
from deeppcr.fuse.step import FusedStep
from deeppcr.ways import trusted
from deeppcr.ways.fused import Call
from loop_problems import TABLE, Loop, Prepared

BEFORE, BESIDE, AFTER = PHASES = ("before", "beside", "after")
#: Warm, and no power of two: such solves are held against the step itself.
_CALLS = 10


class _Compiled:
    """A kernel that does nothing."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: Any) -> None:
        pass


class _AllCompiled(dict):
    def get(self, key: Any, default: Any = None) -> Any:
        return _compiled


_compiled = _Compiled()


def _counts(notes: Notes) -> list[int]:
    return [1, *[0] * (notes._limit + 2)]


@contextmanager
def without_device() -> Iterator[None]:
    """Inside, kernels of steps on the CPU are launched as on a GPU, and do nothing."""
    with ExitStack() as stack:
        for owner, name, value in (
            (launch, "_compiled", _AllCompiled()),
            (launch, "_noted", {}),
            (launch, "current_stream", lambda device: 0),
            (runtime, "KERNEL_DEVICES", {"cpu"}),
            (Notes, "counts", _counts),
            (trusted, "_doubt_of_all", lambda *_: None),
            (FusedStep, "is_borne_out", lambda *_: True),
        ):
            stack.enter_context(patch.object(owner, name, value))
        deeppcr.clear_caches()
        stack.callback(deeppcr.clear_caches)
        yield


class Profile:
    """Counts of one call, each by phase and function: of bytecodes, of functions of Python, and of functions of C that they call."""

    def __init__(self, call: Callable[[], Any]):
        self.bytecodes, self.calls, self.calls_of_c = Counter(), Counter(), Counter()
        for watch, ask, watcher in (
            (sys.settrace, sys.gettrace, self._trace),
            (sys.setprofile, sys.getprofile, self._profile),
        ):
            self._phase, others = BEFORE, ask()
            watch(watcher)
            try:
                call()
            finally:
                watch(others)

    def _enters(self, frame: FrameType) -> bool:
        """Whether what stands for the device is called: the next phase begins."""
        if frame.f_code is _Compiled.run.__code__:
            self._phase = BESIDE
        elif frame.f_code is _counts.__code__:
            self._phase = AFTER
        else:
            return False
        return True

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._enters(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[self._phase, frame.f_code.co_qualname] += 1
        return self._trace_inside

    def _trace_inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.bytecodes[self._phase, frame.f_code.co_qualname] += 1
        return self._trace_inside

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._enters(frame)
        elif event == "c_call":
            self.calls_of_c[self._phase, frame.f_code.co_qualname] += 1

    def of(self, phase: str) -> tuple[int, int, int]:
        """All three of a phase."""
        every = (self.bytecodes, self.calls, self.calls_of_c)
        found = [sum(count for (at, _), count in counter.items() if at == phase) for counter in every]
        return found[0], found[1], found[2]

    def by_function(self) -> Iterator[str]:
        for phase in PHASES:
            for (at, name), count in self.bytecodes.most_common():
                if at == phase:
                    yield f"  {phase:6} {count:5} {self.calls[at, name]:3} {self.calls_of_c[at, name]:3}  {name}"


def profile(loop: Loop) -> Profile:
    """Of a warm call without gradients."""
    prepared = Prepared(replace(loop, B=min(loop.B, 2)), torch.device("cpu"))
    inputs, length = prepared.inputs, None if prepared.inputs.xs is not None else loop.L
    with without_device(), torch.no_grad():
        made = Call(inputs.step, inputs.z0, inputs.xs, length, None).make()
        assert not isinstance(made, str), made
        for _ in range(_CALLS):
            prepared.call()
        return Profile(prepared.call)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these loops: pendulum, gru-wide, ...")
    parser.add_argument("-v", "--verbose", action="store_true", help="by function")
    options = parser.parse_args(arguments)
    print("bytecodes, functions of Python, functions of C: before the first launch | beside the device | after it")
    for loop in TABLE:
        if options.names and loop.name not in options.names:
            continue
        found = profile(loop)
        print(f"{loop.name:18}" + " | ".join("{:5} {:3} {:3}".format(*found.of(phase)) for phase in PHASES), flush=True)
        if options.verbose:
            print("\n".join(found.by_function()))


if __name__ == "__main__":
    main()
