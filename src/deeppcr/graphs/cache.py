"""Which solves are captured: those that repeat, as far as a trace of their step can tell, and loops that are asked for as graphs.

A recording stands for every solve of its kind: same shapes and settings, and the same trace of the step, which knows all
tensors and numbers that the step closes over. The first solve of a kind runs as ever; the second is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..bounded import Bounded
from ..newton import Loop, Newton
from ..newton.guess import Guess
from ..newton.iteration import Outcome, first_ends
from ..runtime import declares, is_capturing, is_out_of_memory
from ..sequence import Sequence
from ..solution import Plan
from .loop import LoopRecording
from .record import RECORDERS, Recorder
from .replay import Recording

#: Recordings that are kept, and bytes of inputs and results in all of them.
_MOST_KEPT, _MOST_BYTES = 16, 2**31
#: Kinds of solves that are remembered.
_MOST_SEEN = 1024
#: Prepared runs of samplers that are kept, and bytes of buffers in all of them.
_MOST_PREPARED, _MOST_PREPARED_BYTES = 24, 2**33
#: Passes of layers that are kept as graphs, and bytes of memory that all of them have for themselves.
_MOST_LAYERS, _MOST_LAYERS_BYTES = 16, 2**30
#: Recordings that differ only in what the step closes over, and have not been replayed since.
_MOST_IDLE = 4
#: So many solves in a row that had to be handed over, and their kind is no longer captured.
_MOST_MISSES = 3

#: Settings of the process that choose how numbers are multiplied.
_ARITHMETIC = (
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    (torch.backends.cudnn, "fp32_precision"),
    (torch.backends.cudnn.conv, "fp32_precision"),  # pyright: ignore[reportAttributeAccessIssue]
    (torch.backends.cudnn.rnn, "fp32_precision"),  # pyright: ignore[reportAttributeAccessIssue]
)


def may_capture(solver: Newton | Loop, z0: Any) -> bool:
    """Whether a solve may be captured, as far as can be said before its step is looked at."""
    first = next(iter(pytree.tree_leaves(z0)), None)
    return (
        isinstance(solver, Newton)
        and solver.capture
        and solver.quadratic
        and isinstance(first, Tensor)
        and first.device.type in RECORDERS
        and all(declares(each, "repeatable") for each in (solver.jacobian, solver.linear, solver.stop))
        and not _are_operations_watched()
        and not is_capturing(first.device)
    )


def _are_operations_watched() -> bool:
    """Whether somebody wants to see the operations, which a replay does not show."""
    return torch._C._len_torch_dispatch_stack() > 0


class CapturedSolves:
    """The recordings of a process, the least recently used forgotten first; safe for threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._recorders: dict[torch.device, Recorder] = {}
        self._recordings = Bounded(_MOST_KEPT, _MOST_BYTES)
        self._seen = Bounded(_MOST_SEEN)  # by hash: why such a solve is not captured, or ""
        self._idle = Bounded(_MOST_SEEN)  # by hash of a structure: recordings less replays

    def clear(self) -> None:
        with self._lock:
            for memory in (self._recorders, self._recordings, self._seen, self._idle):
                memory.clear()

    def __len__(self) -> int:
        return len(self._recordings)

    @torch.no_grad()
    def solve(self, newton: Newton, sequence: Sequence, guess: Guess, plan: Plan) -> tuple[Outcome, Tensor] | None:
        """The outcome and its residual [B]; None where the general iteration must do it, and the plan says why."""
        refusal = _complete_trace(newton, sequence)
        if refusal is None:
            chunk = newton.choose_chunk(sequence, plan)
            found = self._solve(newton, sequence, guess, chunk, plan)
            if not isinstance(found, str):
                return found
            refusal = found
        plan.note(f"not captured: {refusal}")
        return None

    def _solve(
        self, newton: Newton, sequence: Sequence, guess: Guess, chunk: int, plan: Plan
    ) -> tuple[Outcome, Tensor] | str:
        assert sequence.trace is not None
        kind = _kind_of(newton, sequence, chunk)
        key = (kind, sequence.trace.key)
        number = hash(key)
        refusal = self._seen.get(number)
        if refusal is None:
            self._seen.put(number, "")
            return "the first of its kind"
        if refusal:
            return refusal
        ends = first_ends(sequence, guess, chunk)
        try:
            recorder = self._recorder(sequence.layout.device)
            with recorder.turn():
                recording = self._recordings.get(key)
                if recording is None:
                    structure = hash((kind, sequence.trace.structure))
                    if self._idle.get(structure, 0) >= _MOST_IDLE:
                        return "what the step closes over is replaced from solve to solve; hand it over in xs"
                    recording = Recording(newton, sequence, ends, chunk, recorder, structure)
                    self._count(structure, 1)
                    self._recordings.put(key, recording)
                else:
                    self._count(recording.structure, -1)
                found = recording.replay(sequence, ends)
        except Exception as error:  # whatever is wrong, the general iteration says it better
            self._forget(key, str(error).strip().split("\n")[0][:200])
            return self._seen.get(number, "")
        if found is None:
            recording.misses += 1
            if recording.misses >= _MOST_MISSES:
                self._forget(key, "such solves need the safeguards of the general iteration")
            return "handed over to the general iteration"
        recording.misses = 0
        recording.describe(plan)
        return found

    @torch.no_grad()
    def loop(self, sequence: Sequence) -> Tensor:
        """All states [L, B, D], one step after the other, by a graph that is recorded at once where there is none.

        Raises:
            ValueError, RuntimeError: there are no graphs on this device, or of this step, and why
        """
        device, trace = sequence.layout.device, sequence.trace
        if device.type not in RECORDERS:
            raise ValueError(
                f'solver: Loop(by="graph") needs a CUDA device, and z0 is on {device}. Loop() runs everywhere'
            )
        if trace is None:
            raise _not_recorded("it is not one step function, or cannot be traced")
        if trace.refusal is not None or _are_operations_watched():
            raise _not_recorded(trace.refusal or "somebody watches its operations (a TorchDispatchMode)")
        key = (LoopRecording, _surroundings(sequence), trace.key)
        recorder = self._recorder(device)
        with recorder.turn():
            recording = self._recordings.get(key)
            found = None if recording is None else recording.replay(sequence)
            if found is None:  # or what it does has changed behind the trace, so that it is recorded anew
                try:
                    recording = LoopRecording(sequence, recorder)
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise
                    raise _not_recorded(str(error).strip().split("\n")[0][:200]) from error
                self._recordings.put(key, recording)
                found = recording.replay(sequence)
        if found is None:
            self._recordings.take(key)
            raise _not_recorded("a recording of it gives another result than a call")
        return found

    def _recorder(self, device: torch.device) -> Recorder:
        with self._lock:
            if device not in self._recorders:
                self._recorders[device] = RECORDERS[device.type](device)
            return self._recorders[device]

    def _count(self, structure: int, more: int) -> None:
        self._idle.put(structure, max(0, self._idle.get(structure, 0) + more))

    def _forget(self, key: Hashable, reason: str) -> None:
        self._recordings.take(key)
        self._seen.put(hash(key), reason or "it failed")


