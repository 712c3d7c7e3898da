"""``latent-diffusion`` and ``pixel-diffusion``: time, speed-ups, iterations, errors, distances, shares of time, images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ..diffusion_timing import summarise
from ..table import times as as_times
from . import style
from .diffusion_images import images
from .diffusion_panels import Group, legend, panels, sizes_along
from .drawing import Drawing

COLUMNS = ("loop", "graph", "printed", "auto")
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10", "celeba": "CelebA", "digits": "digits"}
#: Parts of the time of a sample, as they stand in bars, from below.
PHASES = {"jacobian": "#56b4e9", "linear": "#e69f00", "network": "#009e73", "rest": "#999999"}
PHASE_LABELS = {
    "jacobian": "Jacobians and values",
    "linear": "linear systems",
    "network": "network",
    "rest": "all else",
}


def latent(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing] = []
    for data in dict.fromkeys(record["data"] for record in result["records"]):
        records = [record for record in result["records"] if record["data"] == data and "loop" in record]
        if not records:
            continue
        paper = "figs. 1 and 6, table 2" if data in ("mnist", "digits") else "fig. 7"
        group = Group(f"latent-diffusion-{data}", f"latents of {DATA.get(data, data)}", "w", paper, records)
        found += [times(group), speedups(group), newton(group), distances(group), phases(group), *images(group)]
    return found


def pixel(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing] = []
    timed = [record for record in result["records"] if "loop" in record]
    for conditional in dict.fromkeys(record["conditional"] for record in timed):
        records = [record for record in timed if record["conditional"] == conditional]
        label = "images, classes given" if conditional == "yes" else "images, without classes"
        slug = "pixel-diffusion" + ("-conditional" if conditional == "yes" else "")
        group = Group(slug, label, "side", "table 2", records)
        found += [times(group), speedups(group), newton(group), phases(group), *images(group)]
    if len({record["conditional"] for record in timed}) == 2:
        found.append(by_class(timed))
    return found


def times(group: Group) -> Drawing:
    """Fig. 6 left: the median time of a sample over the size of its state, a panel for every number of steps."""
    lengths, colours = group.lengths, {}
    figure, places = panels(len(lengths))
    every: list[float] = []
    for axes, length in zip(places, lengths, strict=False):
        mine = {record[group.size]: record for record in group.records if record["L"] == length}
        for column in COLUMNS:
            y = [_median(mine[size].get(column)) if size in mine else math.nan for size in group.sizes]
            if not all(map(math.isnan, y)):
                colours[style.LABELS[column]] = style.METHODS[column]
                axes.plot(group.sizes, y, color=style.METHODS[column], marker="o", gid=column)
                every += [value for value in y if not math.isnan(value)]
        style.panel_title(axes, f"L = {length:,} steps")
        sizes_along(axes, group.sizes)
        axes.set_xlabel(group.axis)
        axes.set_ylabel("time of a sample (s)")
    for axes in places[: len(lengths)]:
        style.decades(axes, every)
    legend(figure, colours, places[len(lengths) :])
    said = []
    for entry in summarise(group.records):
        if entry["L"] == lengths[-1] and "auto" in entry:
            seconds, mine = entry["seconds"], entry["auto"]
            graph = f", {as_times(mine['over_graph'])} over the graph" if mine["over_graph"] else ""
            said.append(
                f"{group.name(entry[group.size])}: {style.seconds(seconds['loop'])} in the eager loop, "
                f"{style.seconds(seconds['auto'])} in parallel, {as_times(mine['over_loop'])}{graph}"
            )
    return Drawing(
        f"{group.slug}-time",
        f"Time of one sample: {group.label}",
        group.paper,
        f"Median times of a sample, everything counted, and their ratios. L = {lengths[-1]:,}: {'; '.join(said)}."
        + _missing(group.records),
        figure,
    )


def speedups(group: Group) -> Drawing:
    """Fig. 6 middle: how many times as fast each sample was, over the two loops."""
    baselines = [name for name in ("loop", "graph") if any(name in record for record in group.records)]
    figure, grid = style.canvas(1, len(baselines), extra=1.2)
    colours = style.ordered(group.lengths)
    share = 0.8 / len(group.lengths)
    for axes, baseline in zip(grid[0], baselines, strict=True):
        every: list[float] = []
        for record in group.records:
            ratios = _ratios(record, baseline)
            if not ratios:
                continue
            number = group.lengths.index(record["L"])
            at = group.sizes.index(record[group.size]) + (number - (len(group.lengths) - 1) / 2) * share
            _violin(axes, at, ratios, 0.9 * share, colours[record["L"]])
            every += ratios
        axes.axhline(1, color=style.INK, linestyle=":", linewidth=1.2)
        style.panel_title(axes, f"over {style.LABELS[baseline].replace('loop in a ', '')}", "auto")
        style.decades(axes, every, also=[1.0])
        axes.set_xticks(range(len(group.sizes)), [str(size) for size in group.sizes])
        axes.set_xlim(-0.6, len(group.sizes) - 0.4)
        axes.set_xlabel(group.axis)
        axes.set_ylabel("speed-up (×)")
    style.legend(figure, colours, "steps L")
    batches = [entry["batch"] for entry in summarise(group.records) if entry["L"] == group.lengths[-1]]
    return Drawing(
        f"{group.slug}-speedup",
        f"Speed-up of one sample: {group.label}",
        group.paper,
        "A run of the loop over the time of each sample in parallel; the bar is the median of these ratios. With "
        f"{batches[0]['samples']} samples at a time, which fill the machine in the loop as well, the speed-up over the fastest "
        f"loop is {_span([each['over_fastest_loop'] for each in batches])} (L = {group.lengths[-1]:,}).",
        figure,
    )


def newton(group: Group) -> Drawing:
    """Table 2: iterations and the largest error of a final sample, for both methods."""
    figure, grid = style.canvas(2, extra=1.0)
    colours = style.ordered(group.sizes, style.COLD)
    said = []
    for row, (key, label) in zip(
        grid, (("iterations", "iterations (mean)"), ("error", "error (L∞, largest)")), strict=True
    ):
        every: list[float] = []
        for axes, method in zip(row, ("printed", "auto"), strict=True):
            for size in group.sizes:
                mine = [record for record in group.records if record[group.size] == size and method in record]
                mine = [record for record in mine if record[method].get(key)]
                values = [_number(record[method][key], fmean if key == "iterations" else max) for record in mine]
                axes.plot([r["L"] for r in mine], values, color=colours[size], marker="o", gid=f"{group.size}={size}")
                every += [value for value in values if math.isfinite(value) and value > 0]
            style.panel_title(axes, f"{style.LABELS[method]}", method)
            style.powers_of_two(axes, group.lengths)
            axes.set_xlabel("steps L (number)")
            axes.set_ylabel(label)
        for axes in row:
            if key == "error":
                style.decades(axes, every)
            else:
                style.free(axes, every, also=[0.0])
    style.legend(figure, colours, group.axis)
    for method in ("printed", "auto"):
        known = [record[method] for record in group.records if record.get(method, {}).get("error")]
        if known:
            most = max(fmean(each["iterations"]) for each in known)
            worst = max(float(error) for each in known for error in each["error"])
            said.append(f"{style.LABELS[method]}: at most {most:.1f} iterations, error at most {style.plain(worst)}")
    return Drawing(
        f"{group.slug}-newton",
        f"Iterations and error: {group.label}",
        "table 2",
        "Mean iterations of a sample, and the largest difference of a final state to the loop's. "
        + "; ".join(said)
        + "."
        + _fell_back(group.records),
        figure,
    )


def distances(group: Group) -> Drawing:
    """Fig. 6 right: the distance of samples to the test set, by the loop and in parallel, and the difference."""
    figure, grid = style.canvas(1, extra=1.2)
    both, apart = grid[0]
    colours = style.ordered(group.lengths)
    share = 0.8 / len(group.lengths)
    values, differences = [], []
    for record in group.records:
        found, number = record["frechet"], group.lengths.index(record["L"])
        at = group.sizes.index(record[group.size]) + (number - (len(group.lengths) - 1) / 2) * share
        for side, way, marker in ((-0.15, "sequential", "s"), (0.15, "parallel", "o")):
            low, high = found[f"{way}_interval"]
            place = at + side * share
            both.plot([place, place], [low, high], color=colours[record["L"]], linewidth=1)
            both.plot(place, found[way], marker=marker, color=colours[record["L"]], markersize=4, gid=way)
            values += [low, high, found[way]]
        low, high = found["difference_interval"]
        apart.plot([at, at], [low, high], color=colours[record["L"]], linewidth=1.5)
        apart.plot(at, found["difference"], marker="o", color=colours[record["L"]], markersize=4, gid="difference")
        differences += [low, high, found["difference"]]
    apart.axhline(0, color=style.INK, linestyle=":", linewidth=1.2)
    style.panel_title(both, "loop (squares), parallel (dots)")
    style.panel_title(apart, "parallel − loop")
    style.free(both, values)
    style.free(apart, differences, also=[0.0])
    both.set_ylabel("distance (W₂)")
    apart.set_ylabel("difference (W₂)")
    for axes in grid[0]:
        axes.set_xticks(range(len(group.sizes)), [str(size) for size in group.sizes])
        axes.set_xlim(-0.6, len(group.sizes) - 0.4)
        axes.set_xlabel(group.axis)
    style.legend(figure, colours, "steps L")
    relative = max(abs(r["frechet"]["difference"]) / max(r["frechet"]["sequential"], 1e-30) for r in group.records)
    samples = group.records[0]["frechet"]["samples"]
    return Drawing(
        f"{group.slug}-distance",
        f"Distance to the test set: {group.label}",
        "fig. 6 right",
        f"Wasserstein-2 distance of the moments of {samples:,} samples to those of the test set's latents; lines hold 95% of a "
        f"bootstrap over samples. The two ways differ by at most {style.plain(100 * relative)}% of the distance.",
        figure,
    )


def phases(group: Group) -> Drawing:
    """Fig. 17: what a sample's time goes into, at the most steps."""
    length = group.lengths[-1]
    mine = sorted((r for r in group.records if r["L"] == length), key=lambda record: record[group.size])
    figure, grid = style.canvas(1, extra=1.2)
    said, used = [], []
    for axes, method in zip(grid[0], ("printed", "auto"), strict=True):
        for number, record in enumerate(mine):
            below = 0.0
            for phase, percent in _shares(record, method).items():
                axes.bar(number, percent, bottom=below, width=0.7, color=PHASES[phase], gid=phase)
                below += percent
                used.append(phase)
        style.panel_title(axes, style.LABELS[method], method)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_xticks(range(len(mine)), [str(record[group.size]) for record in mine])
        axes.set_xlim(-0.6, len(mine) - 0.4)
        axes.set_xlabel(group.axis)
        axes.set_ylabel("share of the time (%)")
        first = [next(iter(_shares(record, method).items()), None) for record in mine]
        known = [each for each in first if each]
        if known:
            values = [percent for _, percent in known]
            said.append(f"{style.LABELS[method]}: {PHASE_LABELS[known[0][0]]} {style.span(values, '.0f')}%")
        else:
            style.remark(axes, "was not timed")
    colours = {PHASE_LABELS[phase]: PHASES[phase] for phase in PHASES if phase in used}
    handles = [Patch(color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), ncols=2, loc="outside upper center")
    return Drawing(
        f"{group.slug}-phases",
        f"Where the time goes: {group.label}",
        "fig. 17",
        f"L = {length:,}. {'; '.join(said)}. As printed: measured in one run. With the defaults: the network's share is its time "
        "on all L steps, scaled by how many evaluations there were.",
        figure,
    )


