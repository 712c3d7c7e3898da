"""A small denoiser of scikit-learn's digits, trained in a second or two; deterministic."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from deeppcr.diffusion import GaussianPrior, Schedule

TRAINING = Schedule.linear(200)
#: what stands for no class
NOTHING = 10


class Denoiser(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 96):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.middle = nn.Linear(hidden, hidden)
        self.time = nn.Sequential(nn.Linear(16, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Embedding(NOTHING + 1, hidden)

    def forward(self, z: Tensor, t: Tensor, classes: Tensor | None = None) -> Tensor:
        angle = t[:, None] * torch.logspace(0, -3, 8, dtype=z.dtype, device=z.device)
        hidden = self.enter(z.flatten(1)) + self.time(torch.cat([angle.sin(), angle.cos()], -1))
        hidden = hidden + self.label(classes if classes is not None else torch.full_like(t, NOTHING))
        hidden = hidden + self.middle(torch.nn.functional.silu(hidden))
        return self.leave(torch.nn.functional.silu(hidden)).view_as(z)


@cache
def data() -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in [-1, 1], and labels [N]."""
    from sklearn.datasets import load_digits  # takes seconds, and not every process of the tests comes here

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


@cache
def prior() -> GaussianPrior:
    return GaussianPrior.from_data(data()[0])


@cache
def trained() -> Denoiser:
    """Predicts the noise; a fifth of the labels were hidden from it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = data()
        net = Denoiser()
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        bars = TRAINING.alphas_bar.float()
        for _ in range(400):
            pick, t = torch.randint(len(images), (128,)), torch.randint(len(bars), (128,))
            noise = torch.randn(128, 1, 8, 8)
            shares = bars[t].reshape(-1, 1, 1, 1)
            hidden = torch.where(torch.rand(128) < 0.2, NOTHING, labels[pick])
            guess = net(shares.sqrt() * images[pick] + (1 - shares).sqrt() * noise, t, hidden)
            loss = ((guess - noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()
