"""Problem ``n``: a loop of some family, written in some units and some nest, and what ``solve`` is asked for.

Shapes: L steps, B rows, D the state of a row packed flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr.ways.fused import Call, solve_fused

from .families import FAMILIES, Draw, Model

#: What is promised without being asked for.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
#: Units are powers of two, so that numbers in them are the same numbers: these are six decades up and six down.
LARGEST_POWER = {torch.float64: 20, torch.float32: 20, torch.bfloat16: 20, torch.float16: 3}


@dataclass(frozen=True)
class Problem:
    """One problem. Its tensors are float64 and hold numbers that ``dtype`` has, so that every precision has the same ones.

    Attributes:
        model: the loop in natural units
        units: what each number of the state is multiplied by, [*state] a leaf of the natural state; None: 1
        nest: how the state is packaged: "" (as the family has it), "tuple" or "dict"
        solver: arguments of Newton, and ``kind``: "Newton", "Jacobi" or "Picard"; empty: whatever ``solve`` does by default
        asked: other arguments of ``solve``
        guess: "" (the default), "zeros", "random" or "near": the loop's own states, one percent off
    """

    number: int
    family: str
    model: Model
    length: int
    batch: tuple[int, ...]
    dtype: torch.dtype
    units: Any
    units_name: str
    nest: str
    solver: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    guess: str = ""

    @property
    def rtol(self) -> float:
        return self.solver.get("rtol", TOLERANCE[self.dtype])

    @property
    def atol(self) -> float:
        """Only where it was asked for."""
        return self.solver.get("atol", 0.0)

    @property
    def plain(self) -> bool:
        """Whether the solver and its start are left to ``solve``."""
        return not self.solver and not self.guess

    @property
    def z0(self) -> Any:
        units = self.units
        z0 = self.model.z0 if units is None else pytree.tree_map(torch.mul, self.model.z0, units)
        return _wrapped(z0, self.nest)

    @property
    def sources(self) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """Initial state, inputs (empty where there are none) and parameters: what gradients are taken of."""
        return self.z0, () if self.model.xs is None else self.model.xs, self.model.parameters

    def step(self, parameters: Sequence[Tensor], dtype: torch.dtype, device: Any = "cpu") -> Callable:
        """``step(z, x)`` as a user writes it, closing over the parameters."""
        inner, nest, parameters = self.model.step, self.nest, tuple(parameters)
        units = pytree.tree_map(lambda leaf: leaf.to(device, dtype), self.units) if self.units is not None else None

        def step(z, x=None):
            z = _unwrapped(z, nest)
            if units is None:
                return _wrapped(inner(z, x, parameters), nest)
            z = inner(pytree.tree_map(torch.div, z, units), x, parameters)
            return _wrapped(pytree.tree_map(torch.mul, z, units), nest)

        return step

    def pack(self, states: Any) -> Tensor:
        """Leaves [L, *batch, *state] to [L, B, D] in float64."""
        leaves = [leaf.detach().to("cpu", torch.float64) for leaf in pytree.tree_leaves(states)]
        rows = self.batch[0] if self.batch else 1
        return torch.cat([leaf.reshape(len(leaf), rows, -1) for leaf in leaves], -1)

    def unpack(self, packed: Tensor) -> Any:
        """[L, B, D] to a nest like the state."""
        leaves, spec = pytree.tree_flatten(self.z0)
        sizes = [leaf.numel() // (self.batch[0] if self.batch else 1) for leaf in leaves]
        parts = packed.split(sizes, -1)
        shaped = [part.reshape(len(packed), *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return pytree.tree_unflatten(shaped, spec)

    def by_way(self, way: str) -> Problem:
        """As a way solves it: kernels know nothing of other Jacobians, guesses and gradients, and short loops are cut into several chunks."""
        if way not in KERNELS:
            return self
        solver = {name: value for name, value in self.solver.items() if name in ("rtol", "atol")}
        if way == "fused" and self.length <= _SHORT:
            solver["chunk"] = max(2, self.length // 8)
        asked = {name: value for name, value in self.asked.items() if name == "batch_dims"}
        return replace(self, solver=solver, asked=asked, guess="")

    def solve(self, way: str, step: Callable, z0: Any, xs: Any, near: Any) -> deeppcr.Solution:
        """By ``way``; ``near``: the loop's states, for a guess."""
        asked = dict(self.asked)
        if way in KERNELS:
            return self._by_kernels(Call(step, z0, xs, self.length, asked.get("batch_dims")), loop=way == "fused-loop")
        if self.solver or way != "default":
            settings = {name: value for name, value in self.solver.items() if name != "kind"}
            asked["solver"] = getattr(deeppcr, self.solver.get("kind", "Newton"))(**settings)
        if self.guess == "near":
            asked["guess"] = pytree.tree_map(lambda leaf: leaf * 1.01, near)
        elif self.guess:
            asked["guess"] = {"zeros": deeppcr.Zeros(), "random": deeppcr.Random()}[self.guess]
        if xs is None:
            asked["length"] = self.length
        for _ in range(REPEATS.get(way, 1) - 1):
            deeppcr.solve(step, z0, xs, **asked)
        return deeppcr.solve(step, z0, xs, **asked)

    def _by_kernels(self, call: Call, *, loop: bool) -> deeppcr.Solution:
        made = call.make()
        if isinstance(made, str):
            raise NoKernels(made)
        found = solve_fused(call, deeppcr.Newton(**self.solver), None, loop=loop)
        if isinstance(found, str):
            raise OtherResult(found)
        return found

    def describe(self) -> str:
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(self.z0)]
        settings = ", ".join(f"{name}={value!r}" for name, value in {**self.solver, **self.asked}.items())
        parts = (
            f"{self.family} L={self.length} {str(self.dtype).removeprefix('torch.')} {shapes}",
            self.nest,
            self.units_name,
            settings,
            f"guess={self.guess}" if self.guess else "",
        )
        return "; ".join(part for part in parts if part)


