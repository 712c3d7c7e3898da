"""``predict``: what a solve would take, each way, before anything long runs.

Shapes: L steps in N chunks of C, B rows, D the packed state.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .jacobian import block_bytes
from .newton import Newton
from .runtime import random_state
from .sequence import Sequence
from .sequence.evaluate import RandomStep, StepError
from .sequence.layout import not_finite_in, refuse_not_finite
from .sequence.lengths import up_to
from .sequence.sequence import find_length
from .sequence.trace import count_operations
from .solution import Plan, first_not_finite
from .solve import has_no_rows
from .ways.fused import Call
from .ways.plan import PROBED, Record, now, record_of, written
from .ways.planned import can_be_planned, is_refused

#: The probe ends after so many steps, or seconds, or this part of the loop.
_MOST_STEPS, _MOST_SECONDS, _MOST_OF_LOOP = 256, 0.3, 0.01
#: Steps that are timed together.
_TIMED = 8
#: So many seconds a loop must take for its step to be traced, and where what traces has yet to be imported.
_WORTH_TRACING, _WORTH_IMPORTING = 5.0, 150.0
#: Newton's iterations: so many, and this for every chunk that an error lives. Fitted by eye to networks and a pendulum.
_ITERATIONS, _ITERATIONS_PER_CHUNK = 4, 0.7
#: Iterations after which Newton gives up.
_PATIENCE = 12
#: By less than the exponential of this errors do not grow or die out over a whole loop. (Of the probe's steps 1 is enough to tell.)
_CLEAR = 3.0
#: Seconds, on an H200: of an operation in a CUDA graph; of a step in a kernel, 0.05e-6 to 0.9e-6; of a pass by kernels; of their call.
_OF_OPERATION, _OF_STEP, _OF_PASS, _OF_CALL = 3e-6, 0.2e-6, 0.07e-3, 0.25e-3

#: Of errors that neither grow nor die out. Then each chunk may cost an iteration, which is the most that a solve may take.
_STAY = "errors stay"

WAYS = {
    "loop": "loop, by Python",
    "graph": "loop, in a CUDA graph",
    "loop kernel": "loop, in one kernel",
    "newton": "in parallel, by PyTorch",
    "kernels": "in parallel, by kernels",
}


@dataclass(frozen=True)
class Prediction:
    """What a solve is expected to take; ``print`` it for a table.

    The times of a loop by Python come from a measured step. All else is rough, by a factor of three either way and more, but for
    what is said to be measured: what earlier solves of this kind took.

    Attributes:
        length, rows, width: L, B and D
        exponent: the largest Lyapunov exponent, the mean logarithm by which a small error grows in a step; NaN where states or
            derivatives are not finite
        errors: the same in words
        probed: steps that it was found from
        step_seconds: of one step by Python
        iterations: of Newton's method, by the exponent alone: within a factor of three or so, and too many where steps are nearly
            linear (one that is linear takes 1); None where the probe does not tell
        chunk: steps of a chunk in Newton's method
        seconds: by way, of those that there are: "loop", "graph", "loop kernel", "newton", "kernels"; without a backward pass, which ``why``
            tells of where gradients are wanted
        basis: by way: "measured", "expected", or why there is no time
        state_bytes, block_bytes: of all states; of the blocks of a parallel solve by PyTorch, while it runs
        way, why: what ``solve`` would do

    >>> import torch, deeppcr
    >>> prediction = deeppcr.predict(lambda z: torch.cos(z), torch.ones(3), length=100)
    >>> prediction.errors, prediction.way
    ('errors die out', 'loop')
    """

    length: int
    rows: int
    width: int
    exponent: float
    errors: str
    probed: int
    step_seconds: float
    iterations: int | None
    chunk: int
    seconds: dict[str, float]
    basis: dict[str, str]
    state_bytes: int
    block_bytes: int
    way: str
    why: str

    def __str__(self) -> str:
        rough = "up to about" if self.errors == _STAY else "about"
        iterations = "not known" if self.iterations is None else f"{rough} {self.iterations}"
        exponent = "not known" if math.isnan(self.exponent) else f"{self.exponent:+.2g} a step"
        lines = [
            f"{_counted(self.length, 'step')}, {_counted(self.rows, 'row')} of {_counted(self.width, 'number')}",
            f"{'exponent':26}{exponent}, by {_counted(self.probed, 'step')}: {self.errors}",
            f"{'iterations':26}{iterations}, in chunks of {self.chunk}",
            f"{'memory':26}{_in_bytes(self.state_bytes)} of states, {_in_bytes(self.block_bytes)} of blocks",
        ]
        for way, name in WAYS.items():
            taken = written(self.seconds[way]) if way in self.seconds else "-"
            lines.append(f"{name:26}{taken:>8}  {self.basis[way]}")
        lines.append(f"{'solve would take':26}{WAYS[self.way]}: {self.why}")
        return "\n".join(lines)


def predict(
    step: Callable[..., Any] | list[Callable[..., Any]] | nn.ModuleList,
    z0: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    batch_dims: int | None = None,
    lengths: Tensor | None = None,
) -> Prediction:
    """What ``deeppcr.solve`` of the same arguments would take, each way, and which way it would go.

    The step is called up to a few hundred times, for half a second or 2% of the loop. Nothing is compiled and nothing is solved. Whether
    there are kernels for the step is found out where a loop of seconds makes it worth it, or an earlier solve has.

    Args:
        step, z0, xs, length, batch_dims, lengths: as for ``deeppcr.solve``

    Raises:
        StepError: ``solve`` would raise it, too: the step draws random numbers, say
        RuntimeError: in ``torch.inference_mode``, where nothing can be differentiated

    >>> import torch, deeppcr
    >>> weights = torch.randn(500, 8, 8) / 6
    >>> prediction = deeppcr.predict(lambda z, w: torch.tanh(z @ w.mT), torch.randn(4, 8), weights)
    >>> print(prediction)
    500 steps, 4 rows of 8 numbers
    exponent                  ... a step, by ... steps: errors die out
    iterations                about 4, in chunks of 8
    memory                    62.5 KiB of states, 252 KiB of blocks
    loop, by Python           ...
    loop, in a CUDA graph     ...
    loop, in one kernel       ...
    in parallel, by PyTorch   ...
    in parallel, by kernels   ...
    solve would take          loop, by Python: the loop would take about ... ms, and nothing else is worth a try
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("deeppcr.predict differentiates the step: call it outside of torch.inference_mode()")
    if has_no_rows(z0, batch_dims):
        leaves, dims = pytree.tree_leaves(z0), 1 if batch_dims is None else batch_dims
        width = sum(math.prod(leaf.shape[dims:]) for leaf in leaves)
        return _loop_alone(find_length(step, xs, length), 0, width, 0, 0.0, "there is no row")
    if lengths is not None:
        step, xs = up_to(lengths, step, z0, xs, length, batch_dims)
    call = Call(step, z0, xs, length, batch_dims)
    try:
        return _predicted(call)
    except StepError as error:
        if isinstance(error, RandomStep) or not can_be_planned(call):
            raise
        why = str(error)
    begin = time.perf_counter()
    sequence = Sequence(step, z0, xs, length=length, batch_dims=batch_dims, watched=False)  # which takes one step
    layout, seconds = sequence.layout, now(sequence.layout.device) - begin
    return _loop_alone(sequence.length, layout.rows, layout.width, layout.dtype.itemsize, seconds, why)


