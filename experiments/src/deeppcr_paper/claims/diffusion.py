"""Readings of the experiments on diffusion: latent and pixel models, error against iterations, initial guesses.

They read the summaries of those experiments: entries with a size (``w`` or ``side``), ``L``, and for ``printed`` and
``auto`` their iterations, errors and speed-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ..diffusion_timing import proxy
from ..figures.style import plain, span
from ..figures.style import seconds as in_words
from ..table import times
from .check import OPEN, Check, Table, held
from .results import IMAGES, Finished, Needs
from .rules import SMALL, judge, judge_all
from .words import SHORT

Entry = Record = dict[str, Any]


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
#: The paper reads off in how many iterations the error has fallen below 0.1.
FEW = 15


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


def _at_best(entries: Sequence[Entry], paper: float, said: str, prefix: str = "") -> list[Check]:
    """The greatest speed-up over the eager loop: as the paper counts, and on the clock."""
    return [
        _greatest(entries, "proxy_over_loop", paper, prefix + PROXY, said),
        _greatest(entries, "over_loop", paper, prefix + CLOCK, said),
    ]


PROXY, CLOCK = "over the eager loop, by proxy", "over the eager loop, on the clock"


def _greatest(entries: Sequence[Entry], name: str, paper: float, what: str, said: str) -> Check:
    def best(method: str, ratio: str) -> Entry | None:
        columns = {"graph" if ratio == "over_graph" else "loop"}
        columns |= set() if ratio == "proxy_over_loop" else {method}  # phases were timed by themselves, once
        known = (e for e in entries if e.get(method, {}).get(ratio) and columns.isdisjoint(e["restless"]))
        return max(known, key=lambda e: e[method][ratio], default=None)

    words, clock = {"what": what, "paper": said}, name == "over_loop"
    if clock and (auto := best("auto", "over_loop")):
        words["defaults"] = f"{times(auto['auto']['over_loop'])} ({_where(auto)}: {in_words(auto['seconds']['auto'])})"
    if clock and (auto := best("auto", "over_graph")):
        words["loop"] = f"CUDA graph: defaults {times(auto['auto']['over_graph'])}"
    found = best("printed", name)
    if found is None:
        timed = any(entry.get("printed", {}).get(name) for entry in entries)
        return Check(**words, printed="times too restless" if timed else "not timed", holds=OPEN)
    ratio = found["printed"][name]
    took = in_words(found["seconds"]["loop"] / ratio)
    return held("speed-up", ratio, paper, printed=f"{times(ratio)} ({_where(found)}: {took})", **words)


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
    what = f"{entries[0]['batch']['samples']} samples at a time"
    return [Check(what=what, loop=f"defaults {times(min(ratios))} to {times(max(ratios))}")]


def distance(entries: Sequence[Entry]) -> Check:
    """The difference of the two distances beside the noise of one of them.

    As printed it was not measured, but bounded: moments of samples that differ by e in every entry are at most √w e apart.
    """
    words = {"what": "distances to the test set differ", "paper": "by about 0"}
    known = [entry for entry in entries if entry.get("frechet")]
    if not known:
        return Check(**words, printed="not measured", holds=OPEN)
    found = max(known, key=lambda entry: abs(entry["frechet"]["difference"]))
    size = plain(abs(found["frechet"]["difference"]))
    words["defaults"] = f"at most {size} of {plain(found['frechet']['sequential'])}"
    timed = [entry for entry in known if "printed" in entry]
    if not timed:
        return Check(**words, printed="not timed", holds=OPEN)
    worst = max(timed, key=lambda entry: _bound(entry) / _noise(entry))
    ours = f"bounded by error × √w = {plain(_bound(worst))}, noise ±{plain(_noise(worst))} ({_where(worst)})"
    return held("same distance", _bound(worst) / _noise(worst), printed=ours, **words)


def _bound(entry: Entry) -> float:
    return entry["w"] ** 0.5 * entry["printed"]["error"]


def _noise(entry: Entry) -> float:
    low, high = entry["frechet"]["sequential_interval"]
    return (high - low) / 2


def other_data(result: Finished) -> list[Check]:
    """Fig. 7: CIFAR-10, and CelebA where its images were to hand."""
    checks = []
    for data, paper in (("cifar10", 8.0), ("celeba", 9.0)):
        entries, name = _entries(result, data), IMAGES[data]
        if entries:
            checks += _at_best(entries, paper, f"{paper:g}×", f"{name}, ")
        else:
            checks.append(Check(what=name, paper=f"{paper:g}×", printed="data not at hand", holds=OPEN))
    return checks


def jacobians(result: Finished) -> list[Check]:
    """Fig. 17: the share of the Jacobians in the method as printed, by the paper's proxy and on the clock."""
    shares: dict[str, list[tuple[float, Record]]] = {"by proxy": [], "on the clock": []}
    for record in result.records:
        phases = record.get("printed", {}).get("phases")
        if phases and "jacobian" in phases:
            once = phases["jacobian"] / record["L"]
            shares["by proxy"].append((once / proxy(phases, record["L"]), record))
            shares["on the clock"].append((phases["jacobian"] / phases["total"], record))
    checks = []
    for how, found in shares.items():
        words = {"what": f"share of the Jacobians, {how}", "paper": "negligible"}
        if not found:
            checks.append(Check(**words, printed="not measured", holds=OPEN))
            continue
        low, high = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
        ours = f"{100 * low[0]:.2g}% ({_where(low[1])}) to {100 * high[0]:.2g}% ({_where(high[1])})"
        checks.append(held("negligible", high[0], printed=ours, **words))
    return checks


