"""What became of a problem: right, told, or wrong; with what rounding explains as the yardstick.

A state is right where its error, relative to the largest size that this number has had in its row so far, is within some
multiples of the tolerance or of what rounding does to the loop itself: of the loop in the problem's own precision against float64,
and of a loop in float64 that is jittered by roundings. Where rounding alone changes a tenth of a state there is no right
trajectory; then every step is to hold by itself. A trajectory whose steps all hold to the last few roundings is right in
any case: it is what the loop might have given.

A gradient is right where it is the loop's, by the same yardstick; or, where the states are right to their own digits (kinks
decide by those) or there is no right trajectory, where it is that of the loop's steps at the states that were found.

Shapes: L steps, B rows, D the state of a row packed flat; all in float64.
"""

from __future__ import annotations

import linecache
import math
import time
import traceback
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import deeppcr

from .problems import NoKernels, OtherResult, Problem
from .reference import Precision, exponent

#: How many tolerances an answer may be off, and how many times what rounding does to the loop.
TOLERANCES, ROUNDINGS = 30, 100
#: Where rounding explains this part of a number, nothing can be said about it.
UNKNOWN = 0.1
#: A row whose small changes shrink faster than this, a step, is to be solved in parallel.
STABLE = -0.02

#: From best to worst.
VERDICTS = {
    "right": "as the loop, and nothing was said",
    "loop": "finished by the loop, where that is no surprise, and right",
    "not covered": "there are no kernels for its step",
    "told": "the caller was told that it did not work, and it did not",
    "warned": "the caller was told so, and it is right",
    "gave up": "finished by the loop with default settings, though it contracts",
    "refused": "an error of the library where the loop has an answer",
    "slow": "beyond the limit of time",
    "WRONG GRADIENT": "and nobody was told",
    "WRONG STATE": "and nobody was told",
    "crash": "an error that nobody raised on purpose",
}
BAD = ("gave up", "refused", "WRONG GRADIENT", "WRONG STATE", "crash")


@dataclass
class Report:
    """A verdict and what it rests on. ``details`` are numbers and texts for a person to read."""

    number: int
    family: str
    verdict: str
    problem: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What the library gave: the solution or an error; the gradients or an error."""

    solution: deeppcr.Solution | None = None
    states: Tensor | None = None
    gradients: list[Tensor] | None = None
    error: Exception | None = None
    warned: str = ""


def _shifted(states: Tensor) -> Tensor:
    """The smallest number of the first row is off by one percent from the middle on."""
    states = states.clone()
    sizes = states[:, 0].abs().amax(0)
    smallest = int(torch.where(sizes > 0, sizes, math.inf).argmin())
    states[len(states) // 2 :, 0, smallest] += 0.01 * sizes[smallest]
    return states


#: What can be planted, so that one sees whether it is found: one number of the states off by a percent, all gradients off by a
#: percent, a solver that stops too early; and a loop that rounds otherwise, which is no fault and must not be found.
PLANTED = ("state", "gradient", "tolerance", "rounding")


def examine(problem: Problem, way: str = "default", device: str = "cpu", plant: str = "") -> Report:
    """Solve a problem, look at the loop, and judge."""
    problem = problem.by_way(way)
    report = Report(problem.number, problem.family, "right", problem.describe())
    loops = Loops(problem, device)
    started = time.perf_counter()
    found = _found(problem, way, loops, plant)
    report.details["seconds"] = round(time.perf_counter() - started, 3)
    report.verdict = _verdict(problem, found, loops, report.details)
    return report


class Loops:
    """The loop in float64 and in the problem's own precision, with gradients of a random functional of its states."""

    def __init__(self, problem: Problem, device: str):
        self.problem = problem
        self.exact = Precision(problem, torch.float64)
        nest = self.exact.loop()
        self.states = problem.pack(nest)  # [L, B, D]
        initial = problem.pack(pytree.tree_map(lambda leaf: leaf.unsqueeze(0), problem.z0))
        self.with_initial = torch.cat([initial, self.states])
        self.sizes = self.with_initial.abs().amax(0)  # [B, D]
        self.sizes = torch.where((self.sizes > 0) & self.sizes.isfinite(), self.sizes, 1)
        source = torch.Generator().manual_seed(problem.number)
        weights = torch.randn(self.states.shape, generator=source, dtype=torch.float64) / self.sizes
        self.weights = problem.unpack(weights)
        self.gradients = self.exact.gradients(nest, self.weights)
        self.same = problem.dtype is torch.float64 and device == "cpu"
        self.own = Precision(problem, problem.dtype, device)
        if self.same:
            self.own_nest, self.own_states, self.own_gradients = nest, self.states, self.gradients
        else:
            self.own_nest = self.own.loop()
            self.own_states = problem.pack(self.own_nest)
            self.own_gradients = self.own.gradients(self.own_nest, self.weights)
        self.own_nest = pytree.tree_map(torch.Tensor.detach, self.own_nest)

    def scale(self) -> Tensor:
        """The largest size of each number so far: [L, B, D]. What was zero so far is measured by a rounding of what it becomes."""
        eps = torch.finfo(self.problem.dtype).eps
        return torch.maximum(self.with_initial.abs().cummax(0).values[1:], eps * self.sizes)

    def exponent(self) -> Tensor:
        """The mean logarithmic growth of a small change, a step and row, relative to what is used of the states: [B]."""
        found = exponent(self.problem, self.problem.unpack(self.states), self.sizes)
        if not self.problem.model.read_out:
            return found
        # Digits of a state that has died out are known as far as changes shrink faster than it does. Without a bias and at a
        # kink they cannot: such a step multiplies a change along its state as it multiplies the state.
        size = (self.with_initial / self.sizes).norm(dim=-1).log()  # [L + 1, B]
        last = torch.where(size.isfinite(), torch.arange(len(size)).unsqueeze(-1), 0).amax(0)
        return found - (size.gather(0, last.unsqueeze(0))[0] - size[0]) / self.problem.length


