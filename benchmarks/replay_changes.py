"""What a function may depend on, one thing at a time: see ``wrong_replays.py``.

A change is a function of a draw. It gives ``change(second)``, the value that the first or the second function of a pair holds, and
``use(held, z)``, what they do with it to states [..., WIDTH]. Some values are replaced, others are the same object with something else
in it.
"""

from __future__ import annotations

import os
import random
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 4
Use = Callable[[Any, Tensor], Tensor]
Change = tuple[Callable[[bool], Any], Use]


class Draw:
    """All that is random about one pair."""

    def __init__(self, number: int, device: str):
        self.device, self.choice = device, random.Random(number)
        self.source = torch.Generator().manual_seed(number)
        self.dtype = self.pick((torch.float64, torch.float64, torch.float32))

    def pick(self, values: Sequence[Any]) -> Any:
        return self.choice.choice(values)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = scale * torch.randn(*shape, generator=self.source, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)

    def numbers(self) -> tuple[float, float]:
        """Two that are far from each other."""
        return self.choice.uniform(0.2, 0.4), self.choice.uniform(0.9, 1.1)

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.normal(WIDTH, WIDTH, scale=0.4), self.normal(WIDTH, WIDTH, scale=0.4) + 0.3


def called(held: Any, z: Tensor) -> Tensor:
    return held(z)


# Another of two values, by which a function chooses what to do.


def sine(z: Tensor) -> Tensor:
    return torch.sin(2 * z)


def less(z: Tensor) -> Tensor:
    return 0.3 * z


Way = Enum("Way", ["SINE", "LESS"])
BRANCHES: dict[str, tuple[Any, Any, Use]] = {
    "bool": (False, True, lambda held, z: sine(z) if held else less(z)),
    "equal, but of another type": (1, True, lambda held, z: sine(z) if held is True else less(z)),
    "sign of zero": (0.0, -0.0, lambda held, z: z * torch.copysign(torch.ones_like(z), torch.full_like(z, held))),
    "whole number": (-1, 2, lambda held, z: torch.roll(z, held, -1)),
    "string": ("less", "sine", lambda held, z: {"less": less, "sine": sine}[held](z)),
    "None or not": (None, 0.3, lambda held, z: z if held is None else held * z),
    "enum": (Way.LESS, Way.SINE, lambda held, z: {Way.LESS: less, Way.SINE: sine}[held](z)),
    "dtype": (torch.float16, torch.float64, lambda held, z: z * (torch.finfo(held).bits / 64)),
    "function": (less, sine, called),
}

# A value that is made of a number: of another number, another value.

Named = namedtuple("Named", ["scale", "more"])


@dataclass(frozen=True)
class Frozen:
    scale: float


class Scaling:
    def __init__(self, scale: float = 0.0):
        self.scale, self.inner = scale, SimpleNamespace(scale=scale)

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def times(self, z: Tensor) -> Tensor:
        return self.scale * z


def closure(scale: Any) -> Callable:
    return lambda z: scale * z


def nested_closure(scale: float) -> Callable:
    inner = closure(scale)
    return lambda z: inner(z)


def with_default(number: float) -> Callable:
    return lambda z, scale=number: scale * z


def _scale(z: Tensor, *, scale: float) -> Tensor:
    return scale * z


MADE: dict[str, tuple[Callable[[float], Any], Use]] = {
    "number": (float, lambda held, z: held * z),
    "numpy scalar": (np.float64, lambda held, z: z * held),
    "short numpy scalar": (np.float32, lambda held, z: z * held),
    "tuple element": (lambda n: (1, (n,)), lambda held, z: held[1][0] * z),
    "named tuple": (lambda n: Named(n, None), lambda held, z: held.scale * z),
    "frozen dataclass": (Frozen, lambda held, z: held.scale * z),
    "closure": (closure, called),
    "nested closure": (nested_closure, called),
    "closure in a list": (lambda n: [torch.tanh, closure(n)], lambda held, z: held[1](z)),
    "closure in a dict": (lambda n: {"times": closure(n)}, lambda held, z: held["times"](z)),
    "argument of a partial": (lambda n: partial(torch.mul, n), called),
    "keyword of a partial": (lambda n: partial(partial(_scale), scale=n), called),
    "default argument": (with_default, called),
    "bound method": (lambda n: Scaling(n).times, called),
    "slice": (
        lambda n: slice(None, 1 if n < 0.5 else 3),
        lambda held, z: z - z[..., held].sum(-1, keepdim=True) / 2,
    ),
}

