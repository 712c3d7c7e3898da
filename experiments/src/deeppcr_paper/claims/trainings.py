"""Readings of the experiments on trainings: ``resnet-training``, ``resnet-iterations``, ``resnet-guess``."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from ..figures.ablations import GUESSES
from ..figures.style import plain
from ..figures.style import seconds as in_words
from ..resnet_training import end_loss
from ..table import times
from .check import OPEN, Check, held
from .results import Finished
from .rules import CLOSE, judge_all
from .words import BASELINES, finite, listed

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


def as_printed(result: Finished) -> bool:
    """Whether it was trained by the paper's method; else by the library's defaults."""
    return result.content["settings"].get("solver", "default") == "paper"


def with_defaults(result: Finished) -> bool:
    return not as_printed(result)


_NOT_TRAINED = "Not yet trained as printed."


def _trained(result: Finished, rule: str, number: Any, ours: str, **words: Any) -> Check:
    """A check of a training, in the column of the method that trained; the defaults decide nothing of the paper's."""
    if as_printed(result):
        return held(rule, number, printed=ours, **words)
    return Check(**{**words, "why": _NOT_TRAINED}, defaults=ours, holds=OPEN, rule=rule)


def times_of_passes(result: Finished) -> list[Check]:
    """Fig. 4: the forward pass in training."""
    entry = deepest(result)
    depth, mode = f"L = {entry['L']:,}", entry["parallel"]["forward_seconds"]
    defaults = mode if with_defaults(result) else None
    words = {"what": f"forward pass over the eager loop, {depth}", "paper": "7×", "why": _why_slow(result)}
    eager, printed = entry["eager_forward_seconds"], entry["printed_forward_seconds"]
    if eager and defaults:
        words["defaults"] = f"{times(eager / defaults)} ({in_words(defaults)})"
    if entry["sequential"]["forward_seconds"]:
        fused, name = entry["sequential"]["forward_seconds"], _loop_name(result, entry)
        each = {"printed": printed, "defaults": defaults}
        said = [f"{how} {times(fused / value)}" for how, value in each.items() if value]
        words["loop"] = f"{name} {in_words(fused)}: {'; '.join(said)}" if said else ""
    if eager and printed:
        ratios = {eager / printed: f"at first ({in_words(printed)}, plain PyTorch)"}
        if as_printed(result) and mode:
            ratios[eager / mode] = f"in all ({in_words(mode)}, our solver)"
        took = "; ".join(f"{times(ratio)} {when}" for ratio, when in ratios.items())
        found, _ = judge_all("speed-up", [(ratio, 7) for ratio in ratios])
        checks = [Check(**words, printed=took, holds=found, rule="speed-up")]
    else:
        checks = [Check(**words, holds=OPEN)]
    checks += _replayed(result, entry) if with_defaults(result) else _graphed(entry)
    return [*checks, _steady(result)]


def _loop_name(result: Finished, entry: Entry) -> str:
    return BASELINES[entry["loop"] or ("graph" if result.content["device"] == "cuda" else "loop")]


def _replayed(result: Finished, entry: Entry) -> list[Check]:
    """Without what the host takes for a pass, which is most of it."""
    one, other = (entry[mode].get("replayed_seconds") for mode in ("sequential", "parallel"))
    if not (one and other):
        return []
    what = f"a training step inside a CUDA graph, L = {entry['L']:,}"
    beside = f"{_loop_name(result, entry)} {in_words(one)}: {times(one / other)}"
    return [Check(what=what, defaults=in_words(other), loop=beside)]


def _graphed(entry: Entry) -> list[Check]:
    """The paper's method with every iteration in a CUDA graph."""
    eager, took = entry["eager_forward_seconds"], entry["parallel"].get("graphed_forward_seconds")
    if not (eager and took):
        return []
    what = f"the same, iterations in CUDA graphs, L = {entry['L']:,}"
    return [Check(what=what, printed=f"{times(eager / took)} ({in_words(took)})")]


#: Seconds of a pass at L = 1024, layer by layer and by the paper's method: 3.2 h and 30 min over 60,000 steps.
PAPER_PASS = (3.2 * 3600 / 60_000, 1800 / 60_000)


def _why_slow(result: Finished) -> str:
    entry, dtype = deepest(result), result.content["settings"].get("dtype", "float32")
    if dtype == "float64":
        return "This run is in float64, for which there are no kernels: it shows that both trainings are the same, not how fast."
    if entry["printed_speedup_over_eager"] and entry["printed_iterations"]:
        paper = " and ".join(map(in_words, PAPER_PASS))
        return f"In the paper a pass of its loop and of its method took {paper}."
    return ""


