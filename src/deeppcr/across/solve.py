"""``solve(..., mesh=)``: a loop whose steps are spread over ranks.

Shapes: L steps on this rank, which may be none; B rows, D the packed state.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..gradient import UNDETERMINED, Gradient, Implicit, refuse_gradients
from ..jacobian import DiagonalJacobian
from ..newton import Loop, Newton
from ..newton.certificate import steps_have_derivative
from ..newton.guess import Guess, as_guess
from ..newton.iteration import Outcome
from ..runtime import is_capturing
from ..sequence.words import in_words
from ..solution import Dropped, Plan, Result, Solution, first_not_finite, loop_on, settle, worst_of, worst_rows
from ..tolerance import measure
from ..warned import warn
from ..ways.judged import Judged, drifting, solution_of, without_claim, without_derivative
from ..ways.looped import Given
from .adjoint import AdjointOver
from .iteration import Iteration
from .kernels import Kernels
from .part import Part


def solve_over(
    ranks: Ranks, loop: Given, solver: Newton | Loop, guess: Any, gradient: Gradient, on_failure: str
) -> Solution:
    """The solution of the whole, with the states of this rank. Arguments as of ``deeppcr.solve``; xs, length and guess are this rank's."""
    part, plan = Part(ranks, *loop), Plan()
    with part.trouble.kept():
        _refuse(part, solver, gradient)
        start = as_guess(guess, loop.z0, loop.xs) if part.sequence is not None else None
    told = ranks.agree(part.trouble.take(), _settings_of(solver, on_failure))
    if len(set(told)) > 1:
        raise ValueError("solver, on_failure: must be the same on every rank, and they differ")
    plan.note(
        f"over {ranks.count} ranks: steps {part.offset + 1} to {part.offset + part.length} of {part.total} on this one"
    )
    if isinstance(solver, Loop):
        found = _Solve(part, Newton(), plan).by_loop()
    else:
        kernels: Kernels | str = "no steps"
        with part.trouble.kept():
            if part.sequence is not None:
                kernels = Kernels.of(solver, *loop)
        found = _Solve(part, solver, plan).in_parallel(start, on_failure, kernels)
    # Where modules of a step hold something else than after its first call, all ranks raise.
    with part.trouble.kept():
        if part.sequence is not None:
            part.sequence.stop_watching()
    ranks.agree(part.trouble.take())
    return found


def _settings_of(solver: Newton | Loop, on_failure: str) -> int:
    """A number for what all ranks have to be told alike: else each would wait for messages that others never send."""
    plain = (bool, int, float, str, type(None))
    said = {name: each if isinstance(each, plain) else type(each).__name__ for name, each in vars(solver).items()}
    return zlib.crc32(repr((type(solver).__name__, said, on_failure)).encode())


def _refuse(part: Part, solver: Newton | Loop, gradient: Gradient) -> None:
    if not isinstance(gradient, Implicit):
        raise ValueError(f"gradient: over ranks there is Implicit() alone, got {gradient!r}")
    if isinstance(solver, Loop) and solver.by != "python":
        raise ValueError(f"solver: over ranks the loop is Loop(), got {solver!r}")
    if is_capturing(part.layout.device):
        raise RuntimeError(
            "mesh: a solve over ranks looks at values, and while a CUDA graph is captured there are none"
        )


@dataclass(frozen=True)
class _Judged(Judged[AdjointOver]):
    """An outcome that the steps themselves have borne out; ``residual`` and ``known`` are of the whole."""

    known: Tensor


