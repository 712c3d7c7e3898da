"""The steps of a scheduler of ``diffusers``, read by running its own ``step`` on a few numbers.

Without clipping, a step is linear in the sample, in the model's output, and in what the scheduler has stored of the steps
before (outputs converted to x0, derivatives, earlier samples). So feeding it ones and zeros tells all of it, whatever
formula it is written with. The slots of ``Steps`` are the sample and the tensors found among the scheduler's attributes
after a step. Nothing here imports ``diffusers``: any object with ``timesteps`` and such a ``step`` will do.

Legend: L steps, K slots.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..samplers import Clip, Prediction, Steps

#: More tensors than this are not what a scheduler stores between steps.
MAX_SLOTS = 12
#: How far, relatively, `step` may be from the linear map read from it. Several schedulers compute in float32.
LINEAR_TO = 1e-5
#: Magnitudes of the numbers that linearity is tested with: clipping shows at the last one at the latest.
MAGNITUDES = (0.3, 3.0, 300.0)

_PREDICTIONS: dict[str, Prediction] = {
    "epsilon": "epsilon",
    "v_prediction": "v",
    "sample": "x0",
    "original_sample": "x0",
}
Path = tuple[str, int | None]  # an attribute, and where it is a list, the place in it


class UnsupportedScheduler(ValueError):
    """A scheduler, or a pipeline, that cannot be run in parallel; the message says why.

    >>> from deeppcr.diffusion import UnsupportedScheduler
    >>> issubclass(UnsupportedScheduler, ValueError)
    True
    """


def read_scheduler(scheduler: Any, timesteps: Sequence[Any] | Tensor | None = None, **step_arguments: Any) -> Steps:
    """Reads the coefficients of every step; the scheduler itself is left as it is.

    Where a scheduler adds noise, the deviation is 1: the noise of ``draw_noise`` has its deviation in it.

    Args:
        scheduler: A scheduler after ``set_timesteps`` and before its first ``step``.
        timesteps: The timesteps of the loop; by default ``scheduler.timesteps``.
        step_arguments: What the loop passes on to ``step``, such as ``eta``. A ``generator`` does not change coefficients.

    Raises:
        UnsupportedScheduler: The scheduler thresholds, clips while it stores outputs, predicts variances, or is not
            linear for another reason.

    >>> import torch
    >>> from deeppcr.diffusion import read_scheduler
    >>> class Euler:  # any scheduler of diffusers, after set_timesteps
    ...     timesteps = torch.arange(9.0, -1.0, -1.0)
    ...
    ...     def step(self, output, t, sample, return_dict=True):
    ...         return (sample - 0.1 * output,)
    >>> steps = read_scheduler(Euler())
    >>> len(steps), round(float(steps.gain[0, 0]), 6)
    (10, -0.1)
    """
    timesteps = getattr(scheduler, "timesteps", None) if timesteps is None else timesteps
    name = type(scheduler).__name__
    if not hasattr(scheduler, "timesteps") or not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler: expected a scheduler of diffusers, with timesteps and a step, got {name}")
    if timesteps is None or len(timesteps) == 0:
        raise ValueError(f"scheduler: {name} has no timesteps: call its set_timesteps(number of steps) first")
    times = tuple(t.cpu() if isinstance(t, Tensor) else t for t in timesteps)
    arguments = {k: v for k, v in step_arguments.items() if k not in ("generator", "return_dict") and v is not None}
    _refuse_by_settings(name, scheduler, arguments)
    clipped = bool(_setting(scheduler, "clip_sample"))
    plain = fork(scheduler)
    if clipped:
        plain.register_to_config(clip_sample=False)
    # What does not take a generator may draw from the global one: the caller's stays as it is.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        keep, gain, scale, noisy, stored = _read_linear(name, plain, times, arguments)
        clip = None
        if clipped:
            if stored:
                raise UnsupportedScheduler(
                    f"{name} clips the predicted x0 (clip_sample=True) and stores {', '.join(stored)} for later steps, which "
                    "is not supported: clipping is exact for one-step schedulers only. Set clip_sample=False"
                )
            clipping, free = (_Runner(name, each, arguments) for each in (scheduler, plain))
            clip = _read_clip(clipping, free, times, keep[:, 0, 0], gain[:, 0])
            keep = keep - (clip.weight * clip.sample)[:, None, None]
            gain = gain - (clip.weight * clip.output)[:, None]
    told = torch.stack([torch.as_tensor(t).cpu() for t in times])
    signal, spread, prediction = _what_is_predicted(scheduler, told)
    deviation = torch.ones(len(times)) if noisy else None
    return Steps(told, keep, gain, signal / scale, spread / scale, deviation, prediction, scale, clip)


def draw_noise(scheduler: Any, sample: Tensor, timesteps: Sequence[Any] | Tensor, **step_arguments: Any) -> Tensor:
    """``[L, *sample.shape]``: what each step adds beside its linear part, drawn as the loop would draw it.

    A step from nothing, by an output of nothing, is the noise alone.
    """
    twin, noise = fork(scheduler), []
    for t in timesteps:
        zero = torch.zeros_like(sample)
        if hasattr(twin, "scale_model_input"):
            twin.scale_model_input(zero, t)
        noise.append(twin.step(zero, t, zero.clone(), **step_arguments, return_dict=False)[0])
    return torch.stack(noise)


def _what_is_predicted(scheduler: Any, timesteps: Tensor) -> tuple[Tensor, Tensor, Prediction]:
    """Signal and spread of the model's input, and what its output estimates: they shape the prior, not the steps."""
    named = _setting(scheduler, "prediction_type") or "epsilon"
    bars = getattr(scheduler, "alphas_cumprod", None)
    if named == "flow_prediction" or (bars is None and _setting(scheduler, "shift") is not None):
        spread = (timesteps.double() / float(_setting(scheduler, "num_train_timesteps") or 1000)).clamp(0, 1)
        return 1 - spread, spread, "flow"
    if bars is None or named not in _PREDICTIONS:
        # Nothing is known: a prior without noise expects outputs that do not depend on the sample.
        return torch.ones(len(timesteps)), torch.zeros(len(timesteps)), "epsilon"
    bars = bars.double().cpu()
    place = timesteps.double().clamp(0, len(bars) - 1)
    low = place.floor().long()
    bar = torch.lerp(bars[low], bars[(low + 1).clamp(max=len(bars) - 1)], place - low)
    return bar.sqrt(), (1 - bar).sqrt(), _PREDICTIONS[named]


