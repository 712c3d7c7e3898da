"""The steps of a sampler: what becomes of a sample and of what the network says about it.

Shapes: L steps, B samples, D the flattened sample, K slots. Without clipping every sampler is affine in the state and
in the network's output. The state has K slots, of which slot 0 is the sample; multistep samplers keep earlier outputs
or samples in the others. A step is

    state' = keep_l state + gain_l out_l   (+ deviation_l noise_l in slot 0),   out_l = network(scale_l sample, t_l),

with keep_l [K, K] and gain_l [K] the same for every coordinate. Clipping adds ``weight_l clamp(x0)`` to slot 0, where
x0 is affine in sample and output: exact, though not affine any more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..runtime import full_precision
from .schedule import Schedule

Prediction = Literal["epsilon", "v", "x0", "flow"]
PREDICTIONS = ("epsilon", "v", "x0", "flow")


@dataclass(frozen=True, eq=False)
class Clip:
    """What a step adds for the clipped estimate of the clean sample: ``weight_l clamp(x0, -limit, limit)`` in slot 0.

    Args:
        limit: of the clean sample's values
        sample, output: [L], with ``x0 = sample_l z_l + output_l out_l``
        weight: [L]

    >>> import torch
    >>> one = torch.ones(3, dtype=torch.float64)
    >>> Clip(1.0, one, -one, 0.5 * one).limit
    1.0
    """

    limit: float
    sample: Tensor
    output: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Steps:
    """All L steps of a sampler in numbers; see the module. Coefficients are float64 and lie on the CPU.

    Args:
        timesteps: [L], what the network is told
        keep: [L], or [L, K, K] for K slots
        gain: [L], or [L, K]
        deviation: [L], of the noise; None where there is none
        signal, spread: [L]: before step l the sample is ``signal_l x0 + spread_l noise``
        prediction: what the network's output estimates: the noise ("epsilon"), the clean sample ("x0"), or with s, n
            signal and spread of the network's input: ``s noise - n x0`` ("v"), ``noise - x0`` ("flow")
        scale: [L], of the sample on its way into the network; None: 1
        clip: None where nothing is clipped; only for K = 1

    >>> from deeppcr.diffusion import DDIM, Schedule
    >>> steps = DDIM().steps(Schedule.linear(1000).take(20))
    >>> len(steps), steps.slots, steps.adds_noise
    (20, 1, False)
    """

    timesteps: Tensor
    keep: Tensor
    gain: Tensor
    signal: Tensor
    spread: Tensor
    deviation: Tensor | None = None
    prediction: Prediction = "epsilon"
    scale: Tensor | None = None
    clip: Clip | None = None

    def __post_init__(self) -> None:
        length = len(self.timesteps)
        keep, gain = self.keep, self.gain
        if keep.ndim == 1:
            keep, gain = keep[:, None, None], gain[:, None]
        slots = keep.shape[-1]
        if keep.shape != (length, slots, slots) or gain.shape != (length, slots):
            raise ValueError(
                f"keep, gain: expected [L] and [L], or [L, K, K] and [L, K] with L = {length}, "
                f"got {tuple(self.keep.shape)} and {tuple(self.gain.shape)}"
            )
        if self.prediction not in PREDICTIONS:
            raise ValueError(f"prediction: expected one of {', '.join(PREDICTIONS)}, got {self.prediction!r}")
        if self.clip is not None and slots > 1:
            raise ValueError("clip: a sampler with several slots cannot clip: what it keeps is not what it has clipped")
        given = {"signal": self.signal, "spread": self.spread, "deviation": self.deviation, "scale": self.scale}
        for name, value in given.items():
            if value is None:
                value = torch.zeros(length) if name == "deviation" else torch.ones(length)
            if value.shape != (length,):
                raise ValueError(f"{name}: expected [L] with L = {length}, got {tuple(value.shape)}")
            object.__setattr__(self, name, value.detach().to("cpu", torch.float64))
        object.__setattr__(self, "keep", keep.detach().to("cpu", torch.float64))
        object.__setattr__(self, "gain", gain.detach().to("cpu", torch.float64))
        object.__setattr__(self, "timesteps", self.timesteps.detach().cpu())

    def __len__(self) -> int:
        return len(self.timesteps)

    @property
    def slots(self) -> int:
        """K"""
        return self.keep.shape[-1]

    @cached_property
    def adds_noise(self) -> bool:
        return bool((self.deviation != 0).any())

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal numbers."""
        tensors = [self.timesteps, self.keep, self.gain, self.signal, self.spread, self.deviation, self.scale]
        clip = self.clip
        if clip is not None:
            tensors += [clip.sample, clip.output, clip.weight]
        numbers = b"".join(repr(each.flatten().tolist()).encode() for each in tensors if each is not None)
        return (self.prediction, len(self), self.slots, clip.limit if clip else None, numbers)

    def deviation_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[L], put there once: a copy to a GPU takes as long as ten launches."""
        known = self._deviations.get((device, dtype))
        if known is None:
            assert self.deviation is not None
            with torch.inference_mode(False):
                known = self._deviations[device, dtype] = self.deviation.to(device, dtype)
        return known

    @cached_property
    def _deviations(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_deviations", "_balanced")}

    def balanced(self) -> Steps:
        """The same samples, with what other slots hold in units of them: a difference of 1 there moves a later sample by about 1.

        DPM-Solver keeps estimates of the clean sample that are off by hundreds in its first steps, where they hardly count: next to
        those nothing would be seen of the sample itself. Units are powers of two, so that nothing rounds otherwise.
        """
        return self if self.slots == 1 else self._balanced

    @cached_property
    def _balanced(self) -> Steps:
        # Of the states before all steps, and after the last.
        counts = torch.ones(len(self) + 1, self.slots, dtype=torch.float64)
        counts[-1, 1:] = 0
        for step in reversed(range(len(self))):
            counts[step, 1:] = (counts[step + 1].unsqueeze(-1) * self.keep[step].abs()).amax(0)[1:]
        units = torch.where(counts > 0, counts.log2().round().exp2(), 0)
        back = torch.where(units > 0, 1 / units, 0)
        keep = units[1:].unsqueeze(-1) * self.keep * back[:-1].unsqueeze(-2)
        return replace(self, keep=keep, gain=units[1:] * self.gain)

    def to(self, device: torch.device, dtype: torch.dtype) -> Coefficients:
        return Coefficients(self, device, dtype)


class Coefficients:
    """The numbers of all steps as tensors beside the states, ready to be applied.

    States are [N, B, D, K], outputs and noise [N, B, D]; ``index`` picks the N steps.
    """

    from_sample: Tensor
    from_output: Tensor
    weight: Tensor

    def __init__(self, steps: Steps, device: torch.device, dtype: torch.dtype):
        def put(values: Tensor, *shape: int) -> Tensor:
            return values.to(device, dtype).reshape(len(steps), *shape)

        assert steps.scale is not None
        self.slots: int = steps.slots
        self.timesteps: Tensor = steps.timesteps.to(device)
        self.keep: Tensor = put(steps.keep, 1, 1, self.slots, self.slots)
        self.gain: Tensor = put(steps.gain, 1, 1, self.slots)
        self.scale: Tensor = put(steps.scale)
        self.scaled: bool = bool((steps.scale != 1).any())
        self.limit: float | None = None
        if steps.clip is not None:
            self.limit = float(steps.clip.limit)
            numbers = steps.clip.sample, steps.clip.output, steps.clip.weight
            self.from_sample, self.from_output, self.weight = (put(each, 1, 1) for each in numbers)

    def taken(self, index: Tensor) -> Coefficients:
        """Those of the steps in ``index`` alone, by themselves: what follows looks nothing up."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(other, name, value[index])
        return other

    @property
    def slope(self) -> Tensor:
        """[L, 1, 1, K]: of the states in the outputs, where nothing is clipped."""
        if self.limit is None:
            return self.gain
        return self.gain + (self.weight * self.from_output).unsqueeze(-1)

    def advance(self, index: slice | Tensor, states: Tensor, outputs: Tensor, shift: Tensor | None) -> Tensor:
        """The states after the steps: [N, B, D, K].

        Args:
            index: which N steps
            states: [N, B, D, K]
            outputs: [N, B, D], of the network
            shift: [N, B, D], the noise times its deviation; None where there is none
        """
        if self.slots == 1:
            keep = self.keep[index].squeeze(-1)
            kept = keep * states if shift is None else torch.addcmul(shift.unsqueeze(-1), keep, states)
            after, shift = torch.addcmul(kept, self.gain[index], outputs.unsqueeze(-1)), None
        else:
            kept = multiply(states.flatten(1, 2), self.keep[index][:, 0, 0].mT).view_as(states)
            after = torch.addcmul(kept, self.gain[index], outputs.unsqueeze(-1))
        extra = shift
        if self.limit is not None:
            clean = self.from_sample[index] * states[..., 0] + self.from_output[index] * outputs
            clipped = self.weight[index] * clean.clamp(-self.limit, self.limit)
            extra = clipped if extra is None else extra + clipped
        if extra is None:
            return after
        if self.slots == 1:
            return after + extra.unsqueeze(-1)
        return torch.cat([after[..., :1] + extra.unsqueeze(-1), after[..., 1:]], -1)


