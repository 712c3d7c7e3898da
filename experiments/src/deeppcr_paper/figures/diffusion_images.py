"""Samples of diffusion models side by side, by the loop and in parallel."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from ..sampling import unpack
from .diffusion_group import Group
from .drawing import Drawing
from .panels import panels

#: Pictures in a row, and pairs of rows.
ACROSS, MOST_ROWS = 8, 4


def images(group: Group) -> list[Drawing]:
    """Samples side by side: above each pair of rows the loop's, below those of the parallel solve, at the most steps."""
    mine = [record for record in group.with_most_steps() if record.get("pictures")][-MOST_ROWS:]
    if not mine:
        return []
    figure, places = panels(2 * len(mine), columns=1)
    figure.set_figheight(0.2 + 1.7 * len(mine))
    apart = 0
    for record, loop, parallel in zip(mine, places[::2], places[1::2], strict=True):
        both = [unpack(record["pictures"][way])[:ACROSS] for way in ("sequential", "parallel")]
        apart = max(apart, int((both[0].int() - both[1].int()).abs().max()))
        _row(loop, both[0], f"{group.name(record[group.size])}, loop")
        _row(parallel, both[1], "in parallel")
    equal = "no pixel differs" if not apart else f"pixels differ by at most {apart} of 255 shades"
    text = f"From the same noise, L = {group.lengths[-1]:,}, by the loop and in parallel: {equal}."
    return [Drawing(f"{group.slug}-images", f"Samples side by side: {group.label}", "fig. 18", text, figure)]


def _row(axes: Axes, pixels: Tensor, title: str) -> None:
    """Images [N, channels, side, side] in a row, with room between them."""
    count, channels, side = pixels.shape[0], pixels.shape[1], pixels.shape[-1]
    gap = max(side // 8, 1)
    strip = np.zeros((side, ACROSS * (side + gap) - gap, 4), dtype=np.uint8)  # transparent where nothing is
    for number in range(count):
        tile = pixels[number].permute(1, 2, 0).numpy()
        place = strip[:, number * (side + gap) : number * (side + gap) + side]
        place[..., :3] = tile if channels == 3 else tile.repeat(3, -1)
        place[..., 3] = 255
    axes.imshow(strip, interpolation="none", aspect="equal")
    axes.set_title(title, fontsize=9, pad=4)
    axes.set_axis_off()
