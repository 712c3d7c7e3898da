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
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deeppcr_paper.timing import relative_error
from kernel_methods import Method, can_capture, captured
from kernel_problems import Problem
from kernel_report import Claim, is_captured
from kernels import Case, examine, line
from recipe_problems import CAPTURED, RECIPES, Recipe
from records import Results, parse, parser_of, set_up

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


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, quick="tiny sizes, in seconds: a dry run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these recipes: gae, biquad, ...")
    parser.add_argument("--budget", type=float, help="seconds of timing for each method (default: 0.3)")
    options = parse(parser, arguments)
    unknown = set(options.only or ()) - {recipe.name for recipe in RECIPES}
    if unknown:
        parser.error(f"--only: no such recipe: {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 where every check held."""
    options = options_of(arguments)
    device = torch.device(options.device)
    set_up(device)
    if device.type != "cuda":
        print("no CUDA device: nothing is captured, and the targets are those of a GPU")
    budget = options.budget if options.budget is not None else 0.005 if options.quick else 0.3
    results = Results("recipes", options, budget_seconds=budget)
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
        results.cases += found
        results.claims += claims_of(recipe, found)
        print("\n".join(map(line, found)), flush=True)
        results.save()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