# One object, and another number in it.


class Slotted:
    __slots__ = ("scale",)


def cell() -> tuple[Callable, Callable]:
    scale = 0.0

    def put(number: float) -> None:
        nonlocal scale
        scale = number

    return put, lambda z: scale * z


def keyword_default() -> Callable:
    def times(z: Tensor, *, scale: float = 0.0) -> Tensor:
        return scale * z

    return times


def global_variable() -> Callable:
    namespace: dict[str, Any] = {}
    exec("def times(z): return scale * z", namespace)
    return namespace["times"]


def other_module() -> Callable:
    namespace: dict[str, Any] = {"settings": ModuleType("settings")}
    exec("def times(z): return settings.scale * z", namespace)
    return namespace["times"]


Put = Callable[[Any, float], Any]
INSIDE: dict[str, tuple[Callable[[], Any], Put, Use]] = {
    "list entry": (lambda: [1, [0.0]], lambda v, n: v[1].__setitem__(0, n), lambda v, z: v[1][0] * z),
    "dict value": (dict, lambda v, n: v.update(scale=n), lambda v, z: v["scale"] * z),
    "deque entry": (lambda: deque([0.0]), lambda v, n: v.__setitem__(0, n), lambda v, z: v[0] * z),
    "member of a set": (set, lambda v, n: (v.clear(), v.add(n > 0.5)), lambda v, z: 0.5 * z if True in v else z),
    "numpy array": (lambda: np.zeros(3), lambda v, n: v.fill(n), lambda v, z: float(v[1]) * z),
    "attribute": (Scaling, lambda v, n: setattr(v, "scale", n), lambda v, z: v.twice * z / 2),
    "attribute of an attribute": (Scaling, lambda v, n: setattr(v.inner, "scale", n), lambda v, z: v.inner.scale * z),
    "slot": (Slotted, lambda v, n: setattr(v, "scale", n), lambda v, z: v.scale * z),
    "class attribute": (type("Own", (), {}), lambda v, n: setattr(type(v), "scale", n), lambda v, z: v.scale * z),
    "self of a bound method": (lambda: Scaling().times, lambda v, n: setattr(v.__self__, "scale", n), called),
    "cell of a closure": (cell, lambda v, n: v[0](n), lambda v, z: v[1](z)),
    "keyword default": (keyword_default, lambda v, n: v.__kwdefaults__.update(scale=n), called),
    "global variable": (global_variable, lambda v, n: v.__globals__.update(scale=n), called),
    "variable of a module": (other_module, lambda v, n: setattr(v.__globals__["settings"], "scale", n), called),
}
#: What only a trace of operations shows, however far one looks into a function.
TRACED: dict[str, tuple[Callable[[], Any], Put, Use]] = {
    "environment": (
        lambda: "DEEPPCR_WRONG_REPLAYS",
        lambda v, n: os.environ.__setitem__(v, str(n)),
        lambda v, z: float(os.environ[v]) * z,
    )
}

# Tensors: another one, or another content.

TENSORS: dict[str, Callable[[Draw], Callable[[bool], Tensor]]] = {
    "tensor": lambda draw: draw.weights().__getitem__,
    # The one before is gone, and the next may lie where it lay.
    "tensor made anew": lambda draw: lambda second, both=draw.weights(): both[second].clone(),
    "transposed tensor": lambda draw: lambda second, one=draw.weights()[1]: one.mT if second else one,
    "part of a tensor": lambda draw: lambda second, both=torch.stack(draw.weights()): both[int(second)],
    "tensor changed in place": lambda draw: (
        lambda second, both=draw.weights(), held=draw.normal(WIDTH, WIDTH): held.copy_(both[second])
    ),
    "tensor on other memory": lambda draw: (
        lambda second, both=draw.weights(), held=draw.normal(WIDTH, WIDTH): held.set_(both[second])
    ),
    "tensor of a single number": lambda draw: lambda second, both=draw.weights(): both[second][0, 0].clone(),
}

# Modules.


