"""Pairs of solves that differ in one thing, one after the other in one process: is a recording ever replayed for the wrong one?

    PYTHONPATH=src python benchmarks/wrong_replays.py --pairs 300 --device cuda --json found.json

Two thirds of the pairs are of ``deeppcr.solve``, the others of ``deeppcr.diffusion.sample``. Of each pair the first (A) and the second (B) are
solved in the order A A A B B B A B, pair after pair, so that both are recorded and replayed; in every round pairs are made anew, and
find the memory and the recordings of those before. Every result must be that of a process of its own that has solved nothing else.
These are forked before anything has touched the device. A and B must differ by far in them, or the pair would prove nothing.

On the CPU a tape (``tests/tape.py``) stands for CUDA graphs; samples have none there, and are all made anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

import deeppcr
import replay_pairs
from deeppcr.diffusion import DDIM, sample
from deeppcr.graphs import record
from replay_pairs import Found, Pair

ORDER = "AAABBBAB"
#: A and B of a pair differ by so many times what equal results may differ by.
APART = 5.0
#: seconds in which a process of its own has its result
PATIENCE = 300.0


@dataclass(frozen=True)
class Task:
    """A pair that is not made yet."""

    number: int
    what: str
    samples: bool
    device: str

    def make(self) -> Pair:
        return replay_pairs.make(self.number, self.what, self.samples, self.device)


def draw_tasks(pairs: int, seed: int, device: str, *, samples: bool | None = None) -> list[Task]:
    """Everything a pair may differ in comes equally often, in any order.

    Args:
        samples: all are of samples, or none; None: a third
    """
    choice = random.Random(seed)
    waiting: dict[bool, list[str]] = {True: [], False: []}
    tasks = []
    for number in range(pairs):
        of_samples = number % 3 == 2 if samples is None else samples
        if not waiting[of_samples]:
            waiting[of_samples] = list(replay_pairs.kinds(of_samples, device))
            choice.shuffle(waiting[of_samples])
        tasks.append(Task(seed * 1_000_000 + number, waiting[of_samples].pop(), of_samples, device))
    return tasks


def preload(device: str) -> None:
    """What a first solve imports takes seconds: once is enough. Nothing here may touch a GPU, which a forked process could not use then."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # for whoever only asks whether there is one
    deeppcr.solve(torch.cos, torch.ones(2, 3), length=9, solver=deeppcr.Newton())
    sample(lambda z, t: 0.1 * z, replay_pairs.SCHEDULE, torch.ones(2, 3), step=DDIM())
    if device == "cuda":
        import_module("deeppcr.diffusion.window.by_kernels")
        for name in ("dense", "diagonal"):
            import_module(f"deeppcr.linear.kernels.{name}")


def alone(attempt: tuple[Task, bool]) -> Found:
    """In a process of its own."""
    torch.set_num_threads(1)
    task, second = attempt
    return task.make().attempt(second)


def solve_alone(tasks: list[Task], workers: int) -> list[tuple[Found, Found]]:
    """The results of A and of B, each from a process that does nothing else."""
    attempts = [(task, second) for task in tasks for second in (False, True)]
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        results = pool.imap(alone, attempts, chunksize=1)
        found = []
        for number in range(len(attempts)):
            found.append(results.next(PATIENCE))  # a process that died would never answer
            say(f"solved alone: {number + 1} of {len(attempts)}")
    return list(zip(found[::2], found[1::2], strict=True))


@dataclass
class Seen:
    """What became of one pair."""

    task: Task
    where: str
    solves: int = 0
    replays: int = 0
    wrong: list[str] | None = None
    notes: list[str] | None = None


def hunt(tasks: list[Task], expected: Callable[[int], tuple[Found, Found]], rounds: int) -> list[Seen]:
    """Solve all pairs in this process.

    Args:
        expected: by the place of a pair, the results of A and of B by themselves
    """
    every: list[Seen] = []
    for round_ in range(rounds):
        for place, task in enumerate(tasks):
            pair = task.make()
            if round_ == 0:
                every.append(Seen(task, pair.where, wrong=[], notes=[]))
            seen, right = every[place], expected(place)
            assert seen.wrong is not None
            apart = replay_pairs.distance(right[1].states, right[0].states)
            if not apart > APART * pair.rounding:
                seen.wrong.append(f"proves nothing: A and B differ by {apart:.1e}")
            for turn, name in enumerate(ORDER):
                found = pair.attempt(name == "B")
                seen.solves += 1
                seen.replays += found.replayed
                problem = pair.differ(found, right[name == "B"])
                if problem:
                    how = "replayed" if found.replayed else "not replayed"
                    seen.wrong.append(f"round {round_ + 1}, {ORDER[:turn]}[{name}], {how}: {problem}")
                seen.notes = found.notes
            say(f"round {round_ + 1} of {rounds}: {place + 1} of {len(tasks)} pairs")
    return every


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def table(every: list[Seen]) -> Iterator[str]:
    for title, key in (("what differs", lambda seen: seen.task.what), ("where it is held", lambda seen: seen.where)):
        solves, replays, wrong = Counter(), Counter(), Counter()
        for seen in every:
            solves[key(seen)] += seen.solves
            replays[key(seen)] += seen.replays
            wrong[key(seen)] += len(seen.wrong or ())
        yield f"{title:28} {'solves':>7} {'replayed':>9} {'wrong':>6}"
        for name in sorted(solves):
            yield f"  {name:26} {solves[name]:7} {replays[name]:9} {wrong[name]:6}"
        yield f"  {'all':26} {solves.total():7} {replays.total():9} {wrong.total():6}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="where to write what became of each pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = draw_tasks(arguments.pairs, arguments.seed, arguments.device)
    began = time.perf_counter()
    preload(arguments.device)
    expected = solve_alone(tasks, arguments.workers)
    between = time.perf_counter()
    if arguments.device == "cpu":
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from tape import Tape

        record.RECORDERS["cpu"] = Tape
    every = hunt(tasks, expected.__getitem__, arguments.rounds)
    ended = time.perf_counter()
    say("")
    bad = [seen for seen in every if seen.wrong]
    vacuous = []
    for name, samples in (("solves", False), ("samples", True)):
        of_kind = [seen for seen in every if seen.task.samples == samples]
        if of_kind:
            print(f"{name}: {len(of_kind)} pairs")
            print("\n".join(table(of_kind)), end="\n\n")
        if not sum(seen.replays for seen in of_kind) and not (samples and arguments.device == "cpu"):
            vacuous.append(name)
    for seen in bad:
        print(
            f"pair {seen.task.number}, {'sample' if seen.task.samples else 'solve'}: {seen.task.what} in {seen.where}"
        )
        for problem in seen.wrong or ():
            print(f"  {problem}")
    for name in vacuous:
        print(f"none of the {name} was replayed: nothing was tested")
    print(
        f"{len(every)} pairs, {sum(seen.solves for seen in every)} solves, {sum(seen.replays for seen in every)} replayed, "
        f"{len(bad)} pairs wrong; {between - began:.0f} s alone, {ended - between:.0f} s in one process"
    )
    if arguments.json:
        rows = [{**vars(seen.task), **{k: v for k, v in vars(seen).items() if k != "task"}} for seen in every]
        about = {"torch": torch.__version__, "arguments": {k: str(v) for k, v in vars(arguments).items()}}
        arguments.json.write_text(json.dumps({**about, "pairs": rows}, indent=1) + "\n")
    return 1 if bad or vacuous else 0


if __name__ == "__main__":
    sys.exit(main())
