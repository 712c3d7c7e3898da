"""A loop recorded as a CUDA graph: some steps of it, one after the other, replayed until all are done.

Shapes: L steps, S of them in the graph, B rows, D the packed state.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..sequence import Sequence
from ..sequence.trace import without_cast_cache
from ..tolerance import Tolerance, default_tolerance, measure
from .record import Recorder

#: Steps in a graph, at most: recording takes the time of so many by Python, and a graph of thousands gains nothing more.
_LONGEST = 256
#: Bytes of inputs and states that it keeps, at most, unless a single step has more.
_MOST_BYTES = 2**28


class LoopRecording:
    """S steps of a loop of one kind: inputs and state are copied to where the graph reads them, results from where it writes.

    Args:
        sequence: a loop of this kind, of one step function
        recorder: of the device
    """

    def __init__(self, sequence: Sequence, recorder: Recorder):
        leaves, spec = self._flatten(sequence)
        self._state = torch.empty_like(sequence.initial, memory_format=torch.contiguous_format)
        one = self._state.nbytes + sum(leaf[0].nbytes for leaf in leaves)
        # Parts of equal length: of the last one no more steps are done in vain than there are parts.
        parts = -(-sequence.length // max(1, min(_LONGEST, _MOST_BYTES // max(1, one))))
        self._steps = -(-sequence.length // parts)
        self._states = self._state.new_empty(self._steps, *self._state.shape)
        self._xs = [leaf.new_empty(self._steps, *leaf.shape[1:]) for leaf in leaves]
        self._sequence = sequence.moved_to(self._state, pytree.tree_unflatten(self._xs, spec) if leaves else None)
        self._load(leaves, 0)
        self._state.copy_(sequence.initial)
        with without_cast_cache(sequence.layout.device.type):
            self._replay = recorder.record(self._advance)
        # Graphs know memory by its address. They are replayed for a step whose tensors lie there, whoever made them.
        self._sequence.forget_step()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._state, self._states, *self._xs))

    def _advance(self) -> None:
        """What is recorded."""
        states, state = [], self._state
        for index in range(self._steps):
            state = self._sequence.step(index, state)
            states.append(state)
        torch.stack(states, out=self._states)
        self._state.copy_(state)

    def replay(self, sequence: Sequence) -> Tensor | None:
        """All states [L, B, D]; None where the graph holds another step than this one, however that escaped the trace."""
        found = sequence.initial.new_empty(sequence.length, *self._state.shape)
        leaves, _ = self._flatten(sequence)
        self._state.copy_(sequence.initial)
        for start in range(0, sequence.length, self._steps):
            self._load(leaves, start)
            self._replay()
            part = found[start : start + self._steps]
            part.copy_(self._states[: len(part)])
        # The first step is taken by itself for every solve.
        assert sequence.first is not None
        tolerance = Tolerance(0.0, default_tolerance(found.dtype))
        alike = measure(sequence.first.unsqueeze(0), found[:1], sequence.initial, tolerance)[1]
        finite = torch.isfinite(sequence.first).all(-1)  # else nothing can be told from it
        return found if bool((alike | ~finite).all()) else None

    def _load(self, leaves: list[Tensor], start: int) -> None:
        """The inputs of S steps from one on. Beyond the last step there are none, and what comes of older ones is not looked at."""
        for place, leaf in zip(self._xs, leaves, strict=True):
            part = leaf[start : start + self._steps]
            place[: len(part)].copy_(part)

    @staticmethod
    def _flatten(sequence: Sequence) -> tuple[list[Tensor], pytree.TreeSpec]:
        leaves, spec = pytree.tree_flatten(sequence.xs)
        return ([] if sequence.xs is None else leaves), spec
