"""Pairs of solves, and of samples, that differ in one thing: see ``wrong_replays.py``.

A holder takes ``body(held, *inputs)`` and gives a function that puts a value where the body finds it, and returns the step. Whatever
is drawn for a pair depends on its number alone. States are [L, B, WIDTH].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import FixedIterations, GivenJacobian, Newton, linear
from deeppcr.diffusion import DDIM, Samples, Schedule, Window, sample
from replay_changes import CHANGES, TRACED_CHANGES, WIDTH, Draw

# Where a function may hold a value.

Body = Callable[..., Tensor]
Hold = Callable[[Any], Callable[..., Tensor]]


def put_on(owner: Any, step: Callable) -> Hold:
    def hold(value: Any) -> Callable:
        owner.held = value
        return step

    return hold


def in_a_closure(body: Body) -> Hold:
    held = None

    def hold(value: Any) -> Callable:
        nonlocal held
        held = value
        return step

    def step(*inputs: Any) -> Tensor:
        return body(held, *inputs)

    return hold


def in_a_closure_inside(body: Body) -> Hold:
    hold = in_a_closure(body)

    def outer(value: Any) -> Callable:
        step = hold(value)
        return lambda *inputs: step(*inputs)

    return outer


def in_a_container(body: Body, make: Callable[[], Any]) -> Hold:
    held, step = make(), lambda *inputs: body(held[0], *inputs)
    return lambda value: (held.__setitem__(0, value), step)[1]


class WithSlots:
    __slots__ = ("__weakref__", "body", "held")

    def __init__(self, body: Body):
        self.body, self.held = body, None

    def __call__(self, *inputs: Any) -> Tensor:
        return self.body(self.held, *inputs)


class WithMethod:
    def __init__(self, body: Body):
        self.body, self.held = body, None

    def method(self, *inputs: Any) -> Tensor:
        return self.body(self.held, *inputs)


class StepModule(nn.Module):
    held: Any

    def __init__(self, body: Body):
        super().__init__()
        self.body = body
        self.eval()

    def forward(self, *inputs: Any) -> Tensor:
        return self.body(self.held, *inputs)


def in_an_object(body: Body, kind: Callable[[Body], Any]) -> Hold:
    owner = kind(body)
    return put_on(owner, getattr(owner, "method", owner))


def in_an_attribute_of_an_attribute(body: Body) -> Hold:
    owner = SimpleNamespace(inner=SimpleNamespace())
    return put_on(owner.inner, lambda *inputs: body(owner.inner.held, *inputs))


def in_a_class(body: Body) -> Hold:
    kind = type("Step", (), {"__call__": lambda self, *inputs: body(vars(type(self))["held"], *inputs)})
    return put_on(kind, kind())


def in_a_global_variable(body: Body) -> Hold:
    namespace = ModuleType("steps")
    vars(namespace)["body"] = body
    exec("def step(*inputs): return body(held, *inputs)", vars(namespace))
    return put_on(namespace, vars(namespace)["step"])


def on_the_function(body: Body) -> Hold:
    def step(*inputs: Any) -> Tensor:
        return body(step.held, *inputs)

    return put_on(step, step)


def in_a_keyword_default(body: Body) -> Hold:
    def step(*inputs: Any, held: Any = None) -> Tensor:
        return body(held, *inputs)

    return lambda value: (step.__kwdefaults__.update(held=value), step)[1]


def _by_keyword(body: Body, *inputs: Any, held: Any) -> Tensor:
    return body(held, *inputs)


HOLDERS: dict[str, Callable[[Body], Hold]] = {
    "closure": in_a_closure,
    "closure made anew": lambda body: lambda value: lambda *inputs: body(value, *inputs),
    "closure inside": in_a_closure_inside,
    "list": lambda body: in_a_container(body, lambda: [None]),
    "dict": lambda body: in_a_container(body, dict),
    "slot": lambda body: in_an_object(body, WithSlots),
    "self of a method": lambda body: in_an_object(body, WithMethod),
    "module": lambda body: in_an_object(body, StepModule),
    "attribute of an attribute": in_an_attribute_of_an_attribute,
    "class": in_a_class,
    "global variable": in_a_global_variable,
    "function": on_the_function,
    "partial": lambda body: lambda value: partial(body, value),
    "keyword of a partial": lambda body: lambda value: partial(_by_keyword, body, held=value),
    "default": lambda body: lambda value: lambda z, x, held=value: body(held, z, x),
    "keyword default": in_a_keyword_default,
}


# Solves and samples, and what is to be the same of them.


@dataclass
class Found:
    """Of one solve, on the host."""

    states: np.ndarray
    iterations: list[int]
    gradients: list[np.ndarray]
    replayed: bool
    notes: list[str] = field(repr=False)
    evaluation: str = ""


@dataclass
class Pair:
    """
    Attributes:
        what: they differ in
        where: they hold it
        attempt: the solve of the first, or of the second
        rounding: by how much equal solves may differ, relative to the largest state; different ones differ by ten times this or more
        slack: in how many iterations equal solves may differ
    """

    what: str
    where: str
    attempt: Callable[[bool], Found]
    rounding: float
    slack: int = 0

    def differ(self, one: Found, other: Found) -> str:
        """In which respect two results are not the same, or ""."""
        apart = distance(one.states, other.states)
        if not apart <= self.rounding:
            return f"states differ by {apart:.1e}"
        steps = np.abs(np.subtract(one.iterations, other.iterations)).max()
        rolled = any(
            "rolled out" in note for note in (*one.notes, *other.notes)
        )  # which a recording does not: it takes more
        alike = one.evaluation == other.evaluation  # kernels, where there are some, count other iterations
        if steps > self.slack and alike and not rolled:
            return f"{one.iterations} iterations, not {other.iterations}"
        apart = max(map(distance, one.gradients, other.gradients), default=0.0)
        return "" if apart <= 10 * self.rounding else f"gradients differ by {apart:.1e}"


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative to the largest number of the other; NaN where one is not finite."""
    if one.shape != other.shape:
        return np.inf
    return float(np.abs(one - other).max() / np.abs(other).max())


