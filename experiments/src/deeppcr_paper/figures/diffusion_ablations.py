"""``diffusion-iterations`` and ``diffusion-guess``: the error after every iteration, and where the iteration starts."""

from __future__ import annotations

import math
from typing import Any

from ..diffusion_guess import summarise
from ..diffusion_iterations import SMALL
from ..diffusion_iterations import summarise as summarise_iterations
from ..table import times as as_times
from . import style
from .drawing import Drawing
from .panels import binary, describe, guide, legend, panels, same_y

GUESSES = {
    "mean": ("training mean", style.BLUE),
    "class-mean": ("class mean", style.GREEN),
    "zeros": ("zeros", style.PINK),
    "prior": ("path of Gaussian data", style.SKY),
    "coarse": ("coarse sampler", style.ORANGE),
}
_PAPER = {"latent": "fig. 20", "pixel": "fig. 21"}


def iterations(result: dict[str, Any]) -> list[Drawing]:
    """For latent and for pixel space, a panel a size: Newton's method (lines) and the prior's Jacobian (dashed)."""
    found = []
    for space, size in (("latent", "w"), ("pixel", "side")):
        records = [record for record in result["records"] if record["space"] == space]
        if records:
            found.append(_errors(space, size, records))
    return found


def _errors(space: str, size: str, records: list[dict[str, Any]]) -> Drawing:
    by_size = sorted(style.grouped(records, size).items())
    figure, places = panels(len(by_size))
    colours = style.ordered(record["L"] for record in records)
    for axes, (value, mine) in zip(places, by_size, strict=True):
        title = f"w = {value}" if size == "w" else f"{value} × {value} pixels"
        describe(axes, title, "iterations (number)", "error (L∞)")
        for record in mine:
            for method, look in (("printed", "-o"), ("auto", "--")):
                curves = record["errors"][method]
                worst = [max(map(style.number, errors)) for errors in zip(*curves, strict=True)]
                worst = [error if error > 0 else math.nan for error in worst]
                axes.plot(worst, look, color=colours[record["L"]], gid=f"{method} L={record['L']}")
        guide(axes, SMALL)
    same_y(places, log=True)
    legend(figure, colours, "steps L (defaults dashed)")
    said = []
    for method, name in (("printed", "Newton's method"), ("auto", "the prior's Jacobian")):
        counts = [entry[method]["iterations"] for entry in summarise_iterations(records)]
        known = [count for count in counts if count is not None]
        reached = f"{style.span(known, '.0f')} iterations" if known else "not reached"
        missed = len(counts) - len(known)
        some = f", not reached in {missed} of {len(counts)} cells" if known and missed else ""
        said.append(f"{name} {reached}{some}")
    samples = [len(record["errors"]["printed"]) for record in records]
    each = f"{style.span(samples, '.0f')} sample{'s' if max(samples) > 1 else ''} of each"
    text = (
        "Largest difference of the final state to the loop's: Newton's method as printed (lines, dots) and with the prior's "
        f"Jacobian (dashed), both from the training set's mean; the largest of {each}. Below {SMALL} after: {'; '.join(said)}."
    )
    title = f"Error after every iteration, {space} space"
    return Drawing(f"diffusion-iterations-{space}", title, _PAPER[space], text, figure)


def guess(result: dict[str, Any]) -> list[Drawing]:
    """For networks without and with classes: iterations of both methods by where they start."""
    entries = summarise(result["records"])
    length = max((entry["L"] for entry in entries), default=0)
    return [
        _starts(conditional, length, [e for e in entries if (e["conditional"], e["L"]) == (conditional, length)])
        for conditional in dict.fromkeys(entry["conditional"] for entry in entries)
    ]


def _starts(conditional: str, length: int, entries: list[dict[str, Any]]) -> Drawing:
    sides = sorted({entry["side"] for entry in entries})
    guesses = {name: each for name, each in GUESSES.items() if any(entry["guess"] == name for entry in entries)}
    figure, places = panels(3)
    shown = (
        (style.LABELS["printed"], "printed", "iterations", "iterations (mean)"),
        (style.LABELS["auto"], "auto", "iterations", "iterations (mean)"),
        ("network evaluations", "auto", "evaluations", "evaluations (in units of L)"),
    )
    for axes, (title, method, key, label) in zip(places, shown, strict=True):
        describe(axes, title, "side of an image (pixels)", label, method)
        for name, (_, colour) in guesses.items():
            mine = {e["side"]: e[method][key] for e in entries if e["guess"] == name and method in e}
            axes.plot(sides, [mine.get(side, math.nan) for side in sides], "-o", color=colour, gid=name)
        binary(axes, style.plain)
        axes.set_xlim(sides[0] / 1.2, sides[-1] * 1.2)
        same_y([axes], zero=True)
    legend(figure, dict(guesses.values()), "start")
    said = [
        f"{label} {entry['auto']['iterations']:.1f} ({as_times(entry['auto']['over_loop'])} over the eager loop)"
        for name, (label, _) in guesses.items()
        for entry in entries
        if (entry["guess"], entry["side"]) == (name, sides[-1])
    ]
    few = f"Means of {_samples(entries, 'auto')} samples with the defaults"
    run = {entry["side"] for entry in entries if "printed" in entry}
    if run:
        left = " and ".join(f"{side} × {side}" for side in sides if side not in run)
        few += f", of {_samples(entries, 'printed')} as printed" + (f", which was not run on {left}" if left else "")
    name, kind = ("conditional", "classes given") if conditional == "yes" else ("unconditional", "without classes")
    title = f"Where the iteration starts: images, {kind}"
    text = f"L = {length:,}. Iterations with the defaults for {sides[-1]} × {sides[-1]} pixels from: {'; '.join(said)}. {few}."
    return Drawing(f"diffusion-guess-{name}", title, "fig. 23", text, figure)


def _samples(entries: list[dict[str, Any]], method: str) -> str:
    return style.span((entry[method]["samples"] for entry in entries if method in entry), ".0f")
