"""Readings of the experiments on trainings: ``resnet-training``, ``resnet-iterations``, ``resnet-guess``."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ..figures.ablations import GUESSES
from ..figures.style import plain
from ..figures.style import seconds as in_words
from ..resnet_training import end_loss
from ..table import times
from .check import NO, OPEN, SPEED_UP, YES, Check, holds
from .results import Finished
from .words import BASELINES, finite, listed

#: Of MNIST, which the paper's trainings go through 8 times.
IMAGES = 60_000
#: Trainings whose losses at the end differ by no more than this share are practically equivalent.
SAME_LOSS = 0.02
#: A loss this many times that of the run with the paper's test is as good.
CLOSE = 1.1
Entry = dict[str, Any]


def deepest(result: Finished) -> Entry:
    return max(result.summary, key=lambda entry: entry["L"])


def curves(result: Finished, depth: int, name: str, mode: str = "parallel") -> list[list[float]]:
    """One of the curves of the trainings of a depth, of every seed that has it."""
    runs = [record["runs"] for record in result.records if "runs" in record and record["L"] == depth]
    return [points for run in runs if (points := run.get(mode, {}).get("curves", {}).get(name))]


def cut_short(result: Finished) -> str:
    """Why the end of these trainings is not the end of the paper's; empty where it is."""
    settings = result.content["settings"]
    if settings.get("steps"):
        return f"This run ends after {settings['steps']:,} steps; the paper's trainings took 60,000."
    if settings["epochs"] < 8:
        return f"This run has {settings['epochs']} epochs, the paper's 8."
    return "" if result.images == "MNIST" else f"This run learnt {result.images}, the paper's MNIST."


def times_of_passes(result: Finished) -> list[Check]:
    """Fig. 4: the forward pass in training."""
    entry = deepest(result)
    depth, why = f"L = {entry['L']:,}", _why_slow(result)
    printed, over_eager = entry["printed_speedup_over_eager"], entry["speedup_over_eager"]
    checks = []
    if printed:
        took = f"{times(printed)} ({in_words(entry['printed_forward_seconds'])} instead of "
        took += f"{in_words(entry['eager_forward_seconds'])})"
        what = f"forward pass as printed over the eager loop, {depth}"
        checks.append(Check(what, "7×", took, holds(printed >= SPEED_UP * 7), why))
    if over_eager:
        took = f"{times(over_eager)} ({in_words(entry['parallel']['forward_seconds'])})"
        what = f"forward pass with the defaults over the eager loop, {depth}"
        checks.append(Check(what, "7×", took, holds(over_eager >= SPEED_UP * 7), why))
    if entry["speedup_over_fastest_loop"]:
        loop = BASELINES[entry["loop"] or ("graph" if result.content["device"] == "cuda" else "loop")]
        took = f"{times(entry['speedup_over_fastest_loop'])} ({in_words(entry['sequential']['forward_seconds'])})"
        checks.append(Check(f"the same over the {loop}", "", took))
        checks += _replayed(result, entry, loop)
    if result.images == "MNIST" and entry["eager_forward_seconds"]:
        checks.append(_whole_training(result, entry))
    return [*checks, *_steady(result, fast=any(check.holds == YES for check in checks))]


def _steps(result: Finished) -> int:
    """Of a whole training."""
    return 8 * IMAGES // result.content["settings"]["batch"]


def _replayed(result: Finished, entry: Entry, loop: str) -> list[Check]:
    """Without what the host takes for a pass, which is most of it."""
    one, other = (entry[mode].get("replayed_seconds") for mode in ("sequential", "parallel"))
    if not (one and other):
        return []
    ours = f"{times(one / other)} ({in_words(other)} instead of {in_words(one)})"
    if result.images == "MNIST":
        ours += (
            f"; times {_steps(result):,} steps: {_steps(result) * other:.0f} s instead of {_steps(result) * one:.0f} s"
        )
    return [Check(f"a whole step of training inside a CUDA graph over the {loop}, L = {entry['L']:,}", "", ours)]


#: Seconds of a pass at L = 1024, layer by layer and by the paper's method: 3.2 h and 30 min over 60,000 steps.
PAPER_PASS = (3.2 * 3600 / 60_000, 1800 / 60_000)