def rounding_of(draw: Draw) -> float:
    return 1e-3 if draw.dtype == torch.float32 else 1e-8


def on_host(nest: Any) -> np.ndarray:
    flat = [leaf.detach().flatten().double().cpu() for leaf in pytree.tree_leaves(nest)]
    return torch.cat(flat).numpy()


def solved(step: Any, z0: Any, xs: Any, solver: Newton = Newton()) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        solution = deeppcr.solve(step, z0, xs, solver=solver)
    leaves = [leaf for leaf in pytree.tree_leaves((z0, xs)) if leaf.requires_grad]
    loss = sum(leaf.square().sum() for leaf in pytree.tree_leaves(solution.states))
    gradients = torch.autograd.grad(loss, leaves) if leaves else ()
    notes = solution.plan.notes
    replayed = "replayed as a CUDA graph" in notes
    gradients = [*map(on_host, gradients)]
    evaluation = solution.plan.evaluation
    return Found(on_host(solution.states), solution.iterations.tolist(), gradients, replayed, notes, evaluation)


def sampled(denoiser: Any, schedule: Schedule, noise: Tensor, **settings: Any) -> Found:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        samples: Samples = sample(denoiser, schedule, noise, step=DDIM(), **{"solver": WINDOW} | settings)
    notes = samples.plan.notes
    return Found(on_host(samples.final), samples.iterations.tolist(), [], "CUDA graphs" in notes, notes)


#: One for all samples, as the default is.
WINDOW = Window(tolerance=1e-4)


def solve_by(what: str, where: str, draw: Draw) -> Pair:
    """Steps that differ in what they hold."""
    change, use = {**CHANGES, **TRACED_CHANGES}[what](draw)
    hold = HOLDERS[where](lambda held, z, x: 0.7 * torch.tanh(use(held, z)) + x)
    z0, xs = draw.normal(draw.pick((1, 3)), WIDTH), draw.normal(draw.pick((7, 20, 33)), WIDTH)
    if draw.pick((True, False, False)):
        z0.requires_grad_()
        xs.requires_grad_()
    return Pair(what, where, lambda second: solved(hold(change(second)), z0, xs), rounding_of(draw))


def sample_by(what: str, where: str, draw: Draw) -> Pair:
    """Denoisers that differ in what they hold."""
    change, use = CHANGES[what](draw)
    hold = HOLDERS[where](lambda held, z, t: torch.tanh(use(held, z)) + 1e-3 * t.unsqueeze(-1))
    noise, schedule = draw.normal(draw.pick((1, 3)), WIDTH), SCHEDULE
    return Pair(what, where, lambda second: sampled(hold(change(second)), schedule, noise), 1e-3, slack=1)


SCHEDULE = Schedule.linear().take(12)


# Solves that differ in something else than what the step holds.


def number_of_iterations(draw: Draw) -> Any:
    stops = FixedIterations(1), FixedIterations(4)
    return lambda second: Newton(chunk=1, stop=stops[second])


