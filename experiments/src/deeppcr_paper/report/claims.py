"""What the paper claims, and what our records say to it: the rows of the summary table. No figure of ours is typed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ..figures.mlp_width import limit_in_words
from ..figures.style import seconds as in_words
from ..figures.style import signed, span
from ..mlp_memory import known_ratios
from ..mlp_summary import break_even, seconds, speedup, threshold
from ..table import of_cells, times
from .claim import Claim, Ours
from .collect import Finished
from .diffusion_claims import CLAIMS as DIFFUSION
from .words import BASELINES, METHODS, activation_name, columns, error_size, finite


@dataclass(frozen=True)
class Row:
    """A claim with one result; without one where nobody has measured it yet."""

    claim: Claim
    result: Finished | None
    ours: Sequence[Ours] = ()


def rows(results: Sequence[Finished]) -> list[Row]:
    """Every claim with every result of its experiment."""
    found = []
    for claim in CLAIMS:
        mine = [result for result in results if result.name == claim.experiment]
        for result in mine:
            with result.blamed():
                found.append(Row(claim, result, claim.ours(result)))
        if not mine:
            found.append(Row(claim, None))
    return found


def best_speedup(way: str, activation: str = "relu") -> Callable[[Finished], list[Ours]]:
    def ours(result: Finished) -> list[Ours]:
        found = []
        for method, baseline, mine in _pairs(result, way, activation):
            known = [(ratio, record) for ratio, record in mine if ratio is not None]
            if not known:
                found.append(Ours("not timed", _against(method, baseline)))
                continue
            ratio, record = max(known, key=lambda pair: pair[0])
            both = [seconds(record, way, column[0]) for column in (method, baseline)]
            took = f"{in_words(both[0] or 0)} instead of {in_words(both[1] or 0)}"
            found.append(Ours(times(ratio), f"{_against(method, baseline)}; {_sizes(record)}: {took}"))
        return found

    return ours


def break_even_depth(way: str, *activations: str) -> Callable[[Finished], list[Ours]]:
    def ours(result: Finished) -> list[Ours]:
        found = []
        for activation in activations:
            for method, baseline, mine in _pairs(result, way, activation):
                by_width: dict[int, dict[int, float]] = {}
                for ratio, record in mine:
                    if ratio is not None:
                        by_width.setdefault(record["w"], {})[record["L"]] = ratio
                depths = {width: break_even(ratios) for width, ratios in sorted(by_width.items())}
                even = {width: depth for width, depth in depths.items() if depth is not None}
                name = f"{activation_name(activation)}: " if len(activations) > 1 else ""
                least = min((record["L"] for _, record in mine), default=0)
                if even and max(even.values()) <= least:
                    value = "every depth"
                    where = f"from L = {least:,}, the least that was timed; {_widths(even, depths)}"
                elif even:
                    value = f"L ≈ {_range(_rounded(depth) for depth in even.values())}"
                    where = _widths(even, depths)
                else:
                    value = "not reached"
                    where = f"up to L = {max((record['L'] for _, record in mine), default=0):,}"
                found.append(Ours(value, f"{name}{_against(method, baseline)}; {where}"))
        return found

    return ours


def leaves_log_regime(result: Finished) -> list[Ours]:
    mine = [record for record in result.records if record["activation"] == "relu"]
    found = []
    for method, label in columns(mine)[1].items():
        limit = threshold(mine, "forward", method)
        where = f"{label}, forward; where a pass takes twice as long as at the smallest w" + (
            "" if limit["widths"] else ", median over depths"
        )
        found.append(Ours(limit_in_words(limit) if limit["w2L"] else "not reached", where))
    return found


def newton_iterations(result: Finished) -> list[Ours]:
    found = []
    for entry, records in _newton(result):
        if not records:
            found.append(Ours("not measured", entry))
            continue
        most = max(max(record["iterations"]) for record in records)
        at = next(record for record in records if max(record["iterations"]) == most)
        missed = sum(name != "CONVERGED" for record in records for name in record["results"])
        where = f"{entry}; most at {_sizes(at)}" + (
            f"; {missed} solve{'s' * (missed > 1)} did not converge" if missed else ""
        )
        found.append(Ours(f"at most {most}", where))
    return found


def iterations_by_gain(result: Finished) -> list[Ours]:
    found = []
    for entry in result.summary:
        name, most = activation_name(entry["activation"]), entry["most_iterations_at_default"]
        if most is not None:
            found.append(Ours(f"at most {most}", f"{name}, weights as PyTorch makes them"))
        if worst := entry["worst"]:
            depth, mean = max(worst["mean_iterations_by_depth"].items())
            exponent = f", exponent {signed(worst['exponent'])}" if worst["exponent"] is not None else ""
            where = (
                f"{name}, weights scaled by {worst['gain']:g}{exponent}: the gain that takes most; "
                f"mean at L = {depth:,}, at most {worst['most_iterations']}"
            )
            if entry["overflow_from_gain"] is not None:
                where += f"; from {entry['overflow_from_gain']:g} on the states overflow"
            found.append(Ours(f"{mean:.0f}", where))
    return found


def output_error(result: Finished) -> list[Ours]:
    found = []
    for entry, records in _newton(result):
        errors = [error for record in records for error in record["error"]]
        known = [error for error in errors if finite(error)]
        if not known:
            found.append(Ours("not finite" if errors else "not measured", entry))
            continue
        wrong = (
            f"; not finite in {len(errors) - len(known)} of {len(errors)} solves" if len(known) < len(errors) else ""
        )
        where = f"{entry}; median, and at most {error_size(max(known))}{wrong}"
        found.append(Ours(error_size(median(known)), where))
    return found


def memory_ratio(result: Finished) -> list[Ours]:
    found = []
    for name, entries in result.summary.items():
        ratios = known_ratios(entries)
        label = _with_cells(METHODS.get(name, f"DeepPCR, {name}"), len(ratios), len(entries))
        if not ratios:
            found.append(Ours("not measured", label))
            continue
        middle = median(ratios)
        where = f"{label}; median, {span(ratios, '.2f')} over the grid; so {times(1 / middle)} the memory"
        found.append(Ours(f"{middle:.2f}", where))
    return found


def training_speedup(result: Finished) -> list[Ours]:
    entry = _deepest(result)
    # On a CPU the loop of the training is the eager one, too.
    loops = {"eager": "loop"}
    if result.content["device"] == "cuda":
        loops["fastest_loop"] = entry["loop"] or "graph"
    found = []
    if entry["printed_speedup_over_eager"]:
        where = f"forward pass as printed (chunk 1) over the {BASELINES['loop']}; L = {entry['L']:,}"
        found.append(Ours(times(entry["printed_speedup_over_eager"]), where))
    for name, loop in loops.items():
        if entry[f"speedup_over_{name}"]:
            where = f"forward pass with the defaults over the {BASELINES[loop]}; L = {entry['L']:,}"
            found.append(Ours(times(entry[f"speedup_over_{name}"]), where))
    one, other = (entry[mode]["replayed_seconds"] for mode in ("sequential", "parallel"))
    if one and other:
        loop = BASELINES[entry["loop"] or "graph"]
        where = f"whole step inside a CUDA graph, with the defaults over the {loop}; L = {entry['L']:,}"
        found.append(Ours(times(one / other), f"{where}: {in_words(other)} instead of {in_words(one)}"))
    return found


def training_accuracy(result: Finished) -> list[Ours]:
    entry = _deepest(result)
    found = []
    for mode, label in (("parallel", "trained in parallel"), ("sequential", "trained layer by layer")):
        ends = [each[-1] for each in entry[mode]["test_accuracy"] if each]
        if ends:
            of = f"mean of {len(ends)} runs" if len(ends) > 1 else "one run"
            found.append(Ours(f"{100 * fmean(ends):.1f}%", f"{label}; L = {entry['L']:,}, {result.images}, {of}"))
    return found


def training_iterations(result: Finished) -> list[Ours]:
    found = []
    steps = result.content["settings"].get("window")
    for depth in sorted({record["L"] for record in result.records}):
        curves = [
            record["runs"]["parallel"]["curves"]
            for record in result.records
            if "runs" in record and record["L"] == depth
        ]
        points = [point for curve in curves for point in curve.get("iterations", [])]
        if points:
            found.append(Ours(f"at most {max(points):.1f}", f"L = {depth:,}; mean of each {steps} steps"))
    return found


def few_iterations(result: Finished) -> list[Ours]:
    deepest = max(entry["L"] for entry in result.summary)
    runs = {entry["iterations"]: entry for entry in result.summary if entry["L"] == deepest}
    tested, three = runs.get(0), runs.get(3)
    if three is None or tested is None:
        return []
    found = []
    if three["speedup_over_tested"]:
        where = f"3 iterations over the run with the test ({tested['mean_iterations']:.1f} on average); L = {deepest:,}"
        found.append(Ours(times(three["speedup_over_tested"]), where))
    ends = [(str(count), runs[count]) for count in sorted(runs) if 0 < count <= 3] + [("by the test", tested)]
    losses = [f"{name}: {_loss(entry)}" for name, entry in ends]
    found.append(Ours(_loss(three), f"loss at the end with 3 iterations ({', '.join(losses)})"))
    return found


def two_machines(result: Finished) -> list[Ours]:
    summary = result.summary
    first, second = summary["machines"]
    found = []
    for name, each in summary["ratios"].items():
        if name in ("forward printed", "forward loop"):
            label = METHODS["printed"] if "printed" in name else BASELINES["loop"]
            spread = f"median, {span([each['smallest'], each['largest']], '.2f')} over the grid"
            found.append(Ours(f"{each['median']:.2f}", f"{label}; time on {second} over time on {first}; {spread}"))
    return found


def _pairs(
    result: Finished, way: str, activation: str
) -> Iterator[tuple[tuple[str, str], tuple[str, str], list[tuple[float | None, dict[str, Any]]]]]:
    """Every method with every baseline, each by name and label, and the speed-up of every cell."""
    mine = [record for record in result.records if record["activation"] == activation]
    baselines, methods = columns(mine, way)
    for method in methods.items():
        for baseline in baselines.items():
            yield method, baseline, [(speedup(record, way, method[0], baseline[0]), record) for record in mine]


def _newton(result: Finished) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The records of every activation and guess that were measured, and how to call them."""
    every: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in result.records:
        every.setdefault((record["activation"], record["guess"]), []).append(record)
    for (activation, guess), records in every.items():
        label = "first layer repeated" if guess == "repeat-initial" else f"{guess} guess"
        known = [record for record in records if record["status"] == "ok"]
        yield _with_cells(f"{activation_name(activation)}, {label}", len(known), len(records)), known


