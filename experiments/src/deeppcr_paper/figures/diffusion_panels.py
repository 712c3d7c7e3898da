"""What the figures of diffusion share: which records stand in one figure, its panels, its axis of sizes, its legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from . import style


@dataclass(frozen=True)
class Group:
    """What stands in one figure: the records of one data set, or of networks with or without classes.

    Attributes:
        slug, label: in names and in titles
        size: the key of the state's size, "w" or "side"
        paper: which of the paper's results these are
    """

    slug: str
    label: str
    size: str
    paper: str
    records: list[dict[str, Any]]

    @property
    def lengths(self) -> list[int]:
        return sorted({record["L"] for record in self.records})

    @property
    def sizes(self) -> list[int]:
        return sorted({record[self.size] for record in self.records})

    @property
    def axis(self) -> str:
        return "width w of a latent (numbers)" if self.size == "w" else "side of an image (pixels)"

    def name(self, size: int) -> str:
        return f"w = {size}" if self.size == "w" else f"{size} × {size}"


def sizes_along(axes: Axes, sizes: Sequence[int]) -> None:
    """The sizes of states along a log axis, each by its own number."""
    style.powers_of_two(axes, sizes)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def panels(count: int) -> tuple[Any, list[Axes]]:
    """Two panels side by side; what is left over is for the legend."""
    rows = math.ceil(count / 2)
    figure, grid = style.canvas(rows, 1 if count == 1 else 2, extra=0.6 if count % 2 and count > 1 else 1.2)
    return figure, [axes for row in grid for axes in row]


def legend(figure: Any, colours: dict[str, str], spare: Sequence[Axes]) -> None:
    """In a place that is free, else above."""
    style.legend(figure, colours, "", place=spare[0] if spare else None, most=2)
