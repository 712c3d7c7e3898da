"""Readings of the experiments on diffusion: latent and pixel models, error against iterations, initial guesses.

They read the summaries of those experiments: entries with a size (``w`` or ``side``), ``L``, and for ``printed`` and
``auto`` their iterations, errors and speed-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from ..figures.style import plain, span
from ..figures.style import seconds as in_words
from ..table import times
from .check import OPEN, SPEED_UP, Check, Table, holds
from .results import IMAGES, Finished, Needs
from .words import HOW

Entry = dict[str, Any]


class PaperRow(NamedTuple):
    """Of its table of times; the error is L∞."""

    speedup: float
    iterations: float
    error: float


#: The paper's table, by L and size (the width of a latent, the side of an image).
LATENT = {
    (256, 16): PaperRow(5.53, 7.05, 0.00195),
    (512, 16): PaperRow(8.32, 9.06, 0.00304),
    (1024, 16): PaperRow(11.22, 13.40, 0.00523),
    (256, 32): PaperRow(5.65, 6.67, 0.00252),
    (512, 32): PaperRow(8.40, 8.90, 0.00298),
    (1024, 32): PaperRow(10.98, 14.06, 0.00608),
    (256, 64): PaperRow(5.56, 6.43, 0.00283),
    (512, 64): PaperRow(8.25, 9.24, 0.00324),
    (1024, 64): PaperRow(8.81, 17.35, 0.00271),
    (256, 128): PaperRow(6.55, 6.09, 0.00282),
    (512, 128): PaperRow(9.42, 9.08, 0.00364),
    (1024, 128): PaperRow(6.09, 18.54, 0.00248),
}
PIXEL = {
    (256, 4): PaperRow(6.85, 6.44, 0.00069),
    (512, 4): PaperRow(10.37, 8.22, 0.00143),
    (1024, 4): PaperRow(14.25, 12.33, 0.00247),
    (256, 8): PaperRow(6.55, 6.89, 0.00094),
    (512, 8): PaperRow(11.18, 7.89, 0.00276),
    (1024, 8): PaperRow(15.95, 11.11, 0.00418),
    (256, 16): PaperRow(3.46, 11.33, 0.00126),
    (512, 16): PaperRow(3.79, 15.78, 0.00235),
    (1024, 16): PaperRow(2.48, 27.33, 0.02638),
}
#: Iterations up to so many times the paper's are the same: other weights, other noise.
SAME = 1.3
#: Mean iterations that are this close, as a share, a few samples hardly tell apart.
TIE = 0.05
#: The paper reads off when the error has fallen below this, and in how many iterations.
SMALL, FEW = 0.1, 15


def of_data(name: str) -> Needs:
    return lambda result: any(_is_of(record, name, result) for record in result.records)


def _is_of(entry: Entry, data: str, result: Finished) -> bool:
    """Quick runs learn scikit-learn's digits, which need no folder of images, in place of MNIST."""
    return entry.get("data") == ("digits" if result.quick and data == "mnist" else data)


def _entries(result: Finished, data: str) -> list[Entry]:
    return [entry for entry in result.summary if _is_of(entry, data, result)]


def _size(entry: Entry) -> int:
    return entry["w"] if "w" in entry else entry["side"]


def _where(entry: Entry) -> str:
    size = f"w = {entry['w']}" if "w" in entry else f"{entry['side']}×{entry['side']}"
    return f"{size}, L = {entry['L']:,}"


def _at_best(entries: Sequence[Entry], paper: float, said: str) -> list[Check]:
    """The greatest speed-up over the eager loop, as printed and with the defaults, and the latter over the graph."""
    checks = []
    for method, words in HOW.items():
        known = [entry for entry in entries if method in entry]
        if not known:
            checks.append(Check(f"{words} over the eager loop, at best", said, "not timed", OPEN))
            continue
        best = max(known, key=lambda entry: entry[method]["over_loop"])
        took = f"{in_words(best['seconds'][method])} instead of {in_words(best['seconds']['loop'])}"
        ours = f"{times(best[method]['over_loop'])} ({_where(best)}: {took})"
        good = best[method]["over_loop"] >= SPEED_UP * paper
        checks.append(Check(f"{words} over the eager loop, at best", said, ours, holds(good), _why(method)))
    against = [entry for entry in entries if entry.get("auto", {}).get("over_graph")]
    if against:
        best = max(against, key=lambda entry: entry["auto"]["over_graph"])
        ours = f"{times(best['auto']['over_graph'])} ({_where(best)})"
        checks.append(Check("with the defaults over the loop in a CUDA graph, at best", "", ours))
    return checks


