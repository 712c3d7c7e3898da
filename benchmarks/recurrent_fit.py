"""The constants of ``deeppcr/nn/recurrent_cost.py``, fitted to what ``recurrent.py`` measured.

    python benchmarks/recurrent_fit.py results/recurrent-*.json [--write]

All files count. What is printed is to be put in the place of the constants there, which --write does; what was not measured stays as it is.
Below it, the measured layers with the times that the library as it is expects of both ways, and what its choice costs.

Fitted to medians of calls, in relative terms, no constant being negative: of a call in parallel the launches, by direction, and the seconds of
a step of one row, by kind, direction and the numbers of a state filled up to a power of two; of PyTorch's kernel the seconds of its
launches, during which the device is at work already, and those of a step, and of each row in it, by kind and direction.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from deeppcr.nn import recurrent_cost
from deeppcr.nn.recurrent_cost import is_faster_in_parallel, numbers_of
from recurrent_methods import AUTO, BOTH, PARALLEL, TORCH, Size

#: As PyTorch calls them.
KINDS = {"RNN": "RNN_TANH", "GRU": "GRU", "LSTM": "LSTM"}
#: Kernels of states with fewer numbers are as fast.
NARROWEST = 8
#: The launches are what is measured up to so many steps, and its steps from so many on: of PyTorch's kernel, and, of all rows, in parallel.
SHORT, LONG = 256, 4_096
FEW, MANY = 1_024, 2**15


@dataclass
class Measured:
    """The seconds of a layer: by PyTorch's own kernel, and of what was done in parallel, once or twice."""

    size: Size
    torch: float
    parallel: list[float]

    @property
    def backward(self) -> bool:
        return self.size.direction == BOTH

    @property
    def width(self) -> int:
        return max(NARROWEST, 1 << (numbers_of(KINDS[self.size.kind], self.size.H) - 1).bit_length())

    @property
    def steps(self) -> int:
        """Of all rows."""
        return self.size.T * self.size.B

    @property
    def faster_in_parallel(self) -> bool:
        s = self.size
        return is_faster_in_parallel(KINDS[s.kind], s.T, s.B, s.H, backward=self.backward)[0]


