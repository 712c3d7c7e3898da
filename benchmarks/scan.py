"""The scans of ``deeppcr.linear.kernels`` beside a plain copy of as many bytes: each plan is checked, then timed.

    python benchmarks/scan.py [--out scan.json] [--cases NAME ...] [--planned]

Needs a CUDA device. For every case: the plan the library chooses, in both directions, called directly and in a CUDA
graph, then a grid of other plans forwards in a graph (not with --planned). A plan that fails to compile or gives a
wrong result is reported and not timed; the exit code is 1 where that is the library's own choice. Inputs are as warm
in the caches as the last call has left them: systems below some 50 MB never leave the L2 cache of an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from deeppcr import linear
from deeppcr.linear.kernels import block_diagonal, diagonal, lookback
from deeppcr_paper.timing import capture, machine, relative_error

TOLERANCE = 1e-5
CALLS, REPEATS = 20, 5


@dataclass(frozen=True)
class Case:
    """``channels`` sequences (or sequences of small blocks) of ``length`` steps."""

    name: str
    structure: type[linear.Blocks]
    length: int
    channels: int
    size: int = 1
    vary: bool = True  # time other plans than the one chosen

    def make(self, device: torch.device) -> tuple[linear.Blocks, Tensor]:
        """Couplings that neither shrink nor grow much, so that rounding has its say."""
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=generator)

        rhs = randn(self.length, self.channels * self.size)
        if self.structure is linear.Diagonal:
            return linear.Diagonal(0.99 * randn(self.length - 1, self.channels).sign()), rhs
        if self.structure is linear.Scalar:
            return linear.Scalar(0.99 * randn(self.length - 1).sign()), rhs
        rotations, _ = torch.linalg.qr(randn(1024, self.size, self.size))
        picked = torch.randint(
            1024, (self.length - 1, self.channels), device=device, generator=generator
        )  # fmt: skip
        return linear.BlockDiagonal(0.99 * rotations[picked]), rhs

    @property
    def kernel(self):
        return block_diagonal if self.structure is linear.BlockDiagonal else diagonal

    def chosen(self) -> Any:
        """The plan of the library."""
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        if self.kernel is block_diagonal:
            return block_diagonal.tiling_for(self.length, self.channels, processors)
        return diagonal.choose(self.length, self.channels, processors, torch.float32)

    def plans(self, chosen) -> Iterator[Any]:
        """The plan the library chooses is varied: one or two things at a time, not all at once."""
        if self.kernel is block_diagonal:
            for chunk, lanes, stages in itertools.product((16, 32, 64, 128), (32, 64, 128), (1, 3)):
                yield block_diagonal.Tiling(chunk, lanes, lanes // 32, stages)
            return
        if isinstance(chosen, lookback.Tiling):
            for steps, groups, in_run, stream in itertools.product((16, 32), (4, 8), (4, 8), (False, True)):
                yield lookback.Tiling(steps, groups, 32, in_run, groups, stream, 80 if steps == 16 else 128)
            return
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        alone, one_sweep = self.channels == 1, chosen.chunk >= self.length
        widths = (1,) if alone else [width for width in (8, 16, 32) if width <= max(8, chosen.channels * 2)]
        for steps, width, in_tile, stages, programs in itertools.product(
            (8, 16) if one_sweep else (4, 8),
            widths,
            (512, 1024) if one_sweep else (256, 512, 1024),
            (1, 2, 3, 4) if one_sweep else (1, 3),
            (0,) if one_sweep else (2, 8),  # a multiprocessor
        ):
            groups, blocks = in_tile // width, triton.cdiv(self.channels, width)
            tiles = triton.cdiv(self.length, steps * groups)
            chunks = min(tiles, triton.cdiv(programs * processors, blocks)) if programs else 1
            yield diagonal.Tiling(steps, groups, width, triton.cdiv(tiles, chunks), in_tile // 128, stages)


CASES = (
    Case("2048 x 16384", linear.Diagonal, 16_384, 2048),
    Case("1 x 2^20", linear.Diagonal, 2**20, 1),
    Case("16 x 16384", linear.Diagonal, 16_384, 16),
    Case("256 x 65536", linear.Diagonal, 65_536, 256),
    Case("scalar, 256 x 16384", linear.Scalar, 16_384, 256, vary=False),
    Case("2x2 blocks, 256 x 16384", linear.BlockDiagonal, 16_384, 256, 2),
    Case("4x4 blocks, 16 x 16384", linear.BlockDiagonal, 16_384, 16, 4, vary=False),
)


def directly(function: Callable[[], Any]) -> Callable[[], None]:
    """``CALLS`` calls."""

    def calls():
        for _ in range(CALLS):
            function()

    return calls


def in_graph(function: Callable[[], Any]) -> Callable[[], None]:
    """The same in one CUDA graph, so that a call of some microseconds can be timed."""
    return capture(directly(function))[0]


def milliseconds(calls: Callable[[], None]) -> float:
    """Of one of the ``CALLS`` calls, at best."""
    calls()
    best = float("inf")
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        calls()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / CALLS)
    return best


def timed(case: Case, plan, couplings, rhs, reference: Tensor, *, reverse=False, graph=True) -> dict[str, Any]:
    """One plan, checked and then timed; ``failure`` says why there is no time."""
    row: dict[str, Any] = {"plan": asdict(plan), "reverse": reverse, "graph": graph}

    def solve():
        return case.kernel.run(couplings, rhs, reverse, plan)

    try:
        row["error"] = relative_error([solve()], [reference])
        if row["error"] > TOLERANCE:
            row["failure"] = f"differs from the reference by {row['error']:.1e}"
        else:
            row["milliseconds"] = milliseconds((in_graph if graph else directly)(solve))
    except Exception as error:  # a plan may ask for more than the device has: the others are still of interest
        row["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return row


def run_case(case: Case, device: torch.device, *, planned: bool) -> dict[str, Any]:
    couplings, rhs = case.make(device)
    # By cyclic reduction in float64: forward substitution would launch a kernel a step.
    full = case.structure(couplings.data.double())
    references = [linear.PCR().solve_coupled(full, rhs.double(), reverse=reverse) for reverse in (False, True)]
    del full
    moved = (couplings.data.numel() + 2 * rhs.numel()) * rhs.element_size()
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    copy = milliseconds(in_graph(lambda: target.copy_(source)))
    chosen = case.chosen()

    print(f"\n{case.name}: {moved / 1e6:.0f} MB, a copy takes {copy:.4f} ms ({moved / copy / 1e9:.2f} TB/s)")
    rows = [
        timed(case, chosen, couplings, rhs, references[reverse], reverse=reverse, graph=graph)
        for reverse, graph in itertools.product((False, True), (True, False))
    ]
    for row in rows:
        how = f"chosen, {'reverse' if row['reverse'] else 'forwards'}, {'graph' if row['graph'] else 'direct'}"
        report(how, row, copy)
    others = []
    if case.vary and not planned:
        others = [timed(case, plan, couplings, rhs, references[0]) for plan in dict.fromkeys(case.plans(chosen))]
        found = sorted((row for row in others if "milliseconds" in row), key=lambda row: row["milliseconds"])
        for row in found[:6]:
            report(str(list(row["plan"].values())), row, copy)
        for row in others:
            if "failure" in row:
                report(str(list(row["plan"].values())), row, copy)
        # What each setting can do at its best, all others free.
        for key in others[0]["plan"]:
            best = {}
            for row in found:
                best.setdefault(row["plan"][key], row["milliseconds"])
            print(f"    best by {key}: " + ", ".join(f"{value}: {best[value]:.4f}" for value in sorted(best)))
    settings = {**asdict(case), "structure": case.structure.__name__}
    return {"case": settings, "bytes": moved, "copy_milliseconds": copy, "chosen": rows, "others": others}


def report(how: str, row: dict[str, Any], copy: float) -> None:
    if "milliseconds" in row:
        took = row["milliseconds"]
        print(f"  {how:34} {took:9.4f} ms  {copy / took:5.0%} of a copy  error {row['error']:.1e}", flush=True)
    else:
        print(f"  {how:34} FAILED: {row['failure'][:120]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="these only")
    parser.add_argument("--planned", action="store_true", help="only what the library chooses")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    print("plans: " + ", ".join(diagonal.Tiling.__dataclass_fields__), end="")
    print("; of many channels: " + ", ".join(lookback.Tiling.__dataclass_fields__), end="")
    print("; of small blocks: " + ", ".join(block_diagonal.Tiling.__dataclass_fields__))
    results: dict[str, Any] = {"machine": {**machine(device), "triton": triton.__version__}, "cases": []}
    for case in CASES:
        if arguments.cases is None or case.name in arguments.cases:
            results["cases"].append(run_case(case, device, planned=arguments.planned))
            if arguments.out:  # as far as it got
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any("failure" in row for result in results["cases"] for row in result["chosen"]))


if __name__ == "__main__":
    sys.exit(main())
