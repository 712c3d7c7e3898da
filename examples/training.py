"""One model trained from the same seed by ``torch.nn`` and after ``deeppcr.nn.convert``: the same batches, step by step, side by side.

Beside them ``torch.nn`` again, with the sequences in another order: what losses differ by where nothing but chance is another.
A run can be stopped at any time: the same command goes on from the last checkpoint, on a CPU as if it had never been stopped, bit by bit.

Shapes: N sequences, T steps, B rows of a batch.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr.nn
from deeppcr_paper.store import as_json, now, session, write, write_bytes

SIDES = ("torch", "deeppcr")
#: By ``torch.nn`` from the same weights, the sequences in another order.
REORDERED = "reordered"
#: Losses are compared by their means over so many parts of a training.
PARTS = 10
#: Arguments that change no number of a training: it may go on with others.
FREE = ("minutes", "every", "out", "device", "data_dir")
#: Of all steps, so many are a warm-up.
WARM_UP = 0.05
LARGEST_GRADIENT = 1.0
#: Seconds between checkpoints.
CHECKPOINT = 60.0


@dataclass(frozen=True)
class Task:
    """What is to be learnt.

    Attributes:
        model: makes one, its weights drawn by PyTorch's global generator. It takes [T, B, 1]
        loss: of the model's outputs and targets, [B, ...]: one number
        measure, score: a name, and of outputs and targets a number for each row, [B]; that of the test set is the mean
        train, test: sequences [N, T], and their targets [N, ...]
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    measure: str
    score: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def options(about: str, name: str, *, epochs: int, batch: int, rate: float) -> argparse.ArgumentParser:
    """What both trainings can be told, with these defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=epochs, help="the rate of learning falls to zero over all of them"
    )
    parser.add_argument("--batch", type=int, default=batch, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=rate, help="the highest rate of learning, by Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of sequences")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of weights and sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; the same command goes on")
    parser.add_argument(
        "--spread", action=argparse.BooleanOptionalAction, default=True,
        help="train torch.nn once more, the sequences in another order: by how much losses differ anyway",
    )  # fmt: skip
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of the table")
    out = Path("results") / "trainings" / f"{name}.json"
    parser.add_argument("--out", type=Path, default=out, help="losses and times; the checkpoint is beside it")
    return parser


def train(task: Task, given: argparse.Namespace) -> dict[str, Any]:
    """Train all sides to the end or for as long as there is time, from the checkpoint where there is one.

    Returns:
        what is written: of each side the losses and milliseconds of all steps, how its solves ended, and the scores after each epoch
    """
    begun = saved = time.monotonic()
    torch.backends.cudnn.allow_tf32 = False  # as products are by default: both sides in float32 proper
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    sequences, targets = (_placed(each, device, dtype) for each in task.train)
    test = tuple(_placed(each, device, dtype) for each in task.test)
    per_epoch = len(sequences) // given.batch
    if per_epoch == 0:
        raise ValueError(f"--batch: expected at most the {len(sequences)} sequences there are, got {given.batch}")
    sides = {name: Side(name, task, given.seed, device, dtype) for name in (*SIDES, *[REORDERED] * given.spread)}
    record = {
        "settings": as_json({name: value for name, value in vars(given).items() if name not in FREE}),
        "measure": task.measure,
        "steps": given.epochs * per_epoch,
        "done": 0,
        "scores": [],
        "sides": {name: {"losses": [], "milliseconds": [], "solves": {}} for name in sides},
        "sessions": [],
    }
    checkpoint = given.out.with_suffix(".partial")
    if checkpoint.exists():
        record = _load(checkpoint, record["settings"], sides, device)
    record["sessions"].append(session(device))
    print(f"{'step':>8}" + "".join(f"{kind + ' ' + name:>16}" for kind in ("loss", "ms") for name in sides))
    while record["done"] < record["steps"] and time.monotonic() - begun < 60 * given.minutes:
        step = record["done"]
        rate = given.rate * rate_at(step, record["steps"])
        for name, side in in_turn(sides, step):
            order = given.seed + (name == REORDERED)
            rows = rows_of(step, len(sequences), given.batch, order).to(device)
            side.step(sequences[rows], targets[rows], rate, record["sides"][name])
        record["done"] = step + 1
        if record["done"] % per_epoch == 0:
            found = {name: side.test(*test, given.batch) for name, side in sides.items()}
            record["scores"].append({"step": record["done"], **found})
        if record["done"] % given.every == 0 or record["done"] == record["steps"]:
            print(_line(record, given.every), flush=True)
        if time.monotonic() - saved > CHECKPOINT:
            _save(checkpoint, given.out, record, sides)
            saved = time.monotonic()
    record["sessions"][-1]["end"] = now()
    _save(checkpoint, given.out, record, sides)
    print(_summary(record, given.out))
    return record


class Side:
    """One of the two: a model and what changes it."""

    def __init__(self, name: str, task: Task, seed: int, device: torch.device, dtype: torch.dtype):
        self.name, self.task, self.device = name, task, device
        torch.manual_seed(seed)
        self.model = task.model().to(device, dtype)  # drawn on the CPU: the same weights everywhere
        self.converted = deeppcr.nn.convert(self.model, mode="parallel") if name == "deeppcr" else {}
        self.optimiser = torch.optim.Adam(self.model.parameters())

    def step(self, sequences: Tensor, targets: Tensor, rate: float, into: dict[str, Any]) -> None:
        """One step of training, timed with the device waited for."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        _wait(self.device)
        begun = time.perf_counter()
        loss = self.task.loss(self.model(sequences.T.unsqueeze(-1)), targets)
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimiser.step()
        _wait(self.device)
        into["milliseconds"].append(round(1e3 * (time.perf_counter() - begun), 3))
        into["losses"].append(loss.item())
        if not math.isfinite(into["losses"][-1]):
            raise FloatingPointError(
                f"the loss of {self.name} is {loss.item()} at step {len(into['losses'])}; try a lower --rate"
            )
        ended = Counter(each.result.name for module in self.converted.values() for each in module.solutions)
        into["solves"] = dict(Counter(into["solves"]) + ended)

    @torch.no_grad()
    def test(self, sequences: Tensor, targets: Tensor, batch: int) -> float:
        """The mean score of all sequences."""
        parts = zip(sequences.split(batch), targets.split(batch), strict=True)
        scores = [self.task.score(self.model(some.T.unsqueeze(-1)), wanted) for some, wanted in parts]
        return torch.cat(scores).double().mean().item()


