"""The recipes of ``examples/`` at sizes that people have, against loops, tools and their targets: checked, then timed, then written.

    python benchmarks/recipes.py [--only NAMES] [--device cpu|cuda] [--quick] [--json FILE]

Each recipe is called as its page has it ("recipe") and, where it can be, captured in a CUDA graph of the caller; beside it the plain loop,
the same in a CUDA graph, and the tool that people use where it is installed (torchdiffeq, scipy on the CPU). Of loops the first 256
steps are run, and their time is scaled to all of them; results are gradients where the recipe is about them.

Results are compared with the plain loop in float64 first (the filter: with scipy, where that is installed): what is wrong is
reported and never timed, and the exit code is then 1. A target that is missed is no failure. Times are minima over the repeats, after
some calls, the device waited for. Float32 with TF32 off, but for MALA, in float64.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr_paper.store import file_name
from deeppcr_paper.timing import machine, relative_error
from kernel_methods import Method, can_capture, captured
from kernel_problems import Problem
from kernel_report import Claim, is_captured, number
from kernels import Case, examine
from recipe_problems import CAPTURED, RECIPES, Recipe
from run import current_commit, versions, write

CALL, LOOP, GRAPH = "recipe", "loop", "loop in a CUDA graph"
#: Of a loop so many steps are run, and their time is scaled.
PART = 256
#: Calls before a recipe is checked and timed: what comes again is compiled first.
WARM_UP = 4


def methods_of(recipe: Recipe, sizes: dict[str, int], device: torch.device) -> dict[str, Method]:
    torch.manual_seed(0)
    made = recipe.make(device, **sizes)
    right = made.right().to(device)

    def error(found: Tensor) -> float:
        return relative_error([found], [right]) / recipe.error

    found = {CALL: Method(made.run, error, warm_up=WARM_UP)} | made.others(error)
    steps = min(PART, sizes["L"])
    # What it computes is right by definition: only where the whole of it runs can that be seen.
    check = error if steps == sizes["L"] else lambda _: 0.0
    loop = Method(made.loop(steps), check, optional=True, scale=sizes["L"] / steps)
    found[LOOP] = loop
    if not can_capture(device):
        return {name: method for name, method in found.items() if not is_captured(name)}
    found = {name: replace(each, prepare=captured) if is_captured(name) else each for name, each in found.items()}
    if made.inside is not None:
        found[CAPTURED] = Method(made.inside(), error, prepare=captured)
    found[GRAPH] = replace(loop, prepare=captured)
    return found


def claims_of(recipe: Recipe, cases: Sequence[Case]) -> list[Claim]:
    times = {case.method: 1e3 * min(case.seconds) for case in cases if case.passed}
    claims = []
    for method, limit, other in recipe.limits:
        value = times.get(method)
        if other is not None:
            value = value / times[other] if value is not None and other in times else None
        claims.append(Claim(f"{recipe.name}: {method}, {f'over {other}' if other else 'ms'}", value, limit))
    return claims


def line(case: Case) -> str:
    text = f"{' '.join(f'{value}' for value in case.parameters.values()):32} {case.method:24}"
    if not case.passed:
        return f"{text} {'not here' if case.optional and case.error is None else 'FAILED'}: {case.failure}"
    text += f"{number(1e3 * min(case.seconds)):>10} ms  median {number(1e3 * median(case.seconds)):>9}"
    return f"{text}  scaled" if case.scale != 1 else f"{text}  error {case.error:.2g} of what is allowed"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these recipes: gae, biquad, ...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: a dry run")
    parser.add_argument("--budget", type=float, help="seconds of timing for each method (default: 0.3)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where results are written (default: a name in --out)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "results", help="folder for the file"
    )
    parser.add_argument("--commit", help="for a copy without its repository (default: as git has it)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    unknown = set(options.only or ()) - {recipe.name for recipe in RECIPES}
    if unknown:
        parser.error(f"--only: no such recipe: {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 where every check held."""
    options = parse(arguments)
    device, now, commit = torch.device(options.device), datetime.now(timezone.utc), options.commit or current_commit()
    torch.set_float32_matmul_precision("highest")
    warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # a capture on another stream than earlier passes may end
    else:
        print("no CUDA device: nothing is captured, and the targets are those of a GPU")
    budget = options.budget if options.budget is not None else 0.005 if options.quick else 0.3
    begun, about = time.perf_counter(), machine(device)
    cases: list[Case] = []
    claims: list[Claim] = []
    experiment = "recipes-quick" if options.quick else "recipes"
    name = file_name(experiment, about["hardware"], f"{now:%Y-%m-%d}", commit, quick=False)
    path = options.json or options.out / f"{name}.json"

    def record() -> dict[str, Any]:
        return {
            "experiment": experiment,
            "date": now.isoformat(timespec="seconds"),
            "commit": commit,
            "machine": about,
            "versions": versions(),
            "settings": {"tf32": False, "quick": options.quick, "budget_seconds": budget},
            "seconds": time.perf_counter() - begun,
            "cases": [asdict(case) for case in cases],
            "targets": [{**asdict(claim), "met": claim.met} for claim in claims],
        }

    partial = path.with_suffix(".partial.json")
    for recipe in RECIPES:
        if options.only and recipe.name not in options.only:
            continue
        sizes = recipe.small if options.quick else recipe.sizes
        problem = Problem(
            "recipes",
            {"recipe": recipe.name} | sizes,
            lambda device, recipe=recipe, sizes=sizes: methods_of(recipe, sizes, device),
            1.0,
            recipe.gradients,
        )
        with torch.set_grad_enabled(recipe.gradients):
            found = examine(problem, device, budget)
        cases += found
        claims += claims_of(recipe, found)
        print("\n".join(map(line, found)), flush=True)
        write(record(), partial)  # as far as it got
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(record(), path)
    partial.unlink(missing_ok=True)
    for claim in claims:
        found = "not measured" if claim.value is None else f"{number(claim.value)}, {'met' if claim.met else 'MISSED'}"
        print(f"{claim.name:48} target {claim.limit:<8g} {found}")
    # What may be impossible here is no failure where it did not run; a wrong result always is.
    failed = [case for case in cases if not case.passed and (case.error is not None or not case.optional)]
    print(f"\n{len(cases)} cases, {len(failed)} failed their check; written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