def pictures(result: Finished) -> list[Check]:
    """Fig. 18: how far the samples in parallel are from the loop's."""
    words, known = {"what": "largest difference of a final state", "paper": "none visible"}, {}
    for method in SHORT:
        found = [entry for entry in result.summary if method in entry]
        if found:
            known[method] = worst = max(found, key=lambda entry: entry[method]["error"])
            words["printed" if method == "printed" else "defaults"] = (
                f"{plain(worst[method]['error'])} ({_where(worst)})"
            )
    if "printed" not in known:
        return [Check(**words, holds=OPEN)]
    return [held("not visible", known["printed"]["printed"]["error"], **words)]


def timing_table(paper: dict[tuple[int, int], PaperRow]) -> Callable[[Finished], list[Check]]:
    """Table 2: speed-ups, iterations and errors, row by row of the paper's."""

    def read(result: Finished) -> list[Check]:
        mine = {(e["L"], _size(e)): e for e in _unconditional(result) if (e["L"], _size(e)) in paper and "printed" in e}
        if not mine:
            return [Check(what="the paper's rows", printed="none of them is in this run", holds=OPEN)]

        def rows(rule: str, what: str, name: str, theirs: str) -> Check:
            known = {
                key: entry["printed"][name] for key, entry in mine.items() if entry["printed"].get(name) is not None
            }
            words = {"what": f"{kind}, {what}"}
            if not known:
                return Check(**words, printed="not in this run", holds=OPEN)
            found, count = judge_all(rule, [(number, getattr(paper[key], theirs)) for key, number in known.items()])
            defaults = [entry["auto"][name] for entry in mine.values() if entry.get("auto", {}).get(name) is not None]
            form = plain if "error" in name else times if name == "over_loop" else "{:.1f}".format
            beside = f"{form(min(defaults))} to {form(max(defaults))}" if defaults else ""
            ours = f"{count} of {len(known)} rows"
            if name == "iterations":  # of the samples that the other rows are of, too
                ours += f" ({span((mine[key]['printed']['samples'] for key in known), '.0f')} samples)"
            return Check(**words, printed=ours, defaults=beside, holds=found, rule=rule)

        kind = "latents" if paper is LATENT else "pixels"
        return [
            rows("speed-up", "speed-up by proxy", "proxy_over_loop", "speedup"),
            rows("speed-up", "speed-up on the clock", "over_loop", "speedup"),
            rows("iterations", "iterations", "iterations", "iterations"),
            rows("error", "error of a sample, mean", "mean_error", "error"),
            rows("error", "error of a sample, largest", "error", "error"),
        ]

    return read


def timing_rows(paper: dict[tuple[int, int], PaperRow]) -> Callable[[Finished], Table]:
    """Beside the checks: the paper's rows and ours."""

    def read(result: Finished) -> Table:
        heads = [
            "size",
            "L",
            "speed-up: paper",
            "proxy",
            "clock",
            "defaults",
            "iterations: paper",
            "printed",
            "defaults",
        ]
        heads += ["error: paper", "printed", "defaults"]
        rows = []
        for entry in _unconditional(result):
            theirs = paper.get((entry["L"], _size(entry)))
            printed, auto = entry.get("printed", {}), entry.get("auto", {})

            def cell(found: Entry, name: str, form: Callable[[float], str]) -> str:
                return form(found[name]) if found.get(name) is not None else "–"

            rows.append(
                [
                    f"w = {entry['w']}" if "w" in entry else f"{entry['side']}×{entry['side']}",
                    f"{entry['L']:,}",
                    f"{theirs.speedup}×" if theirs else "–",
                    *(cell(printed, name, times) for name in ("proxy_over_loop", "over_loop")),
                    cell(auto, "over_loop", times),
                    str(theirs.iterations) if theirs else "–",
                    *(cell(each, "iterations", "{:.1f}".format) for each in (printed, auto)),
                    str(theirs.error) if theirs else "–",
                    *(cell(each, "error", plain) for each in (printed, auto)),
                ]
            )
        return Table("", heads, rows)

    return read


