"""The two trainings of ``examples/``, whole: losses, accuracies and times of a step by ``torch.nn`` and after ``deeppcr.nn.convert``.

    python benchmarks/trainings.py [--only mnist amplifier] [--data-dir DIR] [--epochs mnist=5 amplifier=20] [--device cpu|cuda] [--quick]
                                   [--json FILE] [--print]

Of every training the file has the settings, the means of the losses over its parts, the scores after each epoch, how solves ended, and the
median time of a step; all steps are in the file that the training itself writes. A training is judged by what ``training.apart`` says of its
losses: those of ``torch.nn`` with the sequences in another order are as far apart as chance has it. The exit code is 1 where one did not end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from records import Results, parse, parser_of, set_up

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import amplifier
import sequential_mnist
from training import REORDERED, SIDES, apart, parts_of

#: Digits that numbers are written with.
DIGITS = 5
#: A step of the LSTM is to take at most this part of the time of torch.nn's.
SHARE = 0.2
TINY = {
    "mnist": ["--side", "7", "--images", "300", "--epochs", "1"],
    "amplifier": ["--samples", "65", "--sequences", "8", "--tested", "2", "--epochs", "2"],
}


@dataclass
class Training:
    """
    Attributes:
        losses: of each side, means over the parts of the training
        milliseconds: of each side, the median of a step
        scores: after each epoch
        apart: how far the losses of deeppcr, and those of the other order, are from those of torch
    """

    name: str
    settings: dict[str, Any]
    measure: str
    steps: int
    done: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    scores: list[dict[str, float]] = field(default_factory=list)
    solves: dict[str, int] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(name: str, record: dict[str, Any]) -> Training:
        sides = record["sides"]
        losses = {side: [_short(each) for each in parts_of(of["losses"])] for side, of in sides.items() if of["losses"]}
        times = {side: _short(median(of["milliseconds"])) for side, of in sides.items() if of["milliseconds"]}
        theirs = sides["torch"]["losses"]
        far = {side: _short(apart(sides[side]["losses"], theirs)) for side in losses if side != "torch"}
        scores = [{of: _short(each) for of, each in scores.items()} for scores in record["scores"]]
        found = losses, times, scores, sides["deeppcr"]["solves"], far
        return Training(name, record["settings"], record["measure"], record["steps"], record["done"], *found)

    @property
    def failed(self) -> bool:
        return self.done < self.steps


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def claims_of(found: Training) -> list[tuple[str, float | None, float]]:
    """What a training is to show: a name, a number, and what it is to be at most."""
    last = found.scores[-1] if found.scores and not found.failed else {}
    claims: list[tuple[str, float | None, float]] = []
    if found.name == "mnist":
        for side in SIDES:
            wrong = 1 - last[side] if side in last else None
            claims.append((f"mnist: of the test set wrong, {side}", wrong, 1 - sequential_mnist.GOAL))
    else:
        times = found.milliseconds
        share = times["deeppcr"] / times["torch"] if "deeppcr" in times else None
        claims.append((f"{found.name}: a step of deeppcr over torch", share, SHARE))
    ours, chance = found.apart.get("deeppcr"), found.apart.get(REORDERED)
    value = ours / chance if ours is not None and chance else None
    claims.append((f"{found.name}: losses apart from torch, over those of another order", value, 1.0))
    return claims


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, quick="tiny trainings, in seconds: a dry run")
    parser.add_argument("--only", nargs="+", choices=TINY, default=list(TINY), help="(default: both)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder with the four files of MNIST, else that in DEEPPCR_DATA; sequences of the amplifier are kept there",
    )
    parser.add_argument("--epochs", nargs="+", metavar="NAME=N", default=[], help="(default: those of the examples)")
    parser.add_argument("--minutes", type=float, help="that each of them may take at most")
    parser.add_argument("--every", type=int, help="steps between two lines (default: those of the examples)")
    parser.add_argument("--print", action="store_true", help="the file besides, in one line")
    options = parse(parser, arguments)
    try:
        options.epochs = {name: int(number) for name, number in (each.split("=") for each in options.epochs)}
    except ValueError:
        parser.error(f"--epochs: expected NAME=N, got {' '.join(options.epochs)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them one after the other; the exit code is 0 where each came to its end."""
    options = options_of(arguments)
    set_up(torch.device(options.device))
    results = Results("trainings", options)
    programs: dict[str, Callable[[Sequence[str]], int]] = {
        "mnist": sequential_mnist.main,
        "amplifier": amplifier.main,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            out = Path(folder) / f"{name}.json"
            given = ["--out", str(out), "--device", options.device]
            given += TINY[name] if options.quick else []
            given += ["--epochs", str(options.epochs[name])] if name in options.epochs else []
            given += ["--minutes", str(options.minutes)] if options.minutes is not None else []
            given += ["--every", str(options.every)] if options.every is not None else []
            given += ["--data-dir", str(options.data_dir)] if options.data_dir else []
            print(f"{name}: {' '.join(given[4:])}", flush=True)
            programs[name](given)
            found = Training.of(name, json.loads(out.read_text(encoding="utf-8")))
            results.cases.append(found)
            for claim in claims_of(found):
                results.claim(*claim)
            results.save()
    code = results.finish()
    if options.print:
        print(json.dumps(results.record(), separators=(",", ":")))
    return code


if __name__ == "__main__":
    sys.exit(main())
