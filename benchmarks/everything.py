"""Every benchmark whose results are kept, one after the other, each in a process of its own.

    python benchmarks/everything.py [--only NAMES] [--data-dir DIR] [--seconds N] [--out results] [--device cpu|cuda] [--quick]
    python benchmarks/everything.py --list

What --out holds of this commit and this machine is not measured again, so that an interrupted run goes on. With --seconds, what
would not end in time by what it took before is left for another call. On a CPU there are the core and the compiling alone, or with --quick
a dry run of nearly all. A benchmark that needs data, or a library that is not installed, is left out and named.

--list says of every kept result, those of the paper's experiments too, how many commits have changed the library since.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from deeppcr_paper.store import file_name
from deeppcr_paper.timing import machine
from records import current_commit, parse, parser_of

HERE = Path(__file__).parent
#: What a run may take longer than the one before: other kernels to compile, another machine.
SLACK = 1.2


@dataclass(frozen=True)
class Benchmark:
    """A program beside this one, and what it needs.

    Attributes:
        name: of its results
        on_cpu: whether what it measures there is of use
        dry: whether ``--quick`` is a dry run on a CPU
        data: its option for the folder with data sets
        module: what has to be installed
    """

    name: str
    program: str
    options: tuple[str, ...] = ()
    on_cpu: bool = False
    dry: bool = True
    data: str | None = None
    module: str | None = None


#: Processes that make kernels and references before anything is timed.
_CORES = os.cpu_count() or 1
_WORKERS = "--workers", str(max(1, min(14, _CORES - 2)))
#: Those first that README and pages quote most. All choices first: they make kernels for what comes after.
BENCHMARKS = (
    Benchmark(
        "loops",
        "loops.py",
        ("--budget", "0.08", *_WORKERS, "--part", "choice", "table", "captured", "host", "cold"),
    ),
    Benchmark("recurrent", "recurrent.py", ("--budget", "330", *_WORKERS)),
    Benchmark("real-diffusion", "real_diffusion.py", dry=False, data="--data", module="diffusers"),
    Benchmark("kernels", "kernels.py"),
    Benchmark("core", "run.py", on_cpu=True),
    Benchmark("recipes", "recipes.py"),
    Benchmark("trainings", "trainings.py", ("--epochs", "mnist=4"), data="--data-dir"),
    Benchmark(
        "compile-time",
        "compile_time.py",
        ("--workers", str(max(1, _CORES // 3))),
        on_cpu=True,
        dry=False,
        module="triton",
    ),
    Benchmark("auto-choice", "auto_choice.py"),
)


def lacks(benchmark: Benchmark, options: argparse.Namespace) -> str | None:
    """Why it cannot run here; None where it can."""
    if options.device == "cpu" and not (benchmark.dry if options.quick else benchmark.on_cpu):
        return "needs a GPU"
    if benchmark.module is not None and find_spec(benchmark.module) is None:
        return f"needs {benchmark.module}"
    if benchmark.data is not None and options.data_dir is None:
        return "needs --data-dir, or DEEPPCR_DATA"
    return None


def files_of(name: str, hardware: str, folder: Path, commit: str = "*") -> list[Path]:
    """Whole results, the newest last."""
    beginning = file_name(name, hardware, "", "", quick=False).rstrip("-")
    return sorted(folder.glob(f"{beginning}-[0-9]*-[0-9]*-[0-9]*-{commit}.json"))


def took(benchmark: Benchmark, hardware: str) -> float:
    """Seconds of the newest result in the repository of this machine; 0 where there is none."""
    kept = files_of(benchmark.name, hardware, HERE.parent / "results")
    return json.loads(kept[-1].read_text())["seconds"] if kept else 0.0


def run(benchmark: Benchmark, options: argparse.Namespace, commit: str) -> int:
    command = [sys.executable, str(HERE / benchmark.program), *(() if options.quick else benchmark.options)]
    command += ["--device", options.device, "--out", str(options.out), "--commit", commit]
    command += ["--quick"] if options.quick else []
    command += [benchmark.data, str(options.data_dir)] if benchmark.data else []
    print(f"\n== {benchmark.name}: {' '.join(command[1:])}", flush=True)
    return subprocess.run(command, check=False).returncode


def run_all(options: argparse.Namespace) -> int:
    begun, commit = time.monotonic(), options.commit or current_commit()
    hardware = machine(torch.device(options.device))["hardware"]
    became: dict[str, str] = {}
    for benchmark in BENCHMARKS:
        if options.only and benchmark.name not in options.only:
            continue
        left = options.seconds - (time.monotonic() - begun)
        expected = 0.0 if options.quick else SLACK * took(benchmark, hardware)
        if reason := lacks(benchmark, options):
            became[benchmark.name] = f"left out: {reason}"
        elif files_of(f"{benchmark.name}-quick" if options.quick else benchmark.name, hardware, options.out, commit):
            became[benchmark.name] = f"there, of commit {commit}"
        elif expected > left:
            became[benchmark.name] = f"left for another call: {expected:.0f} s expected, {max(0.0, left):.0f} left"
        else:
            since = time.monotonic()
            code = run(benchmark, options, commit)
            became[benchmark.name] = (
                f"{'measured' if code == 0 else f'FAILED, exit code {code}'} ({time.monotonic() - since:.0f} s)"
            )
    print("", *(f"{name:16}{what}" for name, what in became.items()), sep="\n")
    return int(any(what.startswith("FAILED") for what in became.values()))


def ages(results: Path) -> list[str]:
    """Of every result: its commit, and how many have changed the library since."""
    lines = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        commit = content.get("commit")
        if commit is None:
            lines.append(f"{path.stem:70}names no commit")
            continue
        command = ["git", "-C", str(HERE), "rev-list", "--count", f"{commit}..HEAD", "--", "../src"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        since = found.stdout.strip() if found.returncode == 0 else "an unknown number of"
        lines.append(f"{path.stem:70}{since} commits to src since")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what can run; the exit code is 1 where one of them failed."""
    parser = parser_of(__doc__, quick="tiny problems, in minutes: a dry run")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in BENCHMARKS], help="(default: all)")
    given = os.environ.get("DEEPPCR_DATA")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(given) if given else None,
        help="folder with MNIST and CIFAR-10 (default: DEEPPCR_DATA)",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that there are (default: no limit)")
    parser.add_argument("--list", action="store_true", help="how old the kept results are; nothing is measured")
    options = parse(parser, arguments)
    if options.json is not None:
        parser.error("--json: there are several files; --out says where")
    if options.list:
        print(*ages(options.out), sep="\n")
        return 0
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
