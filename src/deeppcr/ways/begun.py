"""Kernels that are launched before it is known that they are the right ones.

To walk through all that a step reaches takes the host as long as the kernels of a small loop take the device. A call with a step that came before,
on tensors of the same shapes, is mostly the same solve. So its kernels are launched on what the step reached the last time, and the walk goes on
beside them. Where it finds anything else, what was launched is thrown away: it has read tensors that are alive and of the
shape that it was made for, and written to none that anybody knows.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..bounded import Bounded
from ..newton import USUAL, Newton
from ..runtime import is_capturing
from ..sequence.fingerprint import owner_of
from ..tolerance import Tolerance

if TYPE_CHECKING:  # it needs Triton and NumPy, and takes seconds to import: those wait who have use for it
    from ..fuse.step import FusedStep

#: Steps of which it is known what they reached.
_MOST = 256
_expected = Bounded(_MOST)
#: So often in a row what was launched is thrown away, before a step is not expected to be what it was again.
_MOST_MISSED = 3


class Ready:
    """A solve by kernels, ready to be launched.

    Attributes:
        closures, bases: the tensors that the step closes over, and what the kernels read from
        starts: the leaves of the initial state
        differentiated: whether gradients are wanted
        tolerance, wanted: what is promised, and what the kernels are asked for
        run: the kernels with what they read
        key, known, kind: what is known of such solves, and by which key; and a copy for this one to change
        passes: the first of them, where they were launched
    """

    def __init__(
        self, call: Any, fused: FusedStep, closures: list[Tensor], newton: Newton, guess: Tensor | None, *, loop: bool
    ):
        """
        Args:
            call: a ``fused.Call``
            loop: one step after the other, whatever is known of the kind
        """
        fuse_run, layout = _running(), fused.layout
        self.fused, self.newton, self.closures = fused, newton, closures
        self.bases: list[Tensor] = fused.bases(call.inputs, closures)
        self.starts: list[Tensor] = [leaf.detach() if leaf.requires_grad else leaf for leaf in call.states]
        self.differentiated: bool = torch.is_grad_enabled() and any(
            leaf.requires_grad for leaf in (*call.states, *self.bases)
        )
        self.tolerance, local = _usual(layout.dtype) if newton is USUAL else _tolerances(newton, layout.dtype)
        # A gradient asks for the digits of every state, also of one that dies out.
        self.wanted: Tolerance = local if self.differentiated else self.tolerance
        self.run: Any = fuse_run.Run(fused.kernels, layout.pack_leaves(self.starts), self.bases, call.length)
        self.key, self.known = fused.kind(call.length, newton.chunk, self.wanted, guess is None)
        self.kind: Any = fuse_run.Kind(call.length, call.length) if loop else self.known.copy()
        self.passes: Any = None

    def begin(self, guess: Tensor | None = None, every: int = 1) -> Any:
        """The first passes, launched now if they were not before."""
        if self.passes is None:
            self.passes = _running().begin(self.run, self.kind, self.wanted, guess, every)
        return self.passes


class _Expected:
    """What a step reached the last time.

    Attributes:
        signature: of the call
        missed: how often in a row it was something else then
    """

    __slots__ = ("_closures", "fused", "missed", "signature")

    def __init__(self, fused: FusedStep, signature: tuple[Any, ...], closures: list[Tensor], missed: int):
        self.fused, self.signature, self.missed = fused, signature, missed
        self._closures = [(weakref.ref(each), *_memory_of(each)) for each in closures]

    def is_of(self, fused: FusedStep, signature: tuple[Any, ...], closures: list[Tensor]) -> bool:
        """Whether another call reached the same."""
        same, found = self.fused is fused and self.signature == signature, self.closures()
        return same and found is not None and all(one is other for one, other in zip(found, closures, strict=True))

    def closures(self) -> list[Tensor] | None:
        """None where they are gone, or others by now."""
        found = []
        for reference, *memory in self._closures:
            tensor = reference()
            if tensor is None or _memory_of(tensor) != (*memory,):
                return None
            found.append(tensor)
        return found


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What kernels may read: a tensor that is put away keeps its shape, and may have no memory."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


def begin(call: Any, newton: Newton) -> Ready | None:
    """Launch the kernels that a call is expected to need, if any are. Who then knows what it needs, asks ``taken``."""
    if call.refusal is not None or call.every != 1:
        return None
    expected = _expected.get(_place(call))
    if expected is None or expected.missed >= _MOST_MISSED or expected.signature != call.signature:
        return None
    fused, closures = expected.fused, expected.closures()
    device = fused.layout.device
    away = device.type == "cuda" and device.index != torch.cuda.current_device()
    if closures is None or away or is_capturing(device):
        return None
    ready = Ready(call, fused, closures, newton, None, loop=False)
    if not ready.run.shape.ready[ready.differentiated] or (ready.differentiated and not ready.run.shape.fits):
        return None  # what has yet to be compiled may be refused
    expected.missed += 1
    try:
        ready.begin()
    except (_too_large(), torch.OutOfMemoryError):  # the solve, which finds that, too, may have another way
        return None
    return ready


def taken(call: Any, fused: FusedStep, newton: Newton) -> Ready | None:
    """What was launched for a call, where it is what the call needs: kernels of this step with these settings."""
    ready, call.begun = call.begun, None
    closures = fused.closures(call.reached)
    fits = (
        ready is not None
        and ready.fused is fused
        and ready.newton is newton
        and all(one is other for one, other in zip(ready.closures, closures, strict=True))
    )
    if call.every != 1 or not fused.reads_as_given:
        return None
    if torch.__future__.get_swap_module_params_on_conversion():
        return ready if fits else None  # modules then refuse to convert what somebody has weak references to
    place = _place(call)
    expected = _expected.get(place)
    if fits and expected is not None:
        expected.missed = 0
    elif not fits:
        # One that reached the same twice in a row has settled, launched or not.
        missed = 0 if expected is None or expected.is_of(fused, call.signature, closures) else expected.missed
        _expected.put(place, _Expected(fused, call.signature, closures, missed), owner_of(call.step))
    return ready if fits else None


def _place(call: Any) -> tuple[Any, ...]:
    """What a call is remembered by: its step, and the shape of its state. (All of its signature takes longer to look up than to compare.)"""
    step = call.step
    return id(owner_of(step)), getattr(step, "__func__", None), call.states[0].shape


@cache
def _usual(dtype: torch.dtype) -> tuple[Tolerance, Tolerance]:
    """By default: what is asked for, and that with the digits of every state."""
    return _tolerances(USUAL, dtype)


def _tolerances(newton: Newton, dtype: torch.dtype) -> tuple[Tolerance, Tolerance]:
    tolerance = newton.tolerance(dtype)
    return tolerance, Tolerance(tolerance.atol, tolerance.rtol, local=True)


@cache
def _running() -> Any:
    """Looked up once: that takes as long as a launch."""
    from ..fuse import run

    return run


@cache
def _too_large() -> type[Exception]:
    from triton import OutOfResources

    return OutOfResources


def forget_expected() -> None:
    _expected.clear()
