"""What a step leaves behind: in the modules that it calls, and in the tensors that it is given.

The loop calls a module once for each step and in their order; here it is called for all steps at once, and several times. What
it keeps from one call to the next would be another thing than in the loop. The first call of all is the same as in the loop,
and what it leaves is right: caches, and parameters that are made or set by what comes first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .linear.solve import is_capturing
from .stacking import MODULE_INTERNALS
from .steps import StepError, StepGroup, is_out_of_memory

#: Containers with more entries than this are not looked into.
_LARGEST = 1000
#: Of a model with more modules than this, only those are looked at that the step names.
_MOST_MODULES = 200
_MISSING = object()
#: By address: modules that were found harmless, with all that was looked at inside, and whether each was in train mode then.
_HARMLESS: dict[int, list[tuple[ref[nn.Module], bool]]] = {}
#: Types of attributes that cannot be changed in place, and of those whose entries are looked at: subclasses may do anything.
_CONSTANT = frozenset((int, float, bool, str, tuple, type(None)))
_CONTAINERS = {list: list, dict: dict, set: set, OrderedDict: dict, defaultdict: dict}


class SideEffect(StepError):
    """A call of the step changes what later calls give."""


class Kept:
    """What the modules of groups of steps hold, and the tensors that their functions are given, as they are now.

    Args:
        groups: that of the first step first
        once: modules that were found harmless before are not looked at again, until any inside changes between train and eval
    """

    def __init__(self, groups: list[StepGroup], *, once: bool = False):
        self._groups, self._once = groups, once
        self._inputs = [
            (group, number, leaf, version_of(leaf))
            for group in groups
            for number, leaf in enumerate(pytree.tree_leaves(group.xs) if group.xs is not None else ())
        ]
        self._roots: dict[int, tuple[nn.Module, list[nn.Module]]] = {}  # by address, with what is looked at inside
        self._held: dict[int, _Held] = {}  # by address of the module: many groups may share one
        self._reached: list[list[int]] = []  # for each group: its roots
        names: set[str] = set()
        for group in groups:
            roots = modules_of(group.function, names)
            self._reached.append([id(root) for root in roots])
            self._roots |= {id(root): (root, []) for root in roots}
        for number, (root, inside) in self._roots.items():
            if not (once and _is_known(number)):
                inside += _inside(root, names)
                self._held |= {id(module): _Held(module) for module in inside if id(module) not in self._held}

    @torch.no_grad()
    def look_at_first(self, state: Tensor, x: Any, first: Tensor) -> None:
        """Raise where the first step, taken just now, has left something behind that a second call depends on, or changes.

        All else that it has left is as in the loop, and stays.

        Args:
            state: [B, D], from which it led to ``first`` [B, D] by the input ``x``
        """
        self._first = state, x, first
        self._check_inputs()
        group = self._groups[0]
        if group.module is not None:  # a copy stands for several modules, and none of them has been called
            return
        before = [held for held in self._held.values() if held.written() or held.replaced()]
        if not before:
            return
        written = [(held.module, name) for held in before for name, _ in held.written()]
        replaced = [(held.module, name) for held in before for name in held.replaced()]
        if is_capturing(state.device):
            if written:
                raise SideEffect(_writes(*written[0]))
            return
        values = [(tensor, tensor.detach().clone()) for held in before for _, tensor in held.written()]
        after = [_Held(held.module) for held in before]
        second = _call(group, state, x)
        again = [(held.module, name) for held in after for name, _ in held.written()]
        if again:
            for tensor, value in values:
                tensor.copy_(value)
            _restore(after)
            raise SideEffect(_writes(*again[0]))
        if second is None:  # the solve will meet that error, too, and leave it as it is
            _restore(after)
        elif not close(second, first):
            _restore(after)
            third = _call(group, state, x)
            if third is not None and close(third, second):  # else it is random, which the solve will say
                _restore(after if written else before)
                raise SideEffect(_keeps(*(replaced or written)[0]))
        self._held |= {id(held.module): _Held(held.module) for held in before}

    def last_look(self, error: BaseException | None = None) -> None:
        """Raise where calls since have left something behind that other calls depend on; other traces of them are removed.

        Args:
            error: by which the solve has ended. Of the step's own, it is replaced only where what was kept is its cause
        """
        try:
            self._last_look(own_error=error is not None and not isinstance(error, StepError))
        except SideEffect:
            for root in self._roots:
                _HARMLESS.pop(root, None)
            raise
        if self._once and self._held and error is None:
            for number, (root, inside) in self._roots.items():
                if inside:
                    end = ref(root, lambda _, n=number: _HARMLESS.pop(n, None))
                    _HARMLESS[number] = [(end, root.training), *((ref(m), m.training) for m in inside if m is not root)]

    def _last_look(self, *, own_error: bool) -> None:
        if not own_error:
            self._check_inputs()
        replaced = {number: held for number, held in self._held.items() if held.replaced()}
        names = [(held.module, name) for held in replaced.values() for name in held.replaced()]
        written = [(held.module, name) for held in self._held.values() for name, _ in held.written()]
        if written:  # and would be again, if it were called with what it held before
            _restore(replaced.values())
            if not own_error:
                raise SideEffect(_writes(*written[0]))
        elif replaced and not is_capturing(self._first[0].device) and self._matters(replaced, only_errors=own_error):
            raise SideEffect(_keeps(*names[0]))

    def _check_inputs(self) -> None:
        for group, number, leaf, version in self._inputs:
            if version_of(leaf) != version:
                raise SideEffect(_written_to(group, number))

    @torch.no_grad()
    def _matters(self, replaced: dict[int, _Held], *, only_errors: bool) -> bool:
        """Whether a step gives another result now than from what its modules held before, which they hold again afterwards.

        All calls are on states of the loop: the step may not take others, as where it finds an index in them.
        """
        roots = {number for number, (_, inside) in self._roots.items() if any(id(m) in replaced for m in inside)}
        state, x, first = self._first
        calls: list[
            tuple[Callable[[], Tensor | None], Tensor | None]
        ] = []  # and what they gave before, where that is known
        for group, reached in zip(self._groups, self._reached, strict=True):
            if not roots.isdisjoint(reached):
                real = group is self._groups[0] and group.module is None
                # What the first of several modules has left in their copy is right for it: it is the last one that must agree.
                here, given = (state, x) if real else (first, group.inputs(-1))
                calls.append((partial(_call, group, here, given), first if real else None))
        now = [call() for call, _ in calls]
        _restore(replaced.values())
        fresh = [call() for call, _ in calls]
        _restore(replaced.values())
        for (call, before), a, b in zip(calls, now, fresh, strict=True):
            if b is not None and (a is None or not (only_errors or close(a, b))):
                again = call() if before is None else before
                if again is not None and close(again, b):  # else it is random
                    _restore(replaced.values())
                    return True
        _restore(replaced.values())
        return False


def _call(group: StepGroup, state: Tensor, x: Any) -> Tensor | None:
    try:
        return group.call(state.clone(), x)
    except Exception as error:  # what was kept of a call on all steps at once may be of no use in another
        if is_out_of_memory(error):
            raise
        return None


class _Held:
    """What one module holds. Of PyTorch's own modules, which keep nothing else: parameters and buffers."""

    __slots__ = ("_containers", "_stores", "_tensors", "module")

    def __init__(self, module: nn.Module):
        self.module = module
        self._stores: list[tuple[dict, dict]] = []  # dictionaries, and what they had in them
        self._containers: list[tuple[str, Any, Any]] = []
        tensors = _tensors_of(module)
        if not type(module).__module__.startswith("torch.nn.modules."):
            stores = (vars(module), module._parameters, module._buffers)
            self._stores = [(store, store.copy()) for store in stores]
            for name, value in vars(module).items():
                kind = type(value)
                if kind in _CONSTANT or name in MODULE_INTERNALS:
                    continue
                if issubclass(kind, Tensor):
                    tensors.append((name, value))
                elif kind in _CONTAINERS and len(value) <= _LARGEST:
                    self._containers.append((name, value, _CONTAINERS[kind](value)))
        self._tensors = [(name, tensor, version_of(tensor)) for name, tensor in tensors]

    def written(self) -> list[tuple[str, Tensor]]:
        """The tensors that were changed in place, or made."""
        return [(name, tensor) for name, tensor, version in self._tensors if version_of(tensor) != version]

    def replaced(self) -> list[str]:
        """The names of what is another object now, or a container with other entries."""
        found = [name for name, value, entries in self._containers if not _same_entries(entries, value)]
        for now, before in self._stores:
            if len(before) != len(now) or not all(map(is_, before.values(), now.values())):
                found += [
                    name
                    for name in before.keys() | now.keys()
                    if name not in MODULE_INTERNALS and before.get(name, _MISSING) is not now.get(name, _MISSING)
                ]
        return sorted(found)

    def restore(self) -> None:
        """Put back what was replaced, and nothing else."""
        for name in self.replaced():
            for now, before in self._stores:
                if name in before:
                    now[name] = before[name]
                else:
                    now.pop(name, None)
        for _, container, entries in self._containers:
            if not _same_entries(entries, container):
                container.clear()
                container.extend(entries) if isinstance(container, list) else container.update(entries)


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    every = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in every if tensor is not None]