def _found(problem: Problem, way: str, loops: Loops, plant: str) -> Found:
    found, own = Found(), loops.own
    solver = {**problem.solver, "rtol": 0.1, "atol": 0.1} if plant == "tolerance" else problem.solver
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if plant == "rounding":
                found.solution = deeppcr.solve(
                    own.step,
                    own.z0,
                    own.xs,
                    length=None if own.xs is not None else problem.length,
                    batch_dims=len(problem.batch),
                    solver=deeppcr.Loop(),
                )
                nest = own.jittered(seed=1)
            else:
                asked = replace(problem, solver=solver)
                found.solution = asked.solve(way, own.step, own.z0, own.xs, loops.own_nest)
                nest = found.solution.states
            found.states = problem.pack(nest)
            found.gradients = own.gradients(nest, loops.weights)
        except Exception as error:
            found.error = error
    texts = [str(each.message) for each in said if issubclass(each.category, deeppcr.ConvergenceWarning)]
    found.warned = texts[-1] if texts else ""
    if plant == "state" and found.states is not None:
        found.states = _shifted(found.states)
    if plant == "gradient" and found.gradients is not None:
        found.gradients = [1.01 * gradient for gradient in found.gradients]
    return found


def _verdict(problem: Problem, found: Found, loops: Loops, details: dict[str, Any]) -> str:
    if found.error is not None:
        details["error"] = f"{type(found.error).__name__}: {found.error}"[:300]
        for kind, verdict in ((TimeoutError, "slow"), (NoKernels, "not covered"), (OtherResult, "refused")):
            if isinstance(found.error, kind):
                return verdict
        if not on_purpose(found.error):
            details["traceback"] = "".join(traceback.format_tb(found.error.__traceback__)[-3:])[-800:]
            return "crash"
    solution, states = found.solution, found.states
    finite = loops.own_states.isfinite().all(-1).all(0) & loops.states.isfinite().all(-1).all(0)  # [B]
    if solution is None or states is None:
        return "told" if isinstance(found.error, deeppcr.ConvergenceError) or not finite.all() else "refused"
    details |= {"result": solution.result.name, "iterations": int(solution.iterations.max())}
    judged = StateJudge(problem, loops, states)
    claimed = torch.tensor([result.trusted or result is deeppcr.Result.LOOP for result in solution.results])
    details |= judged.details(claimed & finite)
    # What a result that sounds good adds in words is the caller's to read.
    spoken = solution.result is deeppcr.Result.CONVERGED and solution.message != solution.result.value
    if spoken:
        details["message"] = solution.message
    if (claimed & finite & ~judged.right).any():
        return "told" if spoken else "WRONG STATE"
    if not finite.all():  # of what is no number, no gradient is compared
        return "told" if solution.result is deeppcr.Result.NON_FINITE else "WRONG STATE"
    if not claimed.all():
        return "warned" if judged.right.all() else "told"
    gradient = _gradient_verdict(problem, found, loops, judged, details)
    if gradient != "right":  # of states that have converged, only a backward pass warns
        warned = found.warned and solution.result is deeppcr.Result.CONVERGED
        return "told" if spoken or warned else gradient
    if solution.result is deeppcr.Result.FINISHED_BY_LOOP:
        details["message"] = solution.message
        if not problem.plain or problem.dtype not in (torch.float32, torch.float64):
            return "loop"
        failed = torch.tensor([r is deeppcr.Result.FINISHED_BY_LOOP for r in solution.results])
        details["exponent"] = round(float(loops.exponent()[failed].max()), 4)
        return "gave up" if details["exponent"] < STABLE else "loop"
    return "warned" if found.warned else "right"