def chunk(draw: Draw) -> Any:
    return lambda second: Newton(chunk=5 if second else 1, stop=FixedIterations(1))


def given_jacobian(draw: Draw) -> Any:
    """What the function of a Jacobian closes over. Too few iterations to forget it."""
    scale = 0.0

    def blocks(z: Tensor, x: Tensor) -> linear.Diagonal:
        return linear.Diagonal(scale / torch.cosh(z) ** 2)

    def solver(second: bool) -> Newton:
        nonlocal scale
        scale = 0.9 if second else 0.2
        return Newton(chunk=1, jacobian=GivenJacobian(blocks, exact=True), stop=FixedIterations(2))

    return solver


def given_blocks(draw: Draw) -> Any:
    both = [linear.Diagonal(draw.normal(20, 1, WIDTH) + offset) for offset in (-0.5, 0.5)]
    return lambda second: Newton(chunk=1, jacobian=GivenJacobian(both[second], exact=True), stop=FixedIterations(2))


SOLVERS = {
    "number of iterations": number_of_iterations,
    "chunk": chunk,
    "closure of a Jacobian": given_jacobian,
    "blocks of a Jacobian": given_blocks,
}


def by_solver(what: str, draw: Draw) -> Pair:
    solver, z0, xs = SOLVERS[what](draw), draw.normal(2, WIDTH), draw.normal(20, WIDTH)
    step = lambda z, x: 0.9 * torch.tanh(z) + x  # noqa: E731
    return Pair(what, "solver", lambda second: solved(step, z0, xs, solver=solver(second)), rounding_of(draw))


def turned_inputs(draw: Draw) -> Any:
    xs = draw.normal(20, WIDTH, WIDTH, scale=0.4)
    return lambda second: xs.mT if second else xs


def moved_inputs(draw: Draw) -> Any:
    xs = draw.normal(21, WIDTH, WIDTH, scale=0.4)
    return lambda second: xs[1:] if second else xs[:-1]


def repeated_inputs(draw: Draw) -> Any:
    """A leaf that only seems to have its size, and one that has it."""
    xs = draw.normal(20, WIDTH, WIDTH, scale=0.4)
    return lambda second: xs[:1].expand(20, -1, -1) if second else xs


def fewer_inputs(draw: Draw) -> Any:
    xs = draw.normal(20, WIDTH, WIDTH, scale=0.4)
    return lambda second: xs[:13] if second else xs


INPUTS = {
    "strides of xs": turned_inputs,
    "place of xs": moved_inputs,
    "expanded xs": repeated_inputs,
    "length of xs": fewer_inputs,
}


def by_inputs(what: str, draw: Draw) -> Pair:
    make, z0 = INPUTS[what](draw), draw.normal(2, WIDTH)
    step = lambda z, x: torch.tanh(z @ x) + 0.3  # noqa: E731
    return Pair(what, "xs", lambda second: solved(step, z0, make(second)), rounding_of(draw))


def by_autocast(what: str, draw: Draw) -> Pair:
    """Products in bfloat16 take another factor, for rounding alone would be too little to see. What rounds so much does not converge."""
    draw.dtype = torch.float32
    weight, z0, xs = draw.weights()[0], draw.normal(2, WIDTH), draw.normal(20, WIDTH)

    def step(z: Tensor, x: Tensor) -> Tensor:
        product = z @ weight
        return torch.tanh(product.float() * (0.3 if product.dtype == torch.bfloat16 else 1.0)) + x

    def attempt(second: bool) -> Found:
        with torch.autocast(draw.device, dtype=torch.bfloat16, enabled=second):
            return solved(step, z0, xs, solver=Newton(chunk=1, stop=FixedIterations(8)))

    return Pair(what, "settings", attempt, 0.02)


def by_tf32(what: str, draw: Draw) -> Pair:
    """Weights that TF32 rounds to others; states are rounded too, but their products are small."""
    draw.dtype = torch.float32
    width = 64
    weight = 1 + 2**-11 * 0.98 * torch.sign(draw.normal(width, width))  # all become 1
    z0, xs = draw.normal(2, width, scale=0.1), draw.normal(20, width, scale=0.1)
    step = lambda z, x: torch.tanh(300 * (z @ weight - z.sum(-1, keepdim=True)) / 8) + x  # noqa: E731

    def attempt(second: bool) -> Found:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if second else "ieee"
        try:
            return solved(step, z0, xs, solver=Newton(chunk=1, stop=FixedIterations(8)))
        finally:
            torch.backends.cuda.matmul.fp32_precision = "ieee"

    return Pair(what, "settings", attempt, 0.02)