@dataclass(frozen=True, kw_only=True)
class DDPM:
    """Ancestral sampling: the mean of the step before, plus noise; the last step adds none.

    Args:
        variance: of that noise: "large" is beta (the paper's), "small" the variance of the step before given a clean
            sample
        clip: limit of the values of the estimated clean sample; None: not clipped

    >>> from deeppcr.diffusion import Schedule
    >>> DDPM().steps(Schedule.linear(4)).deviation
    tensor([0.9995, 0.9995, 0.9995, 0.0000], dtype=torch.float64)
    """

    variance: Literal["large", "small"] = "large"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.variance not in ("large", "small"):
            raise ValueError(f'variance: expected "large" or "small", got {self.variance!r}')
        _check_clip(self.clip)

    def steps(self, schedule: Schedule, prediction: Prediction = "epsilon") -> Steps:
        before, after = schedule.before, schedule.after
        alpha = before / after
        beta = 1 - alpha
        variance = beta if self.variance == "large" else beta * (1 - after) / (1 - before)
        deviation = variance.sqrt()
        deviation[-1] = 0
        clean = after.sqrt() * beta / (1 - before)
        sample = alpha.sqrt() * (1 - after) / (1 - before)
        return _steps(schedule, prediction, clean=clean, noise=torch.zeros_like(clean), sample=sample,
                      deviation=deviation, clip=self.clip)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DDIM:
    """Implicit sampling: from the estimates of clean sample and noise straight to the next time.

    Args:
        eta: 0 is deterministic, 1 adds as much noise as DDPM with its small variance
        clip: limit of the values of the estimated clean sample; None: not clipped

    >>> from deeppcr.diffusion import Schedule
    >>> DDIM().steps(Schedule.linear(1000).take(20)).adds_noise
    False
    """

    eta: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.eta, (int, float)) or not 0 <= self.eta <= 1:
            raise ValueError(f"eta: expected a number from 0 to 1, got {self.eta!r}")
        _check_clip(self.clip)

    def steps(self, schedule: Schedule, prediction: Prediction = "epsilon") -> Steps:
        before, after = schedule.before, schedule.after
        deviation = self.eta * ((1 - after) / (1 - before) * (1 - before / after)).sqrt()
        noise = (1 - after - deviation**2).clamp(min=0).sqrt()
        return _steps(schedule, prediction, clean=after.sqrt(), noise=noise, sample=torch.zeros_like(noise),
                      deviation=deviation, clip=self.clip)  # fmt: skip


