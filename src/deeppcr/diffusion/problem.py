"""One sampling problem: steps, noise and network put together, on the device of the noise.

Shapes: L steps, B samples, D the flattened sample, K slots. A state is [B, D, K] with the sample in slot 0.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..runtime import full_precision, has_tangent, multiplies_in_tf32, version_of
from ..sequence.fingerprint import kind_of
from ..sequence.rows import rows_that_differ, sizes_of
from ..sequence.trace import Products
from .denoiser import Denoiser, Seen
from .noise import Noise
from .samplers import Coefficients, Steps

#: so many steps, from the first to the last, tell whether a denoiser treats its rows by themselves
_SPREAD = 16
#: at most so many of them in one call: memory may allow no more
_TOGETHER = 8
#: denoisers that do, and in which kinds of runs that was seen; and what they do there
_by_themselves: WeakKeyDictionary[Any, dict[Hashable, Seen]] = WeakKeyDictionary()
#: by how much the outputs of coarse ones differ where their inputs hardly do, in which kinds of runs
_roundings: WeakKeyDictionary[Any, dict[Hashable, Tensor]] = WeakKeyDictionary()
#: of one denoiser no more kinds than these: where a closure holds another number in every call, each call is a kind
_KINDS = 64
#: relative precision of what is multiplied in TF32
TF32 = 2.0**-10
_NOTHING = Seen(frozenset(), False)
_T = TypeVar("_T")


class Problem:
    """What is to be sampled.

    Attributes:
        noise: as it was given
        steps, length: all L steps
        shape, samples, width: of one sample; B; D
        initial: [B, D, K], still attached to the caller's graph
        shift: [L, B, D], the noise of the steps times its deviation; None where there is none
        coefficients: of the steps, as tensors
        ranks: over which the rows of a call are spread; None: they are not
    """

    def __init__(
        self,
        denoiser: Callable[..., Any],
        steps: Steps,
        noise: Noise | Tensor,
        classes: Any = None,
        guidance: float | None = None,
        unconditional: Any = None,
        ranks: Ranks | None = None,
    ):
        noise = Noise(noise) if isinstance(noise, Tensor) else noise
        if not isinstance(noise, Noise):
            raise TypeError(f"noise: expected Noise(...) or a tensor [B, *shape], got {type(noise).__name__}")
        noise.check(len(steps), needed=steps.adds_noise)
        initial, steps = noise.initial, steps.balanced()
        self.noise: Noise = noise
        self.steps: Steps = steps
        self.length: int = len(steps)
        self.ranks: Ranks | None = ranks
        self.samples: int = initial.shape[0]
        self.shape: torch.Size = initial.shape[1:]
        self.width: int = self.shape.numel()
        self.slots: int = steps.slots
        # Half precision is the network's affair: states add up many small steps.
        self.network_dtype: torch.dtype = initial.dtype
        self.dtype: torch.dtype = torch.float32 if initial.dtype in (torch.float16, torch.bfloat16) else initial.dtype
        self.device: torch.device = initial.device
        self.denoiser: Denoiser = Denoiser(denoiser, self.shape, self.samples, classes, guidance, unconditional)
        self.rows_seen: int = 0  # by the network
        self.rows_checked: bool = False
        flat = initial.flatten(1).unsqueeze(-1).to(self.dtype)
        blank = flat.new_zeros(self.samples, self.width, self.slots - 1)
        self.initial: Tensor = torch.cat([flat, blank], -1) if self.slots > 1 else flat
        self.shift: Tensor | None = None
        if steps.adds_noise:
            assert noise.steps is not None
            deviation = steps.deviation_on(self.device, self.dtype)
            self.shift = deviation[:, None, None] * noise.steps.flatten(2).to(self.dtype)

    @cached_property
    def coefficients(self) -> Coefficients:
        return self.steps.to(self.device, self.dtype)

    def check_finite(self) -> None:
        """Raise where the noise that is used holds values that are not finite. The host waits for a GPU to tell."""
        steps = self.noise.steps if self.steps.adds_noise else None
        for name, values in (("initial", self.noise.initial), ("steps", steps)):
            if values is not None and not torch.isfinite(values).all():
                raise ValueError(f"noise: {name} holds values that are not finite")

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
        if self.rows_checked:
            return self.network(samples, times, index)
        versions = samples._version, times._version
        outputs = self.network(samples, times, index)
        if (samples._version, times._version) != versions:
            raise ValueError(
                "denoiser: changes its input z or t in place, which must stay as they are: start with a copy, z = z.clone()"
            )
        if has_tangent(outputs):
            raise RuntimeError(
                "sample: has no forward-mode derivative; use reverse mode (backward), or solver=deeppcr.Loop()"
            )
        self.rows_checked = True
        with full_precision(self.device):
            self._check_rows((samples, times, index), outputs)
        self.check_times()
        return outputs

    def _check_rows(self, call: tuple[Tensor, Tensor, Tensor], outputs: Tensor) -> None:
        """Compare the last, the middle and the first row of a call with the same rows in another order, beside others."""
        samples, times, index = call
        picked = sorted({0, len(samples) // 2, len(samples) - 1}, reverse=True)
        rows, place = samples[picked], picked * 3
        try:
            apart = self.network(torch.cat([rows, -rows, 2 * rows]), times[place], index[place])[: len(picked)]
        except (RuntimeError, ValueError) as error:
            raise _takes_not(len(place), len(samples), error) from error
        found = outputs[picked]
        if samples.is_cuda and self._differ(found, apart):  # which may be of TF32
            found = self.network(*call)[picked]
        self._compare(found, apart, lambda: self.network(*call)[picked])

    @torch.no_grad()
    def check_times(self) -> None:
        """Raise where a row's result depends on the times of others, or on the others themselves, anywhere in the schedule.

        Steps from the first to the last are evaluated beside each other and each by itself, as in the loop: once for a
        denoiser and a kind of run.
        """
        if self.length == 1 or _seen(_by_themselves, *self._kind) is not None:
            return
        _, _, beside = self._spread
        first, seen = self._first, self.rows_seen
        with full_precision(self.device):
            together = torch.cat([first, *map(self._evaluate, beside[1:])])
            try:
                alone = torch.cat([self._evaluate([row]) for part in beside for row in part])
            except (RuntimeError, ValueError) as error:
                raise _takes_not(1, len(beside[0]), error) from error
            self._compare(together, alone, lambda: torch.cat([*map(self._evaluate, beside)]))
        self.rows_seen = seen
        _remember(_by_themselves, *self._kind, self.denoiser.seen or _NOTHING)

    @property
    def coarsest(self) -> torch.dtype:
        """The coarsest dtype that the network is seen to work in."""
        if self.denoiser.seen is None:
            with contextlib.suppress(Exception):  # what is wrong with a denoiser, its first call says
                self.look()
        return self.denoiser.coarsest(self.initial.detach().to(self.network_dtype))

    @property
    def eps(self) -> float:
        """Relative precision of the network, as it is set to multiply."""
        return max(torch.finfo(self.coarsest).eps, TF32 if self.in_tf32 else 0.0)

    @property
    def in_tf32(self) -> bool:
        """Whether the network is set to round the factors of its products to TF32."""
        if self.coarsest != torch.float32:
            return False
        return multiplies_in_tf32(self.device, (self.denoiser.seen or _NOTHING).convolves)

    @property
    def rounding(self) -> Tensor:
        """[L] float64: how far apart two outputs of the network are, at most, where it rounds otherwise; 0 where states round as much.

        As its dtype says of outputs that are about 1, or more: what many layers round adds up, and guidance multiplies it. So it is
        looked at, once for a denoiser and a kind of run.
        """
        eps = self.eps
        if eps <= torch.finfo(self.dtype).eps:
            return torch.zeros(self.length, dtype=torch.float64)
        owner, kind = self._kind
        # Other weights round otherwise: after a step of training, or where an average takes their place.
        about = kind, eps, tuple(map(version_of, self.denoiser.parameters))
        known = _seen(_roundings, owner, about)
        if known is None and self.length > 1:
            with contextlib.suppress(Exception):  # what is wrong with a denoiser, its first call says
                known = self._look_closely(eps)
                _remember(_roundings, owner, about, known)
        return torch.full((self.length,), eps, dtype=torch.float64) if known is None else known

    @torch.no_grad()
    def _look_closely(self, eps: float) -> Tensor:
        """``rounding``, from rows that are moved by less than their rounding, there and back: on a line the middle would be in the middle."""
        samples, picked, (rows, *_) = self._spread
        seen, times = self.rows_seen, self.coefficients.timesteps[[picked[row] for row in rows]]
        who = torch.arange(len(rows), device=self.device) % self.samples
        move = torch.randn(len(rows), self.width, generator=torch.Generator().manual_seed(0)).to(samples)
        move *= eps / 2 * samples[rows].abs()
        once, there, back = (self.network(samples[rows] + way * move, times, who).double() for way in (0, 1, -1))
        apart = (there + back - 2 * once) / math.sqrt(3)  # six roundings as squares add up; of two outputs, two
        self.rows_seen = seen
        # A few rows tell little each.
        sizes = largest_of_normal(self.width) * apart.square().mean(-1).sqrt().cpu().nan_to_num(0, 0, 0)
        sizes = torch.maximum(sizes, sizes.mean()).clamp_min(eps)
        steps = torch.arange(self.length, dtype=torch.float64)
        at = torch.tensor([picked[row] for row in rows], dtype=torch.float64)
        above = torch.searchsorted(at, steps).clamp(1, max(len(at) - 1, 1)).clamp(max=len(at) - 1)
        below = (above - 1).clamp(min=0)
        share = ((steps - at[below]) / (at[above] - at[below]).clamp_min(1)).clamp(0, 1)
        return torch.lerp(sizes[below], sizes[above], share)

    @torch.no_grad()
    def look(self) -> None:
        """See what the network multiplies in, and returns: once for a denoiser and a kind of run, in the first call of ``check_times``."""
        known = _NOTHING if self.length == 1 else _seen(_by_themselves, *self._kind)
        if known is None:
            _ = self._first
        else:
            self.denoiser.seen = known

    @cached_property
    def _kind(self) -> tuple[Any, Hashable]:
        """What a denoiser and a kind of run are known by."""
        # Precision may be switched between calls: by autocast around, in parameters, by what is closed over or a module holds.
        kind = self.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        about = self.steps.key, self.shape, self.network_dtype, self.device, self.denoiser.guidance is None
        owner, made_of = kind_of(self.denoiser.function)
        return owner, (hash((*about, cast, self.denoiser.parameter_dtypes)), made_of)

    @cached_property
    def _spread(self) -> tuple[Tensor, list[int], list[list[int]]]:
        """Inputs [N, D] of steps from the first to the last, which steps they are, and which of them share a call."""
        steps, count = self.steps, min(self.length, _SPREAD)
        picked = [round(k * (self.length - 1) / (count - 1)) for k in range(count)]
        assert steps.scale is not None
        sizes = (steps.scale * torch.hypot(steps.signal, steps.spread))[picked]  # for data of unit variance
        drawn = torch.randn(count, self.width, generator=torch.Generator().manual_seed(0), dtype=self.dtype)
        calls = -(-count // _TOGETHER)
        beside = [list(range(count))[start::calls] for start in range(calls)]
        return (sizes.to(drawn).unsqueeze(-1) * drawn).to(self.device), picked, beside

    def _evaluate(self, rows: list[int]) -> Tensor:
        samples, picked, _ = self._spread
        times = self.coefficients.timesteps[[picked[row] for row in rows]]
        return self.network(samples[rows], times, torch.tensor(rows, device=self.device) % self.samples)

    @cached_property
    def _first(self) -> Tensor:
        """The rows that share the first call; it is watched what the network multiplies in."""
        seen = self.rows_seen
        with full_precision(self.device), Products() as products:
            found = self._evaluate(self._spread[2][0])
        returned = self.denoiser.output_dtype or self.network_dtype
        self.denoiser.seen = Seen(frozenset({*products.dtypes, returned}), products.convolves)
        self.rows_seen = seen
        return found

    def _compare(self, beside: Tensor, apart: Tensor, again: Callable[[], Tensor]) -> None:
        """Raise where rows [N, D] differ with others beside them: random where a second call like the first does, too."""
        if not self._differ(beside, apart):
            return
        if self._differ(again(), beside):
            raise ValueError(
                "denoiser: gives another result each time it is called: is it in train mode, with dropout?"
            )
        raise ValueError(
            "denoiser: gives a row another result when other rows stand beside it: one call holds rows of different times and "
            "samples, so t must be used row by row (not as t[0]), and rows must not influence each other"
        )

    def _differ(self, found: Tensor, expected: Tensor) -> bool:
        # Weaker couplings than this are lost in the tolerance; rounding, which depends on the number of rows, is far below.
        return bool(rows_that_differ(found, expected, 3 * self.eps**0.5 * sizes_of(expected)).any())

    def unflatten(self, states: Tensor) -> Tensor:
        """Samples [..., D] as the caller knows them, [..., *shape]."""
        return states.reshape(*states.shape[:-1], *self.shape).to(self.network_dtype)


def largest_of_normal(count: int) -> float:
    """How large the largest of so many normal numbers is, as rounding leaves them, about."""
    return math.sqrt(2 * math.log(max(count, 2)))


def _takes_not(rows: int, taken: int, error: Exception) -> ValueError:
    return ValueError(f"denoiser: any number of rows may come, but it took {taken} and not {rows} of them: {error}")


def _seen(kept: WeakKeyDictionary[Any, dict[Hashable, _T]], owner: Any, kind: Hashable) -> _T | None:
    try:
        return kept.get(owner, {}).get(kind)
    except TypeError:  # not everything can be watched
        return None


def _remember(kept: WeakKeyDictionary[Any, dict[Hashable, _T]], owner: Any, kind: Hashable, seen: _T) -> None:
    with contextlib.suppress(TypeError):
        kinds = kept.setdefault(owner, {})
        if len(kinds) == _KINDS:
            kinds.clear()
        kinds[kind] = seen
