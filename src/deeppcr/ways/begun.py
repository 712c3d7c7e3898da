"""Kernels that are launched before it is known that they are the right ones.

To walk through all that a step reaches takes the host as long as the kernels of a small loop take the device. A call with a step that came before,
on tensors of the same shapes, is mostly the same solve. So its kernels are launched on what the step reached the last time, and the walk goes on
beside them. Where it finds anything else, what was launched is thrown away: it has read tensors that are alive and of the
shape that it was made for, and written to none that anybody knows.
"""

from __future__ import annotations

import weakref
from functools import cache
from operator import is_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..bounded import Bounded
from ..newton import USUAL, Newton
from ..runtime import is_capturing, is_elsewhere
from ..sequence.fingerprint import Told, owner_of
from ..tolerance import Tolerance

if TYPE_CHECKING:  # it needs Triton and NumPy, and takes seconds to import: those wait who have use for it
    from ..fuse.step import FusedStep

#: Steps of which it is known what they reached.
_MOST = 256
_expected = Bounded(_MOST)
#: So often in a row what was launched is thrown away, before a step is not expected to be what it was again.
_MOST_MISSED = 3
#: Of a step so many ways are remembered in which the tensors of a call may look.
_MOST_LOOKS = 16
_UNKNOWN = (None, None, None)


class Ready:
    """A solve by kernels, ready to be launched.

    Attributes:
        closures, bases: the tensors that the step closes over, and what the kernels read from
        settled: what is the same in all solves on tensors that look the same
        run: the kernels with what they read
        known, kind: what is known of such solves; and a copy for this one to change
        expected: by which it was launched early, if it was
        looks: of the call's tensors, where nobody has noted them
        certain: whether it is known that these are the step's kernels and tensors
        passes: the first of them, where they were launched
    """

    def __init__(
        self, call: Any, fused: FusedStep, closures: list[Tensor], newton: Newton, guess: Tensor | None, *, loop: bool,
        settled: Settled | None = None,
    ):  # fmt: skip
        """
        Args:
            call: a ``fused.Call``
            loop: one step after the other, whatever is known of the kind
            settled: of an earlier one, whose tensors looked the same
        """
        layout, length = fused.layout, call.length
        self.fused: FusedStep = fused
        self.newton: Newton = newton
        self.closures: list[Tensor] = closures
        self.bases: list[Tensor] = fused.bases(call.inputs, closures)
        with_graph = torch.is_grad_enabled()  # else nobody has to keep them out of one
        initial = layout.pack_leaves(self.starts(call) if with_graph else call.states)
        shape = None if settled is None else settled.shape
        self.run: Any = fuse().run.Run(fused.kernels, initial, self.bases, length, shape)
        if settled is None:
            settled = Settled.of(call, fused, newton, self.bases, self.run.shape, repeated=guess is None)
        self.settled: Settled = settled
        if call.short and not settled.differentiated:
            self.run.leaves = tuple(layout.sizes)
        self.know_kind()
        if loop:
            self.kind = fuse().run.Kind(length, length)
        self.expected: _Expected | None = None
        self.looks: tuple[Any, ...] | None = None
        self.certain: bool = False

    def know_kind(self) -> None:
        """What is known by now of such solves; nothing is launched yet."""
        self.known: Any = self.fused.kind(self.settled.key)
        self.kind: Any = self.known.copy()
        self.passes: Any = None

    @staticmethod
    def starts(call: Any) -> list[Tensor]:
        """The leaves of the initial state, by themselves."""
        return [leaf.detach() if leaf.requires_grad else leaf for leaf in call.states]

    def begin(self, guess: Tensor | None = None, every: int = 1) -> Any:
        """The first passes, launched now if they were not before."""
        if self.passes is None:
            self.passes = fuse().run.begin(self.run, self.kind, self.settled.wanted, guess, every)
        return self.passes


class Settled(NamedTuple):
    """What is the same in all solves of a step on tensors that look the same.

    Attributes:
        shape: a ``bound.Shape``
        differentiated: whether gradients are wanted
        tolerance, wanted: what is promised, and what the kernels are asked for
        key: by which it is found what is known of such solves
    """

    shape: Any
    differentiated: bool
    tolerance: Tolerance
    wanted: Tolerance
    key: tuple[Any, ...]

    @staticmethod
    def of(call: Any, fused: FusedStep, newton: Newton, bases: list[Tensor], shape: Any, *, repeated: bool) -> Settled:
        """``repeated``: it starts from the initial state, not from a guess."""
        differentiated = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*call.states, *bases))
        tolerance, local = _usual(fused.layout.dtype) if newton is USUAL else _tolerances(newton, fused.layout.dtype)
        # A gradient asks for the digits of every state, also of one that dies out.
        wanted = local if differentiated else tolerance
        chunk = call.length if call.planned and fused.is_quicker_in_one(call.length) else newton.chunk
        key = fused.key_of_kind(call.length, chunk, wanted, repeated)
        return Settled(shape, differentiated, tolerance, wanted, key)


