"""One sampling problem: steps, noise and network put together, on the device of the noise.

Shapes: L steps, B samples, D the flattened sample, K slots. A state is [B, D, K] with the sample in slot 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..steps import has_tangent
from .denoiser import Denoiser
from .graphs import full_precision
from .noise import Noise
from .step import Coefficients, Steps


class Problem:
    """What is to be sampled.

    Attributes:
        steps, length: all L steps
        shape, samples, width: of one sample; B; D
        initial: [B, D, K], still attached to the caller's graph
        shift: [L, B, D], the noise of the steps times its deviation; None where there is none
        coefficients: of the steps, as tensors
    """

    def __init__(
        self,
        denoiser: Callable,
        steps: Steps,
        noise: Noise | Tensor,
        classes: Any = None,
        guidance: float | None = None,
        unconditional: Any = None,
    ):
        noise = Noise(noise) if isinstance(noise, Tensor) else noise
        if not isinstance(noise, Noise):
            raise TypeError(f"noise: expected Noise(...) or a tensor [B, *shape], got {type(noise).__name__}")
        noise.check(len(steps), needed=steps.adds_noise)
        initial = noise.initial
        self.steps, self.length = steps, len(steps)
        self.samples, self.shape = initial.shape[0], initial.shape[1:]
        self.width, self.slots = self.shape.numel(), steps.slots
        # Half precision is the network's affair: states add up many small steps.
        self.network_dtype = initial.dtype
        self.dtype = torch.float32 if initial.dtype in (torch.float16, torch.bfloat16) else initial.dtype
        self.device = initial.device
        self.denoiser = Denoiser(denoiser, self.shape, self.samples, classes, guidance, unconditional)
        self.rows_seen = 0  # by the network
        self.rows_checked = False
        flat = initial.flatten(1).unsqueeze(-1).to(self.dtype)
        blank = flat.new_zeros(self.samples, self.width, self.slots - 1)
        self.initial = torch.cat([flat, blank], -1) if self.slots > 1 else flat
        self.shift = None
        if steps.adds_noise:
            assert noise.steps is not None
            assert steps.deviation is not None
            deviation = steps.deviation.to(self.device, self.dtype)
            self.shift = deviation[:, None, None] * noise.steps.flatten(2).to(self.dtype)

    @cached_property
    def coefficients(self) -> Coefficients:
        return self.steps.to(self.device, self.dtype)

    def with_noise(self, initial: Tensor, shift: Tensor | None) -> Problem:
        """The same problem with its noise in other tensors: [B, D, K] and [L, B, D]."""
        other = copy.copy(self)
        other.initial, other.shift = initial, shift
        return other

    @property
    def needs_gradients(self) -> bool:
        """Whether anything that the first step depends on requires a gradient."""
        return self.step(0, self.initial).requires_grad

    def step(self, index: int, state: Tensor, who: Tensor | None = None) -> Tensor:
        """One step as the loop takes it: [B, D, K] to [B, D, K], of all samples or of those in ``who``."""
        who = torch.arange(self.samples, device=self.device) if who is None else who
        shift = self.shift[index, who] if self.shift is not None else None
        return self.row_step(state, torch.full_like(who, index), who, shift)

    def row_step(self, states: Tensor, index: Tensor, who: Tensor, shift: Tensor | None) -> Tensor:
        """R rows, each a step of a sample: [R, D, K] to [R, D, K].

        Args:
            states: [R, D, K]
            index: [R], which step
            who: [R], which sample
            shift: [R, D], the noise times its deviation; None where there is none
        """
        coefficients = self.coefficients
        inputs = coefficients.scale[index].unsqueeze(-1) * states[..., 0]
        outputs = self.network(inputs, coefficients.timesteps[index], who)
        shift = shift.unsqueeze(1) if shift is not None else None
        return coefficients.advance(index, states.unsqueeze(1), outputs.unsqueeze(1), shift).squeeze(1)

    def network(self, samples: Tensor, times: Tensor, index: Tensor) -> Tensor:
        """The denoiser on N rows: [N, D] to [N, D]; see ``Denoiser``."""
        self.rows_seen += samples.shape[0] * self.denoiser.rows_per_call
        return self.denoiser(samples.to(self.network_dtype), times, index).to(self.dtype)

    def checked_network(self, samples: Tensor, times: Tensor, index: Tensor) -> Tensor:
        """``network``; its first call raises where the denoiser is random, or its rows influence each other."""
        outputs = self.network(samples, times, index)
        if not self.rows_checked:
            if has_tangent(outputs):
                raise RuntimeError(
                    "sample: has no forward-mode derivative; use reverse mode (backward), or solver=deeppcr.Loop()"
                )
            self.rows_checked, seen = True, self.rows_seen
            with full_precision(self.device):
                self._check_rows((samples, times, index), outputs)
            self.rows_seen = seen
        return outputs

    def _check_rows(self, call: tuple[Tensor, Tensor, Tensor], outputs: Tensor) -> None:
        """Compare the last, the middle and the first row of a call with the same rows in another order, beside others."""
        samples, times, index = call
        picked = sorted({0, len(samples) // 2, len(samples) - 1}, reverse=True)
        rows, place = samples[picked], picked * 3
        try:
            apart = self.network(torch.cat([rows, -rows, 2 * rows]), times[place], index[place])[: len(picked)]
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"denoiser: any number of rows may come, but it took {len(samples)} and not {len(place)} of them: {error}"
            ) from error
        # Weaker couplings than this are lost in the tolerance; rounding, which depends on the number of rows, is far below.
        sizes = torch.nan_to_num(apart.abs(), 0, 0, 0).amax(-1, keepdim=True)
        allowed = 3 * self.denoiser.eps(samples) ** 0.5 * sizes

        def differs(one: Tensor, other: Tensor) -> bool:
            return bool((torch.isfinite(one) & ~((one - other).abs() <= allowed)).any())

        found = outputs[picked]
        if samples.is_cuda and differs(apart, found):  # which may be of TF32
            found = self.network(*call)[picked]
        if not differs(apart, found):
            return
        if differs(found, self.network(*call)[picked]):
            raise ValueError(
                "denoiser: gives another result each time it is called: is it in train mode, with dropout?"
            )
        raise ValueError(
            "denoiser: gives a row another result when other rows stand beside it: rows must not influence each other"
        )

    def unflatten(self, states: Tensor) -> Tensor:
        """Samples [..., D] as the caller knows them, [..., *shape]."""
        return states.reshape(*states.shape[:-1], *self.shape).to(self.network_dtype)
