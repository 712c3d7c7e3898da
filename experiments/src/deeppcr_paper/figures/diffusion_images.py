"""Samples of diffusion models side by side, by the loop and in parallel."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ..sampling import unpack
from . import style
from .diffusion_panels import Group
from .drawing import Drawing

#: Pictures in a row, and pairs of rows.
ACROSS, MOST_ROWS = 8, 4


def images(group: Group) -> list[Drawing]:
    """Samples side by side: above each pair of rows the loop's, below those of the parallel solve, at the most steps."""
    length = group.lengths[-1]
    mine = [record for record in group.records if record["L"] == length and record.get("pictures")]
    mine = sorted(mine, key=lambda record: record[group.size])[-MOST_ROWS:]
    if not mine:
        return []
    figure = Canvas(figsize=(style.WIDTH, 0.3 + 1.55 * len(mine)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.03, w_pad=0.02, hspace=0.0, wspace=0.0)  # pyright: ignore
    grid = figure.subplots(2 * len(mine), 1, squeeze=False)
    apart = 0
    for number, record in enumerate(mine):
        both = {way: unpack(record["pictures"][way])[:ACROSS] for way in ("sequential", "parallel")}
        apart = max(apart, int((both["sequential"].int() - both["parallel"].int()).abs().max()))
        for axes, (way, pixels) in zip(grid[2 * number : 2 * number + 2, 0], both.items(), strict=True):
            _row(axes, pixels)
            name = f"{group.name(record[group.size])}, " if way == "sequential" else ""
            axes.set_title(f"{name}{'loop' if way == 'sequential' else 'in parallel'}", loc="left", fontsize=9, pad=2)
    equal = "no pixel differs" if not apart else f"pixels differ by at most {apart} of 255 shades"
    return [
        Drawing(
            f"{group.slug}-images",
            f"Samples side by side: {group.label}",
            "fig. 18",
            f"From the same noise, L = {length:,}, by the loop and in parallel: {equal}.",
            figure,
        )
    ]


def _row(axes: Axes, pixels: Any) -> None:
    """Images [N, channels, side, side] in a row, with room between them."""
    import numpy as np

    count, channels, side = pixels.shape[0], pixels.shape[1], pixels.shape[-1]
    gap = max(side // 8, 1)
    strip = np.zeros((side, ACROSS * (side + gap) - gap, 4), dtype=np.uint8)  # transparent where nothing is
    for number in range(count):
        tile = pixels[number].permute(1, 2, 0).numpy()
        place = strip[:, number * (side + gap) : number * (side + gap) + side]
        place[..., :3] = tile if channels == 3 else tile.repeat(3, -1)
        place[..., 3] = 255
    axes.imshow(strip, interpolation="none", aspect="equal")
    axes.set_axis_off()