def _why(method: str) -> str:
    if method != "printed":
        return ""
    return (
        "As printed, ours is on the clock: the Jacobians of all steps are assembled and counted, which the paper's proxy "
        "divides by the number of steps, as if they cost what one does."
    )


def headline(result: Finished) -> list[Check]:
    """Fig. 1: the best of latent diffusion on MNIST."""
    return _at_best(_entries(result, "mnist"), 11.2, "11.2×")


def latents(result: Finished) -> list[Check]:
    """Fig. 6: times, and the distances to the test set."""
    entries = _entries(result, "mnist")
    return [*_at_best(entries, 11.0, "11× (1.3 s to 0.12 s)"), *_batch(entries), distance(entries)]


def _batch(entries: Sequence[Entry]) -> list[Check]:
    ratios = [entry["batch"]["over_fastest_loop"] for entry in entries]
    if not ratios:
        return []
    what = f"{entries[0]['batch']['samples']} samples at a time, with the defaults over the fastest loop"
    return [Check(what, "", f"{times(min(ratios))} to {times(max(ratios))}")]


def distance(entries: Sequence[Entry]) -> Check:
    """The difference of the two distances beside the noise of one of them."""
    what = "distances to the test set, sequential and parallel, differ"
    known = [entry for entry in entries if entry.get("frechet")]
    if not known:
        return Check(what, "by about 0", "not measured", OPEN)
    inside = [entry for entry in known if abs(entry["frechet"]["difference"]) <= _noise(entry)]
    worst = max(known, key=lambda entry: abs(entry["frechet"]["difference"]))
    found = worst["frechet"]
    ours = (
        f"by at most {plain(abs(found['difference']))} of {plain(found['sequential'])} ({_where(worst)}; noise of sampling "
        f"± {plain(_noise(worst))}); within that noise in {len(inside)} of {len(known)}"
    )
    return Check(what, "by about 0", ours, holds(len(inside) == len(known)), at_any_size=True)


def _noise(entry: Entry) -> float:
    low, high = entry["frechet"]["sequential_interval"]
    return (high - low) / 2


def other_data(result: Finished) -> list[Check]:
    """Fig. 7: CIFAR-10, and CelebA where its images were to hand."""
    checks = []
    for data, paper in (("cifar10", 8.0), ("celeba", 9.0)):
        entries, name = _entries(result, data), IMAGES[data]
        if not entries:
            checks.append(Check(name, f"{paper:g}×", "not in this run", OPEN))
            continue
        best = _at_best(entries, paper, f"{paper:g}×")
        checks += [replace(each, what=f"{name}, {each.what}") for each in best]
    return checks


def jacobians(result: Finished) -> list[Check]:
    """Fig. 17: the share of the Jacobians in the method as printed."""
    shares = []
    for record in result.records:
        phases = record.get("printed", {}).get("phases")
        if phases and "jacobian" in phases:
            shares.append((phases["jacobian"] / phases["total"], record))
    what = "share of the Jacobians in the time as printed"
    if not shares:
        return [Check(what, "negligible", "not measured", OPEN)]
    low, high = (pick(shares, key=lambda pair: pair[0]) for pick in (min, max))
    ours = f"{100 * low[0]:.0f}% ({_where(low[1])}) to {100 * high[0]:.0f}% ({_where(high[1])})"
    why = "Measured, not divided by the number of steps: assembling dense Jacobians takes a pass for every entry of a state."
    return [Check(what, "negligible", ours, holds(high[0] <= 0.1), why)]