#: How a problem may be solved: as a user gets it; by Newton's iteration whatever ``solve`` would choose; by it for the
#: fourth time, when a GPU replays what it recorded; or by kernels, in parallel, and as the loop in one kernel.
KERNELS = ("fused", "fused-loop")
WAYS = ("default", "newton", "repeated", *KERNELS)
REPEATS = {"repeated": 4}
#: Kernels take so few steps for one chunk, or for few.
_SHORT = 256


class NoKernels(Exception):
    """Of a step for which there are none, and why."""


class OtherResult(Exception):
    """Kernels whose states the step itself does not give."""


def problem(number: int, *, seed: int = 0, longest: int = 5000) -> Problem:
    draw, family = Draw(seed, number, longest), FAMILIES[number % len(FAMILIES)]
    model = family(draw)
    half = len(model.dtypes) > 2 and draw.often(0.15)
    dtype = draw.pick(model.dtypes[2:] if half else (*model.dtypes[:1], *model.dtypes[:2]))  # mostly float32
    rounded = lambda leaf: leaf.to(dtype).double()  # noqa: E731
    model = Model(
        **{
            **vars(model),
            "z0": pytree.tree_map(rounded, model.z0),
            "xs": pytree.tree_map(rounded, model.xs) if model.xs is not None else None,
            "parameters": tuple(map(rounded, model.parameters)),
        }
    )
    units, units_name = _units(draw, model, dtype)
    splits = isinstance(model.z0, Tensor) and model.z0.ndim == len(draw.batch) + 1 and model.z0.shape[-1] > 1
    nest = draw.pick(("", "", "tuple", "dict")) if splits else ""
    solver, asked, guess = _settings(draw, model, dtype)
    if draw.rows is None and any(leaf.ndim > 1 for leaf in pytree.tree_leaves(model.z0)):
        asked["batch_dims"] = 0  # which nobody can guess
    return Problem(
        *(number, family.__name__, model, draw.length, draw.batch, dtype),
        *(units, units_name, nest, solver, asked, guess),
    )


def _units(draw: Draw, model: Model, dtype: torch.dtype) -> tuple[Any, str]:
    kind, power = draw.pick(("", "", "one", "each", "each")), LARGEST_POWER[dtype]
    if not kind:
        return None, ""
    lead = len(draw.batch)
    if kind == "one":
        exponent = draw.choice.randint(-power, power)
        units = pytree.tree_map(lambda leaf: torch.full(leaf.shape[lead:], 2.0**exponent).double(), model.z0)
        return units, f"in units of 2^{exponent}"
    exponents = lambda leaf: ((2 * draw.uniform(*leaf.shape[lead:]) - 1) * power).round()  # noqa: E731
    return pytree.tree_map(lambda leaf: torch.exp2(exponents(leaf)), model.z0), "each number in a unit of its own"


def _settings(draw: Draw, model: Model, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Arguments of the solver, other arguments, and the guess: mostly the defaults."""
    solver: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    if draw.often(0.1) and dtype in (torch.float32, torch.float64):
        asked["gradient"] = deeppcr.Unrolled()
    if draw.often(0.1):
        asked["on_failure"] = draw.pick(("raise", "return"))
    if draw.often(0.6):
        return solver, asked, ""
    change = draw.pick(("jacobian", "jacobian", "chunk", "linear", "tolerance", "guess", "guess"))
    if change == "jacobian":
        names = ["hutchinson", "scalar", "Jacobi", "Picard", *(["diagonal"] * 3 if model.elementwise else [])]
        name = draw.pick(names)
        if name in ("Jacobi", "Picard"):
            solver["kind"] = name
        elif name == "hutchinson":
            solver["jacobian"] = deeppcr.HutchinsonJacobian(samples=draw.pick((1, 4)))
        elif name == "scalar":
            solver["jacobian"] = deeppcr.ScalarJacobian(draw.pick((0.3, 0.9)))
        else:
            solver["jacobian"] = deeppcr.DiagonalJacobian()
    elif change == "chunk":
        solver["chunk"] = draw.pick((1, 2, 8, 33))
    elif change == "linear":
        solver["linear"] = draw.pick((deeppcr.PCR(), deeppcr.Hierarchical(), deeppcr.ForwardSubstitution()))
    elif change == "tolerance":
        solver["rtol"] = TOLERANCE[dtype] * draw.pick((0.3, 10.0))
        solver["atol"] = draw.pick((0.0, solver["rtol"]))
    return solver, asked, draw.pick(("zeros", "random", "near")) if change == "guess" else ""


def _wrapped(z: Any, nest: str) -> Any:
    if not nest:
        return z
    first, rest = z[..., :1], z[..., 1:]
    return (first, rest) if nest == "tuple" else {"first": first, "rest": rest}


def _unwrapped(z: Any, nest: str) -> Any:
    return torch.cat(list(z.values() if nest == "dict" else z), -1) if nest else z