def in_turn(sides: dict[str, Side], step: int) -> list[tuple[str, Side]]:
    """Each is the first as often as any other: what one leaves behind, in caches say, comes to all."""
    every = list(sides.items())
    first = step % len(every)
    return every[first:] + every[:first]


def rows_of(step: int, count: int, batch: int, seed: int) -> Tensor:
    """The batch of a step, [B]: of the step's number and the seed alone, so that nothing else has to be kept to go on."""
    epoch, at = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return order[at * batch : (at + 1) * batch]


def rate_at(step: int, steps: int) -> float:
    """The part of the highest rate of learning: a short rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / steps)) / 2


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _save(checkpoint: Path, out: Path, record: dict[str, Any], sides: dict[str, Side]) -> None:
    state = {name: (side.model.state_dict(), side.optimiser.state_dict()) for name, side in sides.items()}
    content = io.BytesIO()
    torch.save({"record": json.dumps(record), **state}, content)
    write_bytes(checkpoint, content.getvalue())
    write(out, record)


def _load(checkpoint: Path, settings: dict[str, Any], sides: dict[str, Side], device: torch.device) -> dict[str, Any]:
    content = torch.load(checkpoint, map_location=device, weights_only=True)
    record = json.loads(content["record"])
    before = record["settings"]
    other = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if other:
        raise ValueError(f"{checkpoint}: of other settings ({', '.join(other)}); give another --out, or move it away")
    for name, side in sides.items():
        model, optimiser = content[name]
        side.model.load_state_dict(model)
        side.optimiser.load_state_dict(optimiser)
    return record


def _line(record: dict[str, Any], every: int) -> str:
    """The losses of the last step, and the median times since the last line."""
    sides = record["sides"].values()
    numbers = [side["losses"][-1] for side in sides] + [median(side["milliseconds"][-every:]) for side in sides]
    return f"{record['done']:>8}" + "".join(f"{each:>16.6g}" for each in numbers)


def parts_of(losses: Sequence[float]) -> list[float]:
    """Their means over the parts of a training; of a short one, each by itself.

    >>> parts_of([3.0, 1.0] * 10)
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """
    count = min(PARTS, len(losses))
    ends = [len(losses) * part // count for part in range(count + 1)]
    return [fmean(losses[begin:end]) for begin, end in pairwise(ends)]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """By which factor the losses of two trainings differ, in its logarithm: the mean over the parts."""
    return fmean(abs(math.log(a / b)) for a, b in zip(parts_of(one), parts_of(other), strict=True))


def _summary(record: dict[str, Any], out: Path) -> str:
    lines, sides = [f"{record['done']} of {record['steps']} steps, written to {out}"], record["sides"]
    if record["done"]:
        parts = {name: parts_of(side["losses"]) for name, side in sides.items()}
        lines.append(f"losses, means of {len(parts['torch'])} parts of the training:")
        lines += [f"{name:>12}" + "".join(f"{each:>10.4g}" for each in means) for name, means in parts.items()]
        ours = apart(sides["deeppcr"]["losses"], sides["torch"]["losses"])
        spread = ""
        if REORDERED in sides:
            spread = (
                f"; those of torch in another order {apart(sides[REORDERED]['losses'], sides['torch']['losses']):.2g}"
            )
        lines.append(f"losses of deeppcr are {ours:.2g} apart from those of torch (mean of |log|){spread}")
        times = ", ".join(f"{name} {median(side['milliseconds']):.4g}" for name, side in sides.items())
        lines.append(f"milliseconds of a step, median of all: {times}")
        lines.append(f"solves in parallel ended so: {sides['deeppcr']['solves']}")
    for scores in record["scores"][-1:]:
        each = ", ".join(f"{name} {scores[name]:.4f}" for name in sides)
        lines.append(f"{record['measure']} on the test set after step {scores['step']}: {each}")
    return "\n".join(lines)