def pictures(result: Finished) -> list[Check]:
    """Fig. 18: how far the samples in parallel are from the loop's."""
    what, known = "largest difference of a final state", [entry for entry in result.summary if "auto" in entry]
    if not known:
        return [Check(what, "none visible", "not measured", OPEN)]
    worst = max(known, key=lambda entry: entry["auto"]["error"])
    error = worst["auto"]["error"]
    ours = f"{plain(error)} with the defaults ({_where(worst)})"
    return [Check(what, "none visible", ours, holds(error <= 0.01), at_any_size=True)]


def timing_table(paper: dict[tuple[int, int], PaperRow]) -> Callable[[Finished], list[Check]]:
    """Table 2: iterations and errors as printed, row by row of the paper's, and from another start."""

    def read(result: Finished) -> list[Check]:
        mine = {(e["L"], _size(e)): e for e in _unconditional(result) if (e["L"], _size(e)) in paper and "printed" in e}
        if not mine:
            return [Check("the paper's rows", "", "none of them is in this run", OPEN)]

        def rows(what: str, method: str, good: Callable[[Entry, PaperRow], bool]) -> Check:
            known = {key: entry[method] for key, entry in mine.items() if method in entry}
            if not known:
                return Check(what, "see below", "not in this run", OPEN)
            count = sum(good(found, paper[key]) for key, found in known.items())
            return Check(what, "see below", f"{count} of {len(known)} rows", holds(count == len(known)))

        def few(ours: Entry, theirs: PaperRow) -> bool:
            return ours["iterations"] <= SAME * theirs.iterations

        fast = rows("speed-up as printed", "printed", lambda ours, row: ours["over_loop"] >= SPEED_UP * row.speedup)
        largest = "error as printed, the largest of all samples, at most the paper's"
        mean = "error as printed, in the mean, at most the paper's"
        return [
            replace(fast, ours=f"reached in {fast.ours}", why=_why("printed")),
            rows("iterations as printed, at most 1.3 times the paper's", "printed", few),
            rows("the same from the path of Gaussian data, which takes no call of the network", "newton", few),
            rows(largest, "printed", lambda ours, row: ours["error"] <= row.error),
            rows(mean, "printed", lambda ours, row: ours["mean_error"] <= row.error),
        ]

    return read


def timing_rows(paper: dict[tuple[int, int], PaperRow]) -> Callable[[Finished], Table]:
    """Beside the checks: the paper's rows and ours."""

    def read(result: Finished) -> Table:
        heads = ["size", "L", "paper: speed-up", "iterations", "error"]
        heads += ["as printed: speed-up", "iterations (samples)", "error, mean", "largest"]
        heads += ["from the path of Gaussian data: iterations (samples)", "error, mean", "largest"]
        heads += ["defaults: over eager", "over CUDA graph", "iterations (samples)", "error, mean", "largest"]
        rows = []
        for entry in _unconditional(result):
            theirs = paper.get((entry["L"], _size(entry)))
            rows.append(
                [
                    f"w = {entry['w']}" if "w" in entry else f"{entry['side']}×{entry['side']}",
                    f"{entry['L']:,}",
                    *([f"{theirs.speedup}×", str(theirs.iterations), str(theirs.error)] if theirs else "–––"),
                    *_cells(entry.get("printed"), "over_loop"),
                    *_cells(entry.get("newton")),
                    *_cells(entry.get("auto"), "over_loop", "over_graph"),
                ]
            )
        return Table("", heads, rows)

    return read


def _cells(found: Entry | None, *ratios: str) -> list[str]:
    if found is None:
        return ["–"] * (len(ratios) + 3)
    each = [times(found[name]) if found[name] else "–" for name in ratios]
    return [*each, f"{found['iterations']:.1f} ({found['samples']})", plain(found["mean_error"]), plain(found["error"])]


def _unconditional(result: Finished) -> list[Entry]:
    """What the paper's table has: MNIST, without classes."""
    return [entry for entry in _entries(result, "mnist") if entry.get("conditional", "no") == "no"]


