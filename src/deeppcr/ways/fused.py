"""A solve by the kernels of its step.

Which steps have kernels is remembered by what they reach, so that the next solve of a kind asks for little more than to launch them.
The first solve by kernels is held against the step itself in all of its steps; of later ones, now and then, some.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..bounded import Bounded, Hashed
from ..graphs.cache import recorded_layers
from ..newton import USUAL, Newton
from ..runtime import has_kernels, is_elsewhere, is_transformed
from ..sequence import Rowwise
from ..sequence.evaluate import entry_of
from ..sequence.fingerprint import structure_of, without_numbers
from ..sequence.history import WithHistory
from ..sequence.layout import Layout
from ..sequence.stack import LISTS, as_one_step
from .begun import Ready, begin, forget_expected, fuse, taken
from .fused_solution import FusedSolution
from .passes import by_fixed_corrections, by_passes

if TYPE_CHECKING:  # it needs Triton and NumPy, and takes seconds to import: those wait who have use for it
    from ..fuse.step import FusedStep

#: Steps that are remembered: their kernels, or why there are none.
_MOST_STEPS = 256
_steps = Bounded(_MOST_STEPS)
#: No solve by kernels takes more passes: who allows for fewer iterations goes another way.
_MOST_PASSES = 16
#: Kinds of solves that have come: kernels are made for those that come again.
_MOST_SEEN = 1024
_seen = Bounded(_MOST_SEEN)


class Call:
    """One call of ``solve``, as far as kernels have to know it.

    Attributes:
        given: the step and xs as they were given: alike modules of a list are one step here, and xs what it sees of each
        length: L; None where it cannot be told
        every: the states after every so many steps are to be kept
        planned: nobody asked for iterations: the faster way is taken
        short: its states are dropped, and what is known of their digits is noted before
        reached: the tensors that the step reaches
        begun: what was launched before the step was looked at, if anything was
    """

    every: int
    planned: bool
    short: bool
    states: list[Any]
    spec: Any
    inputs: list[Any]
    inputs_spec: Any

    def __init__(
        self, step: Any, z0: Any, xs: Any, length: int | None, batch_dims: int | None, every: int = 1, *, planned: bool = False, short: bool = False,
    ):  # fmt: skip
        self.every, self.planned, self.short = every, planned, short
        self.states, self.spec = _flattened(z0)
        first = self.states[0] if self.states else None
        self.given: tuple[Any, Any] = step, xs
        several = isinstance(step, LISTS)
        steps = len(step) if several else None
        if several and length is None and isinstance(first, Tensor) and has_kernels(first.device):
            step, xs = as_one_step(step, xs) or (step, xs)
        self.step: Any = step.step if isinstance(step, Rowwise) else step
        self.z0: Any = z0
        self.xs: Any = xs
        self.batch_dims: int | None = batch_dims
        self.given_length: int | None = length
        self.inputs, self.inputs_spec = ([], None) if xs is None else _flattened(xs)
        self.reached: list[Tensor] = []
        if self.inputs:
            leaf = self.inputs[0]
            self.length = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim > 0 else None
        else:
            self.length = steps if length is None else length
        self._key: Hashed | None = None
        self._fused: FusedStep | str | None = None
        self.begun: Ready | None = None

    def begin(self, newton: Newton) -> None:
        """Launch what a solve with these settings is expected to need; ``solve_fused`` goes on with it, if that was right."""
        if self.begun is None:
            self.begun = begin(self, newton)

    def know(self, key: Hashed, fused: FusedStep) -> None:
        """What is known of a step that tells what it depends on: by which key, and its kernels."""
        self._key, self._fused, self.reached = key, fused, self.step.tensors()

    @property
    def key(self) -> Hashed:
        """What a kind of solve is known by, but for its length."""
        if self._key is None:
            structure, self.reached = structure_of(self.step)
            self._key = Hashed(structure, self.signature)
        return self._key

    @property
    def relation(self) -> Hashable:
        """What it has in common with solves whose step has other numbers, or is taken by other rows."""
        return without_numbers(self.key.parts[0]), self.sizes[2]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a kind of solve is known by beside its step."""
        return (
            self.spec, self.inputs_spec, self.batch_dims, torch.get_default_dtype(), torch.is_inference_mode_enabled(),
            *[(leaf.shape, leaf.dtype, leaf.device) for leaf in self.states],
            *[(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in self.inputs],
        )  # fmt: skip

    @property
    def differentiated(self) -> bool:
        """Whether somebody may want gradients, as far as tensors tell."""
        self.key  # noqa: B018 - which finds the tensors that the step reaches
        return torch.is_grad_enabled() and any(
            leaf.requires_grad for leaf in (*self.states, *self.inputs, *self.reached)
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """L, B rows and D numbers of a row, as far as shapes tell."""
        several = any(leaf.ndim > 1 for leaf in self.states)
        dims = int(several) if self.batch_dims is None else self.batch_dims
        rows = max(1, self.states[0].shape[:dims].numel())
        return self.length or 1, rows, sum(leaf.numel() * (1 + leaf.is_complex()) for leaf in self.states) // rows

    @property
    def is_observed(self) -> bool:
        """Whether operations are not to be done as they are written, or seen by somebody."""
        watched = torch._C._len_torch_dispatch_stack() > 0 or is_transformed()
        return watched or torch.is_autocast_enabled(self.states[0].device.type)

    @cached_property
    def refusal(self) -> str | None:
        """Why there can be no kernels, as far as can be said before the step is looked at."""
        first, length = self.states[0] if self.states else None, self.length
        if not isinstance(first, Tensor) or not has_kernels(device := first.device):
            return "kernels need a CUDA device, Triton and NumPy"
        if isinstance(self.step, (*LISTS, WithHistory)) or not callable(self.step):
            return "a list of steps that are not alike, or one that looks further back, is not covered"
        if type(length) is not int or length < 1 or self.given_length not in (None, length):
            return "its length is not known"
        for leaf in (*self.states, *self.inputs):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.device != device:
                return "what is not a dense tensor on the same device is not covered"
        for leaf in self.inputs:
            if leaf.ndim == 0 or leaf.shape[0] != length:
                return "inputs of several lengths are not covered"
        if self.is_observed:
            return "autocast, transforms and observers of operations are not covered"
        return None

    def given_inputs(self, index: int) -> Any:
        """What was given for a step: of a list of modules that are one step here without their parameters."""
        return entry_of(self.given[1], index)

    @property
    def fused(self) -> FusedStep | str | None:
        """The step's kernels, or why there are none; None where nobody has tried yet."""
        if self._fused is None:
            self._fused = self.refusal or _steps.get(self.key)
        return self._fused

    @property
    def has_kernels(self) -> bool:
        """Whether the step has kernels, as far as anybody has tried."""
        fused = self._fused or self.fused  # as a rule known: it is asked in every warm call, several times
        return fused is not None and type(fused) is not str

    @property
    def known(self) -> tuple[FusedStep, int]:
        """The step's kernels, which there are, and L."""
        fused, length = self._fused or self.fused, self.length
        assert fused is not None
        assert not isinstance(fused, str)
        assert length is not None
        return fused, length

    def comes_again(self) -> bool:
        """Whether a solve of this kind was seen before; from now on it was."""
        kind = (self.key, self.length)
        again = _seen.get(kind, False)
        _seen.put(kind, True)
        return again

    def make(self) -> FusedStep | str:
        """The same, tried now."""
        found = self.fused
        if found is None:
            from ..fuse.expressions import NotCovered
            from ..fuse.step import FusedStep

            layout = Layout.of(self.z0, self.batch_dims)
            try:
                found = FusedStep.of(self.step, layout, self.z0, entry_of(self.xs, 0), self.reached)
            except NotCovered as reason:
                found = str(reason)
            _steps.put(self.key, found)
            self._fused = found
        return found

    def refuse(self, reason: str) -> None:
        """Have such steps be solved otherwise from now on."""
        _steps.put(self.key, reason)
        self._fused = reason
        forget_expected()
        recorded_layers.clear()  # which may hold its kernels


def _flattened(nest: Any) -> tuple[list[Any], Any]:
    """Its leaves, and what tells its structure; PyTorch takes long even for a single tensor."""
    if isinstance(nest, Tensor):
        return [nest], None
    if type(nest) is tuple and all(isinstance(each, Tensor) for each in nest):
        return list(nest), len(nest)
    return pytree.tree_flatten(nest)


#: What kernels know no other way of.
_AS_USUAL = [
    (each.name, each.default)
    for each in fields(Newton)
    if each.name not in ("atol", "rtol", "scale", "capture", "chunk", "max_iterations")
]


def covers(newton: Newton) -> bool:
    """Whether kernels do what these settings ask for."""
    if newton is USUAL:  # to compare all of them takes as long as a launch
        return True
    asks_for_more = any(getattr(newton, name) != usual for name, usual in _AS_USUAL)
    return not asks_for_more and newton.chunk != 1 and newton.max_iterations >= _MOST_PASSES


def solve_fused(
    call: Call, newton: Newton, guess: Tensor | None, *, loop: bool = False, fixed: int | None = None, every: int = 1
) -> FusedSolution | str:
    """By the kernels of the step; or why that cannot be.

    Args:
        guess: states to start from, [L, B, D]; None: the initial one everywhere
        loop: one step after the other, whatever is known of the kind
        fixed: so many corrections, and nobody looks: as inside a CUDA graph of the caller
        every: the states after every so many steps are to be kept; where all had to be written, all are returned
    """
    fused, _ = call.known
    if is_elsewhere(device := fused.layout.device):
        with torch.cuda.device(device):  # where kernels are launched
            return solve_fused(call, newton, guess, loop=loop, fixed=fixed, every=every)
    begun = taken(call, fused, newton) if guess is None and not loop and fixed is None else None
    ready = begun or Ready(call, fused, fused.closures(call.reached), newton, guess, loop=loop)
    if ready.settled.differentiated and fused.kernels.no_gradients:
        return fused.kernels.no_gradients
    try:
        if fixed is not None:
            return by_fixed_corrections(call, ready, guess, fixed)
        return by_passes(call, ready, guess, loop, every)
    except fuse().too_large as error:
        reason = f"its kernels do not fit the device ({error})"
        call.refuse(reason)
        return reason


def attach_fused(call: Call, states: Tensor) -> list[Tensor]:
    """The leaves of states [L, B, D] that kernels have found before, differentiable by those of the step's gradients."""
    back, fused, length = fuse().back, *call.known
    layout, bases = fused.layout, fused.bases(call.inputs, fused.closures(call.reached))
    if is_elsewhere(layout.device):
        with torch.cuda.device(layout.device):  # where kernels are launched
            return attach_fused(call, states)
    run = fuse().run.Run(fused.kernels, layout.pack_leaves([leaf.detach() for leaf in call.states]), bases, length)
    found = back.aligned(states.contiguous()), back.chunk_of(run, length)
    return back.Apply.of(run, layout, found, call.states, bases)


def forget_kernels() -> None:
    """Let go of everything that is remembered of steps."""
    _steps.clear()
    _seen.clear()
    forget_expected()