def _complete_trace(newton: Newton, sequence: Sequence) -> str | None:
    """Add to the trace of a step what else a recording depends on. Returns why the solve cannot be captured, or None."""
    trace = sequence.trace
    if trace is None:
        return "its step cannot be traced"
    if sequence.evaluation != "vmap":
        return f"its steps are evaluated by {sequence.evaluation}"
    if trace.refusal is None:
        try:
            newton.jacobian.trace(sequence)
            # No residual shows then that derivatives are other ones. Those that are given were traced, and tracing is dear.
            if newton.stop.fixed is not None and not newton.jacobian.given:
                sequence.trace_derivative()
        except Exception:  # if it fails without a trace too, its error says why
            return "its Jacobian cannot be traced"
    return trace.refusal


def _not_recorded(reason: str) -> RuntimeError:
    return RuntimeError(
        f'solver: Loop(by="graph") cannot record this step as a CUDA graph: {reason}. Loop() takes any step'
    )


def _kind_of(newton: Newton, sequence: Sequence, chunk: int) -> Hashable:
    """All but the trace that the recording of a parallel solve depends on."""
    jacobian = newton.jacobian
    return (
        (chunk, newton.tolerance(sequence.layout.dtype), newton.max_iterations, newton.linear, newton.stop),
        (type(jacobian), *jacobian.settings),
        _surroundings(sequence),
    )


def _surroundings(sequence: Sequence) -> Hashable:
    """What every recording depends on beside the trace: shapes, and settings of the process."""
    layout = sequence.layout
    leaves, spec = pytree.tree_flatten(sequence.xs)
    xs = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves if leaf is not None]
    return (layout, sequence.length, spec, *xs), (torch.is_inference_mode_enabled(), *arithmetic(layout.device))


def arithmetic(device: torch.device) -> tuple[Any, ...]:
    """Settings of the process that choose how numbers are multiplied on a device."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    settings = [getattr(where, name) for where, name in _ARITHMETIC]
    return (autocast, torch.are_deterministic_algorithms_enabled(), *settings)


captured_solves: CapturedSolves = CapturedSolves()
#: What ``deeppcr.diffusion`` keeps from run to run, with the graphs of its iterations. A run takes it and puts it back.
prepared_samplers: Bounded = Bounded(_MOST_PREPARED, _MOST_PREPARED_BYTES)
#: Of ``deeppcr.nn``, by module and kind of call: passes of recurrent modules that repeat.
recorded_layers: Bounded = Bounded(_MOST_LAYERS, _MOST_LAYERS_BYTES)
#: How such calls went.
layer_histories: Bounded = Bounded(_MOST_SEEN)


def forget_graphs() -> None:
    """Forget all captured solves, those of ``deeppcr.diffusion`` and ``deeppcr.nn`` too, and give back their memory."""
    captured_solves.clear()
    prepared_samplers.clear()
    recorded_layers.clear()
    layer_histories.clear()