def _why_slow(result: Finished) -> str:
    entry, dtype = deepest(result), result.content["settings"].get("dtype", "float32")
    if dtype == "float64":
        return (
            "This run is in float64, to show that both trainings are the same to the last bit but one. The kernels are for "
            "float32: here Newton's method runs in PyTorch, operation by operation, and the loop wins."
        )
    if entry["printed_speedup_over_eager"] and entry["printed_speedup_over_eager"] < SPEED_UP * 7:
        loop, printed = entry["eager_forward_seconds"], entry["printed_forward_seconds"]
        both = ", so both are faster here" if loop < PAPER_PASS[0] and printed < PAPER_PASS[1] else ""
        paper = " and ".join(map(in_words, PAPER_PASS))
        return (
            f"By the paper's hours a pass of its loop and of its method took {paper}; ours take {in_words(loop)} and "
            f"{in_words(printed)}{both}. As printed a pass takes {entry['printed_iterations']:.1f} iterations, and waits for the "
            "device in each."
        )
    return ""


def _whole_training(result: Finished, entry: Entry) -> Check:
    each = {
        "eager loop": entry["eager_forward_seconds"],
        "as printed": entry["printed_forward_seconds"],
        "with the defaults": entry["parallel"]["forward_seconds"],
    }
    steps = _steps(result)
    said = [f"{steps * value / 60:.3g} min {name}" for name, value in each.items() if value]
    what = f"all forward passes of {steps:,} steps, L = {entry['L']:,} (median of a pass, times the steps)"
    return Check(what, "3.2 h and 30 min", ", ".join(said))