def iterations(space: str) -> Callable[[Finished], list[Check]]:
    """Figs. 20 and 21: how many iterations bring the error below 0.1, and where it ends."""

    def read(result: Finished) -> list[Check]:
        entries = [entry for entry in result.summary if entry["space"] == space]
        if not entries:
            return [Check("iterations until the error is below 0.1", "fewer than 15", "not in this run", OPEN)]
        checks = []
        for method, words in HOW.items():
            counts = [entry[method]["iterations"] for entry in entries]
            known = [count for count in counts if count is not None]
            missed = [entry for entry in entries if entry[method]["iterations"] is None]
            ours = f"{min(known)} to {max(known)}" if known else "never"
            ours += f"; not at {'; '.join(_where(entry) for entry in missed)}" if missed and known else ""
            good = not missed and max(known) < FEW
            what = f"iterations until the error is below {SMALL}, {words}"
            paper, verdict = (f"fewer than {FEW}", holds(good)) if method == "printed" else ("", "")
            checks.append(Check(what, paper, ours, verdict))
        last = max(entries, key=lambda entry: (entry["L"], _size(entry)))
        ours = f"{plain(last['printed']['last'])} as printed, {plain(last['auto']['last'])} with the defaults"
        stalls = space == "pixel"
        what = f"error at the end at the largest size ({_where(last)})"
        good = holds((last["printed"]["last"] >= SMALL / 10) == stalls) if stalls else ""
        checks.append(Check(what, "stalls at 10⁻¹" if stalls else "", ours, good))
        return checks

    return read


def classes(result: Finished) -> list[Check]:
    """Fig. 23: speed-ups with and without classes."""
    by_kind: dict[str, dict[tuple[int, int], Entry]] = {"yes": {}, "no": {}}
    for entry in result.summary:
        by_kind[entry["conditional"]][entry["L"], entry["side"]] = entry
    pairs = [(by_kind["yes"][key], by_kind["no"][key]) for key in by_kind["yes"] if key in by_kind["no"]]
    checks = []
    for method, words in HOW.items():
        both = [(a[method], b[method]) for a, b in pairs if method in a and method in b]
        what = f"conditional models gain more, {words}"
        if not both:
            checks.append(Check(what, "consistently", "not timed", OPEN))
            continue
        more = [a["over_loop"] > b["over_loop"] for a, b in both]
        printed = method == "printed"
        # The loop's own time drifts from run to run, and with it what is gained.
        faster = [a["seconds"][method] < b["seconds"][method] for a, b in pairs if method in a and method in b]
        counts = span((each["samples"] for pair in both for each in pair), ".0f")
        ours = f"in {sum(more)} of {len(more)} sizes ({counts} samples each); in less time in {sum(faster)} of {len(faster)}"
        checks.append(Check(what, "consistently", ours, holds(all(more)) if printed else ""))
        few = [a["iterations"] <= b["iterations"] for a, b in both]
        taken = [fmean(each[which]["iterations"] for each in both) for which in (0, 1)]
        ours = f"in {sum(few)} of {len(few)} sizes; {taken[0]:.1f} against {taken[1]:.1f} on average"
        what = f"conditional models take no more iterations, {words}"
        checks.append(Check(what, "", ours))
    return checks


def guesses(result: Finished) -> list[Check]:
    """Fig. 23: iterations by where they start, of the models that are told a class."""
    checks = []
    for method, words in HOW.items():
        told = [entry for entry in result.summary if entry["conditional"] == "yes" and method in entry]
        means: dict[str, float] = {}
        for guess in dict.fromkeys(entry["guess"] for entry in told):
            means[guess] = fmean(entry[method]["iterations"] for entry in told if entry["guess"] == guess)
        said = ", ".join(f"{mean:.1f} from {guess}" for guess, mean in means.items())
        if told:
            sides = ", ".join(f"{side}×{side}" for side in sorted({entry["side"] for entry in told}))
            said += f" ({sides}; {span((entry[method]['samples'] for entry in told), '.0f')} samples of each size and start)"
        known = {"mean", "class-mean"} <= set(means)
        good, why = OPEN if method == "printed" else "", ""
        if known and good:
            good = holds(means["class-mean"] < means["mean"])
            near = abs(means["class-mean"] - means["mean"]) <= TIE * means["mean"]
            why = "The two are closer than so few samples tell." if near else ""
        checks.append(
            Check(f"the mean of the class saves iterations, {words}", "yes", said or "not in this run", good, why)
        )
    return checks
