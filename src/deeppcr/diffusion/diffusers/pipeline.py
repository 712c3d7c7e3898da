"""Pipelines of ``diffusers`` in parallel over their steps; nothing here imports it.

A pipeline is run as it is: in its own loop the network is silent and it is only noted how it is called (the rehearsal). In
the loop's last step all steps are solved at once, and the pipeline goes on with the result, to its decoder and its images.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..result import Samples
from ..samplers import Steps
from .loop import SOLVING, bind, check_options, parameters_of, solve_loop
from .scheduler import UnsupportedScheduler, fork, read_scheduler

#: What was read from a scheduler before, kept as long as it lives; an entry serves where all values agree.
_steps: WeakKeyDictionary[Any, tuple[dict[str, Any], Steps]] = WeakKeyDictionary()


class PipelineSample(NamedTuple):
    """What ``parallel_sample`` returns.

    Attributes:
        output: the pipeline's own output, images and all
        samples: the certificate: iterations, network evaluations and residual, sample by sample

    >>> from deeppcr.diffusion import PipelineSample
    >>> PipelineSample._fields
    ('output', 'samples')
    """

    output: Any
    samples: Samples


def parallel_sample(
    pipeline: Any, *arguments: Any, options: dict[str, Any] | None = None, **named: Any
) -> PipelineSample:
    """Call a pipeline of ``diffusers``, with its denoising steps in parallel.

    The pipeline is run as it is, ``output_type``, prompts, guidance, ``generator`` and all. While it runs, ``forward`` of
    its network and ``step`` of its scheduler are replaced, so one pipeline must not be called from two threads.

    Args:
        pipeline: with a ``scheduler`` and a network named ``unet`` or ``transformer``
        arguments, named: those of the pipeline
        options: ``solver``, ``jacobian``, ``start``, ``keep_states`` and ``on_failure`` of ``sample``, in a dictionary

    Returns:
        PipelineSample: the pipeline's output, and the certificate

    Raises:
        UnsupportedScheduler: the scheduler is not supported, or the pipeline does more in its loop than to call the
            network on the sample and the scheduler on what it says; the message says what

    >>> import torch
    >>> from deeppcr.diffusion import parallel_sample
    >>> class Network(torch.nn.Module):
    ...     def forward(self, sample, timestep):
    ...         return (0.5 * sample,)
    >>> class Euler:
    ...     timesteps = torch.arange(9.0, -1.0, -1.0)
    ...
    ...     def step(self, output, t, sample, return_dict=True):
    ...         return (sample - 0.1 * output,)
    >>> class Pipeline:  # any pipeline of diffusers
    ...     unet, scheduler = Network(), Euler()
    ...
    ...     def __call__(self, image):
    ...         for t in self.scheduler.timesteps:
    ...             image = self.scheduler.step(self.unet(image, t)[0], t, image)[0]
    ...         return image
    >>> output, samples = parallel_sample(Pipeline(), torch.ones(1, 3))
    >>> output
    tensor([[0.5987, 0.5987, 0.5987]])
    """
    for name in ("callback_on_step_end", "callback"):
        if named.get(name) is not None:
            raise UnsupportedScheduler(f"{name}: in parallel there is no sample after each step that it could be given")
    options = {} if options is None else options
    check_options(options, SOLVING)
    for name in SOLVING:
        if name in named and name not in inspect.signature(pipeline).parameters:
            raise TypeError(
                f'{name}: goes into a dictionary, options={{"{name}": ...}}: other arguments are the pipeline\'s'
            )
    _check_counts(pipeline, arguments, named)
    rehearsal = _Rehearsal(pipeline, options)
    with rehearsal, torch.no_grad():
        output = pipeline(*arguments, **named)
    if rehearsal.samples is None:
        raise UnsupportedScheduler(
            f"{type(pipeline).__name__} ended its loop after {len(rehearsal.times)} of {rehearsal.length} steps"
        )
    return PipelineSample(output, rehearsal.samples)


def _check_counts(pipeline: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Schedulers divide by the number of steps, and so do we by that of the samples: neither says what is wrong."""
    try:
        given = inspect.signature(pipeline).bind_partial(*arguments, **named).arguments
    except TypeError:
        return  # which the call itself will say
    for name in ("num_inference_steps", "batch_size", "num_images_per_prompt"):
        value = given.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name}: at least 1, got {value}")


class _Output(tuple):
    """What stands for the network's output in a rehearsal, whether the pipeline takes ``[0]`` or ``.sample``."""

    @property
    def sample(self) -> Tensor:
        return self[0]