def by_class(records: Sequence[dict[str, Any]]) -> Drawing:
    """Fig. 23: speed-ups over the eager loop with and without classes, over the side of the images."""
    lengths = sorted({record["L"] for record in records})
    sides = sorted({record["side"] for record in records})
    figure, places = panels(len(lengths))
    shades = {"yes": "#0072b2", "no": "#e69f00"}
    labels = {"yes": "classes given", "no": "without classes"}
    every, said = [], []
    entries = {(each["L"], each["conditional"], each["side"]): each for each in summarise(list(records))}
    for axes, length in zip(places, lengths, strict=False):
        for conditional, colour in shades.items():
            for method, line in (("auto", "-"), ("printed", "--")):
                found = [entries.get((length, conditional, side), {}).get(method) for side in sides]
                y = [each["over_loop"] if each else math.nan for each in found]
                axes.plot(sides, y, color=colour, linestyle=line, marker="o", gid=f"{conditional} {method}")
                every += [value for value in y if math.isfinite(value)]
        style.panel_title(axes, f"L = {length:,} steps")
        sizes_along(axes, sides)
        axes.axhline(1, color=style.INK, linestyle=":", linewidth=1.2)
        axes.set_xlabel("side of an image (pixels)")
        axes.set_ylabel("speed-up over eager (×)")
    for axes in places[: len(lengths)]:
        style.decades(axes, every, also=[1.0])
    legend(figure, {labels[key]: colour for key, colour in shades.items()}, places[len(lengths) :])
    for side in sides:
        both = [entries.get((lengths[-1], each, side), {}).get("printed") for each in ("no", "yes")]
        if all(both):
            without, given = both
            said.append(f"{side} × {side}: {without['iterations']:.1f} and {given['iterations']:.1f}")  # pyright: ignore
    counts = f" Newton's iterations without and with classes, L = {lengths[-1]:,}: {'; '.join(said)}." if said else ""
    return Drawing(
        "pixel-diffusion-classes",
        "With and without classes",
        "fig. 23",
        "Speed-up over the eager loop: with this library's defaults (lines) and as printed (dashed), which starts from the mean "
        f"of the class where there is one.{counts}",
        figure,
    )


