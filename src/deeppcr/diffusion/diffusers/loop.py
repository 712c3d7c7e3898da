"""A scheduler and a model of ``diffusers``, apart from any pipeline, in parallel over the steps; nothing here imports it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..noise import Noise
from ..result import Samples
from ..sample import sample
from ..samplers import Steps
from .scheduler import draw_noise, fork, read_scheduler

#: options of ``sample`` that concern how it is solved
SOLVING = ("solver", "jacobian", "start", "keep_states", "on_failure")
_GUIDING = ("guidance", "unconditional")


class ParallelLoop:
    """A scheduler's loop over its timesteps, ready to be run on all of them at once; made by ``parallelize``.

    Attributes:
        steps: the scheduler's steps in numbers

    >>> import torch
    >>> from deeppcr.diffusion import ParallelLoop, parallelize
    >>> class Euler:  # any scheduler of diffusers, after set_timesteps
    ...     timesteps = torch.arange(9.0, -1.0, -1.0)
    ...
    ...     def step(self, output, t, sample, return_dict=True):
    ...         return (sample - 0.1 * output,)
    >>> loop = parallelize(Euler(), lambda sample, t: 0.5 * sample)
    >>> isinstance(loop, ParallelLoop), len(loop.steps)
    (True, 10)
    """

    def __init__(self, scheduler: Any, model: Callable[..., Any], step_arguments: dict[str, Any]):
        self.steps: Steps = read_scheduler(scheduler, **step_arguments)
        self.scheduler: Any = fork(scheduler)
        self.model: Callable[..., Any] = model
        self.step_arguments: dict[str, Any] = step_arguments
        self.network: Network | None = None

    def __call__(
        self,
        latents: Tensor,
        model_arguments: dict[str, Any] | None = None,
        *,
        generator: torch.Generator | list[torch.Generator] | None = None,
        **options: Any,
    ) -> Samples:
        """What the scheduler's loop makes of these latents.

        Args:
            latents: ``[B, ...]``, where the loop starts, already multiplied by ``scheduler.init_noise_sigma``
            model_arguments: further arguments of the model by name: tensors ``[B, ...]``, nests of them, and anything
                that is no tensor. What concerns all samples alike can be bound to the model by ``functools.partial``
            generator: where the noise of the steps comes from; the loop given the same one sees the same noise
            options: ``solver``, ``jacobian``, ``start``, ``guidance``, ``keep_states``, ``on_failure``: see ``sample``.
                With ``guidance``, ``unconditional`` is a nest like ``model_arguments``

        Returns:
            Samples, with ``final`` in the dtype of the latents
        """
        check_options(options, (*SOLVING, *_GUIDING))
        if not isinstance(latents, Tensor):
            raise TypeError(f"latents: expected a tensor [B, ...], got {type(latents).__name__}")
        steps, noise = self.steps, None
        if steps.adds_noise:
            times = self.scheduler.timesteps
            noise = draw_noise(self.scheduler, latents, times, **self.step_arguments, generator=generator)
        network, batched = bind(self.model, model_arguments or {}, len(latents), latents.dtype)
        if self.network is not None and self.network.same_as(network):
            network = self.network  # the same object: what the solver has prepared for it serves again
        self.network = network
        if batched:
            options["classes"] = batched
        if options.get("unconditional") is not None:
            other, options["unconditional"] = bind(self.model, options["unconditional"], len(latents), latents.dtype)
            if not network.same_as(other):
                raise ValueError("unconditional: expected a nest like model_arguments, with tensors in the same places")
        return solve_loop(network, steps, latents, noise, options)


def parallelize(scheduler: Any, model: Callable[..., Any], **step_arguments: Any) -> ParallelLoop:
    """A scheduler's loop, in parallel over its steps.

    Args:
        scheduler: of ``diffusers``, after ``set_timesteps``; it is left as it is
        model: ``model(sample, timestep, **model_arguments)``, on any number of rows; returns a tensor, a tuple that starts
            with it, or an output with it as ``sample``, as the models of ``diffusers`` do
        step_arguments: what the loop passes on to ``scheduler.step``, such as ``eta``

    Returns:
        A function of the latents: see ``ParallelLoop``

    Raises:
        UnsupportedScheduler: with the reason

    >>> import torch
    >>> from deeppcr.diffusion import parallelize
    >>> class Euler:  # any scheduler of diffusers, after set_timesteps
    ...     timesteps = torch.arange(9.0, -1.0, -1.0)
    ...
    ...     def step(self, output, t, sample, return_dict=True):
    ...         return (sample - 0.1 * output,)
    >>> loop = parallelize(Euler(), lambda sample, t: 0.5 * sample)
    >>> loop(torch.ones(2, 3)).final[0]
    tensor([0.5987, 0.5987, 0.5987])
    """
    if not callable(model):
        raise TypeError(f"model: expected a callable, got {type(model).__name__}")
    for name in step_arguments:
        if name in (*SOLVING, *_GUIDING, "generator"):
            raise TypeError(
                f"{name}: is for the loop that parallelize returns, not for scheduler.step: "
                f"parallelize(scheduler, model)(latents, {name}=...)"
            )
        if callable(getattr(scheduler, "step", None)) and not _takes(scheduler.step, name):
            raise TypeError(f"{name}: {type(scheduler).__name__}.step takes no argument of this name")
    return ParallelLoop(scheduler, model, step_arguments)


def check_options(options: Any, known: Sequence[str]) -> None:
    """Raise where one of them is not known, before anything is run."""
    if not isinstance(options, dict):
        raise TypeError(f"options: expected a dictionary of {', '.join(known)}, got {type(options).__name__}")
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise TypeError(f"options: there is none of the name {name!r}; {meant}")


def _takes(function: Callable, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@dataclass(frozen=True, eq=False)
class Network:
    """A model of ``diffusers`` as ``denoiser(z, t, batched)``, with its further arguments bound; made by ``bind``.

    Attributes:
        model: the model
        leaves, structure: its further arguments as a nest, with None at ``places``
        places: of those that are tensors with a row for each sample, and come with each call
        dtype: in which the model sees the sample
        by_name: the model's timestep has that name, and it may not be its second argument
    """

    model: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    places: tuple[int, ...]
    dtype: torch.dtype
    by_name: bool

    @property
    def known_by(self) -> Callable[..., Any]:
        """Stands for this object where it matters whether it was seen before: a pipeline's is made anew for each run."""
        return self.model

    def same_as(self, other: Network) -> bool:
        alike = all(a is b for a, b in zip(self.leaves, other.leaves, strict=False))
        rest = (self.model is other.model, self.dtype == other.dtype, self.places == other.places)
        return alike and all(rest) and self.structure == other.structure

    def __call__(self, z: Tensor, t: Tensor, batched: Sequence[Tensor] = ()) -> Tensor:
        leaves = list(self.leaves)
        for place, value in zip(self.places, batched, strict=True):
            leaves[place] = value
        arguments = pytree.tree_unflatten(leaves, self.structure)
        z = z.to(self.dtype)
        output = self.model(z, timestep=t, **arguments) if self.by_name else self.model(z, t, **arguments)
        if isinstance(output, Tensor):
            return output
        return output[0] if isinstance(output, tuple) else output.sample


def bind(
    model: Callable[..., Any], arguments: dict[str, Any], rows: int, dtype: torch.dtype
) -> tuple[Network, list[Tensor]]:
    """A model with its further arguments, apart from those with ``rows`` rows, which are returned beside it."""
    leaves, structure = pytree.tree_flatten(arguments)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows)
    batched = [leaves[place] for place in places]
    fixed = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
    return Network(model, fixed, structure, places, dtype, "timestep" in parameters_of(model)), batched


def parameters_of(model: Callable[..., Any]) -> list[str]:
    """The names of a model's parameters, those of a compiled one as well."""
    model = getattr(model, "_orig_mod", model)
    return list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters)


def solve_loop(
    network: Network, steps: Steps, latents: Tensor, noise: Tensor | None, options: dict[str, Any]
) -> Samples:
    """Latents of half precision are solved for in float32, and only the network sees them in half."""
    half = latents.dtype in (torch.float16, torch.bfloat16)
    initial = latents.float() if half else latents
    drawn = Noise(initial, noise if noise is None else noise.to(initial.dtype))
    found = sample(network, steps, drawn, **options)
    return replace(found, final=found.final.to(latents.dtype)) if half else found