class _Rehearsal:
    """Lets a pipeline run with a silent network, notes what it does with it, and answers its last step with the solution.

    What is assumed of the loop is checked with random numbers in place of outputs and samples:
    the network sees the scaled sample, once a step, or twice for guidance, and the same arguments at each step;
    the scheduler gets a fixed combination of the outputs, and the sample that it returned.
    Checks stay on the device until the end, so that the rehearsal does not wait for each of them.
    """

    def __init__(self, pipeline: Any, options: dict[str, Any]):
        self.name, self.options = type(pipeline).__name__, options
        self.pipeline, self.scheduler = pipeline, getattr(pipeline, "scheduler", None)
        found = [getattr(pipeline, name, None) for name in ("unet", "transformer")]
        models = [model for model in found if isinstance(model, nn.Module)]
        if len(models) != 1 or self.scheduler is None:
            raise TypeError(
                f"pipeline: expected a pipeline of diffusers with a scheduler and a unet or a transformer, got {self.name}"
            )
        self.model = models[0]
        self.parameters = parameters_of(self.model)
        if "timestep" not in self.parameters:
            raise UnsupportedScheduler(f"the network of {self.name} takes no argument named timestep")
        self.times: list[Any] = []  # as the scheduler is told
        self.told: list[Tensor] = []  # as the network is told
        self.scales: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.checks: list[tuple[str, Tensor]] = []
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []  # since the last step
        self.first: dict[str, Any] = {}
        self.samples: Samples | None = None
        self.length = 0
        self.random: torch.Generator | None = None

    def __enter__(self) -> None:
        self.forward_before = vars(self.model).get("forward")
        self.step_before = vars(self.scheduler).get("step")
        self.step = self.scheduler.step  # type: ignore[union-attr]

        @functools.wraps(self.step)  # pipelines look at the signature to see whether it takes a generator or eta
        def step(*arguments: Any, **named: Any) -> Any:
            return self.on_step(*arguments, **named)

        self.scheduler.step = step  # type: ignore[union-attr]
        self.model.forward = self.on_forward

    def __exit__(self, *exception: object) -> None:
        self.restore_model()
        _put_back(self.scheduler, "step", self.step_before)

    def restore_model(self) -> None:
        _put_back(self.model, "forward", self.forward_before)

    def on_forward(self, *arguments: Any, **named: Any) -> _Output:
        """In place of the network: random numbers, others at each step, so that what is not linear shows."""
        bound = dict(zip(self.parameters, arguments, strict=False)) | named
        seen = bound.pop(self.parameters[0])
        self.calls.append((seen, bound))
        if self.random is None:
            self.random = torch.Generator(seen.device).manual_seed(0)
        channels = getattr(getattr(self.model, "config", None), "out_channels", None)
        shape = list(seen.shape)
        if seen.ndim == 4 and isinstance(channels, int):
            shape[1] = channels
        self.answer = torch.randn(shape, generator=self.random, device=seen.device, dtype=seen.dtype)
        return _Output([self.answer])

    def on_step(self, output: Tensor, timestep: Any, sample: Tensor, *more: Any, **named: Any) -> Any:
        """In place of a step: a random sample; in place of the last one, the solution."""
        if more:
            raise UnsupportedScheduler(f"{self.name} calls scheduler.step with more than three arguments without names")
        l = len(self.times)
        self.times.append(timestep)
        if l == 0:
            if sample.numel() == 0:
                raise ValueError(f"{self.name} starts from an empty sample, {tuple(sample.shape)}")
            self.latents, self.step_arguments, self.start = sample, named, fork(self.scheduler)
            _put_back(self.start, "step", self.step_before)
            self.length = self._count(timestep)
        else:
            self.check(
                "changes the sample between two steps, as inpainting and callbacks do",
                sample == self.mark if sample.shape == self.mark.shape else torch.tensor(False),
            )
        self._note_call(output, sample, l)
        # Of nothing: the noise of this step alone, drawn as the pipeline draws it.
        result = self.step(torch.zeros_like(output), timestep, torch.zeros_like(sample), **named)
        plain = isinstance(result, tuple)
        self.noise.append(result[0] if plain else result.prev_sample)
        last = l + 1 == self.length
        if last:
            after = self._solution()
        else:
            like = {"device": sample.device, "dtype": self.noise[-1].dtype}
            after = self.mark = torch.randn(sample.shape, generator=self.random, **like)
        if plain:
            return (after, *result[1:])
        result.prev_sample = after
        return result

    def _count(self, first: Any) -> int:
        """How many steps the loop will take: pipelines may start late (from an image) or end early."""
        told = getattr(self.pipeline, "num_timesteps", None)
        if isinstance(told, int) and told > 0:
            return told
        times = [float(t) for t in self.scheduler.timesteps]  # type: ignore[union-attr]
        begin = getattr(self.scheduler, "begin_index", None)
        return len(times) - (begin if begin is not None else times.index(float(first)))

    def check(self, what: str, holds: Tensor) -> None:
        self.checks.append((what, holds.all()))

    def _note_call(self, output: Tensor, sample: Tensor, l: int) -> None:
        if len(self.calls) != 1:
            raise UnsupportedScheduler(f"{self.name} calls its network {len(self.calls)} times in a step, not once")
        (seen, named), self.calls = self.calls[0], []
        rows = len(sample)
        if seen.shape[1:] != sample.shape[1:] or len(seen) not in (rows, 2 * rows):
            raise UnsupportedScheduler(
                f"{self.name} shows its network {tuple(seen.shape)} for a sample {tuple(sample.shape)}: more than the sample "
                "itself, or the sample and its copy for guidance"
            )
        if output.shape != sample.shape or self.answer.shape != seen.shape:
            raise UnsupportedScheduler(f"{self.name} gives its scheduler only a part of what its network returns")
        copies = len(seen) // rows
        exact = 200 * torch.finfo(seen.dtype).eps
        flat, mark = seen.reshape(copies, -1).double(), sample.reshape(-1).double()
        scale = (flat @ mark).mean() / (mark @ mark)
        self.scales.append(scale)
        self.check("shows its network something else than the scaled sample", _near(flat, scale * mark, exact))
        answers, got = self.answer.reshape(copies, -1).double(), output.reshape(-1).double()
        if l == 0:
            self.weights = torch.linalg.lstsq(answers.mT, got[:, None]).solution[:, 0]
            self.first = named
        size = self.weights.abs().max().clamp(min=1)
        linear = _near(got, self.weights @ answers, size * exact) & ((self.weights.sum() - 1).abs() < size * exact)
        self.check("does more than guidance with what its network returns, as guidance_rescale does", linear)
        self._note_arguments(named)

    def _note_arguments(self, named: dict[str, Any]) -> None:
        told = torch.as_tensor(named["timestep"]).reshape(-1)
        self.check("tells its network another timestep for each row", told == told[0])
        self.told.append(told[0])
        now, then = (pytree.tree_flatten({k: v for k, v in x.items() if k != "timestep"}) for x in (named, self.first))
        same = now[1] == then[1]
        for new, old in zip(now[0], then[0], strict=False) if same else ():
            if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
                if new is not old:
                    self.check("gives its network other arguments from step to step", new == old)
            elif new is not old and not (type(new) is type(old) and not isinstance(new, Tensor) and new == old):
                same = False
        if not same:
            raise UnsupportedScheduler(f"{self.name} gives its network other arguments from step to step")

    def _solution(self) -> Tensor:
        """All steps at once."""
        held = torch.stack([holds.to(self.latents.device) for _, holds in self.checks]).tolist()
        for (what, _), holds in zip(self.checks, held, strict=True):
            if not holds:
                raise UnsupportedScheduler(f"{self.name} {what}: such a loop cannot be solved all steps at once")
        steps = self._steps()
        scale = torch.stack(self.scales).cpu()
        assert steps.scale is not None
        if not torch.allclose(scale, steps.scale, rtol=200 * torch.finfo(self.answer.dtype).eps):
            # The pipeline does not scale as its scheduler would have it; what it does is what counts.
            steps = replace(steps, scale=scale)
        steps = replace(steps, timesteps=torch.stack([t.cpu() for t in self.told]))
        self.restore_model()
        rows = len(self.answer)
        arguments = {name: value for name, value in self.first.items() if name != "timestep"}
        network, batched = bind(self.model, arguments, rows, self.answer.dtype)
        options = dict(self.options)
        if rows > len(self.latents):
            if not batched:
                raise UnsupportedScheduler(f"{self.name} shows its network every sample twice and alike")
            halves = [each.chunk(2) for each in batched]
            options["classes"], options["unconditional"] = (list(each) for each in zip(*halves, strict=True))
            options["guidance"] = float(self.weights[0])
        elif batched:
            options["classes"] = batched
        noise = torch.stack(self.noise) if steps.adds_noise else None
        self.samples = solve_loop(network, steps, self.latents, noise, options)
        return self.samples.final

    def _steps(self) -> Steps:
        """The scheduler's steps in numbers; read once for the same settings, timesteps and arguments."""
        settings = {**vars(self.start), "times": self.times, **self.step_arguments, "generator": None}
        known, steps = _steps.get(self.scheduler, (None, None))
        if steps is None or not _alike(known, settings):
            steps = read_scheduler(self.start, self.times, **self.step_arguments)
            _steps[self.scheduler] = settings, steps
        return steps


def _alike(one: Any, other: Any) -> bool:
    """Whether two nests hold the same values."""
    (ours, structure), (theirs, other_structure) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return structure == other_structure and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or (type(a) is type(b) and a == b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _near(got: Tensor, expected: Tensor, tolerance: float | Tensor) -> Tensor:
    return (got - expected).abs() <= tolerance * expected.abs().amax()


def _put_back(owner: Any, name: str, before: Any) -> None:
    """An attribute of the object as it was before it was replaced: None where the class's own was seen."""
    if before is not None:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
