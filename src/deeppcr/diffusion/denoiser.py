"""The network as the solver sees it: rows in, rows out, whatever stands around it.

Shapes: N rows, each one (step, sample) pair; B samples; D the flattened sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..sequence.reach import reached_by

#: modules that compute something else in train mode, and what they do there
_RANDOM = (
    nn.modules.dropout._DropoutNd,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
)
_STATISTICS = (nn.modules.batchnorm._NormBase,)


class Seen(NamedTuple):
    """What a network was seen to do inside: the dtypes that it multiplies in and returns, and whether it convolves."""

    dtypes: frozenset[torch.dtype]
    convolves: bool


class Denoiser:
    """A user's denoiser with its classes and guidance.

    Args:
        function: ``denoiser(z, t)``, or ``denoiser(z, t, classes)`` where classes are given
        shape: of one sample
        samples: B
        classes: labels [B], or a nest of tensors [B, ...] (embeddings of prompts); None where there are none
        guidance: weight of classifier-free guidance: ``unconditional + guidance (conditional - unconditional)``
        unconditional: what stands for no class: a label, or a nest like ``classes``
    """

    def __init__(
        self,
        function: Callable[..., Any],
        shape: torch.Size,
        samples: int,
        classes: Any = None,
        guidance: float | None = None,
        unconditional: Any = None,
    ):
        if not callable(function):
            raise TypeError(f"denoiser: expected a callable, got {type(function).__name__}")
        self.function: Callable[..., Any] = function
        self.shape: torch.Size = shape
        self.samples: int = samples
        if guidance is not None and not (isinstance(guidance, (int, float)) and math.isfinite(guidance)):
            raise TypeError(f"guidance: expected a finite number for all samples, got {guidance!r}")
        self.guidance: float | None = guidance if guidance != 1 else None
        self.given: tuple[Any, Any] = (classes, None)
        if classes is not None:
            for leaf in pytree.tree_leaves(classes):
                if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != samples:
                    came = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise ValueError(f"classes: expected tensors [B, ...] with B = {samples}, got {came}")
        if self.guidance is not None:
            if classes is None or unconditional is None:
                raise ValueError("guidance: needs classes, and unconditional: what stands for no class")
            if isinstance(unconditional, int):
                unconditional = pytree.tree_map(lambda leaf: torch.full_like(leaf, unconditional), classes)
            (leaves, nest), (like, expected) = pytree.tree_flatten(unconditional), pytree.tree_flatten(classes)
            shapes = [getattr(leaf, "shape", None) for leaf in leaves]
            if nest != expected or shapes != [leaf.shape for leaf in like]:
                came = [
                    type(leaf).__name__ if shape is None else tuple(shape)
                    for leaf, shape in zip(leaves, shapes, strict=True)
                ]
                raise ValueError(
                    "unconditional: expected a whole number, or tensors like those of classes, "
                    f"{[tuple(leaf.shape) for leaf in like]}, got {came}"
                )
            self.given = (classes, unconditional)
        self.output_dtype: torch.dtype | None = None  # as it came
        self.seen: Seen | None = None  # None: nobody has looked
        _refuse_train_mode(function)

    @property
    def classes(self) -> Any:
        return self.given[0]

    @property
    def rows_per_call(self) -> int:
        """How many rows the network sees for each pair of step and sample."""
        return 2 if self.guidance is not None else 1

    def __call__(self, samples: Tensor, times: Tensor, index: Tensor) -> Tensor:
        """The network's output for N rows, after guidance.

        Args:
            samples: [N, D]
            times: [N]
            index: [N], which of the B samples each row belongs to

        Returns:
            [N, D], in the dtype of ``samples``
        """
        rows = samples.reshape(-1, *self.shape)
        if self.classes is None:
            return self._call(rows, times)
        classes = pytree.tree_map(lambda leaf: leaf[index], self.classes)
        if self.guidance is None:
            return self._call(rows, times, classes)
        nothing = pytree.tree_map(lambda leaf: leaf[index], self.given[1])
        both = pytree.tree_map(lambda one, other: torch.cat([one, other]), classes, nothing)
        doubled = torch.cat([rows, rows])
        outputs = self._call(doubled, torch.cat([times, times]), both)
        conditional, unconditional = outputs.chunk(2)
        return unconditional + self.guidance * (conditional - unconditional)

    def _call(self, rows: Tensor, *more: Any) -> Tensor:
        try:
            output = self.function(rows, *more)
        except RuntimeError as error:
            known = " and ".join(sorted(map(str, self.parameter_dtypes)))
            # PyTorch has many ways to say that dtypes do not fit, all of which name them.
            if "type" not in str(error) or str(rows.dtype) in (known or "torch.float32"):
                raise
            theirs = f"but the denoiser's parameters are {known}" if known else "which the denoiser does not take"
            raise TypeError(f"noise: is {rows.dtype}, {theirs}: both must be of one dtype ({error})") from error
        if not isinstance(output, Tensor):
            raise TypeError(f"denoiser: must return a tensor like its input, returned {type(output).__name__}")
        if output.shape != rows.shape:
            raise ValueError(
                f"denoiser: must return the shape of its input, {tuple(rows.shape)}, returned {tuple(output.shape)}"
            )
        self.output_dtype = output.dtype
        return output.flatten(1).to(rows.dtype)

    @functools.cached_property
    def parameters(self) -> list[Tensor]:
        found = (each for _, module in walk_modules(self.function) for each in module._parameters.values())
        return [each for each in found if each is not None]

    @functools.cached_property
    def parameter_dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(each.dtype for each in self.parameters if each.dtype.is_floating_point)

    def coarsest(self, rows: Tensor) -> torch.dtype:
        """The coarsest dtype that the network is seen to work in on such rows."""
        dtypes = {rows.dtype, self.output_dtype or rows.dtype, *self.parameter_dtypes}
        if self.seen:
            dtypes |= self.seen.dtypes
        if torch.is_autocast_enabled(rows.device.type):
            dtypes.add(torch.get_autocast_dtype(rows.device.type))
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _refuse_train_mode(function: Callable) -> None:
    """Networks that are random, or that mix their rows, are no function of one row."""
    for name, module in walk_modules(function):
        if not module.training:
            continue
        what = "is random" if isinstance(module, _RANDOM) and getattr(module, "p", 1) else None
        if isinstance(module, _STATISTICS):
            what = "normalises by its rows"
        if what:
            where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise ValueError(f"denoiser: is in train mode, where its {where} {what}: call denoiser.eval() first")


def walk_modules(function: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a denoiser with their names: itself, and all that it reaches."""
    for root in reached_by(function)[0]:
        yield from root.named_modules()


def layout_of(nest: Any) -> Hashable:
    """Shapes and dtypes of a nest of tensors."""
    leaves, spec = pytree.tree_flatten(nest)
    return str(spec), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