class _Expected:
    """What a step reached the last time.

    Attributes:
        signature: of the call
        missed: how often in a row it was something else then
    """

    fused: FusedStep
    signature: tuple[Any, ...]
    missed: int

    def __init__(self, fused: FusedStep, signature: tuple[Any, ...], closures: list[Tensor], missed: int):
        self.fused, self.signature, self.missed = fused, signature, missed
        self._closures = [(weakref.ref(each), each.untyped_storage().nbytes(), _look(each)) for each in closures]
        self._known: dict[tuple[Any, ...], tuple[Newton, Settled, Any]] = {}

    def note(self, looks: tuple[Any, ...], ready: Ready, key: Any) -> None:
        """What is settled of calls that look so, and the key of their kind."""
        if len(self._known) >= _MOST_LOOKS:
            self._known.clear()
        self._known[looks] = ready.newton, ready.settled, key

    def known(self, looks: tuple[Any, ...], newton: Newton) -> tuple[Settled | None, Any]:
        """The same of a call with these settings; (None, None) where nobody has noted it."""
        asked, *found = self._known.get(looks, _UNKNOWN)
        return (found[0], found[1]) if asked is newton else (None, None)

    def is_of(self, fused: FusedStep, signature: tuple[Any, ...], closures: list[Tensor]) -> bool:
        """Whether another call reached the same."""
        same, found = self.fused is fused and self.signature == signature, self.closures()
        return same and found is not None and all(map(is_, found, closures))

    def closures(self) -> list[Tensor] | None:
        """None where they are gone, or others by now."""
        found = []
        for reference, memory, look in self._closures:
            tensor = reference()
            # One that is put away keeps its shape, but no memory for kernels to read.
            if tensor is None or tensor.untyped_storage().nbytes() != memory or _look(tensor) != look:
                return None
            found.append(tensor)
        return found


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """All that launches depend on but for its address and its numbers."""
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_neg(),
        tensor.data_ptr() % 16,
    )  # fmt: skip


def _looks_of(call: Any) -> tuple[Any, ...] | None:
    """Of all that is given to a call, and what is set while it is made; None where something is no dense tensor."""
    try:
        looks = [_look(each) for each in (*call.states, *call.inputs)]
    except (AttributeError, RuntimeError):
        return None
    return (
        *looks, call.length, call.given_length, call.spec, call.inputs_spec, call.batch_dims, call.planned,
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
    )  # fmt: skip


def begin(call: Any, newton: Newton) -> Ready | None:
    """Launch the kernels that a call is expected to need, if any are. Who then knows what it needs, asks ``taken``."""
    expected = _expected.get(_place(call)) if call.every == 1 and call.states else None
    if expected is None or expected.missed >= _MOST_MISSED:
        return None
    fused, closures, looks = expected.fused, expected.closures(), _looks_of(call)
    device = fused.layout.device
    if closures is None or looks is None or is_elsewhere(device) or is_capturing(device) or call.is_observed:
        return None
    settled, key = expected.known(looks, newton)
    if settled is not None:
        call.refusal = None  # as for those that looked the same
    elif call.refusal is not None or expected.signature != call.signature:
        return None
    ready = Ready(call, fused, closures, newton, None, loop=False, settled=settled)
    shape, differentiated, *_ = ready.settled
    if not shape.ready[differentiated] or (differentiated and not shape.fits):
        return None  # what has yet to be compiled may be refused
    expected.missed += 1
    try:
        ready.begin()
    except (fuse().too_large, torch.OutOfMemoryError):  # the solve, which finds that, too, may have another way
        return None
    ready.expected = expected
    if settled is None:
        ready.looks = looks
    elif isinstance(call.step, Told):  # which never changes, so nobody has to look at it again
        ready.certain, expected.missed = True, 0
        call.know(key, fused)
    return ready


def taken(call: Any, fused: FusedStep, newton: Newton) -> Ready | None:
    """What was launched for a call, where it is what the call needs: kernels of this step with these settings."""
    ready, call.begun = call.begun, None
    if ready is not None and ready.newton is newton and ready.certain:
        return ready
    closures = fused.closures(call.reached)
    if (
        ready is not None
        and ready.newton is newton
        and ready.fused is fused
        and all(map(is_, ready.closures, closures))
    ):
        assert ready.expected is not None
        ready.expected.missed = 0
        if ready.looks is not None:
            ready.expected.note(ready.looks, ready, call.key)
        return ready
    # Modules whose parameters are swapped refuse to convert what somebody has weak references to.
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    if call.every == 1 and fused.given_places is not None and not swapped:
        place = _place(call)
        expected = _expected.get(place)
        # One that reached the same twice in a row has settled, launched or not.
        missed = 0 if expected is None or expected.is_of(fused, call.signature, closures) else expected.missed
        _expected.put(place, _Expected(fused, call.signature, closures, missed), owner_of(call.step))
    return None


def _place(call: Any) -> tuple[Any, ...]:
    """What a call is remembered by: its step, and the shape of its state. (All of its signature takes longer to look up than to compare.)"""
    step = call.step
    return id(owner_of(step)), getattr(step, "__func__", None), getattr(call.states[0], "shape", None)


@cache
def _usual(dtype: torch.dtype) -> tuple[Tolerance, Tolerance]:
    """By default: what is asked for, and that with the digits of every state."""
    return _tolerances(USUAL, dtype)


def _tolerances(newton: Newton, dtype: torch.dtype) -> tuple[Tolerance, Tolerance]:
    tolerance = newton.tolerance(dtype)
    return tolerance, Tolerance(tolerance.atol, tolerance.rtol, local=True)


@cache
def fuse() -> SimpleNamespace:
    """What launches kernels, which needs Triton and NumPy; looked up once: that takes as long as a launch."""
    from triton import OutOfResources

    from ..fuse import back, closer, run

    return SimpleNamespace(back=back, run=run, closer=closer, too_large=OutOfResources)


def forget_expected() -> None:
    _expected.clear()
