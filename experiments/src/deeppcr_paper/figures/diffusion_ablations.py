"""``diffusion-iterations`` and ``diffusion-guess``: the error after every iteration, and where the iteration starts."""

from __future__ import annotations

import math
from typing import Any

from ..diffusion_guess import summarise
from ..diffusion_iterations import SMALL
from ..diffusion_iterations import summarise as summarise_iterations
from ..table import times as as_times
from . import style
from .diffusion_panels import panels, sizes_along
from .drawing import Drawing

GUESSES = {
    "mean": "training mean",
    "class-mean": "class mean",
    "zeros": "zeros",
    "prior": "path of Gaussian data",
    "coarse": "coarse sampler",
}
_PAPER = {"latent": "fig. 20", "pixel": "fig. 21"}
_COLOURS = {"mean": "#0072b2", "class-mean": "#009e73", "zeros": "#cc79a7", "prior": "#56b4e9", "coarse": "#e69f00"}


def iterations(result: dict[str, Any]) -> list[Drawing]:
    """For latent and for pixel space, a panel a size: Newton's method (lines) and the prior's Jacobian (dashed)."""
    found = []
    for space, size in (("latent", "w"), ("pixel", "side")):
        records = [record for record in result["records"] if record["space"] == space]
        if records:
            found.append(_errors(space, size, records))
    return found


def _errors(space: str, size: str, records: list[dict[str, Any]]) -> Drawing:
    sizes, lengths = sorted({record[size] for record in records}), sorted({record["L"] for record in records})
    figure, places = panels(len(sizes))
    colours = style.ordered(lengths)
    every: list[float] = []
    for axes, value in zip(places, sizes, strict=False):
        for record in (each for each in records if each[size] == value):
            for method, line in (("printed", "-"), ("auto", "--")):
                curves = record["errors"][method]
                worst = [max(style.number(error) for error in errors) for errors in zip(*curves, strict=True)]
                worst = [error if error > 0 else math.nan for error in worst]
                axes.plot(
                    range(len(worst)),
                    worst,
                    color=colours[record["L"]],
                    linestyle=line,
                    marker="o" if line == "-" else None,
                    gid=f"{method} L={record['L']}",
                )
                every += [error for error in worst if math.isfinite(error)]
        style.panel_title(axes, f"w = {value}" if size == "w" else f"{value} × {value} pixels")
        axes.axhline(SMALL, color=style.INK, linestyle=":", linewidth=1.2)
        axes.set_xlabel("iterations (number)")
        axes.set_ylabel("error (L∞)")
    for axes in places[: len(sizes)]:
        style.decades(axes, every, also=[SMALL])
    spare = places[len(sizes) :]
    style.legend(figure, colours, "steps L", place=spare[0] if spare else None)
    said = []
    for method, name in (("printed", "Newton's method"), ("auto", "the prior's Jacobian")):
        counts = [entry[method]["iterations"] for entry in summarise_iterations(records)]
        known = [count for count in counts if count is not None]
        reached = f"{style.span(known, '.0f')} iterations" if known else "not reached"
        missed = (
            f", not reached in {len(counts) - len(known)} of {len(counts)} cells"
            if 0 < len(known) < len(counts)
            else ""
        )
        said.append(f"{name} {reached}{missed}")
    samples = [len(record["errors"]["printed"]) for record in records]
    each = f"{style.span(samples, '.0f')} sample{'s' if max(samples) > 1 else ''} of each"
    return Drawing(
        f"diffusion-iterations-{space}",
        f"Error after every iteration, {space} space",
        _PAPER[space],
        "Largest difference of the final state to the loop's: Newton's method as printed (lines, dots) and with the prior's "
        f"Jacobian (dashed), both from the training set's mean; the largest of {each}. Below {SMALL} after: {'; '.join(said)}.",
        figure,
    )


def guess(result: dict[str, Any]) -> list[Drawing]:
    """For networks without and with classes: iterations of both methods by where they start."""
    entries = summarise(result["records"])
    return [
        _starts(conditional, [entry for entry in entries if entry["conditional"] == conditional])
        for conditional in dict.fromkeys(entry["conditional"] for entry in entries)
    ]


def _starts(conditional: str, entries: list[dict[str, Any]]) -> Drawing:
    sides, length = sorted({entry["side"] for entry in entries}), max(entry["L"] for entry in entries)
    guesses = [name for name in GUESSES if any(entry["guess"] == name for entry in entries)]
    figure, grid = style.canvas(2, extra=0.7)
    (printed, auto), (work, place) = grid
    shown = ((printed, "printed", "iterations"), (auto, "auto", "iterations"), (work, "auto", "evaluations"))
    for axes, method, key in shown:
        values = []
        for name in guesses:
            mine = {
                entry["side"]: entry[method][key]
                for entry in entries
                if (entry["guess"], entry["L"]) == (name, length) and method in entry
            }
            y = [mine.get(side, math.nan) for side in sides]
            axes.plot(sides, y, color=_COLOURS[name], marker="o", gid=name)
            values += [value for value in y if math.isfinite(value)]
        sizes_along(axes, sides)
        style.free(axes, values, also=[0.0])
        axes.set_xlabel("side of an image (pixels)")
    style.panel_title(printed, style.LABELS["printed"], "printed")
    style.panel_title(auto, style.LABELS["auto"], "auto")
    style.panel_title(work, "network evaluations", "auto")
    printed.set_ylabel("iterations (mean)")
    auto.set_ylabel("iterations (mean)")
    work.set_ylabel("evaluations (in units of L)")
    style.legend(figure, {GUESSES[name]: _COLOURS[name] for name in guesses}, "start", place=place)
    said = []
    for name in guesses:
        mine = [entry for entry in entries if (entry["guess"], entry["L"], entry["side"]) == (name, length, sides[-1])]
        said += [
            f"{GUESSES[name]} {entry['auto']['iterations']:.1f} ({as_times(entry['auto']['over_loop'])} over the eager loop)"
            for entry in mine
        ]
    counts = {
        method: style.span((entry[method]["samples"] for entry in mine), ".0f")
        for method in ("printed", "auto")
        if (mine := [entry for entry in entries if method in entry and entry["L"] == length])
    }
    few = f"Means of {counts['auto']} samples with the defaults" if "auto" in counts else ""
    if "printed" in counts:
        run = sorted({entry["side"] for entry in entries if "printed" in entry})
        only = (
            ""
            if run == sides
            else f", which was not run on {' and '.join(f'{s} × {s}' for s in sides if s not in run)}"
        )
        few += f", of {counts['printed']} as printed{only}"
    kind = "classes given" if conditional == "yes" else "without classes"
    return Drawing(
        f"diffusion-guess-{'conditional' if conditional == 'yes' else 'unconditional'}",
        f"Where the iteration starts: images, {kind}",
        "fig. 23",
        f"L = {length:,}. Iterations with the defaults for {sides[-1]} × {sides[-1]} pixels from: {'; '.join(said)}. {few}.",
        figure,
    )
