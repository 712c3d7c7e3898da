"""How long the kernels of the loops of ``loops.py`` take to compile: python benchmarks/compile_time.py [--device cpu|cuda] [--json FILE] [NAME ...]

With a GPU: seconds from a step to all kernels of its kind, gradients included, traced and compiled side by side, in a process that finds nothing
on the disk; and in a second one, which finds what the first has left. What PyTorch and Triton import and look up for the first kernel of
a process was done before: to find out which compiler it is, Triton reads all of it.

Without one (--device cpu): the kernels that a solve launches with its default settings, and the loop in one kernel, compiled for an H200 one after the other. Seconds of the
processor, so that it may be busy with something else: in all, of which the longest; a solve has them compiled side by side. Kernels of one lane
a thread are compiled a second time with the passes of Triton's that the library leaves out, and the instructions compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest.mock import patch

import torch
import triton

from deeppcr import launch, runtime
from deeppcr.compiling import Asked, compile_side_by_side, for_kernel
from deeppcr.fuse import back
from deeppcr.newton import USUAL
from deeppcr.ways.begun import Ready
from deeppcr.ways.fused import Call
from hopper import HOPPER, source_for
from loop_problems import BOTH, FORWARD, TABLE, Loop, Prepared
from loop_steps import Inputs
from records import Results, parse, parser_of, set_up

#: Seconds that all kernels of a kind of solve may take, gradients included, and in a second process; and steps that are enough to see which
#: these are.
MOST, AGAIN, STEPS = 10.0, 0.5, 4_096


@dataclass
class Case:
    """The kernels of a loop.

    Attributes:
        seconds: of each kernel
        in_full: of each with nothing left out; empty for kernels on tiles, of which nothing is
        same: whether the same instructions come out
    """

    loop: str
    direction: str
    kernels: list[str]
    seconds: list[float]
    in_full: list[float]
    same: bool

    @property
    def failed(self) -> bool:
        return not self.same


@dataclass
class InProcesses:
    """Seconds for all kernels of a loop in a process, and in a second one; or why there are none."""

    loop: str
    seconds: list[float]
    failure: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.failure)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, steps on the CPU have kernels, which nobody can launch."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(runtime, "KERNEL_DEVICES", {"cpu"}))
        stack.enter_context(patch.object(launch, "current_stream", lambda device: 0))
        yield


def asked_by(*makes: Callable[[], Any]) -> list[Asked]:
    """What launches would have compiled."""
    found = []
    with patch.object(launch, "compile_side_by_side", found.extend):
        launch.compile_ahead(*makes)
    return found


def shortened(loop: Loop, device: torch.device) -> Inputs:
    length, rows = min(loop.L, STEPS), min(loop.B, 64)
    return Prepared(Loop(loop.name, loop.make, length, rows, loop.D, loop.dtype), device).inputs


def kernels_of(loop: Loop, inputs: Inputs) -> dict[str, list[Asked]]:
    """By direction; those of gradients are those that come in addition."""
    length = min(loop.L, STEPS)
    call = Call(inputs.step, inputs.z0, inputs.xs, None if inputs.xs is not None else length, None)
    fused: Any = call.make()
    assert not isinstance(fused, str), fused
    ready = Ready(call, fused, fused.closures(call.reached), USUAL, None, loop=False)
    run, kind, wanted = ready.run, ready.kind, ready.settled.wanted
    found = {
        FORWARD: asked_by(
            lambda: run.in_parallel(kind, wanted, most=2), lambda: run.loop(run.initial.new_empty(length, *run.initial.shape))
        )
    }  # fmt: skip
    if not loop.chaotic:
        chunk = back.chunk_of(run, kind.chunk)
        found[BOTH] = asked_by(lambda: back.pull_back(run, run.initial, run.initial, chunk))
    return found


def seconds() -> float:
    """Of the processor, by this process and by the assembler, which is another."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compiled(asked: Asked) -> tuple[str, float]:
    """The instructions, and how long that took; nothing is kept on the disk."""
    begun = seconds()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        source = source_for(asked.kernel, asked.arguments)
        instructions = triton.compile(source, target=HOPPER, options=asked.options).asm["ptx"]
    return instructions, seconds() - begun


