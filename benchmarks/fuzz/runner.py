"""Random problems against the plain loop: is every answer right, or is the caller told?

    make fuzz ARGS="--count 1000"               on all cores; started again, it goes on where it was
    make fuzz ARGS="--device cuda"              on a GPU
    make fuzz ARGS="--device cuda --way fused"  by the kernels of its steps, where there are some; interpreted without a GPU
    make fuzz ARGS="--only 1234"                one problem in detail

Problem ``n`` depends on ``n``, the seed and the longest length alone. The table by family and verdict is printed, and written to
``results/fuzz-DEVICE.json`` with the numbers of all problems that ended badly; what is finished so far lies in ``results/tmp``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import deeppcr
from deeppcr import runtime

from .problems import KERNELS, WAYS, problem
from .verdicts import BAD, PLANTED, VERDICTS, Report, examine

ROOT = Path(__file__).parents[2]


def run_one(number: int, given: argparse.Namespace) -> dict[str, Any]:
    """One problem, within its limit of time."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"more than {given.limit} s")

    drawn = problem(number, seed=given.seed, longest=given.longest)
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, given.limit)
    try:
        report = examine(drawn, given.way, given.device, given.plant)
    except TimeoutError as error:  # in the loops that it is compared with
        report = Report(number, drawn.family, "slow", drawn.describe(), {"error": str(error)})
    except Exception as error:
        raise RuntimeError(f"problem {number} ({drawn.describe()}) cannot be judged") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return asdict(report)


def start_worker(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if given.way in KERNELS and given.device == "cpu":
        runtime.KERNEL_DEVICES.add("cpu")
        os.environ["TRITON_INTERPRET"] = "1"  # nobody has imported Triton yet


def finish(numbers: list[int], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The reports, in the order in which they come."""
    run = partial(run_one, given=given)
    if given.workers == 1:
        start_worker(given)
        yield from map(run, numbers)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context, initializer=start_worker, initargs=(given,)) as pool:
        left, under_way = iter(numbers), set()
        while True:
            while len(under_way) < 2 * given.workers and (number := next(left, None)) is not None:
                under_way.add(pool.submit(run, number))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()


def heading(given: argparse.Namespace) -> dict[str, Any]:
    """What a run depends on: reports of another one are not mixed with its own."""
    files = [*Path(deeppcr.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]
    settings = {name: getattr(given, name) for name in ("seed", "longest", "way", "device", "limit", "plant")}
    return {**settings, "sources": sources, "torch": torch.__version__}


def resumed(path: Path, head: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The reports of a run that was broken off; of any other run nothing is kept."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or json.loads(lines[0]) != head:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")
        return {}
    if not path.read_text().endswith("\n"):  # broken off in the middle of a line
        lines = lines[:-1]
        path.write_text("".join(line + "\n" for line in lines))
    return {report["number"]: report for report in map(json.loads, lines[1:])}


def table(reports: list[dict[str, Any]]) -> str:
    counts = Counter((report["family"], report["verdict"]) for report in reports)
    families = sorted({report["family"] for report in reports})
    shown = [verdict for verdict in VERDICTS if any(counts[family, verdict] for family in families)]
    lines = ["".join([f"{'':14}", *(f"{verdict:>{len(verdict) + 2}}" for verdict in shown)])]
    for family in (*families, "all"):
        parts = [sum(counts[f, v] for f in (families if family == "all" else [family])) for v in shown]
        cells = (f"{part or '.':>{len(verdict) + 2}}" for part, verdict in zip(parts, shown, strict=True))
        lines.append("".join([f"{family:14}", *cells]))
    return "\n".join(lines)


def bad_ones(reports: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The numbers of the problems that ended badly: by verdict, by family."""
    found: dict[str, dict[str, list[int]]] = {}
    for report in sorted(reports, key=lambda each: each["number"]):
        if report["verdict"] in BAD:
            found.setdefault(report["verdict"], {}).setdefault(report["family"], []).append(report["number"])
    return found


def show(report: dict[str, Any]) -> None:
    print(f"problem {report['number']}: {report['verdict']} ({VERDICTS[report['verdict']]})\n  {report['problem']}")
    for name, value in report["details"].items():
        print(f"  {name}: {value}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="problems 0 to COUNT - 1")
    parser.add_argument("--only", type=int, nargs="+", help="these problems, in detail; nothing is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest",
        type=int,
        help="steps; lengths are drawn from 1 to this, by their logarithm: 5000, and 40 where kernels are interpreted",
    )
    parser.add_argument("--way", choices=WAYS, default="default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, help="processes; as many as there are cores, and one on a GPU")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one problem, its loops included")
    parser.add_argument("--plant", choices=PLANTED, default="", help="a fault, to see that it is found")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args(arguments)
    if given.longest is None:
        given.longest = 40 if given.way in KERNELS and given.device == "cpu" else 5000
    if given.workers is None:
        given.workers = (os.cpu_count() or 1) if given.device == "cpu" else 1
    return given


def main(arguments: list[str] | None = None) -> int:
    """0 where no problem ended badly."""
    given = parse(arguments)
    # What the cost model chooses is to be the same on every machine.
    os.environ.setdefault("DEEPPCR_CALIBRATE", "0")
    if given.only:
        reports = list(finish(given.only, argparse.Namespace(**{**vars(given), "workers": 1})))
        for report in reports:
            show(report)
        return min(1, len(bad_ones(reports)))

    name = "-".join(["fuzz", given.device, *([given.way] if given.way != "default" else [])])
    head, unfinished = heading(given), given.out / "tmp" / f"{name}.jsonl"
    reports = resumed(unfinished, head)
    numbers = [number for number in range(given.count) if number not in reports]
    if len(numbers) < given.count:
        print(f"{given.count - len(numbers)} of {given.count} are done already")
    with unfinished.open("a") as file:
        for report in finish(numbers, given):
            reports[report["number"]] = report
            file.write(json.dumps(report) + "\n")
            file.flush()
            if sys.stderr.isatty():
                bad = sum(each["verdict"] in BAD for each in reports.values())
                print(f"\r{len(reports)} of {given.count}, {bad} bad", end="", file=sys.stderr, flush=True)
    kept = [reports[number] for number in range(given.count)]
    bad = bad_ones(kept)
    counts = Counter(report["verdict"] for report in kept)
    families = {f: Counter(r["verdict"] for r in kept if r["family"] == f) for f in sorted({r["family"] for r in kept})}
    details = [report for report in kept if report["verdict"] in BAD]
    record = {
        "settings": head,
        "count": given.count,
        "verdicts": counts,
        "families": families,
        "bad": bad,
        "details": details,
    }
    (given.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(kept)}")
    for verdict, by_family in bad.items():
        for family, found in by_family.items():
            print(f"{verdict}, {family}: {' '.join(map(str, found))}")
    return min(1, len(bad))
