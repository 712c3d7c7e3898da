"""What a step leaves behind: in the modules that it calls, and in the tensors that it is given.

The loop calls a module once for each step and in their order; here it is called for all steps at once, and several times. What
it keeps from one call to the next would be another thing than in the loop.
"""

from __future__ import annotations

from functools import partial
from operator import is_
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .folding import varied
from .linear.solve import is_capturing
from .stacking import MODULE_INTERNALS
from .steps import StepError, StepGroup

#: Containers of modules with more entries than this are not looked into.
_LARGEST = 1000
_MISSING = object()
#: By address: modules that were found harmless, whether they were in train mode then, and what notices their end.
_HARMLESS: dict[int, tuple[bool, Any]] = {}
_UNKNOWN = (None, None)
#: Types of attributes that cannot be changed in place.
_CONSTANT = frozenset((int, float, bool, str, tuple, type(None)))


class SideEffect(StepError):
    """A call of the step changes what later calls give."""


class Kept:
    """What the modules of a group of steps hold, and the tensors that its function is given, as they are now.

    Args:
        once: modules that were found harmless before are not looked at again, until they change between train and eval
    """

    def __init__(self, group: StepGroup, *, once: bool = False):
        self._group, self._once = group, once
        self._inputs = (
            [(leaf, version_of(leaf)) for leaf in pytree.tree_leaves(group.xs)] if group.xs is not None else []
        )
        self._roots = modules_of(group.function)
        known = once and all(_HARMLESS.get(id(root), _UNKNOWN)[0] is root.training for root in self._roots)
        self._modules = [] if known else [_Held(module) for module in _all_modules(self._roots)]
        self._harmless: set[tuple[int, str]] = set()  # by place of a module and name: what changes without consequences

    def check(self, state: Tensor) -> None:
        """Raise where a call since has left something behind that other calls depend on.

        Args:
            state: [B, D], near which the function can be called
        """
        for number, (leaf, version) in enumerate(self._inputs):
            if version_of(leaf) != version:
                raise SideEffect(self._written_to(number))
        for held in self._modules:
            for name in held.written_to():
                raise SideEffect(_changes_buffer(name, held.module))
        replaced = {(i, name) for i, held in enumerate(self._modules) for name in held.replaced()} - self._harmless
        if replaced and not is_capturing(state.device) and self._matters(state):
            self._restore()
            number, name = min(replaced)
            kind = type(self._modules[number].module).__name__
            raise SideEffect(
                f"step: a {kind} keeps {name!r} from one call to the next, and its result depends on it, which would not be as in the "
                "loop. Hand over in xs what differs between steps, and compute what does not before the solve"
            )
        self._harmless |= replaced
        if self._once and self._modules:
            for root in self._roots:
                number = id(root)
                _HARMLESS[number] = root.training, ref(root, lambda _, n=number: _HARMLESS.pop(n, None))

    def _written_to(self, number: int) -> str:
        name = pytree.tree_flatten_with_path(self._group.xs)[0][number][0][-1:]
        module = self._group.module
        if module is None or not isinstance(name[0], pytree.MappingKey):
            return changes_in_place("xs")
        return _changes_buffer(name[0].key, module)

    @torch.no_grad()
    def _matters(self, state: Tensor) -> bool:
        """Whether the function gives another result now than from what its modules held before."""
        other, x = varied(state.detach()), self._group.inputs(0)
        try:
            after: Tensor | None = self._group.call(other.clone(), x)
        except Exception:  # what was kept of a call on all steps at once may be of no use in another
            after = None
        self._restore()
        try:
            fresh = self._group.call(other, x)
        except Exception:  # not every step takes values that are made up
            return False
        return after is None or not close(after, fresh)

    def _restore(self) -> None:
        for held in self._modules:
            held.restore()


