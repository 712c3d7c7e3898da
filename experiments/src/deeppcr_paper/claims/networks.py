"""Readings of the experiments on single passes: ``mlp-timing``, ``mlp-memory``, ``mlp-newton``, ``hardware``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ..figures.mlp_width import limit_in_words
from ..figures.style import plain
from ..figures.style import seconds as in_words
from ..mlp_memory import known_ratios
from ..mlp_summary import break_even, seconds, speedup, threshold
from ..table import of_cells, times
from .check import DEPTH, NO, OPEN, SPEED_UP, Check, Table, holds
from .results import Finished, Needs
from .words import BASELINES, HOW, METHODS, activation_name, depths_in_words, error_size, finite, listed, timed_columns

Record = dict[str, Any]
#: The paper's: speed-up at best and break-even depth, forward and backward. It names no best speed-up for smooth ones.
PAPER = {
    "relu": {"forward": (30.0, 128), "backward": (200.0, 32)},
    "tanh": {"forward": (None, 64), "backward": (None, None)},
    "sigmoid": {"forward": (None, 64), "backward": (None, None)},
}
#: Layers from which on what depends on the depth is read off, by how many iterations a flat curve may change, and the
#: error of an output that counts as machine precision: some roundings of states about 1 in size.
DEEP, FLAT, SMALL_ERROR = 64, 1.0, 1e-6
#: Seconds of the paper's fastest passes.
PAPER_SECONDS = {"forward": 0.015, "backward": 0.00245}


def has_activation(name: str) -> Needs:
    return lambda result: bool(of_activation(result, name))


def of_activation(result: Finished, name: str) -> list[Record]:
    return [record for record in result.records if record["activation"] == name]


def best(records: Sequence[Record], way: str, method: str, over: str) -> tuple[float, Record] | None:
    """The greatest speed-up and its cell."""
    known = [(ratio, record) for record in records if (ratio := speedup(record, way, method, over))]
    return max(known, key=lambda pair: pair[0], default=None)


@dataclass(frozen=True)
class BreakEven:
    """From which depth on a method is ahead.

    Attributes:
        depths: by width; None where it is not ahead on this grid
        least: the least depth that was timed
    """

    depths: dict[int, float | None]
    least: int

    @staticmethod
    def of(records: Sequence[Record], way: str, method: str, over: str) -> BreakEven:
        ratios: dict[int, dict[int, float]] = {}
        for record in records:
            ratio = speedup(record, way, method, over)
            if ratio is not None:
                ratios.setdefault(record["w"], {})[record["L"]] = ratio
        depths = {width: break_even(each) for width, each in sorted(ratios.items())}
        return BreakEven(depths, min((depth for each in ratios.values() for depth in each), default=0))

    @property
    def known(self) -> list[float]:
        return [depth for depth in self.depths.values() if depth is not None]

    def __str__(self) -> str:
        if not self.depths:
            return "not timed"
        if not self.known:
            return "never ahead on this grid"
        every = len(self.known) == len(self.depths)
        some = f", at {f'all {len(self.depths)}' if every else f'{len(self.known)} of {len(self.depths)}'} widths"
        if max(self.known) == self.least:
            return f"ahead at every depth timed (from L = {self.least:,} on){some}"
        return f"ahead from L ≈ {depths_in_words(self.known)} on{some}"


def timing(activation: str) -> Callable[[Finished], list[Check]]:
    """Figs. 3, 9 and 10: how the times grow, how fast at best, and from which depth on."""

    def read(result: Finished) -> list[Check]:
        records = of_activation(result, activation)
        checks = [_growth(records, "loop"), _growth(records, "printed")]
        for way, (factor, depth) in PAPER[activation].items():
            checks += [_best(records, way, factor), _even(records, way, depth)]
        return checks + _wrong_gradients(records)

    return read


def _wrong_gradients(records: Sequence[Record]) -> list[Check]:
    """Gradients as printed that failed their check, and so were not timed."""
    entries = [record["backward"]["printed"] for record in records if "printed" in record.get("backward", {})]
    known = [entry for entry in entries if finite(entry.get("error"))]
    wrong = [entry["error"] for entry in known if entry["status"].startswith("differs")]
    if not wrong:
        return []
    ours = f"too far off to be timed in {len(wrong)} of {len(known)} cells, by up to {100 * max(wrong):.0f}%"
    why = "The paper's test leaves states off by 10⁻⁴: a unit as close to 0 is on in one pass and off in the other."
    return [Check("gradients as printed against the loop's in float64", "", ours, why=why)]


def _growth(records: Sequence[Record], column: str) -> Check:
    """From the least to the greatest depth at the least width, where the paper sees its laws best."""
    linear = column == "loop"
    what = "eager loop, time against L" if linear else "DeepPCR as printed, time against L"
    law = "in proportion" if linear else "logarithmic for the most part"
    least = min(record["w"] for record in records)
    mine = {r["L"]: t for r in records if r["w"] == least and r["L"] >= 2 and (t := seconds(r, "forward", column))}
    # Of short loops the overhead is seen, and log L of the shortest says little.
    mine = {depth: time for depth, time in mine.items() if depth >= DEEP} or mine
    if len(mine) < 2:
        return Check(what, law, "too few depths", OPEN)
    low, high = min(mine), max(mine)
    grown = mine[high] / mine[low]
    ours = f"{times(grown)} from L = {low:,} to {high:,} (w = {least}); L itself {times(high / low)}"
    if linear:
        return Check(what, law, ours, holds(0.5 <= grown / (high / low) <= 2))
    return Check(what, law, ours, holds(grown <= (high / low) ** 0.5))


def _best(records: Sequence[Record], way: str, factor: float | None) -> Check:
    found = {method: best(records, way, method, "loop") for method in METHODS}
    said = [
        f"{times(each[0])} {HOW[method]} (L = {each[1]['L']:,}, w = {each[1]['w']:,}: "
        f"{in_words(seconds(each[1], way, method) or 0)} instead of {in_words(seconds(each[1], way, 'loop') or 0)})"
        for method, each in found.items()
        if each
    ]
    what, ours = f"{way} pass over the eager loop, at best", "; ".join(said) or "not timed"
    paper = {"forward": "more than 30× (0.55 s to 0.015 s)", "backward": "200× (589 ms to 2.45 ms)"}[way]
    printed = found["printed"]
    if factor is None:
        return Check(what, "", ours)
    if printed is None:
        return Check(what, paper, ours, OPEN)
    return Check(what, paper, ours, holds(printed[0] >= SPEED_UP * factor), _why_slow(records, way, printed[1]))


def _even(records: Sequence[Record], way: str, depth: int | None) -> Check:
    evens = {method: BreakEven.of(records, way, method, "loop") for method in METHODS}
    said = [f"{HOW[method]} {each}" for method, each in evens.items() if each.depths]
    what = f"{way} pass, depth from which on it is faster than the eager loop"
    if depth is None:
        return Check(what, "", "; ".join(said) or "not timed")
    paper = f"L ≈ {depth}" if depth != 64 else "closer to 64 than to 128"
    printed, fastest = evens["printed"], best(records, way, "printed", "loop")
    if fastest is None:
        return Check(what, paper, "; ".join(said) or "not timed", OPEN)
    why = _why_late(records, way, fastest[1]["w"])
    if not printed.known:
        return Check(what, paper, "; ".join(said), NO, why)
    if min(printed.known) == printed.least > depth:
        return Check(what, paper, "; ".join(said), OPEN, f"The least depth of this run is L = {printed.least}.")
    if depth == 64:  # half-way on a logarithmic axis, for the widths together
        middle = fmean(map(math.log2, printed.known))
        said.append(f"as printed in the geometric mean of those widths L ≈ {2**middle:.0f}, where 90 is half-way")
        return Check(what, paper, "; ".join(said), holds(middle < math.log2(64 * 128) / 2), why)
    return Check(what, paper, "; ".join(said), holds(min(printed.known) <= DEPTH * depth), why)


def _why_late(records: Sequence[Record], way: str, width: int) -> str:
    """Why the paper's method is ahead later here than there: what both ways take at such depths."""
    mine = {r["L"]: r for r in records if r["w"] == width and seconds(r, way, "printed") and seconds(r, way, "loop")}
    if DEEP not in mine:
        return ""
    printed, loop = (seconds(mine[DEEP], way, name) or 0 for name in ("printed", "loop"))
    least = min(mine)
    already = f" ({in_words(seconds(mine[least], way, 'printed') or 0)} at L = {least:,} already)"
    return (
        f"At L = {DEEP}, w = {width:,} a {way} pass as printed takes {in_words(printed)}{already if least < DEEP else ''}, the eager "
        f"loop {in_words(loop)}. The paper does not print its times there."
    )


