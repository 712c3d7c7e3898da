"""The random numbers of a sample, drawn before: the loop and the parallel solve then see the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Noise:
    """What a sample is made from.

    Args:
        initial: [B, *shape], the noise that sampling starts from
        steps: [L, B, *shape], the noise that each step adds; None for samplers that add none

    >>> import torch
    >>> noise = Noise.draw((4, 3, 8, 8), steps=100, generator=torch.Generator().manual_seed(0))
    >>> noise.initial.shape, noise.steps.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([100, 4, 3, 8, 8]))
    """

    initial: Tensor
    steps: Tensor | None = None

    @staticmethod
    def draw(
        shape: Sequence[int],
        steps: int | None = None,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Noise:
        """Draw it.

        Args:
            shape: of the batch of samples, [B, *shape]
            steps: L, for samplers that add noise at every step
            generator: by default PyTorch's own
            device: by default the generator's
        """
        whole = isinstance(shape, Sequence) and all(isinstance(n, Integral) and n > 0 for n in shape)
        if not whole or len(shape) < 2:
            raise TypeError(f"shape: expected [B, *shape], at least two whole numbers from 1, got {shape!r}")
        if steps is not None and not (isinstance(steps, Integral) and steps > 0):
            raise TypeError(f"steps: expected a whole number from 1, or None, got {steps!r}")
        device = device if device is not None else generator.device if generator is not None else None
        like = {"generator": generator, "device": device, "dtype": dtype}
        initial = torch.randn(tuple(shape), **like)
        return Noise(initial, None if steps is None else torch.randn((steps, *shape), **like))

    @property
    def samples(self) -> int:
        return self.initial.shape[0]

    def check(self, length: int, needed: bool) -> None:
        """Raise where it does not fit ``length`` steps, or ``needed`` noise of the steps is missing."""
        initial, steps = self.initial, self.steps
        if not isinstance(initial, Tensor) or not initial.dtype.is_floating_point or initial.ndim < 2:
            came = f"{initial.dtype} {tuple(initial.shape)}" if isinstance(initial, Tensor) else type(initial).__name__
            raise ValueError(f"noise: initial must be a floating tensor [B, *shape], got {came}")
        if initial.numel() == 0:
            raise ValueError(f"noise: initial is empty: {tuple(initial.shape)}")
        if steps is None:
            if needed:
                raise ValueError(
                    f"noise: this sampler adds noise at every step: draw it before, Noise.draw({tuple(initial.shape)}, steps={length})"
                )
            return
        if steps.shape != (length, *initial.shape):
            raise ValueError(
                f"noise: steps must be [L, B, *shape] = {(length, *initial.shape)} here, got {tuple(steps.shape)}"
            )
        if steps.dtype != initial.dtype or steps.device != initial.device:
            raise ValueError(
                f"noise: initial is {initial.dtype} on {initial.device}, steps {steps.dtype} on {steps.device}"
            )