def _steady(result: Finished) -> Check:
    """At the largest depth: the median of the last quarter of the points over that of the second quarter."""
    depth = deepest(result)["L"]

    def grown(mode: str) -> float | None:
        found = [points for points in curves(result, depth, "forward_seconds", mode) if len(points) >= 8]
        quarters = [(points[len(points) // 4 : len(points) // 2], points[-(len(points) // 4) :]) for points in found]
        return max((median(end) / median(begin) for begin, end in quarters), default=None)

    words = {"what": f"time of a pass, last quarter over second, L = {depth:,}", "paper": "roughly constant"}
    ours, own = grown("parallel"), grown("sequential")
    if ours is None:
        return Check(**words, printed="not measured", holds=OPEN)
    if own:
        words["loop"] = f"{_loop_name(result, deepest(result))} {own:.2f}"
    return _trained(result, "steady", ours, f"{ours:.2f}", **words)


def _by_depth(found: dict[int, str]) -> str:
    """
    >>> _by_depth({256: "0.1", 1024: "0.2"})
    'L = 256: 0.1; 1,024: 0.2'
    """
    return "L = " + "; ".join(f"{depth:,}: {text}" for depth, text in found.items()) if found else ""


def losses(result: Finished) -> list[Check]:
    """Fig. 5: the two trainings have the same loss."""
    said, apart = {}, {}
    for entry in result.summary:
        both = [entry[mode]["loss"] for mode in ("sequential", "parallel")]
        if not all(both) or None in both[0] + both[1]:
            said[entry["L"]], apart[entry["L"]] = "diverged", math.inf
            continue
        one, other = map(fmean, both)
        said[entry["L"]] = f"{end_loss(entry, 'parallel')} ({end_loss(entry, 'sequential')})"
        apart[entry["L"]] = abs(one - other) / one
    words = {"what": "final loss (layer by layer)", "paper": "equivalent"}
    return [_trained(result, "same loss", max(apart.values()), _by_depth(said), **words)]


def end_accuracies(entry: Entry, mode: str) -> list[float]:
    """In percent, of every seed."""
    return [100 * each[-1] for each in entry[mode]["test_accuracy"] if each and finite(each[-1])]


def accuracies(result: Finished) -> list[Check]:
    """Fig. 15: 94% in both modes."""
    said, off, apart = {}, {}, {}
    for entry in result.summary:
        found = {mode: end_accuracies(entry, mode) for mode in ("sequential", "parallel")}
        if not all(found.values()):
            said[entry["L"]], off[entry["L"]], apart[entry["L"]] = "diverged", math.inf, math.inf
            continue
        one, other = (fmean(each) for each in found.values())
        said[entry["L"]] = f"{other:.1f}% ({one:.1f}%)"
        off[entry["L"]] = max(abs(one - 94), abs(other - 94))
        apart[entry["L"]] = max(abs(a - b) for a, b in zip(*found.values(), strict=False))
    words = {"what": "final accuracy (layer by layer)", "paper": "94%"}
    judged = _trained(result, "accuracy", max(off.values()), _by_depth(said), **words)
    if why := cut_short(result):
        judged = replace(judged, holds=OPEN, why=why)
    words = {"what": "their difference, in points", "paper": "close to 0"}
    most = _by_depth({depth: f"{value:.2f}" for depth, value in apart.items()})
    return [judged, _trained(result, "same accuracy", max(apart.values()), most, **words)]


def seeds(result: Finished) -> list[Check]:
    """Fig. 16: the same from every seed."""
    said, wide = {}, 0.0
    for entry in result.summary:
        found = {mode: end_accuracies(entry, mode) for mode in ("parallel", "sequential")}
        if min(map(len, found.values())) > 1:
            said[entry["L"]] = "{}% ({}%)".format(*(f"{min(each):.1f}–{max(each):.1f}" for each in found.values()))
            wide = max(wide, *(max(each) - min(each) for each in found.values()))
    words = {"what": "accuracies of the seeds (layer by layer)", "paper": "consistent"}
    if not said:
        column = "printed" if as_printed(result) else "defaults"
        return [Check(**words, **{column: "one seed only"}, holds=OPEN)]
    return [_trained(result, "seeds", wide, _by_depth(said), **words)]


def newton(result: Finished) -> list[Check]:
    """Fig. 8 right: iterations during training, and how far apart the parameters are."""
    words: dict[str, Any] = {"what": "iterations in training (highest point)", "paper": "at most 6"}
    found = {e["L"]: _whole_training(result, e["L"]) for e in result.summary}
    said = _by_depth({depth: text for depth, (text, _) in found.items() if text})
    most = max((highest for _, highest in found.values()), default=0.0)
    checks = [_trained(result, "6 at every point", most, said, **words)] if said else [Check(**words, holds=OPEN)]
    far = {e["L"]: max(apart) for e in result.summary if (apart := [v for v in e["parameter_distance"] if finite(v)])}
    if far:
        words = {"what": "largest difference of a parameter", "paper": "bounded (below 1)"}
        said = _by_depth({depth: plain(value) for depth, value in far.items()})
        checks.append(_trained(result, "bounded", max(far.values()), said, **words))
    return checks


def _whole_training(result: Finished, depth: int) -> tuple[str, float]:
    """The mean number of iterations, in words, and the highest point of a curve."""
    points = [point for curve in curves(result, depth, "iterations") for point in curve]
    if not points:
        return "", 0.0
    if max(points) == 1:
        return "1 (two chunks)", 1.0
    return f"{fmean(points):.1f} ({max(points):.1f}){_by_loop(result, depth)}", max(points)


def _by_loop(result: Finished, depth: int) -> str:
    """How often the loop had to finish what the rounds of a CUDA graph had left."""
    shares = [share for curve in curves(result, depth, "not_converged") for share in curve]
    return f"; the loop finished {fmean(shares):.1%} of steps" if shares and max(shares) > 0 else ""


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
    """The ablation: three iterations suffice, and are twice as fast as the test's six. All as printed."""
    said, good, faster, ratios, few = {}, [], {}, [], False
    for depth in sorted({entry["L"] for entry in result.summary}):
        runs = ends(result, depth, "batch-mean")
        tested, three = runs.get(0), runs.get(3)
        if tested is None or three is None:
            continue
        suffice = enough(runs)
        good.append(3 in suffice)
        said[depth] = f"{_text(three)} ({_text(tested)})"
        said[depth] += f", even with {suffice[0]}" if suffice and suffice[0] < 3 else ""
        if ratio := three["speedup_over_tested"]:
            ratios.append(ratio)
            faster[depth] = f"{times(ratio)} (test {tested['mean_iterations']:.1f})"
            few |= tested["mean_iterations"] < 5.5
    if not said:
        return []
    words = {"what": "final loss with 3 iterations (by the test)", "paper": "as well"}
    checks = [held("trains as well", all(good), printed=_by_depth(said), **words)]
    if ratios:
        words = {"what": "a pass of 3 iterations over one by the test", "paper": "2× (potential)"}
        words["why"] = "The test takes fewer iterations here than the paper's 6." if few else ""
        checks.append(held("speed-up", min(ratios), 2, printed=_by_depth(faster), **words))
    return checks


def guesses(result: Finished) -> list[Check]:
    """Three iterations suffice from the last step's batch mean; more than five are needed from elsewhere."""
    checks = []
    depth = max(entry["L"] for entry in result.summary)
    for guess in dict.fromkeys(entry["guess"] for entry in result.summary):
        runs = ends(result, depth, guess)
        tried, suffice = sorted(count for count in runs if count), enough(runs)
        ours = f"{suffice[0]} suffice" if suffice else f"none of {listed([str(count) for count in tried])} suffices"
        mean = runs[0]["mean_iterations"] if 0 in runs else None
        ours += f"; by the test {mean:.1f}" if mean else ""
        rule, count, paper = (
            ("suffice", 3, "3 suffice") if guess == "batch-mean" else ("needed", 5, "more than 5 needed")
        )
        words = {"what": f"iterations from {GUESSES.get(guess, guess)}, L = {depth:,}", "paper": paper}
        least = suffice[0] if suffice else None
        checks.append(held(rule, least, count, printed=ours, why=_why_any_guess(result, depth), **words))
    return checks


def _why_any_guess(result: Finished, depth: int) -> str:
    every = [ends(result, depth, guess).get(0) for guess in dict.fromkeys(entry["guess"] for entry in result.summary)]
    if not all(tested and tested["mean_iterations"] and tested["mean_iterations"] < 5 for tested in every):
        return ""
    return "By its own test the method ends after fewer than 5 iterations from any start: there is little to save."


def _text(entry: Entry) -> str:
    return "diverged" if entry["diverged"] is not None or entry["loss"] is None else f"{entry['loss']:.3f}"