def _restore(every: Iterable[_Held]) -> None:
    for held in every:
        held.restore()


def _same_entries(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and value is b[key] for key, value in a.items())
    return a == b if isinstance(a, set) else all(map(is_, a, b))


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not counted, or where it has yet to be made."""
    try:
        return None if tensor.is_inference() else tensor._version
    except ValueError:  # of a lazy module
        return None


def changes_in_place(name: str) -> str:
    return f"step: changes {name} in place, which would overwrite the solver's states; use an operation that returns a new tensor"


def _written_to(group: StepGroup, number: int) -> str:
    name = pytree.tree_flatten_with_path(group.xs)[0][number][0][-1:]
    if group.module is None or not isinstance(name[0], pytree.MappingKey):
        return changes_in_place("xs")
    return _writes(group.module, name[0].key)


def _writes(module: nn.Module, name: str) -> str:
    kind = type(module).__name__
    if name in dict(module.named_parameters()):
        return (
            f"step: changes the parameter {name!r} of a {kind} in place, and would leave it otherwise than the loop does. Where "
            "the first call sets it, let the loop do that once: solver=Loop()"
        )
    return (
        f"step: changes the buffer {name!r} of a {kind} at every call (batch statistics or a power iteration in train mode?), and "
        "would leave it otherwise than the loop does. Call .eval()"
    )


def _keeps(module: nn.Module, name: str) -> str:
    return (
        f"step: a {type(module).__name__} keeps {name!r} from one call to the next, and its result depends on it, which would not "
        "be as in the loop. Hand over in xs what differs between steps, and compute what does not before the solve"
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    eps = torch.finfo(a.dtype).eps
    size = float(1 + b[b.isfinite()].abs().sum() / max(1, b.numel()))
    return torch.allclose(a, b, rtol=1000 * eps, atol=1000 * eps * size, equal_nan=True)


def with_lazy_parts(steps: Iterable[Any]) -> list[int]:
    """The places of steps in whose modules parameters or buffers are yet to be made, by their first call."""
    names: set[str] = set()
    reached = [modules_of(step, names) for step in steps]
    roots = {id(root): root for each in reached for root in each}
    lazy = {
        number
        for number, root in roots.items()
        if any(is_lazy(t) for m in _inside(root, names) for _, t in _tensors_of(m))
    }
    return [place for place, each in enumerate(reached) if any(id(root) in lazy for root in each)] if lazy else []


def modules_of(step: Any, names: set[str] | None = None) -> list[nn.Module]:
    """The modules that a step is, holds or closes over, also through other functions.

    Args:
        names: takes all names that those functions use
    """
    found: dict[int, nn.Module] = {}
    _find_modules(step, 4, found, set() if names is None else names, set())
    return list(found.values())


# In what follows types are asked, not values: a proxy answers for something else, or raises.


def _find_modules(value: Any, depth: int, found: dict[int, nn.Module], names: set[str], seen: set[int]) -> None:
    kind = type(value)
    if issubclass(kind, nn.Module):
        found[id(value)] = value
        return
    if depth == 0 or issubclass(kind, (type, ModuleType)) or id(value) in seen:
        return
    seen.add(id(value))
    for each in _held_by(value, names):
        if len(each) <= _LARGEST if type(each) in (list, tuple, dict) else callable(each):
            _find_modules(each, depth - 1, found, names, seen)


def _held_by(value: Any, names: set[str]) -> list[Any]:
    kind = type(value)
    if kind in (list, tuple):
        return list(value)
    if kind is dict:
        return list(value.values())
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is MethodType:
        return [value.__self__, value.__func__, *_attributes_of(value.__self__)]
    held = _attributes_of(value)
    if kind is FunctionType:
        held += value.__defaults__ or ()
        held += [_contents_of(cell) for cell in value.__closure__ or ()]
        if not (value.__module__ or "").startswith("torch."):  # whose functions hold none
            scope, used = value.__globals__, value.__code__.co_names
            names.update(used)
            held += [scope[name] for name in used if name in scope]
    return held


def _attributes_of(value: Any) -> list[Any]:
    """Of an object that is neither a module nor a type."""
    if issubclass(type(value), (nn.Module, type, ModuleType)):
        return []
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:  # it has none
        return []


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is still empty
        return None


def _inside(root: nn.Module, names: set[str]) -> list[nn.Module]:
    """The modules of a root, itself first, each once. Of many, those that are called by name, or else the first."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting and len(found) <= _MOST_MODULES:
        module = waiting.pop()
        # A scripted module keeps what it has outside of Python.
        if id(module) not in found and isinstance(module._buffers, dict):
            found[id(module)] = module
            waiting += [inner for inner in reversed(module._modules.values()) if inner is not None]
    if len(found) <= _MOST_MODULES:
        return list(found.values())
    named = [inner for name, inner in root._modules.items() if name in names and inner is not None]
    if not named:
        return list(found.values())[:_MOST_MODULES]
    return list({id(m): m for m in [root, *(m for inner in named for m in _inside(inner, names))]}.values())


def _is_known(root: int) -> bool:
    """Whether a module was found harmless, and nothing inside has been replaced or has changed its mode since."""
    known = _HARMLESS.get(root)
    return known is not None and all((module := each()) is not None and module.training is mode for each, mode in known)
