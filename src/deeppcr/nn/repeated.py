"""Passes of a recurrent module that repeat, by CUDA graphs of its own.

Between the launches of a short pass a GPU waits for Python. A pass that comes again and again, on tensors of the same shapes, is recorded: the passes
over chunks that sufficed the last times, and the backward pass. All that a call brings is copied to where the graphs read it, weights included, so it does not
matter who made them or where they lie. What kernels note is read after a replay as after launches; where it says anything but that all is
settled, the call goes its ordinary way from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..bounded import Hashed
from ..graphs.cache import layer_histories, recorded_layers
from ..graphs.function import SCRATCH, FunctionRecording, Made, Replayed
from ..newton import Newton
from ..runtime import has_hooks_of_saved_tensors, is_capturing, is_elsewhere, is_out_of_memory, is_transformed
from ..solution import Result, Solution
from ..tolerance import Tolerance
from ..ways.begun import Ready
from ..ways.fused import Call
from ..ways.fused_solution import FusedSolution, plan_of
from ..ways.trusted import is_due
from .arguments import Mode
from .cells import Restarting

if TYPE_CHECKING:
    from ..fuse.found import Found

#: After so many calls of a kind in a row that went well, all by kernels, the next one is recorded.
_OFTEN = 4
#: Bytes of all that is copied for a call, at most: where there are more, the device is busy for longer than Python.
_LARGEST = 2**26
#: A recording has paid for itself after so many replays. So many of a module that have not, and there are no more: its kinds may be too many.
_PAYS, _MOST_UNPAID = 32, 12
#: After so many replays in a row that made more passes than they needed, a recording is made anew.
_SPARE = 256
_GOOD = (Result.CONVERGED, Result.PRECISION_FLOOR)
_PLAIN = (Tensor, nn.Parameter)


@dataclass(eq=False)
class _Owner:
    """A module, of which so many recordings have not paid for themselves."""

    unpaid: int = 0


@dataclass(eq=False)
class _History:
    """How calls of a kind went.

    Attributes:
        newton: their settings, which their key knows by ``id``
        owner: shared by all kinds of a module
        well: how many in a row went well by kernels
        passes: of each solve, the most that these took
        refused: they cannot be recorded
        replays, spare: of the last recording; and how many of them in a row made more passes than were needed
    """

    newton: Newton
    owner: _Owner
    well: int = 0
    passes: tuple[int, ...] = ()
    refused: bool = False
    replays: int = 0
    spare: int = 0


_recording = threading.Lock()  # one thread at a time; another one has its call done meanwhile


class _Given(NamedTuple):
    """What a call brings.

    Attributes:
        tensors: all of it: input, initial states, resets, and the weights
        starts: how many initial states
        resets: whether there are resets
    """

    tensors: list[Tensor]
    starts: int
    resets: bool
    mode: Mode

    def taken_apart(self, module: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
        """Input, initial states, resets, and the weights by layer and direction, from tensors that stand for these."""
        rest = iter(tensors)
        input, starts = next(rest), tuple([next(rest) for _ in range(self.starts)])
        reset = next(rest) if self.resets else None
        weights = [{name.partition("_l")[0]: next(rest) for name in names} for names in module._all_weights]
        return input, module._nested(starts) if starts else None, reset, weights

    def bytes(self, module: Any) -> int:
        """Of all that is copied for a call."""
        input, width = self.tensors[0], module.hidden_size * (2 if module.bidirectional else 1)
        outputs = input.nbytes // max(1, input.shape[-1]) * width
        return outputs + sum(each.nbytes for each in self.tensors)


class Repeating:
    """A call that may be one of many: how such calls went, and the graphs that there are for them."""

    def __init__(self, module: Any, given: _Given, key: Hashed):
        self._module, self._given, self._key = module, given, key

    @staticmethod
    def owner_of(module: Any) -> _Owner | None:
        """None where no call of the module went by kernels: then there is nothing to look up."""
        owner, passed = layer_histories.get(id(module)), module._passed
        if owner is None and (callable(passed) or (passed and isinstance(passed[0], FusedSolution))):
            layer_histories.put(id(module), owner := _Owner(), module)
        return owner

    @staticmethod
    def of(module: Any, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Repeating | None:
        """None where a call may not be replayed, as far as can be said before anything is looked up."""
        if type(input) is not Tensor or input.device.type not in SCRATCH or mode == "sequential":
            return None
        device, newton, attributes = input.device, module.newton, vars(module)
        if (
            is_elsewhere(device)
            or not newton.capture
            or (module.dropout and module.training)
            or "_solve_steps" in attributes  # somebody wants to see the solves
            or is_capturing(device)
            or is_transformed()
            or torch._C._get_tracing_state() is not None
            or torch.is_autocast_enabled(device.type)
            or torch._C._len_torch_dispatch_stack()
            or has_hooks_of_saved_tensors()
        ):
            return None
        starts = () if hx is None else (hx,) if isinstance(hx, Tensor) else hx
        if not isinstance(starts, tuple | list):  # somebody else says what is wrong
            return None
        resets = () if reset is None else (reset,)
        known = module._parameters
        weights = [
            known[name] if name in known else getattr(module, name) for names in module._all_weights for name in names
        ]
        tensors, looks = [input, *starts, *resets, *weights], []
        for each in tensors:
            if type(each) not in _PLAIN or each.device != device:
                return None
            looks.append((each.shape, each.stride(), each.dtype, each.requires_grad, type(each)))
        stream = torch._C._cuda_getCurrentRawStream(input.get_device()) if input.is_cuda else 0
        key = Hashed(
            id(module), id(newton), mode, module.batch_first, attributes.get("mode"), type(hx), len(resets), *looks,
            device, stream, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch._C._get_fp32_precision_getter("cuda", "matmul"),
        )  # fmt: skip
        return Repeating(module, _Given(tensors, len(starts), reset is not None, mode), key)

    def replayed(self) -> Any:
        """What the module returns; None where the call has to go its ordinary way."""
        layer: Layer | None = recorded_layers.get(self._key)
        if layer is None or layer.is_due():
            return None
        tensors, history = self._given.tensors, layer.history
        replayed = layer.recording.call(tensors)
        if replayed is None:
            return None
        returned = layer.nested(replayed.attached(tensors))  # while the device is at work
        found = layer.judged(replayed)
        if found is None:
            self._let_go(history)
            return None
        history.replays += 1
        history.owner.unpaid -= history.replays == _PAYS
        history.spare = 0 if layer.needed_all(found) else history.spare + 1
        if history.spare >= _SPARE:
            self._let_go(history)
        self._module.__dict__["_passed"] = partial(_told, layer.about, found)
        return returned

    def learn(self) -> None:
        """After a call that went its ordinary way: whether such calls are recorded from now on."""
        history: _History | None = layer_histories.get(self._key)
        passes = _passes_of(self._module._passed)
        if passes is None:  # kernels may have been refused
            if history is not None:
                self._let_go(history)
            return
        if history is None:
            history = _History(self._module.newton, self.owner_of(self._module) or _Owner())
            layer_histories.put(self._key, history, self._module)
        history.passes = tuple(map(max, history.passes, passes)) if history.well else passes
        history.well += 1
        if history.well < _OFTEN or history.refused or history.owner.unpaid >= _MOST_UNPAID:
            return
        if recorded_layers.get(self._key) is not None:
            return
        # A pass that a backward pass makes again is not recorded inside of that.
        if torch._C._current_graph_task_id() == -1 and _recording.acquire(blocking=False):
            try:
                self._record(history)
            finally:
                _recording.release()

    def _record(self, history: _History) -> None:
        history.replays = history.spare = 0
        try:
            if self._given.bytes(self._module) > _LARGEST:
                raise RuntimeError("to copy all that a call brings takes as long as Python")
            recorded_layers.put(self._key, Layer(self._module, self._given, history), self._module)
            history.owner.unpaid += 1
        except Exception as error:  # whatever is wrong, calls go their ordinary way
            history.well, history.refused = 0, not is_out_of_memory(error)

    def _let_go(self, history: _History) -> None:
        recorded_layers.take(self._key)
        history.well = history.spare = 0


class _Solve:
    """A solve of one layer in one direction: the passes that are recorded, and what is told of them."""

    def __init__(self, ready: Ready, promised: Tolerance | None):
        """``promised``: the tolerance that states are known within; None where each has all of its digits."""
        self.passes: Any = ready.passes
        self.fused, self.promised, self._differentiated = ready.fused, promised, ready.settled.differentiated
        self._nothing = self.passes.states.new_empty(0)

    def is_due(self) -> bool:
        """Whether the step itself is to bear out the next solve."""
        return is_due(self.fused.solves[self._differentiated] + 1)

    def judged(self, counts: list[int], memory: Tensor) -> Found | None:
        """What came out; None where that is anything but that all lanes are settled."""
        found = self.passes.judged(counts, self.passes.notes.moved_to(memory))
        if found is None or found.unsettled or found.suspected is not None:
            return None
        self.fused.solves[self._differentiated] += 1
        found.states = self._nothing
        return found


class Layer:
    """A pass of a module as CUDA graphs. It holds neither the module nor what was given.

    Args:
        given: to a call
        history: of such calls, which tells the passes to be recorded of each solve

    Attributes:
        about: of each solve, its kernels and the tolerance that its states are known within
    """

    def __init__(self, module: Any, given: _Given, history: _History):
        first, passes = given.tensors[0], history.passes
        self.history: _History = history
        self._alone: bool = len(module._all_weights) == 1 and len(module._widths()) == 1
        self._batch_first: bool = module.batch_first and first.ndim == 3
        self._nest: Callable[[tuple[Tensor, ...]], Any] = module._nested
        self._solves: list[_Solve] = []

        def function(tensors: list[Tensor]) -> Made:
            self._solves = solves = []
            input, hx, reset, weights = given.taken_apart(module, tensors)

            def run(at: int, x: Tensor, start: tuple[Tensor, ...], reset: Tensor | None, _: None) -> Any:
                states, solve = _launched(module, given.mode, weights[at], x, start, reset, passes[at])
                solves.append(solve)
                return states, None

            output, last = module._by_layers(input, hx, reset, run)
            ends = [] if self._alone else [last] if isinstance(last, Tensor) else list(last)
            notes = [each.passes.notes for each in solves]
            counts = [each.unsettled for each in notes]
            whole = counts[0] if len(counts) == 1 else torch.cat(counts)
            return Made([output, *ends], [each.memory for each in notes], whole)

        self.recording: FunctionRecording = FunctionRecording(
            function, given.tensors, SCRATCH[first.device.type](first.device)
        )
        self.bytes: int = self.recording.bytes
        self.about: list[tuple[Any, Tolerance | None]] = [(each.fused, each.promised) for each in self._solves]

    def is_due(self) -> bool:
        """Whether one of the steps itself is to bear out the next solve."""
        return any(each.is_due() for each in self._solves)

    def judged(self, replayed: Replayed) -> list[Found] | None:
        """What the solves came to; None where one of them is not settled."""
        found, counts = [], replayed.counts()
        for solve, memory in zip(self._solves, replayed.notes, strict=True):
            size = len(counts) if len(self._solves) == 1 else solve.passes.notes.unsettled.numel()
            of_solve = solve.judged(counts[:size], memory)
            if of_solve is None:
                return None
            found.append(of_solve)
            counts = counts[size:]
        return found

    def needed_all(self, found: list[Found]) -> bool:
        """Whether one of the solves needed all passes that are recorded."""
        return any(each.passes >= solve.passes.done for each, solve in zip(found, self._solves, strict=True))

    def nested(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        """As the module returns them."""
        output, *last = outputs
        if self._alone:  # the last states are a copy, which takes less time here than its derivative in a graph
            last = [(output[:, -1:].transpose(0, 1) if self._batch_first else output[-1:]).clone()]
        return output, self._nest(tuple(last))


def _launched(
    module: Any, mode: Mode, weights: dict[str, Tensor], x: Tensor, start: tuple[Tensor, ...], reset: Tensor | None, passes: int
) -> tuple[Any, _Solve]:  # fmt: skip
    """A solve of one layer in one direction by so many passes, which nobody waits for, and its states: as far as ``solve_fused`` goes before it looks."""
    from ..fuse import back

    cell, xs = module._cell(weights), module._cell_type.project(x, weights)
    if reset is not None:
        cell, xs = Restarting(cell), (xs, reset)
    newton = module._newton_in(mode)
    call = Call(cell, module._nested(start), xs, None, 1, short=True)
    fused, _ = call.known
    ready = Ready(call, fused, fused.closures(call.reached), newton, None, loop=False)
    ready.kind.passes = passes
    begun, settled, layout = ready.begin(), ready.settled, fused.layout
    promised = None if settled.differentiated or not newton.stop.promises else settled.wanted
    if begun.done < 1 or (promised is not None and begun.notes.known is None):
        raise RuntimeError("what is known of its states cannot be told from a recording")
    leaves = layout.leaves(begun.states)
    if settled.differentiated:
        leaves = back.Apply.of(
            ready.run, layout, (begun.states, back.chunk_of(ready.run, begun.chunk)), call.states, ready.bases
        )
    return layout.nest(leaves), _Solve(ready, promised)


def _passes_of(passed: Any) -> tuple[int, ...] | None:
    """Of each solve of a pass that went well by kernels; else None."""
    passes = []
    for each in passed if isinstance(passed, tuple) else ():
        late = each._late if isinstance(each, FusedSolution) else None
        if late is None or each.result not in _GOOD or not late[0].passes or late[0].unsettled:
            return None
        passes.append(late[0].passes)
    return tuple(passes) or None


def _told(about: list[tuple[Any, Tolerance | None]], found: list[Found]) -> tuple[Solution, ...]:
    """How solves went that were replayed."""
    solutions = []
    for (fused, promised), each in zip(about, found, strict=True):
        plan = plan_of(fused, each.chunk, each.length)
        plan.note("replayed as a CUDA graph")
        solution = FusedSolution(states=None, z0=None, plan=plan)
        solution.tell(None, fused, each, Result.CONVERGED, tolerance=promised, dropped=None)
        solutions.append(solution.in_short())
    return tuple(solutions)
