"""The UNet that denoises small images.

Shapes: N rows, C the channels of an image, c those of a level.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .time import Embedding

#: Levels: the image is halved so many times.
LEVELS = 2


class Level(nn.Module):
    """Two layers of (3x3 convolution, ReLU, batch norm) with a residual connection; the embedding is added in between."""

    def __init__(self, channels: int, embedding: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shift = nn.Linear(embedding, channels)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        inner = self.first_norm(torch.relu(self.first(x))) + self.shift(embedded)[..., None, None]
        return x + self.second_norm(torch.relu(self.second(inner)))


class UNet(nn.Module):
    """Appendix E: two levels down, two levels up.

    The table has "Residual" over a layer that changes the resolution: here it is over the two convolutions before it,
    and the usual skip connection leads from the way down to the way up at the same resolution.

    Args:
        channels: of an image
        base: channels of the first level; the paper: 16
        embedding: of time and class
        classes: how many; None for an unconditional network

    >>> UNet()(torch.zeros(3, 1, 8, 8), torch.rand(3)).shape
    torch.Size([3, 1, 8, 8])
    """

    def __init__(self, channels: int = 1, *, base: int = 16, embedding: int = 64, classes: int | None = None):
        super().__init__()
        widths = [base * 2**level for level in range(LEVELS + 1)]
        self.embedding = Embedding(embedding, classes)
        self.first = nn.Conv2d(channels, base, 3, padding=1)
        self.down = nn.ModuleList([Level(width, embedding) for width in widths[:-1]])
        self.shrink = nn.ModuleList([nn.Conv2d(width, 2 * width, 3, stride=2, padding=1) for width in widths[:-1]])
        self.up = nn.ModuleList([Level(width, embedding) for width in widths[:0:-1]])
        self.grow = nn.ModuleList([nn.Conv2d(width, width // 2, 3, padding=1) for width in widths[:0:-1]])
        self.last = nn.Conv2d(base, channels, 3, padding=1)

    def forward(self, z: Tensor, t: Tensor, classes: Tensor | None = None) -> Tensor:
        """z [N, C, side, side] with a side that 4 divides, t [N] in [0, 1], classes [N]: the noise in z."""
        if z.shape[-1] % 2**LEVELS or z.shape[-2] % 2**LEVELS:
            raise ValueError(f"z: expected sides that {2**LEVELS} divides, got {tuple(z.shape)}")
        embedded = self.embedding(t, classes, z.dtype)
        x, skipped = self.first(z), []
        for level, shrink in zip(self.down, self.shrink, strict=True):
            x = level(x, embedded)
            skipped.append(x)
            x = shrink(x)
        for level, grow in zip(self.up, self.grow, strict=True):
            x = functional.interpolate(grow(level(x, embedded)), scale_factor=2.0, mode="nearest") + skipped.pop()
        return self.last(x)
