"""How fast recurrent layers are with ``mode="auto"``, size by size, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from deeppcr_paper.figures import panels, style
from deeppcr_paper.figures.drawing import Drawing
from recurrent_methods import AUTO, BOTH, TORCH, Size

NAME = "recurrent-map"
#: Inches. As wide as the other figures, for a phone: the scale stands below the panels, and T are powers of two.
WIDTH, ROW, AROUND = panels.WIDTH, 0.3, 2.25
#: How many times as fast, between which there are colours: faster ones have the last.
SLOWEST, FASTEST = 0.5, 16.0
#: From slower over equal to faster.
_COLOURS = ("#a63d00", "#eda27a", "#ececec", "#7fb5da", "#00538a", "#002b4d")
#: Where on the scale they stand.
_PLACES = (0.0, 0.25, 0.5, 0.68, 0.88, 1.0)
#: Of places that were not measured: layers as fast as PyTorch's are nearly as pale as the paper.
_EMPTY = {"facecolor": "none", "edgecolor": "#a0a0a0", "hatch": "////", "linewidth": 0}


@dataclass(frozen=True)
class Place:
    """A layer of the grid: how many times as fast as PyTorch's own kernel ``auto`` is, and whether it went in parallel."""

    size: Size
    torch: float
    auto: float
    parallel: bool

    @property
    def speed(self) -> float:
        return self.torch / self.auto


def places(record: Mapping[str, Any]) -> list[Place]:
    """Of the grid, where both were timed."""
    found: dict[Size, dict[str, Mapping[str, Any]]] = {}
    for case in record["cases"]:
        if case["suite"] == "torch" and case["passed"]:
            found.setdefault(Size(**case["parameters"]), {})[case["method"]] = case
    return [
        Place(size, median(ways[TORCH]["seconds"]), median(ways[AUTO]["seconds"]), ways[AUTO]["result"] != "LOOP")
        for size, ways in found.items()
        if {TORCH, AUTO} <= ways.keys()
    ]


def draw(found: Sequence[Place], about: str) -> Drawing:
    """A panel for each kind: T across, H and B up.

    Args:
        about: the machine, and when
    """
    kinds = list(dict.fromkeys(sorted(place.size.kind for place in found)))
    across = sorted({place.size.T for place in found})
    up = sorted({(place.size.H, place.size.B) for place in found})
    colours = LinearSegmentedColormap.from_list("speed", list(zip(_PLACES, _COLOURS, strict=True)))
    norm = TwoSlopeNorm(0.0, math.log2(SLOWEST), math.log2(FASTEST))
    with style.context():
        figure = Canvas(figsize=(WIDTH, AROUND + ROW * len(up)), layout="constrained")
        grid = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
        for axes, kind in zip(grid, kinds, strict=True):
            axes.set(title=kind, xlabel="steps T")
            axes.grid(False)
            _panel(axes, [place for place in found if place.size.kind == kind], across, up, colours, norm)
        grid[0].set_ylabel("hidden size H, rows B")
        scale = figure.colorbar(
            ScalarMappable(norm, colours), ax=list(grid), location="bottom", fraction=0.03, aspect=40, pad=0.02
        )
        ticks = [0.5, 1, 2, 4, 8, 16]
        scale.set_ticks([math.log2(each) for each in ticks], labels=[f"{each:g}" for each in ticks])
        scale.set_label("times as fast as torch.nn")
        figure.legend(handles=_legend(), ncols=2, loc="outside lower center", fontsize=9)
    taken = sum(place.parallel for place in found)
    caption = (
        f"How many times as fast as torch.nn a layer of deeppcr.nn is with mode auto, on {about}; {taken} of {len(found)} layers "
        f"are run in parallel, the others by PyTorch's own kernel. From {min(place.speed for place in found):.2f} to "
        f"{max(place.speed for place in found):.1f} times as fast. Hatched places were not measured."
    )
    return Drawing(NAME, "Recurrent layers, size by size", "not in it", caption, figure)


def _panel(
    axes: Axes,
    found: Sequence[Place],
    across: Sequence[int],
    up: Sequence[tuple[int, int]],
    colours: Colormap,
    norm: TwoSlopeNorm,
) -> None:
    shades = numpy.full((len(up), len(across)), numpy.nan)
    for place in found:
        x, y = across.index(place.size.T), up.index((place.size.H, place.size.B))
        shades[y, x] = math.log2(min(max(place.speed, SLOWEST), FASTEST))
        red, green, blue, _ = colours(norm(shades[y, x]))
        ink = "#ffffff" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.55 else style.INK
        axes.text(x + 0.15, y, _speed(place.speed), color=ink, ha="center", va="center", fontsize=8)
        _mark(axes, x - 0.37, y, ink, place.parallel, place.size.direction)
    axes.pcolormesh(
        numpy.arange(len(across) + 1) - 0.5,
        numpy.arange(len(up) + 1) - 0.5,
        shades,
        cmap=colours,
        norm=norm,
        linewidth=0,
    )
    for y, x in numpy.argwhere(numpy.isnan(shades)):
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **_EMPTY))
    for y in range(1, len(up)):
        if up[y][0] != up[y - 1][0]:
            axes.axhline(y - 0.5, color=style.INK, linewidth=0.7)
    axes.set_xticks(range(len(across)), [style.power(T, 2) for T in across])
    axes.set_yticks(range(len(up)), [f"{H}, {B}" for H, B in up])
    axes.tick_params(length=0)


def _mark(axes: Axes, x: float, y: float, ink: str, parallel: bool, direction: str) -> None:
    axes.plot([x], [y], **_look(ink, parallel, direction))


def _look(ink: str, parallel: bool, direction: str) -> dict[str, Any]:
    """Filled where it went in parallel; a square with gradients, a circle without."""
    filled = ink if parallel else "none"
    shape = "s" if direction == BOTH else "o"
    return {"marker": shape, "markersize": 4, "color": ink, "markerfacecolor": filled, "markeredgewidth": 0.8, "ls": ""}


def _legend() -> list[Line2D | Patch]:
    names = {True: "in parallel", False: "by torch.nn"}
    ways = {"forward": "forward", BOTH: "forward and backward"}
    columns = [
        [Line2D([], [], **_look(style.INK, parallel, way), label=f"{names[parallel]}, {ways[way]}") for way in ways]
        for parallel in names
    ]
    return [*columns[0], Patch(**_EMPTY, label="not measured"), *columns[1]]


def _speed(value: float) -> str:
    """
    >>> _speed(0.98), _speed(1.34), _speed(12.3)
    ('0.98', '1.3', '12')
    """
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
