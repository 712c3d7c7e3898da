"""``latent-diffusion`` and ``pixel-diffusion``: time, speed-ups, iterations, errors, distances, shares of time, images."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes

from ..diffusion_timing import summarise
from ..table import times as as_times
from . import style
from .diffusion_group import Group
from .diffusion_images import images
from .drawing import Drawing
from .panels import binary, describe, guide, legend, lines, panels, remark, same_y

Record = dict[str, Any]

COLUMNS = ("loop", "graph", "printed", "auto")
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10", "celeba": "CelebA", "digits": "digits"}
#: Parts of the time of a sample, as they stand in bars, from below.
PHASES = {
    "jacobian": ("Jacobians and values", style.SKY),
    "linear": ("linear systems", style.ORANGE),
    "network": ("network", style.GREEN),
    "rest": ("all else", style.GREY),
}
#: Whether classes are given.
CLASSES = {"yes": ("classes given", style.BLUE), "no": ("without classes", style.ORANGE)}


def _timed(result: dict[str, Any]) -> list[Record]:
    """Without the records of trainings."""
    return [record for record in result["records"] if "loop" in record]


def latent(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing] = []
    for data, records in style.grouped(_timed(result), "data").items():
        paper = "figs. 1 and 6, table 2" if data in ("mnist", "digits") else "fig. 7"
        group = Group(f"latent-diffusion-{data}", f"latents of {DATA.get(data, data)}", "w", paper, records)
        found += [times(group), speedups(group), newton(group), distances(group), phases(group), *images(group)]
    return found


def pixel(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing] = []
    kinds = style.grouped(_timed(result), "conditional")
    for conditional, records in kinds.items():
        slug = "pixel-diffusion" + ("-conditional" if conditional == "yes" else "")
        group = Group(slug, f"images, {CLASSES[conditional][0]}", "side", "table 2", records)
        found += [times(group), speedups(group), newton(group), phases(group), *images(group)]
    if len(kinds) == 2:
        found.append(by_class(_timed(result)))
    return found


def times(group: Group) -> Drawing:
    """Fig. 6 left: the median time of a sample over the size of its state, a panel for every number of steps."""
    columns = [column for column in COLUMNS if any(record.get(column, {}).get("seconds") for record in group.records)]
    figure, places = panels(len(group.lengths))
    for axes, length in zip(places, group.lengths, strict=True):
        describe(axes, f"L = {length:,} steps", group.axis, "time of a sample (s)")
        mine = sorted((r for r in group.records if r["L"] == length), key=lambda record: record[group.size])
        for column in columns:
            middle = [median(record.get(column, {}).get("seconds", [math.nan])) for record in mine]
            sizes = [record[group.size] for record in mine]
            axes.plot(sizes, middle, color=style.COLOURS[column], marker="o", gid=column)
        binary(axes, style.plain)
    same_y(places, log=True)
    legend(figure, {style.LABELS[column]: style.COLOURS[column] for column in columns}, across=2)
    said = []
    for entry in summarise(group.with_most_steps()):
        if "auto" in entry:
            seconds, mine = entry["seconds"], entry["auto"]
            graph = f", {as_times(mine['over_graph'])} over the graph" if mine["over_graph"] else ""
            said.append(
                f"{group.name(entry[group.size])}: {style.seconds(seconds['loop'])} in the eager loop, "
                f"{style.seconds(seconds['auto'])} in parallel, {as_times(mine['over_loop'])}{graph}"
            )
    gone = sum(record.get("printed", {}).get("status") == "out of memory" for record in group.records)
    missing = f" As printed, out of memory in {style.cells(gone)}." if gone else ""
    text = "Median times of a sample, everything counted, and their ratios. "
    text += f"L = {group.lengths[-1]:,}: {'; '.join(said)}.{missing}"
    return Drawing(f"{group.slug}-time", f"Time of one sample: {group.label}", group.paper, text, figure)


def _at(group: Group, record: Record, part: float = 0.0) -> float:
    """Where a cell stands on an axis of sizes: around the number of its size, by its number of steps.

    Args:
        part: to the right, as a part of the room that it has
    """
    count = len(group.lengths)
    beside = group.lengths.index(record["L"]) - (count - 1) / 2 + part
    return group.sizes.index(record[group.size]) + 0.8 / count * beside


def _sizes(axes: Axes, group: Group) -> None:
    axes.set_xticks(range(len(group.sizes)), [str(size) for size in group.sizes])
    axes.set_xlim(-0.6, len(group.sizes) - 0.4)


def speedups(group: Group) -> Drawing:
    """Fig. 6 middle: how many times as fast each sample was, over the two loops."""
    baselines = [name for name in ("loop", "graph") if any(name in record for record in group.records)]
    figure, places = panels(len(baselines))
    colours = style.ordered(group.lengths)
    for axes, baseline in zip(places, baselines, strict=True):
        title = f"over {style.LABELS[baseline].replace('loop in a ', '')}"
        describe(axes, title, group.axis, "speed-up (×)", "auto")
        for record in group.records:
            slow, fast = (record.get(column, {}).get("seconds") for column in (baseline, "auto"))
            if slow and fast:
                # The loop takes the same time for every sample, and has fewer runs.
                ratios = [slow[number % len(slow)] / each for number, each in enumerate(fast)]
                _violin(axes, _at(group, record), ratios, 0.72 / len(group.lengths), colours[record["L"]])
        guide(axes, 1)
        _sizes(axes, group)
        same_y([axes], log=True)
    legend(figure, colours, "steps L")
    batches = [entry["batch"] for entry in summarise(group.with_most_steps())]
    ratios = [each["over_fastest_loop"] for each in batches]
    low, high = as_times(min(ratios)), as_times(max(ratios))
    text = (
        "A run of the loop over the time of each sample in parallel; the bar is the median of these ratios. With "
        f"{batches[0]['samples']} samples at a time, which fill the machine in the loop as well, the speed-up over the fastest "
        f"loop is {low if low == high else f'{low} to {high}'} (L = {group.lengths[-1]:,})."
    )
    return Drawing(f"{group.slug}-speedup", f"Speed-up of one sample: {group.label}", group.paper, text, figure)


def _violin(axes: Axes, at: float, values: list[float], width: float, colour: str) -> None:
    parts: Any = axes.violinplot([values], positions=[at], widths=width, showmedians=True, showextrema=False)
    for body in parts["bodies"]:
        body.set(facecolor=colour, edgecolor=colour, alpha=0.6, linewidth=0.8, gid="violin")
    parts["cmedians"].set(color=style.INK, linewidth=1.2)


def newton(group: Group) -> Drawing:
    """Table 2: iterations and the largest error of a final sample, for both methods."""
    figure, places = panels(4)
    colours = style.ordered(group.sizes, style.COLD)
    said, gone = [], []
    for above, below, method in zip(places[:2], places[2:], ("printed", "auto"), strict=True):
        known = [record for record in group.records if record.get(method, {}).get("error")]
        counts = [fmean(record[method]["iterations"]) for record in known]
        errors = [max(map(float, record[method]["error"])) for record in known]
        describe(above, style.LABELS[method], "steps L (number)", "iterations (mean)", method)
        lines(above, known, counts, colours, group=group.size)
        describe(below, style.LABELS[method], "steps L (number)", "error (L∞, largest)", method)
        lines(below, known, [error if 0 < error < math.inf else None for error in errors], colours, group=group.size)
        if known:
            said.append(
                f"{style.LABELS[method]}: at most {max(counts):.1f} iterations, error at most {style.plain(max(errors))}"
            )
        results = [name for record in group.records for name in record.get(method, {}).get("results", [])]
        if bad := sum(name != "CONVERGED" for name in results):
            gone.append(f"{style.LABELS[method]} in {bad} of {len(results)} samples")
    for axes in places:
        binary(axes, style.plain)
    same_y(places[:2], zero=True)
    same_y(places[2:], log=True)
    legend(figure, colours, group.axis)
    text = "Mean iterations of a sample, and the largest difference of a final state to the loop's. "
    text += f"{'; '.join(said)}." + (f" Not converged: {', '.join(gone)}." if gone else "")
    return Drawing(f"{group.slug}-newton", f"Iterations and error: {group.label}", "table 2", text, figure)


def distances(group: Group) -> Drawing:
    """Fig. 6 right: the distance of samples to the test set, by the loop and in parallel, and the difference."""
    figure, (both, apart) = panels(2)
    colours = style.ordered(group.lengths)
    describe(both, "loop (squares), parallel (dots)", group.axis, "distance (W₂)")
    describe(apart, "parallel − loop", group.axis, "difference (W₂)")
    drawn = ((both, "sequential", "s", -0.15), (both, "parallel", "o", 0.15), (apart, "difference", "o", 0.0))
    for record in group.records:
        for axes, name, marker, part in drawn:
            x, colour = _at(group, record, part), colours[record["L"]]
            axes.plot([x, x], record["frechet"][f"{name}_interval"], color=colour, linewidth=1.2)
            axes.plot(x, record["frechet"][name], marker, color=colour, markersize=4, gid=name)
    guide(apart, 0)
    for axes in (both, apart):
        _sizes(axes, group)
        same_y([axes])
    legend(figure, colours, "steps L")
    relative = max(abs(r["frechet"]["difference"]) / max(r["frechet"]["sequential"], 1e-30) for r in group.records)
    samples = group.records[0]["frechet"]["samples"]
    text = (
        f"Wasserstein-2 distance of the moments of {samples:,} samples to those of the test set's latents; lines hold 95% of a "
        f"bootstrap over samples. The two ways differ by at most {style.plain(100 * relative)}% of the distance."
    )
    return Drawing(f"{group.slug}-distance", f"Distance to the test set: {group.label}", "fig. 6 right", text, figure)


def phases(group: Group) -> Drawing:
    """Fig. 17: what a sample's time goes into, at the most steps."""
    figure, places = panels(2)
    said, used = [], set()
    for axes, method in zip(places, ("printed", "auto"), strict=True):
        describe(axes, style.LABELS[method], group.axis, "share of the time (%)", method)
        first = []
        for record in group.with_most_steps():
            shares, below = _shares(record, method), 0.0
            for phase, percent in shares.items():
                at = group.sizes.index(record[group.size])
                axes.bar(at, percent, bottom=below, width=0.7, color=PHASES[phase][1], gid=phase)
                below += percent
            used |= {*shares}
            first += [*shares.items()][:1]
        _sizes(axes, group)
        axes.set(ylim=(0, 100), yticks=range(0, 101, 25))
        if first:
            name = PHASES[first[0][0]][0]
            said.append(f"{style.LABELS[method]}: {name} {style.span((percent for _, percent in first), '.0f')}%")
        else:
            remark(axes, "was not timed")
    legend(figure, dict(each for phase, each in PHASES.items() if phase in used), across=2)
    text = (
        f"L = {group.lengths[-1]:,}. {'; '.join(said)}. As printed: measured in one run. With the defaults: the network's share "
        "is its time on all L steps, scaled by how many evaluations there were."
    )
    return Drawing(f"{group.slug}-phases", f"Where the time goes: {group.label}", "fig. 17", text, figure)


