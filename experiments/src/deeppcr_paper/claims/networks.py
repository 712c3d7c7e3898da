"""Readings of the experiments on single passes: ``mlp-timing``, ``mlp-memory``, ``mlp-newton``, ``hardware``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any

from ..figures.mlp_width import limit_in_words
from ..figures.style import activation, plain
from ..figures.style import seconds as in_words
from ..mlp_memory import known_ratios
from ..mlp_summary import best_speedup, break_even, seconds, speedup, threshold
from ..table import of_cells, times
from .check import OPEN, Check, held
from .results import Finished, Needs
from .rules import DEEP, SMALL_ERROR
from .words import (
    BASELINES,
    METHODS,
    SHORT,
    depths_in_words,
    error_size,
    finite,
    listed,
    timed_columns,
)

Record = dict[str, Any]
#: The paper's: speed-up at best and break-even depth, forward and backward. It names no best speed-up for smooth ones.
PAPER = {
    "relu": {"forward": (30.0, 128), "backward": (200.0, 32)},
    "tanh": {"forward": (None, 64), "backward": (None, None)},
    "sigmoid": {"forward": (None, 64), "backward": (None, None)},
}
_SAID = {
    30.0: "more than 30× (to 15 ms)",
    200.0: "200× (to 2.45 ms)",
    64: "nearer to 64 than to 128",
}


def has_activation(name: str) -> Needs:
    return lambda result: bool(of_activation(result, name))


def of_activation(result: Finished, name: str) -> list[Record]:
    return [record for record in result.records if record["activation"] == name]


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
    def of(records: Sequence[Record], way: str, method: str, over: str, factor: float = 1.0) -> BreakEven:
        """With all speed-ups so many times as large: noise could have made them so."""
        ratios: dict[int, dict[int, float]] = {}
        for record in records:
            ratio = speedup(record, way, method, over)
            if ratio is not None:
                ratios.setdefault(record["w"], {})[record["L"]] = factor * ratio
        depths = {width: break_even(each) for width, each in sorted(ratios.items())}
        return BreakEven(depths, min((depth for each in ratios.values() for depth in each), default=0))

    @property
    def known(self) -> list[float]:
        return [depth for depth in self.depths.values() if depth is not None]

    @property
    def middle(self) -> float:
        """From there on it is ahead at half of the widths, or more."""
        return median_low(math.inf if depth is None else depth for depth in self.depths.values())

    @property
    def short(self) -> str:
        return f"L ≈ {depths_in_words([self.middle])}" if self.known and math.isfinite(self.middle) else "never"

    def __str__(self) -> str:
        if not self.known:
            return "never" if self.depths else "not timed"
        some = f", {len(self.known)} of {len(self.depths)} widths" if len(self.known) < len(self.depths) else ""
        if max(self.known) == self.least:
            return f"L = {self.least:,}, the least timed{some}"
        middle = depths_in_words([self.middle]) if math.isfinite(self.middle) else "–"
        return f"L ≈ {middle} ({depths_in_words(self.known)}{some})"


def timing(activation: str) -> Callable[[Finished], list[Check]]:
    """Figs. 3, 9 and 10: how the times grow, how fast at best, and from which depth on."""

    def read(result: Finished) -> list[Check]:
        records = of_activation(result, activation)
        # The eager loop's time says the same for every activation.
        checks = [_growth(records, law) for law in ("linear", "logarithmic")[activation != "relu" :]]
        for way, (factor, depth) in PAPER[activation].items():
            checks += [_best(records, way, factor)] if factor else []
            checks += [_even(records, way, depth)] if depth else []
        return [*checks, *_wrong_gradients(records), *(_lost(records) if activation == "relu" else [])]

    return read


def _lost(records: Sequence[Record]) -> list[Check]:
    """In how many cells some loop that does not go through Python is the faster."""
    found = {}
    for method in METHODS:
        ratios = [speedup(record, way, method, "fastest") for record in records for way in ("forward", "backward")]
        known = [ratio for ratio in ratios if ratio is not None]
        found[method] = f"{sum(ratio < 1 for ratio in known)} of {len(known)}" if known else ""
    if timed_columns(records, BASELINES).keys() <= {"loop"}:
        return []
    beside = "; ".join(f"{SHORT[method]} {each}" for method, each in found.items() if each)
    return [Check(what="cells that the fastest loop wins", loop=beside)]


def _wrong_gradients(records: Sequence[Record]) -> list[Check]:
    """Gradients as printed that failed their check, and so were not timed."""
    entries = [record["backward"]["printed"] for record in records if "printed" in record.get("backward", {})]
    known = [entry for entry in entries if finite(entry.get("error"))]
    wrong = [entry["error"] for entry in known if entry["status"].startswith("differs")]
    if not wrong:
        return []
    ours = f"up to {100 * max(wrong):.0f}% off: {len(wrong)} of {len(known)} cells not timed"
    why = "Its test leaves states off by 10⁻⁴, and a unit as close to 0 may be on in one pass and off in the other."
    return [Check(what="gradients", printed=ours, why=why)]


def _growth(records: Sequence[Record], law: str) -> Check:
    """From the least to the greatest depth at the least width, where the paper sees its laws best."""
    linear = law == "linear"
    what = "eager loop, time against L" if linear else "DeepPCR, time against L"
    paper = "in proportion" if linear else "mostly logarithmic"
    least = min(record["w"] for record in records)

    def grown(column: str) -> tuple[float, int, int] | None:
        mine = {r["L"]: t for r in records if r["w"] == least and r["L"] >= 2 and (t := seconds(r, "forward", column))}
        # Of short loops the overhead is seen, and log L of the shortest says little.
        mine = {depth: time for depth, time in mine.items() if depth >= DEEP} or mine
        return (mine[max(mine)] / mine[min(mine)], min(mine), max(mine)) if len(mine) > 1 else None

    found = {column: grown(column) for column in ("loop", "printed graph", *METHODS)}
    known = found["loop" if linear else "printed"]
    if known is None:
        return Check(what=what, paper=paper, printed="too few depths", holds=OPEN)
    factor, low, high = known
    words = {"what": what, "paper": paper, "printed": f"{times(factor)} while L {times(high / low)} (w = {least})"}
    if linear:
        return held("linear", factor / (high / low), **words)
    if graph := found["printed graph"]:
        words["printed"] += f"; in a CUDA graph {times(graph[0])}"
    if auto := found["auto"]:
        words["defaults"] = times(auto[0])
    return held("logarithmic", factor / (high / low) ** 0.5, **words)


def _best(records: Sequence[Record], way: str, factor: float) -> Check:
    found = {method: best_speedup(records, way, method, "loop") for method in METHODS}
    said = {method: _with_cell(method, way, *each) for method, each in found.items() if each}
    words = {
        "what": f"{way} pass over the eager loop",
        "paper": _SAID[factor],
        "printed": _with_graph(said.get("printed") or _why_no_best(records, way), records, way),
        "defaults": said.get("auto", ""),
        "loop": _beside(
            records,
            way,
            lambda method: times(each[0]) if (each := best_speedup(records, way, method, "fastest")) else "",
        ),
    }
    if found["printed"] is None:
        return Check(**words, holds=OPEN)
    return held("speed-up", found["printed"][0], factor, **words)


def _with_cell(method: str, way: str, ratio: float, record: Record) -> str:
    took = in_words(seconds(record, way, method) or 0)
    return f"{times(ratio)} (L = {record['L']:,}, w = {record['w']:,}: {took})"


def _why_no_best(records: Sequence[Record], way: str) -> str:
    return "times too restless" if any(speedup(r, way, "printed", "loop") for r in records) else "not timed"


def _with_graph(said: str, records: Sequence[Record], way: str) -> str:
    """As printed; where it was also timed in a CUDA graph, that beside it."""
    graph = best_speedup(records, way, "printed graph", "loop")
    return said + (f"; in a CUDA graph {times(graph[0])}" if graph else "")


def _beside(records: Sequence[Record], way: str, words: Callable[[str], str]) -> str:
    """Both methods beside the fastest loop, where others than the eager one were timed."""
    if timed_columns(records, BASELINES).keys() <= {"loop"}:
        return ""
    said = {method: words(method) for method in METHODS}
    return "; ".join(f"{SHORT[method]} {each}" for method, each in said.items() if each)


def _even(records: Sequence[Record], way: str, depth: int) -> Check:
    evens = {method: BreakEven.of(records, way, method, "loop") for method in METHODS}
    words = {
        "what": f"{way} pass, break-even",
        "paper": _SAID.get(depth, f"L ≈ {depth}"),
        "printed": str(evens["printed"]),
        "defaults": evens["auto"].short if evens["auto"].depths else "",
        "loop": _beside(records, way, lambda method: BreakEven.of(records, way, method, "fastest").short),
    }
    printed = evens["printed"]
    if not printed.depths:
        return Check(**words, holds=OPEN)
    if printed.known and min(printed.known) == printed.least > depth:
        return Check(**words, holds=OPEN, why=f"The least depth of this run is L = {printed.least}.")

    def middle(factor: float) -> float:
        return BreakEven.of(records, way, "printed", "loop", factor).middle

    return held("break-even", middle, depth, **words)


def widths(result: Finished) -> list[Check]:
    """Fig. 11: whether the time leaves the logarithmic regime at one value of w²L, and how far chunks move it."""
    records = of_activation(result, "relu")
    limits = {method: threshold(records, "forward", method) for method in METHODS}
    said = {method: _limit(limit) for method, limit in limits.items()}
    plain_code = result.name == "mlp-printed"
    code = f"{len({record['w'] for record in records})} widths, {'plain PyTorch' if plain_code else 'our solver'}"
    rows = (
        []
        if plain_code
        else [Check(what="where the time has doubled: our solver", printed=said["printed"], defaults=said["auto"])]
    )
    depths = limits["printed"]["by_depth"]
    words = {"what": f"one value of w²L: {code}", "paper": "yes"}
    if len(depths) < 2:
        why = f"As printed, the time doubles at {len(depths)} of the depths of this run: too few to see a line."
        return [*rows, Check(**words, printed="too few depths", holds=OPEN, why=why)]
    ours = _over_depths(depths)
    if graph := threshold(records, "forward", "printed graph")["by_depth"]:
        ours += f"; in a CUDA graph {_over_depths(graph)}"
    return [*rows, held("isoline", max(depths.values()) / min(depths.values()), printed=ours, **words)]


def _over_depths(sizes: dict[int, float]) -> str:
    return f"{plain(min(sizes.values()))} to {plain(max(sizes.values()))} over {len(sizes)} depths"


def _limit(limit: dict[str, Any]) -> str:
    """Where it is: one size or width, if it is nearly one."""
    sizes = limit["by_depth"].values()
    if not sizes:
        return "not reached"
    near = limit["widths"] or max(sizes) <= 16 * min(sizes)
    return limit_in_words(limit) if near else f"w²L {plain(min(sizes))} to {plain(max(sizes))}"


#: From this width on a state of float32 fills what PyTorch allocates at least, 512 bytes.
WIDE = 128


def memory(result: Finished) -> list[Check]:
    """Fig. 14: the memory of the loop over that of the parallel pass."""
    said: dict[str, str] = {}
    for name, entries in result.summary.items():
        if ratios := known_ratios(entries):
            left = of_cells(len(ratios), len(entries))
            said[name] = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}{left and f'; {left}'})"
            wide = known_ratios([entry for entry in entries if entry["w"] >= WIDE])
            said[name] += f"; w ≥ {WIDE}: {median(wide):.2f}" if wide else ""
    words = {"what": "memory of the loop over that of DeepPCR, weights included, median", "paper": "about 0.6"}
    words |= {"printed": said.get("printed", "not measured"), "defaults": said.get("chunk auto", "")}
    if "printed" not in said:
        return [Check(**words, holds=OPEN)]
    entries = [entry for entry in result.summary["printed"] if entry["ratio"] is not None]
    why = _why_memory(entries, blocks=result.content["device"] == "cuda")
    return [held("memory", median(entry["ratio"] for entry in entries), why=why, **words)]


def _why_memory(entries: Sequence[dict[str, Any]], *, blocks: bool) -> str:
    wide = max(entry["w"] for entry in entries)
    arrays = 1 / median(entry["ratio"] for entry in entries if entry["w"] == wide) - 1
    found = f"At w = {wide:,} DeepPCR holds {arrays:.0f} arrays as large as the weights: Jacobians and two rounds of products."
    padded = f" Below w = {WIDE} most of the loop's is padding: PyTorch allocates at least 512 bytes."
    return found + (padded if blocks else "")


def newton(result: Finished) -> list[Check]:
    """Fig. 8 left: iterations over depths and widths, and the error of the output. All as printed."""
    known = [record for record in result.records if record["status"] == "ok"]
    first = [record for record in known if record["guess"] == "repeat-initial"] or known
    if not first:
        return [Check(what="Newton iterations, at most", paper="6", printed="not measured", holds=OPEN)]
    by_activation: dict[str, list[Record]] = {}
    for record in first:
        by_activation.setdefault(record["activation"], []).append(record)
    most = {name: max(max(r["iterations"]) for r in mine) for name, mine in by_activation.items()}
    guesses = {record["guess"] for record in first}
    tried = [record for record in result.records if record["guess"] in guesses]
    left = {
        name: of_cells(len(mine), sum(record["activation"] == name for record in tried))
        for name, mine in by_activation.items()
    }
    each = [f"{activation(name)} {most[name]}{left[name] and f' ({left[name]})'}" for name in by_activation]
    checks = [held("at most 6", max(most.values()), what="Newton iterations, at most", paper="6", printed=listed(each))]
    if missed := sum(name != "CONVERGED" for record in first for name in record["results"]):
        checks.append(held("converged", missed, what="solves that did not converge", paper="none", printed=str(missed)))
    means = {name: mean_iterations_by_depth(mine) for name, mine in by_activation.items()}
    grown = {name: max(each.values()) - min(each.values()) for name, each in means.items() if len(each) > 1}
    if grown:
        spread = listed([f"{activation(name)} by {value:.1f}" for name, value in grown.items()])
        what = f"mean iterations from L = {DEEP} on change with L"
        checks.append(held("flat", max(grown.values()), what=what, paper="practically not", printed=spread))
    if means.get("relu") and means.get("sigmoid"):
        relu, sigmoid = (fmean(means[name].values()) for name in ("relu", "sigmoid"))
        ours = f"{relu:.1f} against {sigmoid:.1f}"
        checks.append(held("ReLU more", relu / sigmoid, what="ReLU takes more than sigmoid", paper="yes", printed=ours))
    for name, mine in by_activation.items():
        errors = [error for record in mine for error in record["error"] if finite(error)]
        if errors:
            small = sum(error <= SMALL_ERROR for error in errors) / len(errors)
            ours = f"{small:.0%} within {error_size(SMALL_ERROR)}; at most {error_size(max(errors))}"
            why = "The paper's test stops once the residual is below 10⁻⁴."
            what = f"error of the output, {activation(name)}"
            checks.append(
                held(
                    "machine precision",
                    small,
                    what=what,
                    paper="machine precision",
                    printed=ours,
                    why=why,
                )
            )
    random = [record for record in known if record["guess"] == "random"]
    if random and random is not first:
        both = [fmean(fmean(r["iterations"]) for r in mine) for mine in (first, random)]
        words = {"what": "a random guess against the first layer repeated", "paper": "comparable"}
        ours = f"{both[1]:.1f} against {both[0]:.1f} iterations"
        checks.append(held("comparable", abs(both[1] - both[0]), printed=ours, **words))
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
        checks.append(Check(what=what, paper=f"{paper} (A100 over V100)", printed=ours))
    if all(ratios.values()):
        inside, outside = (median(ratios[each]) for each in (True, False))
        what, ours = "the newer machine gains more beyond the logarithmic regime", f"{inside:.2f} and {outside:.2f}"
        checks.append(held("newer gains", outside / inside, what=what, paper="yes", printed=ours))
    return checks


def _first_machine_limit(records: Sequence[Record]) -> float | None:
    """w²L at which the first machine leaves the logarithmic regime."""
    timed = []
    for record in records:
        found = record["forward"].get("printed", {}).get("seconds") or [None]
        timed.append({**record, "forward": {"printed": {"seconds": [found[0]] if found[0] else None}}})
    return threshold(timed, "forward", "printed")["w2L"]