def _with_cells(label: str, known: int, every: int) -> str:
    """Where cells were left out, how many were not."""
    return "; ".join(filter(None, [label, of_cells(known, every)]))


def _deepest(result: Finished) -> dict[str, Any]:
    return max(result.summary, key=lambda entry: entry["L"])


def _against(method: tuple[str, str], baseline: tuple[str, str]) -> str:
    return f"{method[1]} over the {baseline[1]}"


def _sizes(record: dict[str, Any]) -> str:
    return f"L = {record['L']:,}, w = {record['w']:,}"


def _widths(even: dict[int, float], tried: dict[int, float | None]) -> str:
    return f"{len(even)} of {len(tried)} widths, w = {_range(even)}"


def _rounded(value: float) -> float:
    """To two digits: a depth between measured ones is not known better."""
    return float(f"{value:.2g}")


def _range(values: Iterable[float]) -> str:
    found = list(values)
    low, high = min(found), max(found)
    return f"{low:,.0f}" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f}"


def _loss(entry: dict[str, Any]) -> str:
    if entry["diverged"] is not None or entry["loss"] is None:
        return "diverged"
    return f"{entry['loss']:.3f}"


#: The paper's own words in figures, with the section that has them.
CLAIMS = (
    Claim(
        "Fastest forward pass of a network, ReLU",
        "more than 30×",
        "0.55 s to 0.015 s; §4.1, fig. 3",
        "mlp-timing",
        best_speedup("forward"),
    ),
    Claim(
        "Fastest backward pass of a network, ReLU",
        "200×",
        "589 ms to 2.45 ms; §4.1, fig. 3",
        "mlp-timing",
        best_speedup("backward"),
    ),
    Claim(
        "Depth from which on the forward pass gains, ReLU",
        "L ≈ 128",
        "§4.1, fig. 3",
        "mlp-timing",
        break_even_depth("forward", "relu"),
    ),
    Claim(
        "The same with smoother activations",
        "closer to L = 64",
        "than to 128; app. C",
        "mlp-timing",
        break_even_depth("forward", "tanh", "sigmoid"),
    ),
    Claim(
        "Depth from which on the backward pass gains, ReLU",
        "L ≈ 32",
        "§4.1, fig. 3",
        "mlp-timing",
        break_even_depth("backward", "relu"),
    ),
    Claim(
        "Size at which the logarithmic regime ends",
        "at a constant w²L",
        "its value is not given; app. C.1",
        "mlp-timing",
        leaves_log_regime,
    ),
    Claim(
        "Memory of the loop over that of DeepPCR, forward pass",
        "about 0.6",
        "so 1.7× the memory; app. C.2",
        "mlp-memory",
        memory_ratio,
    ),
    Claim(
        "Newton iterations of a forward pass, whatever L and w",
        "at most 6",
        "§4.4, fig. 8",
        "mlp-newton",
        newton_iterations,
    ),
    Claim(
        "Newton iterations, whatever the weights",
        "roughly independent",
        "of the configuration, of L in particular; §4.4",
        "mlp-gain",
        iterations_by_gain,
    ),
    Claim(
        "Error of the output against the loop",
        "machine precision",
        "almost always; §4.4, fig. 8",
        "mlp-newton",
        output_error,
    ),
    Claim(
        "Two machines: time on one over time on the other",
        "1.1 and 0.65",
        "in the logarithmic regime and beyond it, A100 over V100; app. C.1",
        "hardware",
        two_machines,
    ),
    Claim(
        "Forward pass in the training of a ResNet",
        "7×",
        "3.2 h to 30 min over the whole training; §4.2, fig. 4",
        "resnet-training",
        training_speedup,
    ),
    Claim(
        "Accuracy on the test images after training",
        "94%",
        "sequential and parallel; §4.2, app. D",
        "resnet-training",
        training_accuracy,
    ),
    Claim("Newton iterations during training", "at most 6", "§4.4, fig. 8", "resnet-training", training_iterations),
    Claim(
        "Training with 3 Newton iterations a pass",
        "another 2×",
        "14× in all, and training succeeds; §4.4, app. F.1",
        "resnet-iterations",
        few_iterations,
    ),
    *DIFFUSION,
)
