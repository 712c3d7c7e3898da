"""What a step must not leave behind: in the modules that it calls, in the tensors that it is given, and in what else it reaches.

The loop calls a step once for each place and in their order; here it is called for all of them at once, and several times. What
it keeps from one call to the next would be another thing than in the loop, and is refused by name. The first call of all is the
same as in the loop, and what it leaves for good is right: caches, and parameters that are made or set by what comes first.
Nothing is ever put back.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime import is_capturing, is_out_of_memory, version_of
from .changing import LARGEST, PLAIN, draws, state_of
from .code import own_classes
from .evaluate import RandomStep, StepError, StepGroup
from .reach import MOST_MODULES, Values, reached_by
from .stack import MODULE_INTERNALS, surely_equal
from .unread import never_read

#: Types of containers whose entries are looked at: subclasses may do anything.
_CONTAINERS = frozenset((list, deque, dict, set, OrderedDict, defaultdict))


class SideEffect(StepError):
    """A call of the step changes what it, or another part of the program, finds later."""

    kind = "side effect"


class Purity:
    """What groups of steps hold, in modules and outside, and the tensors that their functions are given, as they are now.

    Args:
        groups: that of the first step first

    Attributes:
        roots: the modules that the steps reach, without those inside of them
    """

    def __init__(self, groups: list[StepGroup]):
        self._groups = groups
        self._inputs = [
            (group, number, leaf, version_of(leaf))
            for group in groups
            for number, leaf in enumerate(pytree.tree_leaves(group.xs) if group.xs is not None else ())
        ]
        self._used: set[Any] = set()
        reached = [reached_by(group.function, self._used) for group in groups]
        every = [root for modules, _ in reached for root in modules]
        self.roots: list[nn.Module] = list({id(root): root for root in every}.values())  # many groups may share one
        self._held = self._look()
        self._values = [_Values(group.function, found) for group, (_, found) in zip(groups, reached, strict=True)]
        for module in self._held.lazy() if len(groups) > 1 else ():
            raise SideEffect(_is_yet_to_be_made(module))

    def look_at_first(self, state: Tensor, x: Any, first: Tensor) -> None:
        """Raise where the first step, taken just now, has left something behind that a second call changes or depends on.

        All else that it has left is as in the loop, and stays.

        Args:
            state: [B, D], from which it led to ``first`` [B, D] by the input ``x``
        """
        self._first = first
        self._check_inputs()
        written, replaced = self._held.written(), self._held.replaced() + self._values[0].changed()
        if not written and not replaced:
            return
        group = self._groups[0]
        capturing = is_capturing(state.device)
        # What stands for several modules would let all of them find what the first has left.
        if group.module is not None or (written and capturing):
            self._refuse_changes()
        self._held = self._look()  # also into modules that were made just now
        self._values[0] = _Values(group.function)
        if capturing:  # where nothing can be tried
            return
        second = group.call(state.clone(), x).detach()
        self._refuse_changes()
        if not close(second, first):
            third = group.call(state.clone(), x).detach()
            if close(third, second):  # else it is random, which the solve will say
                raise SideEffect(_keeps(*(replaced or written)[0]))

    def last_look(self, error: BaseException | None = None) -> None:
        """Raise where modules hold something else than after the first step, or inputs were written to.

        Args:
            error: by which the solve has ended. A StepError, or what transforms raise where they meet a tensor that was
                kept from another call, gives way to its cause; all others are the step's own
        """
        gives_way = isinstance(error, (StepError, RuntimeError)) and not is_out_of_memory(error)
        if isinstance(error, SideEffect) or (error is not None and not gives_way):
            return
        if isinstance(error, StepError):
            for group in self._groups[1:]:  # a transform fails where a plain call writes, and says nothing of that
                with suppress(Exception):
                    group.call(self._first, group.inputs(-1))
        self._check_inputs()
        self._refuse_changes()

    def _look(self) -> _Held:
        modules = [module for root in self.roots for module in _inside(root, self._used)]
        return _Held({id(module): module for module in modules}.values())

    def _refuse_changes(self) -> None:
        for place in self._held.written():
            raise SideEffect(_writes(*place))
        for place in self._held.replaced():
            raise SideEffect(_keeps(*place))
        for values in self._values:
            for place in values.changed():
                raise RandomStep() if values.draw else SideEffect(_keeps(*place))

    def _check_inputs(self) -> None:
        for group, number, leaf, version in self._inputs:
            if version_of(leaf) != version:
                raise SideEffect(_written_to(group, number))


def watch(step: Any) -> Callable[[], str | None]:
    """To be asked after a call of the step: what that has changed in the modules which the step reaches; None where it has nothing."""
    used: set[Any] = set()
    roots, found = reached_by(step, used)
    modules = [module for root in roots for module in _inside(root, used)]
    held, values = _Held({id(module): module for module in modules}.values()), _Values(step, found)

    def changed() -> str | None:
        for owner, name in (*held.written(), *held.replaced(), *values.changed()):
            return f"{_a(owner)} of the step changes {name!r} at every call"
        return None

    return changed


def _inside(root: nn.Module, used: set[Any]) -> list[nn.Module]:
    """The modules of a root, itself first, each once. Of many, those that are called by name, or else the first."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting and len(found) <= MOST_MODULES:
        module = waiting.pop()
        # A scripted module keeps what it has outside of Python.
        if module is not None and id(module) not in found and isinstance(module._buffers, dict):
            found[id(module)] = module
            if module._modules:
                waiting += reversed(module._modules.values())
    every = list(found.values())
    if len(every) <= MOST_MODULES:
        return every
    named = [inner for name, inner in root._modules.items() if name in used and inner is not None]
    if not named:
        return every[:MOST_MODULES]
    return list({id(m): m for m in [root, *(m for inner in named for m in _inside(inner, used))]}.values())