def _why_slow(records: Sequence[Record], way: str, record: Record) -> str:
    """Why the paper's method takes longer here than there: its time at the least depth tells launches from arithmetic."""
    mine = {r["L"]: t for r in records if r["w"] == record["w"] and (t := seconds(r, way, "printed"))}
    low, high = min(mine), max(mine)
    return (
        f"At w = {record['w']:,} the {way} pass as printed takes {in_words(mine[low])} at L = {low:,} and {in_words(mine[high])} at "
        f"L = {high:,}; the paper's took {in_words(PAPER_SECONDS[way])} at its best."
    )


def strong_baselines(activation: str) -> Callable[[Finished], Table]:
    """Beside the checks: best speed-up and break-even depth over every loop, not only over the eager one."""

    def read(result: Finished) -> Table:
        records = of_activation(result, activation)
        loops = timed_columns(records, BASELINES)
        rows = [
            [f"{way}, {label}", *(_against(records, way, method, over) for over in loops)]
            for way in ("forward", "backward")
            for method, label in METHODS.items()
        ]
        title = f"Over stronger loops, {activation_name(activation)}, at best and by break-even depth:"
        return Table(title, ["", *(f"over the {label}" for label in loops.values())], rows)

    return read


def _against(records: Sequence[Record], way: str, method: str, over: str) -> str:
    found = best(records, way, method, over)
    if found is None:
        return "not timed"
    at = f"L = {found[1]['L']:,}, w = {found[1]['w']:,}"
    return f"{times(found[0])} ({at}); {BreakEven.of(records, way, method, over)}"