def _setting(scheduler: Any, name: str) -> Any:
    config = getattr(scheduler, "config", None)
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _refuse_by_settings(name: str, scheduler: Any, arguments: dict[str, Any]) -> None:
    if _setting(scheduler, "thresholding"):
        raise UnsupportedScheduler(
            f"{name} thresholds the predicted x0 (thresholding=True): the threshold is a quantile of the whole sample, so a "
            "step is not linear. Set thresholding=False"
        )
    if _setting(scheduler, "variance_type") in ("learned", "learned_range"):
        raise UnsupportedScheduler(
            f"{name} takes its variance from the model (variance_type={_setting(scheduler, 'variance_type')!r}), which is not "
            "supported: the noise must not depend on the model's output"
        )
    for attribute, value in vars(scheduler).items():
        if callable(getattr(value, "step", None)):
            raise UnsupportedScheduler(
                f"{name} runs another scheduler inside (`{attribute}`), whose stored outputs cannot be seen. Set it to None"
            )
    for argument, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim:
            raise UnsupportedScheduler(f"{name}.step is given the tensor `{argument}`: only numbers are supported")


def fork(scheduler: Any) -> Any:
    """A copy that steps by itself: lists are copied, tensors (which no step changes in place) are shared."""
    twin = copy.copy(scheduler)
    for attribute, value in vars(twin).items():
        if isinstance(value, list):
            setattr(twin, attribute, list(value))
    return twin


def _on_cpu(scheduler: Any) -> Any:
    """A fork whose tensors are on the CPU, where a few numbers are read fastest."""
    twin = fork(scheduler)
    for attribute, value in vars(twin).items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            setattr(twin, attribute, value.cpu())
    return twin


def stored_tensors(scheduler: Any, shape: torch.Size) -> dict[Path, Tensor]:
    """The tensors of this shape among the attributes of a scheduler, in lists as well."""
    found: dict[Path, Tensor] = {}
    for attribute, value in vars(scheduler).items():
        if isinstance(value, Tensor) and value.shape == shape:
            found[attribute, None] = value
        elif isinstance(value, list):
            found |= {(attribute, i): v for i, v in enumerate(value) if isinstance(v, Tensor) and v.shape == shape}
    return found