def _unconditional(result: Finished) -> list[Entry]:
    """What the paper's table has: MNIST, without classes."""
    return [entry for entry in _entries(result, "mnist") if entry.get("conditional", "no") == "no"]


def iterations(space: str) -> Callable[[Finished], list[Check]]:
    """Figs. 20 and 21: how many iterations bring the error below 0.1, and where it ends."""

    def read(result: Finished) -> list[Check]:
        entries = [entry for entry in result.summary if entry["space"] == space]
        words = {"what": f"iterations until the error is below {SMALL}", "paper": f"fewer than {FEW}"}
        if not entries:
            return [Check(**words, printed="not in this run", holds=OPEN)]
        most: int | None = None
        for method, column in (("printed", "printed"), ("auto", "defaults")):
            known = [count for entry in entries if (count := entry[method]["iterations"]) is not None]
            missed = [entry for entry in entries if entry[method]["iterations"] is None]
            ours = f"{min(known)} to {max(known)}" if known else "never"
            if method == "printed":
                ours += f" ({span((entry[method]['samples'] for entry in entries), '.0f')} samples)"
            words[column] = ours + (f"; not at {'; '.join(map(_where, missed))}" if missed and known else "")
            if method == "printed":
                most = None if missed else max(known)
        checks = [held("below 0.1", most, FEW, **words)]
        last = max(entries, key=lambda entry: (entry["L"], _size(entry)))
        words = {
            "what": f"final error at {_where(last)}",
            "printed": plain(last["printed"]["last"]),
        }
        words["defaults"] = plain(last["auto"]["last"])
        if space == "pixel":
            return [*checks, held("stalls", last["printed"]["last"], paper="stalls at 10⁻¹", **words)]
        return [*checks, Check(**words)]

    return read


def classes(result: Finished) -> list[Check]:
    """Fig. 23: speed-ups with and without classes."""
    by_kind: dict[str, dict[tuple[int, int], Entry]] = {"yes": {}, "no": {}}
    for entry in result.summary:
        by_kind[entry["conditional"]][entry["L"], entry["side"]] = entry
    pairs = [(by_kind["yes"][key], by_kind["no"][key]) for key in by_kind["yes"] if key in by_kind["no"]]
    gain = {"what": "conditional models gain more", "paper": "consistently"}
    few: dict[str, str] = {"what": "mean iterations with and without classes"}
    judged = OPEN
    for method, column in (("printed", "printed"), ("auto", "defaults")):
        both = [(a[method], b[method]) for a, b in pairs if method in a and method in b]
        if not both:
            gain[column] = "not timed"
            continue
        ratios = [a["over_loop"] / b["over_loop"] for a, b in both]
        found, count = judge_all("gains more", [(ratio,) for ratio in ratios])
        judged = found if method == "printed" else judged
        samples = span((each["samples"] for pair in both for each in pair), ".0f")
        gain[column] = f"in {count} of {len(ratios)} sizes ({samples} samples)"
        few[column] = " and ".join(f"{fmean(each[which]['iterations'] for each in both):.1f}" for which in (0, 1))
    why = "Times with and without classes differ by less than noise." if judged == OPEN else ""
    return [Check(**gain, holds=judged, rule="gains more", why=why), Check(**few)]


def guesses(result: Finished) -> list[Check]:
    """Fig. 23: iterations by where they start, of the models that are told a class."""
    words, judged = {"what": "the mean of the class saves iterations", "paper": "yes"}, OPEN
    for method, column in (("printed", "printed"), ("auto", "defaults")):
        told = [entry for entry in result.summary if entry["conditional"] == "yes" and method in entry]
        means: dict[str, float] = {}
        for guess in dict.fromkeys(entry["guess"] for entry in told):
            means[guess] = fmean(entry[method]["iterations"] for entry in told if entry["guess"] == guess)
        if not told:
            words[column] = "not in this run"
            continue
        said = ", ".join(f"{guess} {mean:.1f}" for guess, mean in means.items())
        words[column] = f"{said} ({span((entry[method]['samples'] for entry in told), '.0f')} samples)"
        if method == "printed" and {"mean", "class-mean"} <= set(means):
            judged = judge("fewer", means["class-mean"] / means["mean"])
    why = "So few samples do not tell the two means apart." if judged == OPEN else ""
    return [Check(**words, holds=judged, rule="fewer", why=why)]