def measured(records: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Of the layers that were run in parallel by kernels."""
    found: dict[Size, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in (case for record in records for case in record["cases"]):
        if not case["passed"] or case["parameters"]["kind"] not in KINDS:
            continue
        way = PARALLEL if case["method"] == AUTO and case["result"] != "LOOP" else case["method"]
        found[Size(**case["parameters"])][way].append(median(case["seconds"]))
    return [
        Measured(size, median(ways[TORCH]), ways[PARALLEL])
        for size, ways in found.items()
        if TORCH in ways and PARALLEL in ways
    ]


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares in relative terms. Of constants that come out negative the worst is set to zero, until none is."""
    matrix = numpy.array(rows) / numpy.array(seconds)[:, None]
    scale = numpy.abs(matrix).max(axis=0)
    left = list(range(matrix.shape[1]))
    while True:
        found = numpy.zeros(matrix.shape[1])
        found[left] = numpy.linalg.lstsq(matrix[:, left] / scale[left], numpy.ones(len(matrix)), rcond=None)[0]
        if found.min() >= 0:
            return (found / scale).tolist()
        left.remove(int(found.argmin()))


def fit_parallel(layers: Sequence[Measured]) -> tuple[float, dict[tuple[str, int], float]]:
    """Seconds of the launches, and by kind and width those of a step of one row."""
    cells = sorted({(each.size.kind, each.width) for each in layers if each.steps >= MANY})
    rows, seconds = [], []
    for each in layers:
        of_cell = [each.steps * float(cell == (each.size.kind, each.width)) for cell in cells]
        if any(of_cell) or each.steps <= FEW:
            rows += [[1.0, *of_cell]] * len(each.parallel)
            seconds += each.parallel
    launches, *steps = fitted(rows, seconds)
    return launches, dict(zip(cells, steps, strict=True))


def fit_torch(layers: Sequence[Measured]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds of the launches, and by kind those of a step, and of each row in it."""
    launches = median(each.torch for each in layers if each.size.T <= SHORT)
    steps = {}
    for kind in KINDS:
        long = [each for each in layers if each.size.kind == kind and each.size.T >= LONG]
        if len({each.size.B for each in long}) > 1:
            rows = [[each.size.T, each.size.T * each.size.B] for each in long]
            one, more = fitted(rows, [each.torch for each in long])
            steps[kind] = one, more
    return launches, steps


def constants(layers: Sequence[Measured]) -> dict[str, str]:
    """By name, as they are written; what was not measured is what the library has."""
    ways = [[each for each in layers if each.backward == backward] for backward in (False, True)]
    (launches, forward), (more_launches, both) = map(fit_parallel, ways)
    (torch_launches, torch_forward), (more_torch_launches, torch_both) = map(fit_torch, ways)
    steps, torch_steps = ["{"], ["{"]
    for kind, name in KINDS.items():
        before, cells = recurrent_cost._STEPS[name], []
        measured = {width for of, width in (*forward, *both) if of == kind}
        for width in sorted({*before, *measured}):
            at = kind, width
            # Where the backward pass was measured alone, forward is no slower; where it was never, nothing is known of it.
            known = both.get(at, before[width][1] if width in before else None)
            if known is not None:
                earlier = before[width][0] if width in before else known
                cells.append(f"{width}: {_of(forward.get(at, min(earlier, known)), known)}")
        steps.append(f'    "{name}": {{{", ".join(cells)}}},')
        pairs = zip((torch_forward, torch_both), recurrent_cost._TORCH_STEPS[name], strict=True)
        torch_steps.append(f'    "{name}": ({", ".join(_of(*found.get(kind, kept)) for found, kept in pairs)}),')
    return {
        "_LAUNCHES": _of(launches, more_launches),
        "_STEPS": "\n".join([*steps, "}"]),
        "_TORCH_LAUNCHES": _of(torch_launches, more_torch_launches),
        "_TORCH_STEPS": "\n".join([*torch_steps, "}"]),
    }


def written(source: str, found: Mapping[str, str]) -> str:
    """The source of a module with other values of its constants."""
    lines = source.splitlines(keepends=True)
    for each in reversed(ast.parse(source).body):
        target = (
            each.target
            if isinstance(each, ast.AnnAssign)
            else each.targets[0]
            if isinstance(each, ast.Assign)
            else None
        )
        value = getattr(each, "value", None)
        if isinstance(target, ast.Name) and target.id in found and isinstance(value, ast.expr):
            head = lines[value.lineno - 1].encode()[: value.col_offset].decode()
            lines[value.lineno - 1 : value.end_lineno] = [f"{head}{found[target.id]}\n"]
    return "".join(lines)


def report(layers: Sequence[Measured], found: Mapping[str, str]) -> str:
    lines = [*(f"{name} = {value}" for name, value in found.items()), ""]
    for each in layers:
        s, ours = each.size, min(each.parallel)
        why = is_faster_in_parallel(KINDS[s.kind], s.T, s.B, s.H, backward=each.backward)[1]
        cost = (ours if each.faster_in_parallel else each.torch) / min(ours, each.torch)
        lines.append(
            f"{s.kind:4} T {s.T:6} B {s.B:3} H {s.H:3} {s.direction:20} {1e3 * ours:7.2f} {1e3 * each.torch:7.2f} ms; {why}; "
            f"{'parallel' if each.faster_in_parallel else 'torch.nn'}, {cost:.2f} of the faster way"
        )
    return "\n".join(lines)


def _of(*seconds: float) -> str:
    """
    >>> _of(2.345e-8, 0.001)
    '(2.3e-08, 0.001)'
    """
    return f"({', '.join(f'{each:.2g}' for each in seconds)})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of recurrent.py")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=Path(recurrent_cost.__file__), metavar="FILE",
        help="put the constants in their place (default: in the library)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    layers = measured([json.loads(path.read_text(encoding="utf-8")) for path in options.results])
    found = constants(layers)
    print(report(layers, found))
    if options.write is not None:
        source = options.write.read_text(encoding="utf-8")
        options.write.write_text(written(source, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
