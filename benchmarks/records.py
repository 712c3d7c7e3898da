"""What every benchmark has in common: its options, how it begins, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import deeppcr
from deeppcr_paper.store import file_name
from deeppcr_paper.timing import machine
from kernel_report import Claim, number


def parser_of(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    Args:
        description: the program's docstring
        quick: what ``--quick`` does to it
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where results are written (default: a name in --out)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "results", help="folder for the file"
    )
    parser.add_argument("--commit", help="for a copy without its repository (default: as git has it)")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    return options


def set_up(device: torch.device) -> None:
    """Full precision; and a stream on which a capture may end: not the one of earlier passes."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # Whether the loop had to finish a solve is written down; a warning a call is not needed.
    warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


class Results:
    """What a run found, and its file: partial as it grows, whole at the end.

    Args:
        experiment: by which the file is named
        options: those of ``parser_of``
        settings: what the numbers depend on, and nothing else says

    Attributes:
        cases: dataclasses, each with ``failed``
        claims: what is held against a target; a target that is missed is no failure
        more: what else is written
    """

    def __init__(self, experiment: str, options: argparse.Namespace, **settings: Any):
        self.begun, now = time.perf_counter(), datetime.now(UTC)
        commit, about = options.commit or current_commit(), machine(torch.device(options.device))
        experiment = f"{experiment}-quick" if options.quick else experiment
        self.head = {
            "experiment": experiment,
            "date": now.isoformat(timespec="seconds"),
            "commit": commit,
            "machine": about,
            "versions": versions(),
        }
        self.settings = {"tf32": False, "quick": options.quick, **settings}
        self.cases: list[Any] = []
        self.claims: list[Claim] = []
        self.more: dict[str, Any] = {}
        name = file_name(experiment, about["hardware"], f"{now:%Y-%m-%d}", commit, quick=False)
        self.path: Path = options.json or options.out / f"{name}.json"
        self.partial = self.path.with_suffix(".partial.json")

    def record(self) -> dict[str, Any]:
        return {
            **self.head,
            "settings": self.settings,
            "seconds": time.perf_counter() - self.begun,
            **self.more,
            "cases": [asdict(case) for case in self.cases],
            "targets": [{**asdict(claim), "met": claim.met} for claim in self.claims],
        }

    def go_on_with(self, path: Path) -> dict[str, Any]:
        """What an earlier run wrote, whose seconds count from now on; refused where that was another commit or machine."""
        before = json.loads(path.read_text())
        theirs, ours = ((of["experiment"], of["commit"], of["machine"]["hardware"]) for of in (before, self.head))
        if theirs != ours:
            raise SystemExit(f"{path}: was written by {' '.join(theirs)}, which this is not: {' '.join(ours)}")
        self.begun -= before["seconds"]
        return before

    def claim(self, name: str, value: float | None, limit: float) -> None:
        self.claims.append(Claim(name, value, limit))

    def save(self) -> None:
        """As far as it got."""
        write(self.record(), self.partial)

    def finish(self) -> int:
        """Write all of it; the exit code is 0 where every check held."""
        write(self.record(), self.path)
        self.partial.unlink(missing_ok=True)
        for claim in self.claims:
            found = (
                "not measured" if claim.value is None else f"{number(claim.value)}, {'met' if claim.met else 'MISSED'}"
            )
            print(f"{claim.name:80} target {claim.limit:<8g} {found}")
        failed = sum(case.failed for case in self.cases)
        seconds = time.perf_counter() - self.begun
        print(f"\n{len(self.cases)} cases, {failed} failed their check; {seconds:.0f} s; written to {self.path}")
        return 1 if failed else 0


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "jax", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"deeppcr": deeppcr.__version__, **found}


def current_commit() -> str:
    """The commit of this checkout, marked where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(record: dict[str, Any], path: Path) -> None:
    """All or nothing: an interrupted run leaves no half-written results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