def _store(scheduler: Any, path: Path, value: Tensor) -> None:
    attribute, place = path
    if place is None:
        setattr(scheduler, attribute, value)
    else:
        getattr(scheduler, attribute)[place] = value


class _Runner:
    """A scheduler that steps on chosen numbers, its stored tensors overwritten before each step."""

    def __init__(self, name: str, scheduler: Any, arguments: dict[str, Any]) -> None:
        self.name, self.scheduler, self.arguments = name, _on_cpu(scheduler), dict(arguments)
        self.takes_generator = "generator" in inspect.signature(self.scheduler.step).parameters
        if self.takes_generator:
            self.arguments["generator"] = torch.Generator().manual_seed(0)

    def scale(self, sample: Tensor, t: Any) -> Tensor:
        method = getattr(self.scheduler, "scale_model_input", None)
        return sample if method is None else method(sample, t)

    def __call__(self, output: Tensor, t: Any, sample: Tensor) -> tuple[Tensor, ...]:
        try:
            return self.scheduler.step(output, t, sample, **self.arguments, return_dict=False)
        except Exception as error:
            # Before set_timesteps there are timesteps already, those of the training, and no number of them.
            unset = getattr(self.scheduler, "num_inference_steps", None) is None
            if unset and hasattr(self.scheduler, "set_timesteps"):
                raise ValueError(
                    f"scheduler: the timesteps of {self.name} are not set, call its set_timesteps(number of steps) first: {error}"
                ) from error
            raise UnsupportedScheduler(f"{self.name}.step failed on plain numbers: {error}") from error


def _read_linear(
    name: str, scheduler: Any, timesteps: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, bool, tuple[str, ...]]:
    """``keep``, ``gain``, ``scale``, whether there is noise, and the names of the slots that a later step needs."""
    L, tests = len(timesteps), len(MAGNITUDES)
    rows = torch.Size((MAX_SLOTS + 1 + tests, 1, 1, 1))  # a one for each slot and the output, and random numbers
    random = torch.randn(L, MAX_SLOTS + 1, tests, generator=torch.Generator().manual_seed(0)).double()
    fed = torch.cat([torch.eye(MAX_SLOTS + 1).double().expand(L, -1, -1), random * torch.tensor(MAGNITUDES)], -1)
    fed = fed.contiguous()  # [L, slots and then the output, rows]
    result = torch.zeros(L, MAX_SLOTS, rows[0]).double()
    still, scaled = torch.zeros(L, rows[0]).double(), torch.zeros(L, rows[0]).double()
    # Fed with ones and, its twin, with zeros: the noise is the same in both and drops out of the difference.
    runner, twin = _Runner(name, scheduler, arguments), _Runner(name, scheduler, arguments)
    places: dict[Path, int] = {}
    held: dict[Path, Tensor] = {}
    for l, t in enumerate(timesteps):
        for path, slot in places.items():
            if path in held:
                _store(runner.scheduler, path, fed[l, slot].clone().view(rows))
                _store(twin.scheduler, path, torch.zeros(rows).double())
            else:
                fed[l, slot] = 0  # the scheduler holds nothing there now
        sample, output = fed[l, 0].clone().view(rows), fed[l, -1].clone().view(rows)
        scaled[l] = runner.scale(sample, t).flatten()
        twin.scale(torch.zeros(rows).double(), t)
        after = runner(output, t, sample)[0]
        still[l] = twin(torch.zeros(rows).double(), t, torch.zeros(rows).double())[0].flatten()
        result[l, 0] = after.flatten() - still[l]
        held, held_still = stored_tensors(runner.scheduler, rows), stored_tensors(twin.scheduler, rows)
        for path, value in held.items():
            place = places.setdefault(path, len(places) + 1)
            if place >= MAX_SLOTS:
                raise UnsupportedScheduler(f"{name} stores more than {MAX_SLOTS - 1} tensors between steps")
            result[l, place] = value.flatten() - held_still[path].flatten()
        if any(value.count_nonzero() for value in held_still.values()):
            raise UnsupportedScheduler(f"{name} stores noise for later steps, which is not supported")
    finite = result.isfinite().all(-1).all(-1) & still.isfinite().all(-1)
    if not bool(finite.all()):
        at = _at_step(~finite, timesteps)
        raise UnsupportedScheduler(f"{name}: its {at} gives values that are not finite")
    noisy = bool(still.count_nonzero())
    if noisy and not runner.takes_generator:
        raise UnsupportedScheduler(
            f"{name}.step makes something of nothing, but takes no generator: its noise cannot be drawn beforehand, or it "
            "remembers earlier steps where that cannot be seen"
        )
    keep, gain, scale = result[..., :MAX_SLOTS], result[..., MAX_SLOTS], scaled[:, 0]
    linear = keep @ fed[:, :-1] + gain[:, :, None] * fed[:, -1:]
    size = keep.abs() @ fed[:, :-1].abs() + gain[:, :, None].abs() * fed[:, -1:].abs()
    wrong = (result - linear).abs() > LINEAR_TO * (size + still.abs().amax(-1)[:, None, None])
    wrong_scale = (scaled - scale[:, None] * fed[:, 0]).abs() > LINEAR_TO * scaled.abs()
    _refuse_unless_linear(name, wrong.any(-1).any(-1) | wrong_scale.any(-1), timesteps)
    needed = _needed(keep)
    names = {slot: path[0] if path[1] is None else f"{path[0]}[{path[1]}]" for path, slot in places.items()}
    return keep[:, needed][:, :, needed], gain[:, needed], scale, noisy, tuple(names[slot] for slot in needed[1:])


