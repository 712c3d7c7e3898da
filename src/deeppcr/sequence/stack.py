"""A list of callables as few groups: those of equal structure are stacked and evaluated together."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .evaluate import StepGroup, entry_of
from .layout import Layout

#: What a list of steps may be.
LISTS = (list, tuple, nn.ModuleList)
#: Where modules have hooks: with another one, on gradients too, a step is another step.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: What every module has.
MODULE_INTERNALS = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, OrderedDict, set)
_PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, type)


def group_callables(
    callables: Sequence[Callable[..., Any]], xs: Any, layout: Layout, *, stack: bool = True
) -> tuple[list[tuple[list[int], StepGroup]], str]:
    """Groups of steps, each with the indices of its members, and a sentence on what was stacked.

    Args:
        callables: L of them, each ``f(z)``, or ``f(z, x)`` where xs is not None
        xs: nest of tensors [L, ...], or None
        stack: without it, each is called itself, and not a copy that stands for several: it may keep what it likes
    """
    alike: list[list[int]] = []
    known: dict[int, list[int]] = {}
    for index, candidate in enumerate(callables):
        same = (members for members in alike if stack and _same_structure(callables[members[0]], candidate))
        members = known.get(id(candidate)) or next(same, None)
        if members is None:
            alike.append(members := [])
        known[id(candidate)] = members
        members.append(index)

    groups, stacked, alone = [], 0, 0
    for members in alike:
        chosen = [callables[i] for i in members]
        inputs = entry_of(xs, members)
        if all(f is chosen[0] for f in chosen):
            single = len(members) == 1
            groups.append((members, StepGroup(chosen[0], inputs, layout, one_by_one=single)))
            alone, stacked = alone + single, stacked + (0 if single else len(members))
        else:
            step, state = Stacked(chosen, inputs is not None), stacked_state(chosen)
            state = state if inputs is None else (state, inputs)
            groups.append((members, StepGroup(step, state, layout, module=step.stand_in)))
            stacked += len(members)
    said = f"{len(callables)} callables: {stacked} stacked in {sum(len(m) > 1 for m, _ in groups)} groups"
    return groups, said + (f", {alone} called one by one" if alone else "")


class Stacked:
    """Modules of equal structure as one step: ``step(z, state)``, or ``step(z, (state, x))``, with parameters and buffers of one of them.

    Args:
        modules: that are alike
        has_inputs: each is ``f(z, x)``
    """

    def __init__(self, modules: Sequence[Any], has_inputs: bool):
        self.stand_in: nn.Module = _stand_in_for(modules[0])
        self._has_inputs = has_inputs

    def __call__(self, z: Any, x: Any) -> Any:
        state, arguments = (x[0], (z, x[1])) if self._has_inputs else (x, (z,))
        return functional_call(self.stand_in, state, arguments)


def _stand_in_for(module: nn.Module, own: dict[int, Any] | None = None) -> nn.Module:
    """The same tree of modules, of its own: functional_call swaps parameters inside the modules that it is given, and two threads that
    solve with one model must not do that to each other. What the modules hold beside, and so its gradients, is theirs.

    Args:
        own: what was made for others of the tree, by the id of what it stands for
    """
    own = {} if own is None else own
    if id(module) in own:
        return own[id(module)]
    if isinstance(module, torch.jit.ScriptModule):  # which keeps what it has outside of Python
        shared = {id(each): each for each in (*module.parameters(), *module.buffers())}
        own[id(module)] = copy.deepcopy(module, shared)
        return own[id(module)]
    # Past what its class may do where it is made, or set.
    own[id(module)] = stand_in = object.__new__(type(module))
    held = vars(module)
    # What it adds to lists of its own, before it is refused, is not added to the caller's.
    own |= {id(each): copy.copy(each) for each in held.values() if type(each) in _CONTAINERS and id(each) not in own}
    object.__setattr__(stand_in, "__dict__", {name: own.get(id(each), each) for name, each in held.items()})
    children = stand_in._modules
    children.update({name: _stand_in_for(child, own) for name, child in children.items() if child is not None})
    return stand_in


def stacked_state(modules: Sequence[Any]) -> dict[str, Tensor]:
    """Parameters and buffers [L, ...] of modules of equal structure."""
    names = [name for name, _ in [*modules[0].named_parameters(), *modules[0].named_buffers()]]
    tensors = [dict([*m.named_parameters(), *m.named_buffers()]) for m in modules]
    return {name: torch.stack([each[name] for each in tensors]) for name in names}


def as_one_step(callables: Iterable[Any], xs: Any) -> tuple[Stacked, Any] | None:
    """A list of modules that are all alike as one step, and what that sees of each; None where they are not, or are one."""
    modules = list(callables)
    if len(modules) < 2 or not all(_same_structure(modules[0], each) for each in modules):
        return None
    state = stacked_state(modules)
    return Stacked(modules, xs is not None), state if xs is None else (state, xs)


def _same_structure(a: Any, b: Any) -> bool:
    """Whether two callables compute the same function of their input and their parameters and buffers."""
    if not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        return False
    parts_a, parts_b = list(a.named_modules()), list(b.named_modules())
    if [name for name, _ in parts_a] != [name for name, _ in parts_b]:
        return False
    if not all(_same_module(m, n) for (_, m), (_, n) in zip(parts_a, parts_b, strict=True)):
        return False

    def tensors(module):
        return [(name, t.shape, t.dtype, t.device) for name, t in [*module.named_parameters(), *module.named_buffers()]]

    return tensors(a) == tensors(b) and len(tensors(a)) > 0


def _same_module(a: nn.Module, b: nn.Module) -> bool:
    if type(a) is not type(b) or a.training != b.training:
        return False
    if any(getattr(module, name) for module in (a, b) for name in HOOKS):
        return False  # a hook may do anything
    own_a, own_b = ({k: v for k, v in vars(m).items() if k not in MODULE_INTERNALS} for m in (a, b))
    return own_a.keys() == own_b.keys() and all(surely_equal(own_a[k], own_b[k]) for k in own_a)


def surely_equal(a: Any, b: Any) -> bool:
    """Equality that is certain: what cannot be compared safely counts as different."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(surely_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(surely_equal(a[k], b[k]) for k in a)
    return isinstance(a, _PLAIN) and not isinstance(a, Tensor) and a == b