def case_of(loop: Loop, direction: str, every: list[Asked]) -> Case:
    case = Case(loop.name, direction, [each.kernel.__name__ for each in every], [], [], True)
    for asked in every:
        with for_kernel(asked.kernel):
            instructions, took = compiled(asked)
        case.seconds.append(took)
        if getattr(asked.kernel, "one_lane_a_thread", False):
            in_full, took = compiled(asked)
            case.in_full.append(took)
            case.same &= in_full == instructions
    return case


def in_this_process(loop: Loop, device: torch.device) -> float:
    """Seconds for all kernels of a loop, of which no kernel is the first one of the process."""
    another = next(each for each in TABLE if each.make is not loop.make)
    kernels_of(another, shortened(another, device))[FORWARD][0].compile()
    inputs = shortened(loop, device)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    compile_side_by_side([asked for every in kernels_of(loop, inputs).values() for asked in every])
    return time.perf_counter() - begun


def in_a_process(case: InProcesses, folder: str) -> None:
    """What kernels it compiles is left in the folder; a second one finds it there."""
    if case.failed:
        return
    program = [sys.executable, __file__, "--device", "cuda", "--here", case.loop]
    environment = {**os.environ, "TRITON_CACHE_DIR": os.path.join(folder, case.loop)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        case.failure = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    else:
        case.seconds.append(json.loads(done.stdout.splitlines()[-1]))


def with_a_gpu(loops: Sequence[Loop], results: Results, workers: int = 1) -> None:
    """Second processes run after all first ones, fewer at a time: what others do on other cores is not theirs."""
    cases = [InProcesses(loop.name, []) for loop in loops]
    with tempfile.TemporaryDirectory() as folder:
        for at_a_time in (workers, max(1, workers // 3)):
            with ThreadPool(at_a_time) as pool:  # each thread waits for a process
                pool.map(lambda case: in_a_process(case, folder), cases, chunksize=1)
    print("seconds in a process, and in a second one")
    for case in cases:
        results.cases.append(case)
        print(f"{case.loop:18}" + (case.failure or " ".join(f"{each:6.2f}" for each in case.seconds)), flush=True)
        for seconds, what, most in zip(case.seconds, ("", ", a second process"), (MOST, AGAIN), strict=False):
            results.claim(f"{case.loop}: all kernels{what}, s", seconds, most)
    results.save()


def without_device(loops: Sequence[Loop], results: Results) -> None:
    print("seconds of the processor: in all, the longest kernel | with nothing left out | the same instructions")
    with as_on_a_gpu():
        for loop in loops:
            found = kernels_of(loop, shortened(loop, torch.device("cpu")))
            cases = [case_of(loop, direction, every) for direction, every in found.items()]
            results.cases += cases
            for case in cases:
                of_all = f"{sum(case.seconds):7.1f} {max(case.seconds):6.1f} | {sum(case.in_full):7.1f} | "
                print(f"{loop.name:18}{case.direction:22}{of_all}{case.same}", flush=True)
            results.claim(f"{loop.name}: longest kernel, s", max(max(case.seconds) for case in cases), MOST)
            results.save()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "the first loop alone")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these loops: pendulum, gru-wide, ...")
    parser.add_argument("--here", action="store_true", help="on a GPU: in this process, and nothing is written")
    parser.add_argument(
        "--workers", type=int, default=1, help="on a GPU: loops at a time, where cores suffice (default: 1)"
    )
    options = parse(parser, arguments)
    device = torch.device(options.device)
    loops = [loop for loop in TABLE if not options.names or loop.name in options.names]
    loops = loops[:1] if options.quick or options.here else loops
    set_up(device)
    if options.here:
        print(in_this_process(loops[0], device))
        return 0
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # which differs where a source lies elsewhere
    results = Results("compile-time", options, target="sm_90" if device.type == "cpu" else "this GPU")
    if device.type == "cpu":
        without_device(loops, results)
    else:
        with_a_gpu(loops, results, options.workers)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
