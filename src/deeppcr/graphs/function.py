"""A function of tensors, and its gradients, as two CUDA graphs: for a layer whose call repeats.

A call copies its tensors to where the graphs read them, replays one, and copies what came out to tensors that are the caller's; a backward pass
likewise. What it reads of the forward pass lies in memory of the graphs. As long as somebody may ask for it, the graphs are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..runtime import apply_directly, as_written, check_backward
from .record import RECORDING, Scratch

#: By type of device, what graphs are recorded by. Elsewhere there is nothing to gain.
SCRATCH: dict[str, Callable[[torch.device], Any]] = {"cuda": Scratch}
#: Bytes from which on a tensor is copied by itself: a launch for all leaves most of a GPU idle that has one large tensor to copy.
_LARGE = 2**20


class Made(NamedTuple):
    """What a function makes of tensors.

    Attributes:
        outputs: what it is asked for, differentiable
        notes: what it notes beside, of the dtype of the outputs as a rule, which takes least time to copy
        counts: integers, which the host waits for
    """

    outputs: list[Tensor]
    notes: list[Tensor]
    counts: Tensor


class FunctionRecording:
    """A function, recorded.

    Args:
        function: makes ``Made`` from a list of tensors, by operations that ask the host for nothing
        tensors: what it was called with before; those of later calls are like them
        scratch: a stream, and memory of its own: what a graph writes to between a forward pass and its backward pass is no other graph's

    Attributes:
        bytes: of memory that it has for itself
        differentiated: whether a backward pass may come
    """

    def __init__(self, function: Callable[[list[Tensor]], Made], tensors: Sequence[Tensor], scratch: Any):
        self._turn = threading.Lock()
        self._waiting: TensorWeakRef | None = None  # what a backward pass holds that may yet come
        self.differentiated: bool = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        with torch.inference_mode(False):  # a graph's memory is written to in any mode
            self._given_to = [_place_of(each) for each in tensors]
        self._places = [each.detach() for each in self._given_to]
        self._wanted = [each for each in self._given_to if each.requires_grad] if self.differentiated else []
        self._cotangents: list[Tensor] = []
        self._made: Made
        self._counts: Tensor | None = None  # on the host, where a graph writes them
        self._written = torch.cuda.Event() if tensors[0].is_cuda else None
        self._gradients: tuple[Tensor | None, ...]

        # Functions of here: what is recorded is not to keep what the function reaches.
        def forwards() -> None:
            self._made = made = function(self._given_to)
            if self._counts is None:
                # On the host, whatever the default device is.
                how: dict[str, Any] = {"dtype": made.counts.dtype, "device": "cpu", "pin_memory": made.counts.is_cuda}
                self._counts = torch.empty(made.counts.shape, **how)
            self._counts.copy_(made.counts, non_blocking=True)

        def backwards() -> None:
            # What the outputs were made of is kept, also for a second backward pass: no graph takes its memory.
            self._gradients = torch.autograd.grad(
                self._made.outputs, self._wanted, self._cotangents, retain_graph=True, allow_unused=True
            )

        with RECORDING, as_written():  # a rehearsal must not get into what another thread captures
            with torch.no_grad():
                _copy_all(self._places, tensors)
            scratch.call(forwards)
            if self.differentiated:
                self._cotangents = [torch.zeros_like(each) for each in self._made.outputs]
                scratch.call(backwards)
            self._go = scratch.record(forwards)
            self._come_back = scratch.record(backwards) if self.differentiated else None
        self._are_zero = [True] * len(self._cotangents)
        self.bytes: int = scratch.bytes + sum(each.nbytes for each in (*self._places, *self._cotangents))

    def call(self, tensors: Sequence[Tensor]) -> Replayed | None:
        """None where somebody else has the graphs: another thread, or a backward pass that is yet to come. Nobody has waited for the device."""
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if self._waiting is not None and self._waiting() is not None:
                return None
            with torch.no_grad():
                _copy_all(self._places, tensors)
                self._go()
                if self._written is not None:
                    self._written.record()
                made = self._made
                copies = _copied([*made.outputs, *made.notes])
            found = Replayed(self, copies[: len(made.outputs)], copies[len(made.outputs) :])
            self._waiting = TensorWeakRef(found.hold)
            return found
        finally:
            self._turn.release()

    def counts(self) -> list[int]:
        """Of the last call, waited for."""
        if self._written is not None:
            self._written.synchronize()
        assert self._counts is not None
        return self._counts.tolist()

    def pull_back(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all tensors, from those of the outputs: None where they are nothing."""
        with self._turn:
            into, cotangents = [], []
            for at, (place, each) in enumerate(zip(self._cotangents, given, strict=True)):
                if each is not None:
                    into.append(place)
                    cotangents.append(each)
                elif not self._are_zero[at]:
                    place.zero_()
                self._are_zero[at] = each is None
            if into:
                _copy_all(into, cotangents)
            assert self._come_back is not None
            self._come_back()
            copies = iter(_copied([each for each in self._gradients if each is not None]))
        found = iter([None if each is None else next(copies) for each in self._gradients])
        return [next(found) if each.requires_grad else None for each in self._given_to]


class Replayed:
    """What a call comes to; the device is still at work.

    Attributes:
        outputs, notes: the caller's own
        hold: as long as it lives, the graphs are taken
    """

    __slots__ = ("_recording", "hold", "notes", "outputs")

    def __init__(self, recording: FunctionRecording, outputs: list[Tensor], notes: list[Tensor]):
        self._recording = recording
        self.outputs: list[Tensor] = outputs
        self.notes: list[Tensor] = notes
        self.hold: Tensor = torch.empty(0, device="cpu")

    def counts(self) -> list[int]:
        """Waited for."""
        return self._recording.counts()

    def attached(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs as functions of the tensors that they were made of."""
        if not self._recording.differentiated:
            return tuple(self.outputs)
        return apply_directly(_Apply, (self._recording, self.hold, self.outputs), *tensors)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replayed: tuple[FunctionRecording, Tensor, list[Tensor]], *tensors: Tensor) -> Any:
        ctx.recording, hold, outputs = replayed
        ctx.set_materialize_grads(False)
        # Tensors, so that who changes them before a backward pass is told. And what is saved is let go of when no backward pass can
        # come any more, though the node itself may live on.
        ctx.save_for_backward(hold, *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018 - which raises where they were changed, or let go of
        for each in grad_outputs:
            if each is not None:
                check_backward(each)
        return None, *ctx.recording.pull_back(grad_outputs)


def _place_of(tensor: Tensor) -> Tensor:
    """Memory for a tensor like this, which kernels are found by as by the tensor itself."""
    place = torch.empty_like(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(place, tensor.requires_grad)
    return place.requires_grad_(tensor.requires_grad)


def _copy_all(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Tensors to where others lie: small ones by one launch, if they have one dtype."""
    to, small = [], []
    for place, each in zip(places, tensors, strict=True):
        if place.nbytes >= _LARGE:
            place.copy_(each)
        else:
            to.append(place)
            small.append(each)
    if small:
        torch._foreach_copy_(to, small)  # pyright: ignore[reportPrivateImportUsage]


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all."""
    copies = [torch.empty_like(each) for each in tensors]
    _copy_all(copies, tensors)
    return copies