class _Held:
    """The attributes and buffers of one module."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._attributes, self._buffers = vars(module).copy(), module._buffers.copy()
        self._tensors = [(name, b, version_of(b)) for name, b in self._buffers.items() if b is not None]
        self._containers: list[tuple[str, Any, Any]] = []
        for name, value in self._attributes.items():
            if name in MODULE_INTERNALS or type(value) in _CONSTANT:
                continue
            if isinstance(value, Tensor):
                self._tensors.append((name, value, version_of(value)))
            elif isinstance(value, (list, dict, set)) and len(value) <= _LARGEST:
                self._containers.append((name, value, value.copy()))

    def written_to(self) -> list[str]:
        """The names of tensors that were changed in place."""
        return [name for name, tensor, version in self._tensors if version_of(tensor) != version]

    def replaced(self) -> list[str]:
        """The names of what is another object now, or a container with other entries."""
        found = [name for name, value, entries in self._containers if not _same_entries(entries, value)]
        for before, now in ((self._attributes, vars(self.module)), (self._buffers, self.module._buffers)):
            if len(before) != len(now) or not all(map(is_, before.values(), now.values())):
                found += [n for n in before.keys() | now.keys() if before.get(n, _MISSING) is not now.get(n, _MISSING)]
        return found

    def restore(self) -> None:
        for before, now in ((self._attributes, vars(self.module)), (self._buffers, self.module._buffers)):
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for _, container, entries in self._containers:
            container.clear()
            container.extend(entries) if isinstance(container, list) else container.update(entries)


def _same_entries(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and value is b[key] for key, value in a.items())
    return a == b if isinstance(a, set) else all(map(is_, a, b))


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def changes_in_place(name: str) -> str:
    return f"step: changes {name} in place, which would overwrite the solver's states; use an operation that returns a new tensor"


def _changes_buffer(name: str, module: nn.Module) -> str:
    return (
        f"step: changes the buffer {name!r} of a {type(module).__name__} at every call (batch statistics or a power iteration in train "
        "mode?), and would leave it otherwise than the loop does. Call .eval()"
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    eps = torch.finfo(a.dtype).eps
    size = float(1 + b[b.isfinite()].abs().sum() / max(1, b.numel()))
    return torch.allclose(a, b, rtol=1000 * eps, atol=1000 * eps * size, equal_nan=True)


def modules_of(step: Any) -> list[nn.Module]:
    """The modules that a step is, holds or closes over, also through other functions."""
    found: list[nn.Module] = []
    _find_modules(step, 4, found, set())
    return found


def _find_modules(value: Any, depth: int, found: list[nn.Module], seen: set[int]) -> None:
    if isinstance(value, nn.Module):
        found.append(value)
    if depth == 0 or isinstance(value, (nn.Module, type)) or id(value) in seen:
        return
    seen.add(id(value))
    for each in _held_by(value):
        if len(each) <= _LARGEST if isinstance(each, (list, tuple, dict)) else callable(each):
            _find_modules(each, depth - 1, found, seen)


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    owner = getattr(value, "__self__", None)  # of a method
    held = [owner, *getattr(value, "__dict__", {}).values(), *(getattr(value, "__defaults__", None) or ())]
    held += [_contents_of(cell) for cell in getattr(value, "__closure__", None) or ()]
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        held += getattr(owner, "__dict__", {}).values()
    code = getattr(value, "__code__", None)
    if code is not None and not (value.__module__ or "").startswith("torch."):  # whose functions hold none
        scope = value.__globals__
        held += [scope[name] for name in code.co_names if name in scope]
    return held


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is still empty
        return None


def _all_modules(roots: list[nn.Module]) -> list[nn.Module]:
    """Each once, with those inside."""
    found: dict[int, nn.Module] = {}
    waiting = roots[::-1]
    while waiting:
        module = waiting.pop()
        # A scripted module keeps what it has outside of Python.
        if id(module) not in found and isinstance(module._buffers, dict):
            found[id(module)] = module
            waiting += [inner for inner in reversed(module._modules.values()) if inner is not None]
    return list(found.values())