def _steady(result: Finished, *, fast: bool) -> list[Check]:
    """At the largest depth, the largest of the last three quarters of the points over the least.

    The paper takes it to confirm that the speed-up lasts: where there is none, it confirms nothing. Beside it, where steps were
    replayed in a CUDA graph, the same of those: the times of single calls are the host's, and its unrest.
    """
    depth, paper = deepest(result)["L"], "roughly constant: the speed-up lasts"

    def unrest(name: str, mode: str = "parallel") -> float | None:
        after = [points[len(points) // 4 :] for points in curves(result, depth, name, mode)]
        return max((max(points) / min(points) for points in after if len(points) > 1), default=None)

    when = f"after the first quarter of the training, most over least of 100 steps, L = {depth:,}"
    what = f"time of a pass {when}"
    forward, replayed = unrest("forward_seconds"), unrest("replayed_seconds")
    if forward is None:
        return [Check(what, paper, "not measured", OPEN)]
    if not fast:
        return [Check(what, paper, f"{forward:.2f}, but without the speed-up")]
    own = unrest("forward_seconds", "sequential")
    why = ""
    if replayed is not None and replayed < forward:
        why = "The times of single calls are the host's: inside a CUDA graph, in the last row, they vary less."
    beside = f"{forward:.2f}" + (f"; of the loop beside it {own:.2f}" if own else "")
    checks = [Check(what, paper, beside, holds(forward <= 1.5), why)]
    if replayed is not None:
        checks.append(Check(f"time of a whole step inside a CUDA graph {when}", "", f"{replayed:.2f}"))
    return checks


def losses(result: Finished) -> list[Check]:
    """Fig. 5: the two trainings have the same loss."""
    checks = []
    for entry in result.summary:
        both = [entry[mode]["loss"] for mode in ("sequential", "parallel")]
        what = f"loss at the end, L = {entry['L']:,}"
        if not all(both) or None in both[0] + both[1]:
            checks.append(Check(what, "practically equivalent", "diverged", NO, at_any_size=True))
            continue
        one, other = map(fmean, both)
        apart = entry["loss_difference"]
        ours = f"{end_loss(entry, 'sequential')} layer by layer, {end_loss(entry, 'parallel')} in parallel"
        ours += f"; losses of a step differ by at most {plain(max(apart))}" if apart else ""
        good = holds(abs(one - other) <= SAME_LOSS * one)
        checks.append(Check(what, "practically equivalent (ours: within 2%)", ours, good, at_any_size=True))
    return checks


def end_accuracies(entry: Entry, mode: str) -> list[float]:
    """In percent, of every seed."""
    return [100 * each[-1] for each in entry[mode]["test_accuracy"] if each and finite(each[-1])]


def accuracies(result: Finished) -> list[Check]:
    """Fig. 15: 94% in both modes."""
    checks, why = [], cut_short(result)
    for entry in result.summary:
        found = {mode: end_accuracies(entry, mode) for mode in ("sequential", "parallel")}
        if not all(found.values()):
            checks.append(Check(f"accuracy at the end, L = {entry['L']:,}", "94%", "diverged", NO, at_any_size=True))
            continue
        one, other = (fmean(each) for each in found.values())
        ours = f"{one:.1f}% layer by layer, {other:.1f}% in parallel"
        near = holds(max(abs(one - 94), abs(other - 94)) <= 1)
        above = f"At L = {entry['L']:,} ours is above the paper's." if min(one, other) > 94 else ""
        what = f"accuracy at the end, L = {entry['L']:,}"
        checks.append(Check(what, "94%", ours, OPEN if why else near, why or above))
        apart = max(abs(a - b) for a, b in zip(*found.values(), strict=False))
        what = f"difference of the two at the end, L = {entry['L']:,}"
        checks.append(Check(what, "close to 0", f"at most {apart:.2f} points", holds(apart <= 1), at_any_size=True))
    return checks


def seeds(result: Finished) -> list[Check]:
    """Fig. 16: the same from every seed."""
    checks = []
    for entry in result.summary:
        found = {mode: end_accuracies(entry, mode) for mode in ("sequential", "parallel")}
        count = min(map(len, found.values()))
        what = f"accuracy at the end from {count} seeds, L = {entry['L']:,}"
        if count < 2:
            what = f"accuracy at the end from several seeds, L = {entry['L']:,}"
            checks.append(Check(what, "consistent (5 seeds)", "one seed only", OPEN))
            continue
        said = [
            f"{min(each):.1f} to {max(each):.1f}% {'layer by layer' if mode == 'sequential' else 'in parallel'}"
            for mode, each in found.items()
        ]
        wide = max(max(each) - min(each) for each in found.values())
        checks.append(Check(what, "consistent (5 seeds)", "; ".join(said), holds(wide <= 2)))
    return checks


def newton(result: Finished) -> list[Check]:
    """Fig. 8 right: iterations during training, and how far apart the parameters are."""
    checks = []
    for entry in result.summary:
        depth = f"L = {entry['L']:,}"
        if entry["printed_iterations"]:
            ours = f"{entry['printed_iterations']:.1f} on average"
            what = f"iterations as printed, first steps, {depth}"
            checks.append(Check(what, "at most 6", ours, holds(entry["printed_iterations"] <= 6)))
        points = [point for curve in curves(result, entry["L"], "iterations") for point in curve]
        if points:
            what = f"iterations with the defaults, mean of 100 steps, {depth}"
            ours = f"at most {max(points):.1f}{_by_loop(result, entry['L'])}"
            # Two chunks are exact after one iteration, whatever the weights: that says nothing of Newton's method.
            good = "" if max(points) == 1 else holds(max(points) <= 6)
            checks.append(Check(what, "at most 6", ours, good, _ONE if max(points) == 1 else ""))
        apart = [value for value in entry["parameter_distance"] if finite(value)]
        if apart:
            what = f"largest difference of a parameter at the end, {depth}"
            checks.append(Check(what, "bounded (below 1)", plain(max(apart)), holds(max(apart) < 1), at_any_size=True))
    return checks


_ONE = (
    "Where the defaults take exactly one iteration, they have cut the network into two chunks: two passes over those are exact, "
    "whatever the weights."
)


def _by_loop(result: Finished, depth: int) -> str:
    """How often the loop had to finish what the rounds of a CUDA graph had left."""
    shares = [share for curve in curves(result, depth, "not_converged") for share in curve]
    return f"; the loop finished {fmean(shares):.1%} of the steps" if shares and max(shares) > 0 else ""


def ends(result: Finished, depth: int, guess: str) -> dict[int, Entry]:
    """The runs of the first seed by their number of iterations; 0 is the paper's test."""
    mine = [entry for entry in result.summary if (entry["L"], entry["guess"]) == (depth, guess)]
    first = min((entry["seed"] for entry in mine), default=0)
    return {entry["iterations"]: entry for entry in mine if entry["seed"] == first}


def enough(runs: dict[int, Entry]) -> list[int]:
    """Fixed numbers of iterations whose loss at the end is within a tenth of that with the paper's test."""
    tested = runs.get(0)
    if tested is None or tested["loss"] is None or tested["diverged"] is not None:
        return []
    return sorted(
        count
        for count, entry in runs.items()
        if count and entry["diverged"] is None and finite(entry["loss"]) and entry["loss"] <= CLOSE * tested["loss"]
    )


def few_iterations(result: Finished) -> list[Check]:
    """The ablation: three iterations suffice, and are twice as fast as the test's six."""
    checks = []
    for depth in sorted({entry["L"] for entry in result.summary}):
        runs = ends(result, depth, "batch-mean")
        tested, three = runs.get(0), runs.get(3)
        if tested is None or three is None:
            continue
        suffice = enough(runs)
        ours = f"{_text(three)} with 3, {_text(tested)} by the test"
        what = f"loss at the end, L = {depth:,}"
        checks.append(Check(what, "3 iterations train as well", ours, holds(3 in suffice)))
        least = f"{suffice[0]} suffice" if suffice else "none of those tried suffices"
        checks.append(Check(f"fewest iterations within a tenth of the test's loss, L = {depth:,}", "3", least))
        most = max(runs)
        if (mean := runs[most]["mean_iterations"]) and mean < most:
            taken = f"{mean:.1f} on average; those after them change nothing but rounding"
            checks.append(Check(f"iterations of {most} that count, L = {depth:,}", "", taken))
        ratio = three["speedup_over_tested"]
        if ratio:
            what = f"a pass of 3 iterations over one by the test, L = {depth:,}"
            ours = f"{times(ratio)} (the test takes {tested['mean_iterations']:.1f} on average)"
            why = _why_no_gain(result) if tested["mean_iterations"] < 5.5 else ""
            checks.append(Check(what, "2× (potential)", ours, holds(ratio >= SPEED_UP * 2), why))
    return checks


def _why_no_gain(result: Finished) -> str:
    said = "The test takes fewer iterations here than the paper's 6"
    for length in sorted({entry["L"] for entry in result.summary}):
        few, more = (ends(result, length, "batch-mean").get(count, {}).get("forward_seconds") for count in (1, 3))
        if few and more and few > more:
            return (
                f"{said}, and the times of a pass scatter by more than an iteration costs (L = {length:,}: {in_words(few)} with 1, "
                f"{in_words(more)} with 3)."
            )
    return f"{said}."


def guesses(result: Finished) -> list[Check]:
    """Three iterations suffice from the last step's batch mean; more than five are needed from elsewhere."""
    checks = []
    depth = max(entry["L"] for entry in result.summary)
    for guess in dict.fromkeys(entry["guess"] for entry in result.summary):
        runs = ends(result, depth, guess)
        tried, suffice = sorted(count for count in runs if count), enough(runs)
        ours = f"{suffice[0]} suffice" if suffice else f"none of {listed([str(count) for count in tried])} suffices"
        mean = runs[0]["mean_iterations"] if 0 in runs else None
        ours += f"; by the test {mean:.1f} on average" if mean else ""
        paper, good = "3 suffice", bool(suffice) and suffice[0] <= 3
        if guess != "batch-mean":
            paper, good = "more than 5 needed", not suffice or suffice[0] > 5
        what = f"iterations from {GUESSES.get(guess, guess)}, L = {depth:,}"
        checks.append(Check(what, paper, ours, holds(good), _why_any_guess(result, depth)))
    return checks


def _why_any_guess(result: Finished, depth: int) -> str:
    every = [ends(result, depth, guess).get(0) for guess in dict.fromkeys(entry["guess"] for entry in result.summary)]
    if not all(tested and tested["mean_iterations"] and tested["mean_iterations"] < 5 for tested in every):
        return ""
    return (
        "Under its own test the paper's method ends after fewer than 5 iterations on average here, from any start: there is little for a "
        "better one to save. The paper does not say how its weights were made, or after how many steps of training its figure ends."
    )


def _text(entry: Entry) -> str:
    return "diverged" if entry["diverged"] is not None or entry["loss"] is None else f"{entry['loss']:.3f}"