class StateJudge:
    """Which rows hold the loop's states, [B], and by what they are furthest off."""

    def __init__(self, problem: Problem, loops: Loops, states: Tensor):
        scale, tolerance = loops.scale(), _tolerance(problem)
        self.error = (states - loops.states).abs()
        with torch.no_grad():
            by_rounding = (problem.pack(loops.exact.jittered()) - loops.states).abs()
        by_rounding = torch.maximum(by_rounding, (loops.own_states - loops.states).abs()) / scale
        explained = ROUNDINGS * by_rounding.nan_to_num(math.inf).cummax(0).values
        # What one number does not know, the others will not know for long.
        self.lost = (explained > UNKNOWN).any(-1, keepdim=True).cummax(0).values  # [L, B, 1]
        allowed = scale * torch.maximum(explained, torch.full_like(explained, tolerance))
        allowed = allowed + TOLERANCES * problem.atol + 10 * torch.finfo(problem.dtype).tiny
        self.ratio = (self.error / allowed).nan_to_num(math.inf)
        self.relative = self.error / scale
        off, rounding = self._residual(problem, loops, states)
        largest = torch.cat([loops.with_initial[:1], states]).abs().cummax(0).values[1:]
        residual = off / (tolerance * largest + TOLERANCES * problem.atol + 32 * rounding)
        some = torch.where(explained < 100 * UNKNOWN, self.ratio, 0)  # as long as rounding does not explain anything
        judged = torch.where(self.lost, torch.maximum(residual.nan_to_num(math.inf), some), self.ratio)
        # A residual of a few units, always to one side, is more than the loop's rounding: it adds up.
        holds = (off <= rounding).all(-1).all(0)
        self.right = (judged <= 1).all(-1).all(0) | holds
        self.judged = judged
        # To their own digits: relative to the size around a step, rather than to the largest so far.
        around = _recent(loops.states.abs())
        local = self.error <= torch.maximum(0.01 * around, ROUNDINGS * _recent(by_rounding * scale))
        self.to_their_digits = bool((local | self.lost).all())

    @staticmethod
    def _residual(problem: Problem, loops: Loops, states: Tensor) -> tuple[Tensor, Tensor]:
        """How far each step is from holding, and what a step rounds there: at least half a unit of its result."""
        nest = problem.unpack(states)
        exact = loops.exact.images(nest)
        device, dtype = pytree.tree_leaves(loops.own.z0)[0].device, problem.dtype
        own = loops.own.images(pytree.tree_map(lambda leaf: leaf.to(device, dtype), nest))
        unit = 0.6 * torch.finfo(dtype).eps * exact.abs()
        # By luck, a single step may not round at all.
        rounding = torch.maximum(_recent((own - exact).abs()), unit)
        return (states - exact).abs(), rounding + torch.finfo(dtype).tiny

    def details(self, rows: Tensor) -> dict[str, Any]:
        if not rows.any():
            return {}
        worst = torch.where(rows.unsqueeze(-1), self.judged, -1.0)
        step, row, component = (int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
        return {
            "states": f"{float(worst.max()):.2g} of what is allowed",
            "off by": f"{float(self.relative[step, row, component]):.1e}",
            "at": [step, row, component],
            "by": "residual" if bool(self.lost[step, row]) else "states",
        }


def _recent(rounding: Tensor) -> Tensor:
    """The largest of the last eight steps."""
    found = rounding.clone()
    for step in (1, 2, 4):
        found[step:] = torch.maximum(found[step:], found[:-step].clone())
    return found


def _tolerance(problem: Problem) -> float:
    return min(TOLERANCES * problem.rtol, UNKNOWN)


def _gradient_verdict(problem: Problem, found: Found, loops: Loops, judged: StateJudge, details: dict[str, Any]) -> str:
    def by_rounding(own: list[Tensor], exact: list[Tensor], values: Any = None) -> tuple[list[Tensor], bool]:
        if loops.same:  # the loop has no more precision to show what it rounds
            own = loops.exact.gradients(loops.exact.jittered(values), loops.weights)
        return _spread(problem, loops, own, exact)

    known = all(gradient.isfinite().all() for gradient in (*loops.gradients, *loops.own_gradients))
    if not known:
        return "told" if found.gradients is None else "right"
    if found.gradients is not None and loops.same:
        nothing = [torch.zeros_like(group) for group in _groups(problem, loops, loops.gradients)]
        if _gradient_ratio(problem, loops, found.gradients, loops.gradients, nothing) <= 1:
            return "right"  # whatever rounding does
    rounding, lost = by_rounding(loops.own_gradients, loops.gradients)
    if found.gradients is None:
        return "told" if lost or judged.lost.any() else "refused"
    ratio = _gradient_ratio(problem, loops, found.gradients, loops.gradients, rounding)
    details["gradient"] = f"{ratio:.2g} of what is allowed"
    if ratio <= 1 and not lost:
        return "right"
    if not judged.to_their_digits:
        return "WRONG GRADIENT" if ratio > 1 else "right"
    assert found.states is not None
    nest = problem.unpack(found.states)
    own = pytree.tree_map(lambda leaf, like: leaf.to(like.device, like.dtype), nest, loops.own_nest)
    there = loops.exact.gradients(loops.exact.loop(nest), loops.weights)
    there_own = there if loops.same else loops.own.gradients(loops.own.loop(own), loops.weights)
    if not all(gradient.isfinite().all() for gradient in (*there, *there_own)):
        return "right"
    rounding, lost = by_rounding(there_own, there, nest)
    ratio = _gradient_ratio(problem, loops, found.gradients, there, rounding)
    details["gradient at these states"] = f"{ratio:.2g} of what is allowed"
    return "right" if ratio <= 1 or lost else "WRONG GRADIENT"


def _groups(problem: Problem, loops: Loops, gradients: list[Tensor]) -> list[Tensor]:
    """Gradients as what a relative change does, grouped by what is measured together: the largest of each group.

    A group is a row of z0; all of a parameter; of xs, what one step and all after it have, row by row where they have rows. So
    each comes out as [groups], or [L, groups] for xs.
    """
    z0, xs, parameters = problem.sources
    counts = [len(pytree.tree_leaves(each)) for each in (z0, xs)]
    rows = problem.batch[0] if problem.batch else 1
    grouped = []
    sizes = pytree.tree_leaves(problem.unpack(loops.sizes.unsqueeze(0)))
    for gradient, size in zip(gradients[: counts[0]], sizes, strict=True):
        grouped.append((gradient * size[0]).abs().reshape(rows, -1).amax(-1))
    for gradient, x in zip(gradients[counts[0] : sum(counts)], pytree.tree_leaves(xs), strict=True):
        change = (gradient * x.abs().max()).abs()
        apart = problem.batch and change.ndim > 2 and change.shape[1] == rows
        change = change.reshape(len(change), rows if apart else 1, -1).amax(-1)
        grouped.append(change.flip(0).cummax(0).values.flip(0))
    for gradient, parameter in zip(gradients[sum(counts) :], parameters, strict=True):
        grouped.append((gradient * parameter.abs().max()).abs().max().reshape(1))
    return grouped


def _spread(problem: Problem, loops: Loops, some: list[Tensor], others: list[Tensor]) -> tuple[list[Tensor], bool]:
    """What rounding does to gradients, group by group; and whether it leaves nothing of some."""
    spread = _groups(problem, loops, [a - b for a, b in zip(some, others, strict=True)])
    sizes = _groups(problem, loops, others)
    floor = _floor(problem, sizes)
    lost = any((ROUNDINGS * a > UNKNOWN * b + floor).any() for a, b in zip(spread, sizes, strict=True))
    return spread, bool(lost)


def _gradient_ratio(
    problem: Problem, loops: Loops, found: list[Tensor], expected: list[Tensor], rounding: list[Tensor]
) -> float:
    """The largest error of any group, in units of what is allowed."""
    if not all(gradient.isfinite().all() for gradient in found):
        return math.inf
    errors = _groups(problem, loops, [a - b for a, b in zip(found, expected, strict=True)])
    sizes = _groups(problem, loops, expected)
    floor, worst = _floor(problem, sizes), 0.0
    for error, size, spread in zip(errors, sizes, rounding, strict=True):
        allowed = _tolerance(problem) * size + ROUNDINGS * spread + floor
        worst = max(worst, float((error / allowed).nan_to_num(math.inf).max()))
    return worst


def _floor(problem: Problem, sizes: list[Tensor]) -> float:
    """What sums of the largest terms may round to where they cancel."""
    info = torch.finfo(problem.dtype)
    return 64 * info.eps * max(float(size.max()) for size in sizes) + info.tiny


def on_purpose(error: Exception) -> bool:
    """Whether the library raised it itself: the last line that ran is a ``raise`` of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    home = Path(deeppcr.__file__).parent
    if not frames or home not in Path(frames[-1].filename).parents:
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.strip().startswith("raise")