def _loop_alone(length: int, rows: int, width: int, itemsize: int, seconds: float, why: str) -> Prediction:
    """Of what ``solve`` leaves to the loop, whatever that takes; ``seconds``: of a step."""
    return Prediction(
        length=length, rows=rows, width=width, exponent=math.nan, errors="not looked at", probed=0, step_seconds=seconds, iterations=None,
        chunk=1, seconds={"loop": length * seconds}, basis={**dict.fromkeys(WAYS, "the loop alone is right"), "loop": "expected"},
        state_bytes=length * rows * width * itemsize, block_bytes=0, way="loop", why=f"one step after the other: {why}",
    )  # fmt: skip


def _predicted(call: Call) -> Prediction:
    step, xs = call.given
    sequence = Sequence(step, call.z0, xs, length=call.given_length, batch_dims=call.batch_dims)
    refuse_not_finite(call.z0, infinities=True)
    layout, steps = sequence.layout, sequence.length
    chunk, drawn = Newton().choose_chunk(sequence, Plan()), random_state(layout.device)
    step_seconds = _time_of_step(sequence)
    if steps > 1 and not torch.equal(drawn, random_state(layout.device)) and sequence.draws(1):
        raise RandomStep
    known = record_of(call.key, call.sizes, layout.device, call.differentiated)
    loop = known.seconds.get("loop", steps * step_seconds)
    estimated = known.estimated if "loop" in known.seconds else {"loop"}
    record = replace(known, seconds={**known.seconds, "loop": loop}, estimated=estimated)
    probe = _Probe(sequence, max(_MOST_SECONDS, _MOST_OF_LOOP * loop))
    iterations = probe.iterations(chunk)
    expected: dict[str, float | str] = {
        "loop": loop,
        "graph": _graph_seconds(sequence),
        "newton": _newton_seconds(record, loop, -(-steps // chunk), iterations),
        **_by_kernels(call, probe, loop),
    }
    sequence.stop_watching()
    seconds: dict[str, float] = {way: each for way, each in expected.items() if not isinstance(each, str)}
    basis = {way: each if isinstance(each, str) else "expected" for way, each in expected.items()}
    for way in known.tries.keys() & known.seconds.keys():  # what did not work has no time
        seconds[way], basis[way] = known.seconds[way], "measured"
    way, why = _choice(call, record, known)
    if way == "newton" and basis[way] == "expected" and seconds[way] > loop:
        why += ", in case its steps are nearly linear; where it takes as long as expected, later solves take the loop"
    return Prediction(
        length=steps, rows=layout.rows, width=layout.width, exponent=probe.exponent, errors=probe.errors, probed=probe.steps,
        step_seconds=step_seconds, iterations=iterations, chunk=chunk, seconds=seconds, basis=basis,
        state_bytes=steps * layout.rows * layout.width * layout.dtype.itemsize,
        block_bytes=4 * -(-steps // chunk) * block_bytes(sequence), way=way, why=why,
    )  # fmt: skip


def _time_of_step(sequence: Sequence) -> float:
    """Seconds of a step as the loop takes it: by some steps, twice, the lesser."""
    device, state, times, index = sequence.layout.device, sequence.initial, [], 0
    while len(times) < 2 and index < sequence.length:
        first, begin = index, now(device)
        while index < min(first + _TIMED, sequence.length) and time.perf_counter() - begin < _MOST_SECONDS / 3:
            state, index = sequence.step(index, state), index + 1
        times.append((now(device) - begin) / (index - first))
        if times[-1] > _MOST_SECONDS:
            break
    return min(times)


class _Probe:
    """The first steps of a loop, and a cotangent back along them: it grows as a tangent does, and asks for autograd alone.

    Attributes:
        steps: how many were taken
        exponent: the mean logarithm by which the cotangent grew in a step, over rows and steps
        errors: the same in words
        is_clear: whether these few steps tell it
    """

    def __init__(self, sequence: Sequence, budget: float):
        self._length, device = sequence.length, sequence.layout.device
        taken: list[tuple[Tensor, Tensor]] = []
        state, begin = sequence.initial.detach(), now(device)
        while len(taken) < min(_MOST_STEPS, self._length) and (not taken or now(device) - begin < budget / 2):
            before = state.requires_grad_()
            with torch.enable_grad():
                after = sequence.step(len(taken), before)
            taken.append((before, after))
            state = after.detach()
        self.steps = len(taken)
        settled = self.steps - self.steps // 4  # in the last steps the cotangent turns to where it grows most
        growths, not_finite = _growths(taken), _not_finite(taken)
        if not_finite is None and (wrong := torch.isnan(growths) | (growths == math.inf)).any():
            # The cotangent comes from behind, and what is not finite stays so.
            not_finite = f"the derivative of step {int(wrong.nonzero().max()) + 1} is not finite"
        growths = growths[:settled]
        self.exponent = math.nan if not_finite else float(growths.mean())
        over_all = self.exponent * self._length
        self.is_clear = True
        if not_finite is not None:
            self.errors, self.is_clear = not_finite, False
        elif self._length == 1:
            self.errors = "there is no step after it for errors to grow or die out in"
        elif abs(over_all) < _CLEAR and self._length <= 4 * self.steps:
            self.errors = _STAY
        elif abs(self.exponent) * len(growths) < 1:
            self.errors, self.is_clear = "so few steps do not tell whether errors die out", False
        else:
            self.errors = "errors grow" if over_all > 0 else "errors die out"

    def iterations(self, chunk: int) -> int | None:
        """Of Newton's method with such chunks, or passes of kernels; None where the probe does not tell."""
        if not self.is_clear:
            return None
        chunks = -(-self._length // chunk)
        # An error lives for so many chunks, and takes an iteration or so to get through each.
        lives = min(chunks, -1 / (chunk * self.exponent)) if self.errors == "errors die out" else chunks
        return min(chunks, round(_ITERATIONS + _ITERATIONS_PER_CHUNK * lives))


def _not_finite(taken: list[tuple[Tensor, Tensor]]) -> str | None:
    """The first step after which states are not finite, in words; None where all are."""
    bad = first_not_finite(torch.stack([after for _, after in taken]))
    rows = (bad >= 0).nonzero().flatten().tolist()
    if not rows:
        return None
    row = min(rows, key=lambda each: int(bad[each]))
    where = f" (row {row}; {_counted(len(rows), 'row')} of {len(bad)})" if len(bad) > 1 else ""
    return f"states are not finite from step {int(bad[row]) + 1} on{where}"


def _growths(taken: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of a cotangent in each step, the first first: the mean logarithm over rows.

    Args:
        taken: of each step the state [B, D] before it, and the one after it with a graph
    """
    last, growths = taken[-1][1], []
    generator = torch.Generator().manual_seed(0)  # which leaves the caller's random numbers alone
    cotangent = torch.randn(last.shape, generator=generator, device="cpu").to(last)
    for before, after in reversed(taken):
        cotangent = cotangent / cotangent.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(last.dtype).tiny)
        found = None
        if after.requires_grad:
            (found,) = torch.autograd.grad(after, before, cotangent, allow_unused=True)
        cotangent = torch.zeros_like(last) if found is None else found
        growths.append(cotangent.norm(dim=-1).log().mean())
    return torch.stack(growths[::-1]).double()


def _newton_seconds(record: Record, loop: float, chunks: int, iterations: int | None) -> float | str:
    """Of a solve by PyTorch, where the loop takes so many."""
    if iterations is None:
        return "the iterations are not known"
    if iterations > max(_PATIENCE, chunks // 2):
        return loop + record.expected_newton(loop, _PATIENCE)  # it gives up, and the loop does it
    return record.expected_newton(loop, iterations)


def _graph_seconds(sequence: Sequence) -> float | str:
    if sequence.layout.device.type != "cuda":
        return "needs a CUDA device"
    return sequence.length * count_operations(lambda: sequence.step(0, sequence.initial)) * _OF_OPERATION


def _by_kernels(call: Call, probe: _Probe, loop: float) -> dict[str, float | str]:
    """Seconds by kernels, one step after the other and in parallel, where a loop takes so many; or why none are expected."""
    fused = call.fused
    if fused is None:
        imported = f"{__package__}.fuse.trace" in sys.modules
        if loop < (_WORTH_TRACING if imported else _WORTH_IMPORTING):
            return dict.fromkeys(("loop kernel", "kernels"), "not looked at: whether they cover the step")
        fused = call.make()
    if isinstance(fused, str):
        return dict.fromkeys(("loop kernel", "kernels"), fused)
    (_, length), chunk = call.known, _chunk_of_kernels(call)
    in_turn, passes = _OF_CALL + _OF_STEP * length, probe.iterations(chunk)
    if chunk == length:
        in_parallel = "so few steps are one chunk, or earlier chunks did not join"
    elif passes is None:
        in_parallel = "the passes are not known"
    else:
        in_parallel = _OF_CALL + _OF_PASS * passes
    return {"loop kernel": in_turn, "kernels": in_parallel}


def _chunk_of_kernels(call: Call) -> int:
    """Steps of a chunk in a solve by kernels, which there are, without gradients; all of them where it would be a loop."""
    fused, length = call.known
    tolerance = Newton().tolerance(fused.layout.dtype)
    chunk = length if fused.is_quicker_in_one(length) else "auto"
    return fused.kind(fused.key_of_kind(length, chunk, tolerance, repeated=True)).chunk


def _choice(call: Call, record: Record, known: Record) -> tuple[str, str]:
    """What ``solve`` would do, and why.

    Args:
        record: of solves of this kind, with what the loop is expected to take
        known: the same, without
    """
    if not can_be_planned(call):
        return "newton", "a step that looks further back is solved in parallel"
    held = not_finite_in(call.z0)
    if held is not None and not call.has_kernels:
        return "loop", f"one step after the other: z0 holds {held}"
    if call.has_kernels:
        return "loop kernel" if _chunk_of_kernels(call) == call.length else "kernels", "the step has kernels"
    again = "loop" in known.seconds
    if call.fused is None and record.is_worth_kernels(again):
        return "kernels", f"the {record.told('loop')}; kernels are made, if they cover the step"
    # A loop that is short is not stopped by what it is found to take.
    asked = record if again or (call.length or 0) > 2 * PROBED else known
    way, why = asked.choose()
    return asked.choose() if way in ("newton", "graph") and is_refused(call, asked) else (way, why)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _in_bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