def widths(result: Finished) -> list[Check]:
    """Fig. 11: whether the time leaves the logarithmic regime at one value of w²L, and how far chunks move it."""
    records = of_activation(result, "relu")
    limits = {method: threshold(records, "forward", method) for method in METHODS}
    printed, auto = (limits[name]["w2L"] for name in ("printed", "auto"))
    said = [
        f"{limit_in_words(limit)} {HOW[method]}" if limit["w2L"] else f"not reached {HOW[method]}"
        for method, limit in limits.items()
    ]
    depths = limits["printed"]["by_depth"]
    checks = [Check("size at which a pass takes twice as long as at the least width", "not given", "; ".join(said))]
    what, ours, good, why = "that size is one value of w²L at every depth", "too few depths", OPEN, ""
    if len(depths) > 1:
        low, high = min(depths.values()), max(depths.values())
        ours = f"{plain(low)} to {plain(high)} over {len(depths)} depths, as printed (read off between widths)"
        good = holds(high <= 16 * low)  # while L itself grows by hundreds; and times are those of single runs
    else:
        why = f"As printed, the time doubles at {len(depths)} of the depths of this run: too few to see a line."
    checks.append(Check(what, "yes", ours, good, why))
    if printed:
        moved = f"{times(auto / printed)} as large" if auto else "beyond this grid"
        if limits["auto"]["widths"]:
            moved = "with the defaults it follows no line of w²L: the width varies less"
        checks.append(Check("how far chunks and kernels move that size", "", moved))
    return checks


def memory(result: Finished) -> list[Check]:
    """Fig. 14: the memory of the loop over that of the parallel pass."""
    checks = []
    for name, entries in result.summary.items():
        ratios = known_ratios(entries)
        if not ratios:
            checks.append(Check("as printed" if name == "printed" else name, "", "not measured", OPEN))
            continue
        middle, left = median(ratios), of_cells(len(ratios), len(entries))
        ours = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), so {times(1 / middle)} the memory"
        ours += left and f"; {left}"
        if name == "printed":
            why = _why_memory([entry for entry in entries if entry["ratio"] is not None])
            checks.insert(0, Check("as printed", "about 0.6", ours, holds(0.5 <= middle <= 0.7), why))
        else:
            label = "the library's own chunk" if name == "chunk auto" else f"chunks of {name.removeprefix('chunk ')}"
            checks.append(Check(label, "", ours))
    return checks


def _why_memory(entries: Sequence[dict[str, Any]]) -> str:
    wide = max(entry["w"] for entry in entries)
    at_wide = [entry["ratio"] for entry in entries if entry["w"] == wide]
    arrays = 1 / median(at_wide) - 1
    said = (
        f"At the greatest width, w = {wide:,}, where little else counts, the ratio is {median(at_wide):.2f}: about "
        f"{arrays:.0f} arrays as large as the weights are held beside them, the Jacobians and their products of two rounds of the "
        "reduction."
    )
    if max(entry["ratio"] for entry in entries) > 1:
        said += (
            " Above 1 it is where networks are so narrow that the loop's states outweigh them, each in an allocation of its own; "
            "it is least for a few narrow layers, which weigh less than the solver's own small arrays."
        )
    return said