def _at_step(wrong: Tensor, timesteps: tuple[Any, ...]) -> str:
    l = int(wrong.nonzero()[0])
    return f"step {l} (timestep {float(timesteps[l]):g})"


def _refuse_unless_linear(name: str, wrong: Tensor, timesteps: tuple[Any, ...]) -> None:
    if wrong.any():
        raise UnsupportedScheduler(
            f"{name} is not supported: its {_at_step(wrong, timesteps)} is not a linear map of the sample, the model's output "
            "and what it has stored before"
        )


def _needed(keep: Tensor) -> list[int]:
    """The slots whose value a later step's sample depends on, the sample first."""
    L, K, _ = keep.shape
    ever = {0}
    live = torch.zeros(K, dtype=torch.bool)
    live[0] = True  # after the last step only the sample matters
    for l in reversed(range(1, L)):
        live = (keep[l][live] != 0).any(0)
        live[0] = True
        ever |= set(live.nonzero().flatten().tolist())
    return sorted(ever)


def _read_clip(clipped: _Runner, free: _Runner, timesteps: tuple[Any, ...], keep: Tensor, gain: Tensor) -> Clip:
    """What clipping changes: the step with it against the step without, at numbers that are clipped."""
    name, bound = clipped.name, float(_setting(clipped.scheduler, "clip_sample_range") or 1.0)
    L, tests = len(timesteps), len(MAGNITUDES)
    random = torch.randn(L, 2, tests, generator=torch.Generator().manual_seed(0)).double()
    ones = torch.eye(2).double().expand(L, -1, -1)
    fed = torch.cat([ones, 1e3 * bound * ones, bound * random * torch.tensor(MAGNITUDES)], -1)  # [L, 2, rows]
    after, linear, x0 = torch.zeros(3, L, fed.shape[-1]).double()
    for l, t in enumerate(timesteps):
        sample, output = fed[l].reshape(2, -1, 1, 1, 1)
        after[l] = clipped(output, t, sample)[0].flatten()
        unclipped = free(output, t, sample)
        if len(unclipped) < 2:
            raise UnsupportedScheduler(f"{name} clips the predicted x0 but does not return it from step")
        linear[l], x0[l] = (each.flatten() for each in unclipped[:2])
    change, cut = after - linear, x0.clamp(-bound, bound) - x0
    largest = cut.abs().argmax(-1, keepdim=True)
    weight = change.gather(-1, largest) / cut.gather(-1, largest)  # [L, 1]
    linear_x0 = x0[:, :1] * fed[:, 0] + x0[:, 1:2] * fed[:, 1]
    size = keep.abs()[:, None] * fed[:, 0].abs() + gain.abs()[:, None] * fed[:, 1].abs() + bound
    right = ((change - weight * cut).abs() <= LINEAR_TO * size) & ((x0 - linear_x0).abs() <= LINEAR_TO * x0.abs())
    _refuse_unless_linear(name, ~right.all(-1), timesteps)
    return Clip(bound, x0[:, 0], x0[:, 1], weight[:, 0])