Sampler = DDPM | DDIM


def _steps(
    schedule: Schedule,
    prediction: Prediction,
    *,
    clean: Tensor,
    noise: Tensor,
    sample: Tensor,
    deviation: Tensor,
    clip: float | None,
) -> Steps:
    """``z' = clean x0 + noise eps + sample z + deviation n``, with x0 and eps written in z and the network's output."""
    signal, spread = schedule.before.sqrt(), (1 - schedule.before).sqrt()
    one, none = torch.ones_like(signal), torch.zeros_like(signal)
    if prediction == "epsilon":
        x0, eps = (1 / signal, -spread / signal), (none, one)
    elif prediction == "v":
        x0, eps = (signal, -spread), (spread, signal)
    elif prediction == "x0":
        x0, eps = (none, one), (1 / spread, -signal / spread)
    else:
        raise ValueError(f'prediction: expected "epsilon", "v" or "x0", got {prediction!r}')
    keep, gain = sample + noise * eps[0], noise * eps[1]
    clipped = None
    if clip is None:
        keep, gain = keep + clean * x0[0], gain + clean * x0[1]
    else:
        clipped = Clip(float(clip), x0[0], x0[1], clean)
    return Steps(schedule.timesteps, keep, gain, signal, spread, deviation, prediction, clip=clipped)


def _check_clip(clip: float | None) -> None:
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip: expected a positive number or None, got {clip!r}")


def multiply(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other`` in their own precision: TF32 and autocast are the network's affair."""
    with exactly(one.device):
        return one @ other


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Products inside are what their dtypes say, whatever is set for the network."""
    cast = torch.is_autocast_enabled(device.type)
    with full_precision(device), torch.autocast(device.type, enabled=False) if cast else nullcontext():
        yield