def newton(result: Finished) -> list[Check]:
    """Fig. 8 left: iterations over depths and widths, and the error of the output."""
    known = [record for record in result.records if record["status"] == "ok"]
    first = [record for record in known if record["guess"] == "repeat-initial"] or known
    if not first:
        return [Check("Newton iterations, at most", "6", "not measured", OPEN)]
    by_activation: dict[str, list[Record]] = {}
    for record in first:
        by_activation.setdefault(record["activation"], []).append(record)
    most = {name: max(max(r["iterations"]) for r in mine) for name, mine in by_activation.items()}
    guesses = {record["guess"] for record in first}
    tried = [record for record in result.records if record["guess"] in guesses]
    each = []
    for name, mine in by_activation.items():
        left = of_cells(len(mine), sum(record["activation"] == name for record in tried))
        each.append(f"{activation_name(name)} {most[name]}{left and f' ({left})'}")
    checks = [Check("Newton iterations, at most", "6", listed(each), holds(max(most.values()) <= 6), at_any_size=True)]
    missed = sum(name != "CONVERGED" for record in first for name in record["results"])
    if missed:
        checks.append(Check("solves that did not converge", "none", str(missed), NO, at_any_size=True))
    means = {name: mean_iterations_by_depth(mine) for name, mine in by_activation.items()}
    grown = {name: max(each.values()) - min(each.values()) for name, each in means.items() if len(each) > 1}
    if grown:
        spread = listed([f"{activation_name(name)} by {value:.1f}" for name, value in grown.items()])
        what = f"mean iterations from L = {DEEP} on change with L, over widths measured at every depth"
        checks.append(Check(what, "practically not", spread, holds(max(grown.values()) <= FLAT)))
    if means.get("relu") and means.get("sigmoid"):
        relu, sigmoid = (fmean(means[name].values()) for name in ("relu", "sigmoid"))
        ours = f"{relu:.1f} against {sigmoid:.1f} on average"
        checks.append(Check("ReLU takes more than sigmoid", "yes", ours, holds(relu > sigmoid)))
    for name, mine in by_activation.items():
        errors = [error for record in mine for error in record["error"] if finite(error)]
        if errors:
            small = sum(error <= SMALL_ERROR for error in errors) / len(errors)
            ours = f"{small:.0%} at most {error_size(SMALL_ERROR)}, median {error_size(median(errors))}, "
            left = of_cells(len(mine), sum(record["activation"] == name for record in tried))
            ours += f"at most {error_size(max(errors))}{left and f'; {left}'}"
            what, good = f"error of the output, {activation_name(name)}", holds(small >= 0.9)
            why = "The test is content with a residual of 10⁻⁴ in every entry; the error is a norm over all w of them."
            checks.append(Check(what, "almost always machine precision", ours, good, why, at_any_size=True))
    random = [record for record in known if record["guess"] == "random"]
    if random and random is not first:
        both = [fmean(fmean(r["iterations"]) for r in mine) for mine in (first, random)]
        ours = f"{both[1]:.1f} against {both[0]:.1f} iterations on average"
        what = "a random guess is comparable to the first layer repeated"
        checks.append(Check(what, "yes (app. F)", ours, holds(abs(both[1] - both[0]) <= 1)))
    return checks


def mean_iterations_by_depth(records: Sequence[Record]) -> dict[int, float]:
    """From L = 64 on, where there are such depths: shallow networks cannot take more iterations than they have layers.

    Over the widths that were measured at all of these depths: the largest ones are not.
    """
    counts: dict[int, dict[int, list[int]]] = {}
    for record in records:
        if found := record.get("iterations"):
            counts.setdefault(record["L"], {}).setdefault(record["w"], []).extend(found)
    counts = {depth: each for depth, each in sorted(counts.items()) if depth >= DEEP} or counts
    if not counts:
        return {}
    widths = set.intersection(*map(set, counts.values()))
    return {depth: fmean(n for w in widths for n in each[w]) for depth, each in counts.items()} if widths else {}


def machines(result: Finished) -> list[Check]:
    """Fig. 12: the ratio of two machines, in the logarithmic regime and beyond it."""
    records = [record for record in result.records if record["activation"] == "relu"] or result.records
    first, second = result.summary["machines"]
    limit = _first_machine_limit(records)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        ratio = record["forward"].get("printed", {}).get("ratio")
        if ratio is not None:
            ratios[limit is None or record["w"] ** 2 * record["L"] < limit].append(ratio)
    checks = []
    for inside, paper in ((True, 1.1), (False, 0.65)):
        where = "in the logarithmic regime" if inside else "beyond it"
        mine = ratios[inside]
        ours = f"{median(mine):.2f} ({min(mine):.2f} to {max(mine):.2f})" if mine else "no such cell"
        what = f"time on {second} over time on {first}, {where}"
        checks.append(Check(what, f"{paper} (A100 over V100)", ours))
    if all(ratios.values()):
        inside, outside = (median(ratios[each]) for each in (True, False))
        what = "the newer machine gains more beyond the logarithmic regime"
        checks.append(Check(what, "yes", f"{inside:.2f} and {outside:.2f}", holds(outside < inside)))
    return checks


def _first_machine_limit(records: Sequence[Record]) -> float | None:
    """w²L at which the first machine leaves the logarithmic regime."""
    timed = []
    for record in records:
        found = record["forward"].get("printed", {}).get("seconds") or [None]
        timed.append({**record, "forward": {"printed": {"seconds": [found[0]] if found[0] else None}}})
    return threshold(timed, "forward", "printed")["w2L"]