class _Held:
    """What modules and their classes hold. Of PyTorch's own, which keep nothing else: parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module]):
        tensors: list[tuple[Any, str, Any]] = []
        self._stores: list[tuple[Any, Mapping, int, dict]] = []  # how many entries, and those that are no internals
        self._containers: list[tuple[Any, str, Any, Any]] = []
        self._changing: list[tuple[Any, str, Any, Any]] = []  # what changes in place and is none of these
        modules = list(modules)
        for owner in {each: None for module in modules for each in own_classes(type(module))}:
            own = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
            self._stores.append((owner, vars(owner), len(vars(owner)), own))
            self._note(owner, own, tensors)
        for module in modules:
            if module._parameters:
                tensors += [(module, name, tensor) for name, tensor in module._parameters.items()]
            if module._buffers:
                tensors += [(module, name, tensor) for name, tensor in module._buffers.items()]
            if type(module).__module__.startswith("torch.nn.modules."):
                continue
            attributes = vars(module)
            own = {name: value for name, value in attributes.items() if name not in MODULE_INTERNALS}
            self._stores.append((module, attributes, len(attributes), own))
            for store in (module._parameters, module._buffers, module._modules):
                self._stores.append((module, store, len(store), store.copy()))
            self._note(module, own, tensors)
        every = [(*each, version_of(each[2])) for each in tensors if each[2] is not None]
        self._counted = [each for each in every if each[3] is not None]
        self._lazy = [each[:3] for each in every if each[3] is None and is_lazy(each[2])]

    def _note(self, owner: Any, attributes: dict[str, Any], tensors: list[tuple[Any, str, Any]]) -> None:
        for name, value in attributes.items():
            kind = type(value)
            if kind in _CONTAINERS and len(value) <= LARGEST:
                self._containers.append((owner, name, value, value.copy()))
            elif issubclass(kind, Tensor):
                tensors.append((owner, name, value))
            elif kind not in PLAIN and (state := state_of(value)) is not None:
                self._changing.append((owner, name, value, state))

    def lazy(self) -> list[nn.Module]:
        return [module for module, _, _ in self._lazy]

    def written(self) -> list[tuple[Any, str]]:
        """Of tensors that were written to since, or made: the module or its class, and the name in it."""
        made = [(module, name) for module, name, tensor in self._lazy if not is_lazy(tensor)]
        return made + [(module, name) for module, name, tensor, version in self._counted if tensor._version != version]

    def replaced(self) -> list[tuple[Any, str]]:
        """The same of what is something else now, or a container with other entries."""
        found = [(module, name) for module, name, now, before in self._containers if not _same_entries(before, now)]
        found += [(owner, name) for owner, name, now, before in self._changing if state_of(now) != before]
        for module, now, count, before in self._stores:
            if len(now) != count or (before and not all(map(is_, before.values(), map(now.get, before)))):
                every = sorted((before.keys() | now.keys()) - MODULE_INTERNALS)
                names = [name for name in every if not name.startswith("__")]  # which Python itself sets in classes
                found += [(module, name) for name in names if not surely_equal(before.get(name), now.get(name))]
        return found


class _Values:
    """Everything that has a state and that a step reaches outside of modules.

    Attributes:
        draw: whether one of the generators had drawn when it was last asked what changed
    """

    draw: bool = False

    def __init__(self, step: Any, found: Values | None = None):
        """``found``: by a walk through the step just now."""
        self._step, self._before = step, reached_by(step)[1] if found is None else found
        self._states = {place: state_of(each) for place, (_, _, each) in self._before.items()}

    def changed(self) -> list[tuple[Any, str]]:
        """Those that are other ones now, or were written to: what holds them, and the name there."""
        self.draw = False
        found = self._others(reached_by(self._step)[1])
        if found:  # what is noted somewhere, and never read, is nobody's business
            found = self._others(reached_by(self._step, without=never_read(self._step))[1])
        return found

    def _others(self, values: Values) -> list[tuple[Any, str]]:
        found = []
        for place, (owner, called, now) in values.items():
            looked_up = isinstance(owner, dict) and not issubclass(type(now), Tensor)
            if place not in self._before and (looked_up or isinstance(owner, str)):
                self._before[place], self._states[place] = (owner, called, now), state_of(now)
                continue  # its key, or the library with its generator, was not there before
            if state_of(now) != self._states.get(place):
                self.draw = self.draw or draws(now)
                inside = type(owner) in _CONTAINERS
                what = f"{_what(owner)} ({called!r})" if called is not None else _what(owner)
                found.append((what, "entries" if inside else _plainly(place[1])))
        return found


def _plainly(name: Hashable) -> str:
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _same_entries(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return a == b
    return surely_equal(list(a), list(b)) if isinstance(a, deque) else surely_equal(a, b)


def changes_in_place(name: str) -> str:
    return (
        f"step: changes {name} in place; write it with operations that return new tensors (z + 1 instead of z.add_(1))"
    )


def _written_to(group: StepGroup, number: int) -> str:
    name = pytree.tree_flatten_with_path(group.xs)[0][number][0][-1:]
    if group.module is None or not isinstance(name[0], pytree.MappingKey):
        return changes_in_place("xs")
    path, _, name = name[0].key.rpartition(".")
    return _writes(group.module.get_submodule(path), name)


def _writes(owner: Any, name: str) -> str:
    kind = _a(owner)
    if name in getattr(owner, "_buffers", ()):
        return (
            f"step: changes the buffer {name!r} of {kind} at every call (batch statistics or a power iteration in train mode?), and "
            "would leave it otherwise than the loop does. Call .eval(), or use solver=Loop(). What it holds now is not put back"
        )
    what = "parameter" if name in getattr(owner, "_parameters", ()) else "tensor"
    return (
        f"step: changes the {what} {name!r} of {kind} in place, and would leave it otherwise than the loop does. Do that before "
        "the solve; where the first call sets it, let the loop do that once: solver=Loop(). What it holds now is not put back"
    )


def _what(owner: Any) -> str:
    if isinstance(owner, str):  # it was told before
        return owner
    return "class" if owner is None or isinstance(owner, type) else type(owner).__name__


def _a(owner: Any) -> str:
    """With its article."""
    name = _what(owner)
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _keeps(owner: Any, name: str) -> str:
    return (
        f"step: {_a(owner)} keeps {name!r} from one call to the next, which would not be as in the loop. Take that out of "
        "the step, or use solver=Loop(): hand over in xs what differs between steps, and compute what does not before the solve. "
        "If the first call alone sets it, call the step once before the solve; if that depends on the state, use solver=Loop() once. "
        "Its present value is not put back"
    )


def _is_yet_to_be_made(module: nn.Module) -> str:
    return (
        f"step: a {type(module).__name__} in the list has parameters that its first call is yet to make, from a state that only "
        'the loop knows. Let the loop do that once: solver=Loop(), or mode="sequential" of deeppcr.nn'
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    eps = torch.finfo(a.dtype).eps
    size = float(1 + b[b.isfinite()].abs().sum() / max(1, b.numel()))
    return torch.allclose(a, b, rtol=1000 * eps, atol=1000 * eps * size, equal_nan=True)


# Hooks on gradients: the loop calls them at every step, a backward pass through all steps at once does not.

_NOT_CALLED = (
    "which a backward pass through all steps at once does not call: the gradient would not be the loop's. Take it away (to scale "
    "gradients a torch.autograd.Function does), use solver=Loop(), or torch.no_grad() where no gradient is needed"
)


#: Fourth of their arguments is whether gradients are divided by the frequency of an index.
_TABLES = (torch.embedding, torch.embedding_bag)
#: What an assignment comes to.
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
#: Raised by PyTorch inside of ``AsDifferentiated``.
_SAVES = (
    "step: changes how tensors are saved for the backward pass (torch.utils.checkpoint with use_reentrant=False, save_on_cpu), which "
    "cannot be undone for all steps at once. Take it away (a parallel solve keeps no graph of its iterations), use solver=Loop(), or "
    "torch.no_grad() where no gradient is needed"
)


class AsTransformed(TorchFunctionMode):
    """Inside, what would end the process under a transform of PyTorch's is refused.

    Attributes:
        switches_off: whether a part ran without gradients, of which forward mode knows nothing; where gradients are on
    """

    switches_off: bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and not is_lazy(args[0]):  # those are made in the first call
            raise StepError(
                "step: puts another tensor into the .data of one, which PyTorch does not survive where a step is differentiated. Change "
                "it before the solve (module.to(...) and .float() do this, too), let the step use what is computed (weight = renorm(weight)), or use "
                "solver=Loop()"
            )
        return func(*args, **(kwargs or {}))


class AsDifferentiated(AsTransformed):
    """Inside, a hook on the gradient of a tensor is refused, too, and one on what is saved for it."""

    _saving: AbstractContextManager[Any]

    def __enter__(self) -> Self:
        self._saving = disable_saved_tensors_hooks(_SAVES)
        try:
            self._saving.__enter__()
        except RuntimeError:  # the caller has some around the solve, which are no business of the step
            self._saving = nullcontext()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        self._saving.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and str(error) == _SAVES:
            raise StepError(_SAVES) from None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch's own (of counters of operations, say) look on and change nothing.
        if func is Tensor.register_hook and getattr(args[1], "__module__", None) != "torch.autograd.graph":
            raise StepError(f"step: registers a hook on the gradient of a tensor, {_NOT_CALLED}")
        by_frequency = (kwargs or {}).get("scale_grad_by_freq") or (func in _TABLES and args[3:4] == (True,))
        if by_frequency and any(isinstance(each, Tensor) and each.requires_grad for each in args):
            raise StepError(
                "step: divides gradients by how often an index comes in a call (scale_grad_by_freq), and a backward pass through all steps at "
                "once has them in one. Switch it off, use solver=Loop(), or torch.no_grad() where no gradient is needed"
            )
        if func is torch._C._set_grad_enabled and not args[0]:
            self.switches_off = True
        return super().__torch_function__(func, types, args, kwargs)


def refuse_hooked(roots: Iterable[nn.Module]) -> None:
    """Raise where a module or one inside of it has a hook on its gradient."""
    roots = list(roots)
    if roots and (all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks):
        raise StepError(f"step: all modules have a backward hook, {_NOT_CALLED}")
    for root in roots:
        for name, module in root.named_modules():
            if getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None):
                path = ".".join([type(root).__name__, *([name] if name else [])])
                raise StepError(f"step: the module {path} has a backward hook, {_NOT_CALLED}")