class Gate(nn.Module):
    """Holds one of everything."""

    def __init__(self, draw: Draw):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device=draw.device, dtype=draw.dtype).requires_grad_(False)
        self.linear.weight.copy_(draw.weights()[0])
        self.shift: Tensor
        self.register_buffer("shift", draw.normal(WIDTH))
        self.scale, self.activation = 0.7, torch.nn.functional.silu
        self.eval()

    def forward(self, z: Tensor) -> Tensor:
        z = self.activation(self.scale * self.linear(z) + self.shift)
        return torch.sin(2 * z) if self.training else z


def hooked(gate: Gate, second: bool) -> None:
    gate._forward_hooks.clear()
    if second:
        gate.register_forward_hook(lambda module, inputs, found: 0.3 * found)


def hook_with_a_closure(gate: Gate, scale: float) -> None:
    gate.linear._forward_pre_hooks.clear()
    gate.linear.register_forward_pre_hook(lambda module, inputs: (scale * inputs[0],))


#: by a module, whether it is of the second function, a number, a vector and a matrix of its own
MODULES: dict[str, Callable[[Gate, bool, float, Tensor, Tensor], Any]] = {
    "mode of a module": lambda gate, second, n, v, m: gate.train(second),
    "attribute of a module": lambda gate, second, n, v, m: setattr(gate, "scale", n),
    "closure that a module holds": lambda gate, second, n, v, m: setattr(gate, "activation", closure(n)),
    "buffer": lambda gate, second, n, v, m: setattr(gate, "shift", v),
    "buffer changed in place": lambda gate, second, n, v, m: gate.shift.copy_(v),
    "parameter": lambda gate, second, n, v, m: setattr(gate.linear, "weight", nn.Parameter(m, requires_grad=False)),
    "data of a parameter": lambda gate, second, n, v, m: setattr(gate.linear.weight, "data", m),
    "parameter changed in place": lambda gate, second, n, v, m: gate.linear.weight.copy_(m),
    "hook": lambda gate, second, n, v, m: hooked(gate, second),
    "closure of a hook": lambda gate, second, n, v, m: hook_with_a_closure(gate, n),
    "forward of a module": lambda gate, second, n, v, m: setattr(gate.linear, "forward", closure(n)),
}


def another_module(draw: Draw) -> Change:
    both = Gate(draw), Gate(draw)
    return both.__getitem__, called


def submodule(draw: Draw) -> Change:
    gate, both = Gate(draw), (Gate(draw).linear, Gate(draw).linear)

    def change(second: bool) -> nn.Module:
        gate.linear = both[second]
        return gate

    return change, called


def of_branch(name: str, draw: Draw) -> Change:
    *both, use = BRANCHES[name]
    return both.__getitem__, use


def of_number(name: str, draw: Draw) -> Change:
    (make, use), numbers = MADE[name], draw.numbers()
    return lambda second: make(numbers[second]), use


def of_content(name: str, draw: Draw) -> Change:
    make, put, use = {**INSIDE, **TRACED}[name]
    value, numbers = make(), draw.numbers()

    def change(second: bool) -> Any:
        put(value, numbers[second])
        return value

    return change, use


def of_tensor(name: str, draw: Draw) -> Change:
    return TENSORS[name](draw), lambda held, z: z @ held if held.ndim else held * z


def of_module(name: str, draw: Draw) -> Change:
    gate, numbers, vectors, matrices = (
        Gate(draw),
        draw.numbers(),
        (draw.normal(WIDTH), draw.normal(WIDTH)),
        draw.weights(),
    )

    def change(second: bool) -> nn.Module:
        with torch.no_grad():
            MODULES[name](gate, second, numbers[second], vectors[second], matrices[second])
        return gate

    return change, called


CHANGES: dict[str, Callable[[Draw], Change]] = {
    **{name: partial(of_branch, name) for name in BRANCHES},
    **{name: partial(of_number, name) for name in MADE},
    **{name: partial(of_content, name) for name in INSIDE},
    **{name: partial(of_tensor, name) for name in TENSORS},
    **{name: partial(of_module, name) for name in MODULES},
    "module": another_module,
    "module of a module": submodule,
}
TRACED_CHANGES = {name: partial(of_content, name) for name in TRACED}
