"""A solve recorded once, as CUDA graphs, and replayed on other inputs.

On a GPU the operations of an iteration take less time than Python takes to ask for them. Four parts are recorded: the
first iteration, another iteration, the same where states were called back, and the check of the result. (Of a fixed
number of iterations nothing is called back.) Replays work on memory that stays where it is, so inputs are copied there
first and results copied from there. A recording cannot branch: it holds the iteration as it mostly goes,
and whatever calls for one of the safeguards hands the solve over to the general iteration, from the start.

Shapes: L steps in N chunks of C, B rows, D the packed state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..newton import Newton
from ..newton.iteration import Iteration, Outcome
from ..sequence import Sequence
from ..sequence.trace import without_cast_cache
from ..solution import Plan, Result
from ..tolerance import measure
from .record import Recorder
from .straight import Noting

#: What takes more iterations may need one of the safeguards of the general iteration.
_MOST_ITERATIONS = 10
#: Larger blocks keep a GPU busy whatever Python does, and their memory would never be given back.
_LARGEST_BLOCKS = 2**28


class Recording:
    """One kind of solve, recorded.

    Args:
        newton, sequence, ends, chunk: of a solve of this kind; ends are the unknowns to start from, [N, B, D]
        recorder: of the device
        structure: a number for all recordings that differ only in what the step closes over

    Attributes:
        misses: solves in a row that had to be handed over
    """

    def __init__(
        self, newton: Newton, sequence: Sequence, ends: Tensor, chunk: int, recorder: Recorder, structure: int
    ):
        self.structure: int = structure
        self.misses: int = 0
        # Each iteration makes one more chunk exact: after all of them there is nothing left to change.
        chunks = -(-sequence.length // chunk)
        self._fixed = None if newton.stop.fixed is None else min(newton.stop.fixed, chunks)
        self.limit: int = min(_MOST_ITERATIONS, newton.max_iterations)
        newton = replace(newton, jacobian=newton.jacobian.for_recording(sequence))
        self._newton, self._chunk, self._plan = newton, chunk, Plan(chunk=chunk)
        layout = sequence.layout
        self._kept: dict[str, Tensor] = {}
        self._initial = torch.empty_like(sequence.initial, memory_format=torch.contiguous_format)
        self._first_state = torch.empty_like(self._initial)
        self._ends = torch.empty(ends.shape, dtype=ends.dtype, device=ends.device)
        leaves, spec = pytree.tree_flatten(sequence.xs)
        self._xs = [torch.empty_like(_unexpanded(leaf)) for leaf in leaves if leaf is not None]
        xs = None
        if self._xs:
            xs = pytree.tree_unflatten([a.expand(b.shape) for a, b in zip(self._xs, leaves, strict=True)], spec)
        self._sequence = sequence.moved_to(self._initial, xs)
        self._verify = newton.jacobian.verifier(self._sequence)
        most = max(_MOST_ITERATIONS, self._fixed or 0)
        self._updates = torch.zeros(most, layout.rows, dtype=torch.float64, device=layout.device)
        self._count = torch.zeros(1, dtype=torch.long, device=layout.device)

        self._load(sequence, ends)
        with without_cast_cache(layout.device.type):
            self._first = recorder.record(self._begin)
            self._first()  # a graph does nothing while it is captured, and the next part works on what this one leaves
            self._afresh = recorder.record(lambda: self._iterate(None))
            self._again = self._afresh
            if self._fixed is None:
                self._again = recorder.record(lambda: self._iterate(self._kept["values"]))
            self._last = recorder.record(self._finish)
        # Graphs know memory by its address. They are replayed for a step whose tensors lie there, whoever made them.
        self._sequence.forget_step()

    @property
    def bytes(self) -> int:
        kept = [self._initial, self._ends, *self._xs, *self._kept.values(), self._states]
        return sum(tensor.nbytes for tensor in kept)

    # What is recorded.

    def _begin(self) -> None:
        self._iteration = Noting(self._newton, self._sequence, self._ends, self._chunk, self._plan)
        self._count.zero_()
        if self._verify is not None:
            starts, steps = self._iteration.starts(), self._sequence.chunk_steps(self._chunk)[0]
            self._iteration.needs_safeguard(self._verify(starts, steps))
        self._iterate(None)

    def _iterate(self, values: Tensor | None) -> None:
        """One iteration and, where something is tested, the look at it.

        Args:
            values: the chunks' ends as they come out, from the look before
        """
        iteration, progress = self._iteration, self._iteration.progress
        iteration.update(*iteration.linearise(values))
        assert iteration.blocks is not None
        if self._sequence.evaluation != "vmap":  # thousands of steps, one by one
            raise RuntimeError(f"its steps are evaluated by {self._sequence.evaluation}")
        if iteration.blocks.data.nbytes > _LARGEST_BLOCKS:
            raise RuntimeError(f"its blocks take {iteration.blocks.data.nbytes / 2**20:.0f} MiB")
        if self._fixed is None:
            values = iteration.evaluate()
            iteration.look(values)
            self._keep("values", values)
            self._keep("status", torch.stack([progress.active.any(), iteration.unusual, iteration.stale]))
        self._updates.index_copy_(0, self._count, progress.updates[-1].unsqueeze(0))
        self._count += 1
        progress.carry(self._keep)
        iteration.ends = iteration.values = self._keep("ends", iteration.ends)
        iteration.unusual = self._keep("unusual", iteration.unusual)
        iteration.errors, iteration.sizes = self._keep("errors", iteration.errors), self._keep("sizes", iteration.sizes)
        iteration.blocks = None

    def _finish(self) -> None:
        iteration, sequence, newton = self._iteration, self._sequence, self._newton
        states = iteration.states()
        previous = torch.cat([self._initial.unsqueeze(0), states[:-1]])
        values = sequence.values(previous, range(sequence.length))
        residual, held, drift = measure(values, states, self._initial, newton.tolerance(states.dtype))
        progress = iteration.progress
        codes = progress.codes
        if newton.stop.by_residual:
            held = torch.isfinite(residual)
        elif self._fixed is None:
            held = held & (drift <= 1)  # whether derivatives know of that, the general iteration asks
        else:
            held = ~iteration.unusual
            codes = torch.where(progress.active, Result.ITERATIONS_DONE.severity, codes)
        held = held & self._begins_alike(states)
        self._states = states
        self._keep("residual", residual)
        hidden = torch.zeros_like(held)
        if newton.stop.promises and not progress.tolerance.local:
            hidden = progress.tolerance.hides(iteration.sizes, self._initial, iteration.errors)
        verdict = torch.stack([held.all().long(), hidden.any().long(), progress.iterations.amax()])
        self._keep("verdict", torch.cat([verdict, codes]))
        progress.carry(self._keep)  # else a replay would begin with what was left by the rehearsal of this

    def _begins_alike(self, states: Tensor) -> Tensor:
        """[B]: whether the first step, taken by itself for every solve, leads to the recording's first state.

        Where it does not, the recording holds another step than the one that was given, however that escaped the trace.
        """
        tolerance = self._newton.tolerance(states.dtype)
        return measure(self._first_state.unsqueeze(0), states[:1], self._initial, tolerance).held

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor, always in the same place."""
        if name not in self._kept:
            self._kept[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return self._kept[name].copy_(tensor)

    # What is done for each solve.

    def _load(self, sequence: Sequence, ends: Tensor) -> None:
        self._initial.copy_(sequence.initial)
        self._first_state.copy_(sequence.first)
        self._ends.copy_(ends)
        for place, leaf in zip(self._xs, pytree.tree_leaves(sequence.xs) if self._xs else [], strict=True):
            place.copy_(_unexpanded(leaf))

    def replay(self, sequence: Sequence, ends: Tensor) -> tuple[Outcome, Tensor] | None:
        """The outcome and its residual [B]; None where the general iteration must take over."""
        self._load(sequence, ends)
        self._first()
        if self._fixed is None and not self._go_on_until_done():
            return None
        for _ in range(1, self._fixed or 1):
            self._afresh()
        self._last()
        held, suspected, count, *codes = self._kept["verdict"].tolist()
        results = [_RESULTS[code] for code in codes]
        if not held or any(result not in _GOOD for result in results):
            return None
        states = self._looked_at(sequence) if suspected else self._states.clone()
        if states is None:
            return None
        outcome = Outcome(
            states=states,
            results=results,
            iterations=self._kept["iterations"].clone(),
            exact_steps=torch.full_like(self._kept["iterations"], sequence.length),
            updates=self._updates[:count].clone(),
        )
        return outcome, self._kept["residual"].clone()

    @torch.no_grad()
    def _looked_at(self, sequence: Sequence) -> Tensor | None:
        """The states, corrected by closer looks than a recording holds; None where what seems to be hidden is more than noise."""
        iteration = Iteration(self._newton, sequence, self._kept["ends"].clone(), self._chunk, Plan())
        every, ends = torch.ones_like(iteration.progress.active), iteration.ends
        values, blocks = iteration.linearise()
        errors = iteration.solve(blocks, values - ends)
        hidden, nearest = iteration.find_hidden(every, ends, values, errors, blocks)
        if hidden.any():
            return None
        iteration.replace(nearest)  # as ``look`` does
        return iteration.states()

    def _go_on_until_done(self) -> bool:
        """Whether the rows finished without a safeguard of the general iteration."""
        count = 1
        while True:
            active, unusual, stale = self._kept["status"].tolist()
            if unusual or not active or count == self.limit:
                return not (unusual or active)
            (self._afresh if stale else self._again)()
            count += 1

    def describe(self, plan: Plan) -> None:
        plan.chunk, plan.linear = self._plan.chunk, self._plan.linear
        plan.derivative = self._newton.jacobian.name or self._sequence.derivative
        for note in self._sequence.all_notes:
            plan.note(note)
        plan.note("replayed as a CUDA graph")


_RESULTS = list(Result)
_GOOD = (Result.CONVERGED, Result.ITERATIONS_DONE)


def _unexpanded(leaf: Tensor) -> Tensor:
    """A leaf without the copies of itself that it only seems to hold."""
    apparent = [stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)]
    leaf = leaf.detach()
    return leaf[tuple(slice(0, 1) if each else slice(None) for each in apparent)] if any(apparent) else leaf