def _shares(record: Record, method: str) -> dict[str, float]:
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


def by_class(records: list[Record]) -> Drawing:
    """Fig. 23: speed-ups over the eager loop with and without classes, over the side of the images."""
    lengths, sides = (sorted({record[key] for record in records}) for key in ("L", "side"))
    entries = {(each["L"], each["conditional"], each["side"]): each for each in summarise(records)}
    figure, places = panels(len(lengths))
    for axes, length in zip(places, lengths, strict=True):
        describe(axes, f"L = {length:,} steps", "side of an image (pixels)", "speed-up over eager (×)")
        for conditional, (_, colour) in CLASSES.items():
            for method, dashes in (("printed", "-"), ("auto", "--")):
                found = [entries.get((length, conditional, side), {}).get(method, {}) for side in sides]
                ratios = [each.get("over_loop", math.nan) for each in found]
                axes.plot(sides, ratios, dashes, color=colour, marker="o", gid=f"{conditional} {method}")
        guide(axes, 1)
        binary(axes, style.plain)
    same_y(places, log=True)
    legend(figure, dict(CLASSES.values()), "defaults dashed", across=2)
    said = []
    for side in sides:
        both = [entries.get((lengths[-1], each, side), {}).get("printed", {}) for each in ("no", "yes")]
        if all(both):
            said.append(f"{side} × {side}: {both[0]['iterations']:.1f} and {both[1]['iterations']:.1f}")
    counts = f" Newton's iterations without and with classes, L = {lengths[-1]:,}: {'; '.join(said)}." if said else ""
    text = (
        "Speed-up over the eager loop: as printed (lines), which starts from the mean of the class where there is one, and with this "
        f"library's defaults (dashed).{counts}"
    )
    return Drawing("pixel-diffusion-classes", "With and without classes", "fig. 23", text, figure)
