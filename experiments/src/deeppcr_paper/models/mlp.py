"""The residual MLP that denoises latent vectors.

Shapes: N rows, w the width of a latent, H the width of a layer, E that of the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .time import Embedding


class AdaLayerNorm(nn.Module):
    """A layer norm whose scale and shift are read off an embedding."""

    def __init__(self, width: int, embedding: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.affine = nn.Linear(embedding, 2 * width)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        scale, shift = self.affine(embedded).chunk(2, -1)
        return torch.addcmul(shift, self.norm(x), 1 + scale)


class ResidualMLP(nn.Module):
    """Appendix E: a linear layer, three residual blocks of (AdaLayerNorm, Swish, linear) twice, and a linear layer.

    Args:
        width: of a latent
        hidden: of a layer; the paper: 2,048
        blocks: the paper: 3
        embedding: of time and class
        classes: how many; None for an unconditional network

    >>> network = ResidualMLP(16, hidden=64, classes=10)
    >>> network(torch.zeros(5, 16), torch.rand(5), torch.full((5,), 10)).shape  # 10: no class
    torch.Size([5, 16])
    """

    def __init__(
        self, width: int, *, hidden: int = 2048, blocks: int = 3, embedding: int = 256, classes: int | None = None
    ):
        super().__init__()
        self.embedding = Embedding(embedding, classes)
        self.first = nn.Linear(width, hidden)
        self.norms = nn.ModuleList([AdaLayerNorm(hidden, embedding) for _ in range(2 * blocks)])
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(2 * blocks)])
        self.last_norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, width)

    def forward(self, z: Tensor, t: Tensor, classes: Tensor | None = None) -> Tensor:
        """z [N, w], t [N] in [0, 1], classes [N]: the noise in z, [N, w]."""
        embedded = self.embedding(t, classes, z.dtype)
        x = self.first(z)
        for block in range(0, len(self.layers), 2):
            inner = x
            for each in (block, block + 1):
                inner = self.layers[each](functional.silu(self.norms[each](inner, embedded)))
            x = x + inner
        return self.last(functional.silu(self.last_norm(x)))