class _Solve:
    def __init__(self, part: Part, newton: Newton, plan: Plan):
        self.part, self.newton, self.plan = part, newton, plan
        self.tolerance = newton.tolerance(part.layout.dtype)

    def in_parallel(self, guess: Guess | None, on_failure: str, kernels: Kernels | str) -> Solution:
        part, found = self.part, self._agree_on_chunks(kernels)
        newton = self.newton
        iteration = Iteration(newton, part, guess, self.plan.chunk, self.plan, found)
        outcome = iteration.run()
        self.plan.derivative = newton.jacobian.name or (part.sequence.derivative if part.sequence else "none")
        judged = self._judge(outcome, iteration.entry, iteration.peak, iteration.sizes)
        if any(result.failed or result is Result.UNCERTIFIED for result in judged.results):
            if on_failure != "loop":
                judged = replace(judged, outcome=self._located(judged.outcome, iteration.entry))
            judged = settle(
                judged, on_failure, lambda failed: self._looped(failed.outcome, Result.FINISHED_BY_LOOP), self._describe
            )
        failed = on_failure == "return" and any(result.failed for result in judged.results)
        return self._solution(judged, failed=failed, promised=newton.promised(part.layout.dtype))

    def by_loop(self) -> Solution:
        part = self.part
        states = part.initial.detach().expand(part.length, -1, -1)
        outcome = Outcome.of_loop(states, Result.NOT_CONVERGED, part.layout.rows, 0)
        judged = self._looped(outcome, Result.LOOP)
        if Result.NON_FINITE in judged.results:
            warn(self._describe(judged))
        return self._solution(judged, failed=False, promised=None)

    def _agree_on_chunks(self, kernels: Kernels | str) -> Kernels | None:
        """How many steps a chunk has: the same on all ranks, and so many that blocks fit the memory of each. Chunks are rolled out by the
        kernels of the step where all ranks that have steps have them.

        Args:
            kernels: of this rank, or why there are none
        """
        part, newton, plan = self.part, self.newton, self.plan
        chunk = fitting = newton.usual_chunk(part.total, part.history, plan)
        with part.trouble.kept():
            if part.sequence is not None and newton.chunk == "auto" and newton.quadratic:
                fitting = newton.jacobian.fit_chunk(part.sequence, chunk)
        facts = (0, 0, 0) if isinstance(kernels, str) else (1, kernels.elementwise, kernels.chunk)
        told = part.ranks.agree(part.trouble.take(), fitting, *facts)
        with_steps = (each[1:] for each, length in zip(told, part.lengths, strict=True) if length)
        have, elementwise, wanted = zip(*with_steps, strict=True)
        plan.chunk = max(chunk, *(each[0] for each in told))
        if not all(have) or len(set(elementwise)) > 1:
            plan.note(f"not by kernels: {kernels if isinstance(kernels, str) else 'another rank has none'}")
            return None
        plan.note("chunks are rolled out by kernels, and joined over ranks")
        if newton.chunk == "auto":
            plan.chunk = max(wanted)
        if elementwise[0]:  # kernels see that by themselves; gradients are to know it, too
            self.newton = replace(newton, jacobian=DiagonalJacobian())
        return None if isinstance(kernels, str) else kernels

    # What the steps themselves say.

    def _judge(self, outcome: Outcome, entry: Tensor, peak: Tensor, sizes: Tensor, *, looped: bool = False) -> _Judged:
        """One evaluation of all steps, with a graph where a gradient may be asked for.

        Args:
            entry, peak, sizes: [B, D], the state that this rank starts from, the size of what came before, and of all states of all ranks
            looped: they are the loop's own, and its derivatives are taken where it is
        """
        part, states, adjoint = self.part, outcome.states, None
        values = states
        if part.needs_gradients and torch.is_grad_enabled():
            adjoint = AdjointOver(part, states, entry, self.newton.jacobian, self.newton.linear)
            values = adjoint.values.detach()
        elif part.sequence is not None:
            with part.trouble.kept(), torch.no_grad():
                previous = torch.cat([entry.unsqueeze(0), states[:-1]])
                values = part.sequence.values(previous, range(part.length))
        # What a tolerance is relative to, beside the states themselves.
        before = entry if self.tolerance.local else peak
        rows = torch.zeros(part.layout.rows, dtype=part.layout.dtype, device=states.device)
        residual = broken = drift = lost = rows
        known = faint = rows.new_zeros(part.layout.rows, len(part.layout.sizes))
        with torch.no_grad(), part.trouble.kept():
            if part.sequence is not None and part.trouble.error is None:
                residual, held, drift = measure(values, states, before, self.tolerance)
                residual, broken = residual.nan_to_num(torch.inf), ~held
                known, faint = self._last(states, before)
                if adjoint is not None and adjoint.local is not None and self.newton.stop.promises and not looped:
                    lost = adjoint.local.lost(states, sizes).any(0)
        lost_before, (residual, broken, drift, known, faint, lost_anywhere) = part.say(
            part.ranks, lost.to(rows.dtype), torch.maximum, (residual, broken, drift, known, faint, lost)
        )
        known = torch.where(faint > known, known, part.total)
        if self.newton.stop.promises and not looped:
            nothing = torch.zeros_like(outcome.exact_steps)
            outcome = without_claim(outcome, broken > 0, nothing)
            # What drifts on every rank adds up over all of them.
            drifts = drifting(outcome, self.newton, drift * part.ranks.count)
            if drifts.any():
                outcome = without_derivative(outcome, drifts & self._hides(entry, states, values), nothing)
        if adjoint is not None and self.newton.stop.promises and not looped:
            adjoint.promise(self.tolerance.rtol)
        if lost_anywhere.any() and adjoint is not None:
            outcome = self._determined(outcome, adjoint, sizes, before, lost_before)
        return _Judged(outcome, residual.to(states.dtype), adjoint, known.amin(-1).long())

    @torch.no_grad()
    def _hides(self, entry: Tensor, states: Tensor, values: Tensor) -> Tensor:
        """[B]: whether steps of any rank do not change as their Jacobians say."""
        part, hidden = self.part, torch.zeros(self.part.layout.rows, dtype=torch.bool, device=states.device)
        with part.trouble.kept():
            if part.sequence is not None:
                given = entry, states, values, self.tolerance.rtol
                hidden = ~steps_have_derivative(part.sequence, self.newton.jacobian, *given)
        return part.say(part.ranks, hidden.double(), torch.maximum, (hidden,))[1][0] > 0

    def _determined(
        self, outcome: Outcome, adjoint: AdjointOver, sizes: Tensor, before: Tensor, lost_before: Tensor | None
    ) -> Outcome:
        """Rows whose states do not determine the derivatives of their steps lose their claim: see ``Adjoint.determined``."""
        part, states, local = self.part, outcome.states, adjoint.local
        trusted = torch.tensor([not each.failed for each in outcome.results], device=states.device)
        other, first = torch.zeros_like(trusted), torch.full_like(outcome.exact_steps, part.total)
        with torch.no_grad(), part.trouble.kept():
            if local is not None:
                lost = local.lost(states, sizes).cummax(0).values
                lost = (lost if lost_before is None else lost | (lost_before > 0)) & trusted
                allowed = self.tolerance.allowed(states, before)
                other = local.kinked(states, sizes, allowed, lost, self.tolerance.rtol)
                rounded = local.rounded(states, sizes)
                first = torch.where(rounded < part.length, part.offset + rounded, part.total)
        _, (other, first) = part.say(part.ranks, other.double(), torch.maximum, (other, -first))
        gone = (other > 0) & trusted
        if not gone.any():
            return outcome
        self.plan.note(UNDETERMINED)
        return without_claim(outcome, gone, torch.minimum(-first.long(), outcome.exact_steps), UNDETERMINED)

    def _last(self, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[B, leaves] each, as of ``Tolerance.last_of``: in steps of the whole."""
        scale = self.tolerance.scale(states, before)
        numbers = torch.arange(self.part.offset + 1, self.part.offset + 1 + len(states), device=states.device)
        layout = self.part.layout
        leaves = zip(layout.split(states), layout.split(scale), strict=True)
        known, lost = zip(*(self.tolerance.last_of(*each, numbers) for each in leaves), strict=True)
        return torch.stack(known, -1), torch.stack(lost, -1)

    # Where Newton failed.

    def _looped(self, outcome: Outcome, result: Result) -> _Judged:
        """The rows that failed, one step after the other: a rank hands its last state on to the next, and waits for that of the one before."""
        part, device = self.part, self.part.layout.device
        failed = torch.tensor([each.failed for each in outcome.results], device=device)
        exact = torch.where(failed, outcome.exact_steps, part.total)
        states, entry = outcome.states, part.initial.detach()
        own = (exact - part.offset).clamp(0, part.length)

        def work(told: Tensor) -> Tensor:
            nonlocal states, entry
            entry, wrong = told[:, :-1].to(entry.dtype), told[:, -1:]
            if part.sequence is not None and not wrong.any():
                with part.trouble.kept():
                    try:
                        states = loop_on(part.sequence.step, entry, states, own, part.length)
                    except Exception as error:
                        error.args = (f"{error} (steps {part.offset + 1} to {part.offset + part.length})",)
                        raise
            handed = states[-1] if len(states) else entry
            return torch.cat([handed.to(told.dtype), wrong + (part.trouble.error is not None)], -1)

        with torch.no_grad():
            start = torch.cat([entry, torch.zeros_like(entry[:, :1])], -1)
            part.ranks.relay(start, work)
            at = first_not_finite(states) if len(states) else torch.full_like(exact, -1)
            at = torch.where(at >= 0, at + part.offset, part.total)
            told = states.nan_to_num(0.0, 0.0, 0.0)
            sizes = told.abs().amax(0) if len(told) else torch.zeros_like(entry)
            _, peak, (first, sizes) = part.meet(told, -at, sizes)
        at = torch.where(failed & (-first < part.total), -first.long(), -1)
        outcome = replace(outcome, states=states).marked(result, at)
        if result is Result.LOOP:
            outcome = replace(outcome, exact_steps=torch.where(at >= 0, at, part.total))
        judged = self._judge(outcome, entry, peak, sizes.to(entry.dtype), looped=True)
        if result is Result.LOOP:
            judged = replace(judged, residual=torch.zeros_like(judged.residual), known=outcome.exact_steps)
        return replace(judged, outcome=outcome)

    def _located(self, outcome: Outcome, entry: Tensor) -> Outcome:
        """Newton knows in which chunk a value stopped being finite; the steps of that chunk tell which it was."""
        part = self.part
        rows = torch.tensor([each is Result.NON_FINITE for each in outcome.results], device=part.layout.device)
        if not rows.any():
            return outcome
        at = torch.full_like(outcome.exact_steps, part.total)
        here = rows & (outcome.exact_steps >= part.offset) & (outcome.exact_steps < part.offset + part.length)
        with torch.no_grad(), part.trouble.kept():
            if part.sequence is not None and here.any():
                own = torch.where(here, outcome.exact_steps - part.offset, part.length)
                stop = min(int(own[here].max()) + self.plan.chunk, part.length)
                found = first_not_finite(loop_on(part.sequence.step, entry, outcome.states, own, stop))
                at = torch.where(here & (found >= 0), part.offset + found, at)
        _, (first,) = part.say(part.ranks, at.new_zeros(1), torch.maximum, (-at,))
        at = -first.long()
        return replace(outcome, exact_steps=torch.where(rows & (at < part.total), at, outcome.exact_steps))

    def _describe(self, judged: _Judged) -> str:
        """The worst result in words, the same on all ranks; where a step is to blame, by the rank that holds it."""
        part, outcome = self.part, judged.outcome
        reasons, holder = outcome.reasons, 0
        if worst_of(outcome.results) is Result.NON_FINITE:
            _, at, _ = worst_rows(outcome.results, outcome.exact_steps)
            holder = part.holder(min(at, part.total - 1))
            rank = part.ranks.reversed().rank if part.ranks.backwards else holder
            reasons = (*reasons, f"rank {rank} holds that step")

        def inputs(index: int) -> Any:
            local = index - part.offset
            inside = part.sequence is not None and 0 <= local < part.length
            return part.sequence.given_inputs(local) if inside and part.sequence else None

        said = in_words(outcome.results, outcome.exact_steps, inputs, part.layout, *reasons)
        return part.ranks.told_by(holder, said) if worst_of(outcome.results) is Result.NON_FINITE else said

    def _solution(self, judged: _Judged, *, failed: bool, promised: Any) -> Solution:
        part, outcome, plan = self.part, judged.outcome, self.plan
        states, layout = outcome.states, part.layout
        held = states[-1] if len(states) else torch.zeros_like(part.initial)
        final = part.ranks.spread(held.detach(), part.last)
        description = self._describe(judged)
        if failed and judged.adjoint is not None:
            states = refuse_gradients(states, description, judged.adjoint.values)
        elif judged.adjoint is not None:
            states, final = judged.adjoint.attach(states, final)
        if part.sequence is not None:
            plan.evaluation = part.sequence.evaluation
            for note in part.sequence.all_notes:
                plan.note(note)
        known = judged.known if promised is not None else outcome.exact_steps
        if promised is not None and outcome.local is not None:
            known = torch.where(outcome.local, part.total, known)
        dropped = Dropped(1, part.total, layout.unpack(final), known.reshape(layout.batch_shape))
        about: dict[str, Any] = {"description": description, "tolerance": promised, "dropped": dropped}
        return solution_of(outcome, states, judged.residual, part.initial, layout, plan, **about)