def by_inference_mode(what: str, draw: Draw) -> Pair:
    z0, xs = draw.normal(2, WIDTH), draw.normal(20, WIDTH)
    step = lambda z, x: torch.tanh(z * (0.3 if torch.is_inference_mode_enabled() else 1.0)) + x  # noqa: E731

    def attempt(second: bool) -> Found:
        with torch.inference_mode(second):
            return solved(step, z0, xs)

    return Pair(what, "settings", attempt, rounding_of(draw))


def by_requires_grad(what: str, draw: Draw) -> Pair:
    weight, z0, xs = draw.weights()[0], draw.normal(2, WIDTH), draw.normal(20, WIDTH)
    step = lambda z, x: torch.tanh(z @ weight * (0.3 if weight.requires_grad else 1.0)) + x  # noqa: E731

    def attempt(second: bool) -> Found:
        weight.requires_grad_(second)
        return solved(step, z0, xs)

    return Pair(what, "settings", attempt, rounding_of(draw))


def by_order(what: str, draw: Draw) -> Pair:
    """Which of the results of equal operations is which state."""
    z0, xs, swap = (draw.normal(2, 2), draw.normal(2, 2)), draw.normal(20, 2), False

    def step(z: Any, x: Tensor) -> Any:
        one, other = torch.tanh(0.9 * z[0]) + x, torch.sin(0.5 * z[1])
        return (other, one) if swap else (one, other)

    def attempt(second: bool) -> Found:
        nonlocal swap
        swap = second
        return solved(step, z0, xs)

    return Pair(what, "step", attempt, rounding_of(draw))


OTHERS = {
    **dict.fromkeys(SOLVERS, by_solver),
    **dict.fromkeys(INPUTS, by_inputs),
    "autocast": by_autocast,
    "inference mode": by_inference_mode,
    "requires_grad": by_requires_grad,
    "order of the results": by_order,
}
GPU_OTHERS = {"TF32": by_tf32}


# Samples that differ in something else than what the denoiser holds.


def by_guidance(what: str, draw: Draw) -> Pair:
    noise, table = draw.normal(2, WIDTH), draw.normal(5, WIDTH)
    labels = torch.tensor([[0, 1], [2, 3]], device=draw.device)
    denoiser = lambda z, t, label: 0.5 * torch.tanh(z + table[label])  # noqa: E731

    def attempt(second: bool) -> Found:
        changed = {"classes": labels[int(second)] if what == "classes" else labels[0]}
        changed["guidance"] = 3.0 if what == "guidance" and second else 1.5
        changed["unconditional"] = 3 if what == "unconditional" and second else 4
        return sampled(denoiser, SCHEDULE, noise, **changed)

    return Pair(what, "arguments", attempt, 1e-3, slack=1)


def by_schedule(what: str, draw: Draw) -> Pair:
    noise, both = draw.normal(2, WIDTH), (SCHEDULE, Schedule.cosine().take(12))
    denoiser = lambda z, t: 0.5 * torch.tanh(z)  # noqa: E731
    return Pair(what, "arguments", lambda second: sampled(denoiser, both[second], noise), 1e-3, slack=1)


def by_prediction(what: str, draw: Draw) -> Pair:
    noise = draw.normal(2, WIDTH)
    denoiser = lambda z, t: 0.5 * torch.tanh(z)  # noqa: E731
    ways = {False: "epsilon", True: "v"}
    return Pair(
        what, "arguments", lambda second: sampled(denoiser, SCHEDULE, noise, prediction=ways[second]), 1e-3, slack=1
    )


OTHER_SAMPLES = {
    **dict.fromkeys(("guidance", "classes", "unconditional"), by_guidance),
    "schedule": by_schedule,
    "prediction": by_prediction,
}


def kinds(samples: bool, device: str) -> dict[str, Callable[[str, Draw], Pair] | None]:
    """All that a pair may differ in; None: in what its functions hold."""
    if samples:
        return {**dict.fromkeys(CHANGES), **OTHER_SAMPLES}
    return {**dict.fromkeys([*CHANGES, *TRACED_CHANGES]), **OTHERS, **(GPU_OTHERS if device == "cuda" else {})}


def make(number: int, what: str, samples: bool, device: str) -> Pair:
    draw = Draw(number, device)
    other = kinds(samples, device)[what]
    if other is not None:
        return other(what, draw)
    return (sample_by if samples else solve_by)(what, draw.pick(list(HOLDERS)), draw)