def _median(entry: dict[str, Any] | None) -> float:
    return median(entry["seconds"]) if entry and entry.get("seconds") else math.nan


def _ratios(record: dict[str, Any], baseline: str) -> list[float]:
    """Every sample in parallel against a run of the loop, which takes the same time for every sample."""
    slow, fast = record.get(baseline, {}).get("seconds"), record.get("auto", {}).get("seconds")
    return [slow[number % len(slow)] / seconds for number, seconds in enumerate(fast)] if slow and fast else []


def _violin(axes: Axes, at: float, values: list[float], width: float, colour: str) -> None:
    parts: Any = axes.violinplot([values], positions=[at], widths=width, showmedians=True, showextrema=False)
    for body in parts["bodies"]:
        body.set(facecolor=colour, edgecolor=colour, alpha=0.6, linewidth=0.8, gid="violin")
    parts["cmedians"].set(color=style.INK, linewidth=1.2)


def _shares(record: dict[str, Any], method: str) -> dict[str, float]:
    """Percent of the time, the most interesting first."""
    entry = record.get(method, {})
    if method == "printed":
        if not entry.get("phases"):
            return {}
        total = entry["phases"]["total"]
        parts = {name: 100 * entry["phases"].get(name, 0.0) / total for name in ("jacobian", "linear")}
    else:
        if not entry.get("seconds"):
            return {}
        calls = fmean(entry["evaluations"]) / record["L"]
        parts = {"network": min(100 * calls * record["network_seconds"] / fmean(entry["seconds"]), 100.0)}
    return {**parts, "rest": max(100 - sum(parts.values()), 0.0)}


def _number(values: Iterable[Any], how: Callable[[list[float]], float]) -> float:
    found = [style.number(value) for value in values]
    return how(found) if found else math.nan


def _span(ratios: list[float]) -> str:
    low, high = as_times(min(ratios)), as_times(max(ratios))
    return low if low == high else f"{low} to {high}"


def _missing(records: list[dict[str, Any]]) -> str:
    gone = [record for record in records if record.get("printed", {}).get("status") == "out of memory"]
    return f" As printed, out of memory in {style.cells(len(gone))}." if gone else ""


def _fell_back(records: list[dict[str, Any]]) -> str:
    """What did not converge by itself."""
    said = []
    for method in ("printed", "auto"):
        names = [name for record in records for name in record.get(method, {}).get("results", [])]
        bad = [name for name in names if name != "CONVERGED"]
        if bad:
            said.append(f"{style.LABELS[method]} in {len(bad)} of {len(names)} samples")
    return f" Not converged: {', '.join(said)}." if said else ""
