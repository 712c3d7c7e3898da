"""The autoencoder whose latent vectors are denoised, and the discriminator that it is trained against.

The paper's tables with their slips mended: four halvings take 32 x 32 to 2 x 2, not to the 4 x 4 x 128 that is printed, so
the fourth layer keeps the resolution; and the decoder has no ReLU before its tanh, which would forbid dark pixels.

Shapes: N rows, C the channels of an image, w the width of a latent.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

LAYERS = 4
#: The side of what the last layer of the encoder returns.
SMALLEST = 4


def _halvings(side: int) -> int:
    """How often an image is halved on its way to 4 x 4."""
    if side not in (4, 8, 16, 32):
        raise ValueError(f"side: expected 4, 8, 16 or 32, got {side}")
    return (side // SMALLEST).bit_length() - 1


class Encoder(nn.Module):
    """Images [N, C, side, side] to mean and log-variance of their latents, [N, w] each."""

    def __init__(self, width: int, *, channels: int = 1, side: int = 32, base: int = 16, hidden: int = 256):
        super().__init__()
        widths = [channels, *(base * 2**layer for layer in range(LAYERS))]
        strides = [2 if layer < _halvings(side) else 1 for layer in range(LAYERS)]
        layers: list[nn.Module] = []
        for (before, after), stride in zip(pairwise(widths), strides, strict=True):
            layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.ReLU()]
        features = SMALLEST**2 * widths[-1]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, hidden), nn.Linear(hidden, 2 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.layers(x).chunk(2, -1)
        return mean, log_variance


class Decoder(nn.Module):
    """Latents [N, w] to images [N, C, side, side] in [-1, 1].

    As the paper has it, a layer doubles the resolution after its convolution: at 32 x 32 the finest one sees 16 x 16.
    """

    def __init__(self, width: int, *, channels: int = 1, side: int = 32, base: int = 16, hidden: int = 256):
        super().__init__()
        widths = [base * 2**layer for layer in reversed(range(LAYERS))]
        layers: list[nn.Module] = []
        for layer, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1)]
            layers += [nn.Upsample(scale_factor=2.0, mode="nearest")] if layer < _halvings(side) else []
            layers += [nn.ReLU()]
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.Linear(hidden, SMALLEST**2 * widths[0]),
            nn.Unflatten(1, (widths[0], SMALLEST, SMALLEST)),
            *layers,
            nn.Conv2d(widths[-1], channels, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)


class Discriminator(nn.Module):
    """Images [N, C, side, side] to a score [N], high for those of the data."""

    def __init__(self, *, channels: int = 1, base: int = 16):
        super().__init__()
        widths = [channels, *(base * 2**layer for layer in range(LAYERS))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 1, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((1, 2, 3))


class Autoencoder(nn.Module):
    """Encoder and decoder, with latents that have mean 0 and covariance 1 over the training set.

    The encoder's own latents have any scale (its divergence to the normal distribution has a weight of 1e-6 only):
    `fit_scale` finds their mean and covariance, and `encode` and `decode` speak of whitened latents from then on. For those
    the prior on the denoiser's Jacobian is a scalar.

    >>> autoencoder = Autoencoder(16)
    >>> autoencoder.decode(autoencoder.encode(torch.zeros(3, 1, 32, 32))).shape
    torch.Size([3, 1, 32, 32])
    """

    centre: Tensor
    whiten: Tensor
    colour: Tensor

    def __init__(self, width: int, *, channels: int = 1, side: int = 32, base: int = 16, hidden: int = 256):
        super().__init__()
        sizes = {"channels": channels, "side": side, "base": base, "hidden": hidden}
        self.encoder, self.decoder = Encoder(width, **sizes), Decoder(width, **sizes)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("whiten", torch.eye(width))
        self.register_buffer("colour", torch.eye(width))

    @torch.no_grad()
    def begin_at(self, x: Tensor) -> None:
        """Before training: the decoder's first images have the mean of the training images x [N, C, side, side].

        From grey, images that are mostly dark drive every pixel to the flat end of the tanh in a few steps, and nothing comes
        back from there.
        """
        last = self.decoder.layers[-2]
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        last.bias.copy_(torch.atanh(x.mean((0, 2, 3)).clamp(-0.99, 0.99)))

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Whitened latents [N, w]: drawn as in training with a generator, else the means."""
        return (self._draw(x, generator) - self.centre) @ self.whiten

    def decode(self, z: Tensor) -> Tensor:
        """Images [N, C, side, side] of whitened latents."""
        return self.decoder(z @ self.colour + self.centre)

    def _draw(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        mean, log_variance = self.encoder(x)
        if generator is None:
            return mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return mean + torch.exp(log_variance / 2) * noise

    @torch.no_grad()
    def fit_scale(self, x: Tensor, generator: torch.Generator, rows: int = 4096) -> None:
        """Find the mean and the covariance of the latents of the training images x [N, C, side, side]."""
        latents = torch.cat([self._draw(part, generator) for part in x.split(rows)]).double()
        centre = latents.mean(0)
        values, vectors = torch.linalg.eigh((latents - centre).mT @ (latents - centre) / len(latents))
        # A direction that the encoder does not use has no spread that could be scaled to 1.
        values = values.clamp(min=1e-8 * values[-1].item())
        self.centre.copy_(centre)
        self.whiten.copy_(vectors / values.sqrt())
        self.colour.copy_((vectors * values.sqrt()).mT)
