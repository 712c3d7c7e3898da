"""What a step leaves behind: in the modules that it calls, and in the tensors that it is given.

The loop calls a module once for each step and in their order; here it is called for all steps at once, and several times. What
it keeps from one call to the next would be another thing than in the loop. The first call of all is the same as in the loop,
and what it leaves is right: caches, and parameters that are made or set by what comes first. All else is undone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..runtime import is_capturing, is_out_of_memory
from .evaluate import StepError, StepGroup
from .reach import inside, modules_of
from .snapshot import Snapshot, restore, rewind, version_of


class SideEffect(StepError):
    """A call of the step changes what later calls give."""

    kind = "side effect"


class Purity:
    """What the modules of groups of steps hold, and the tensors that their functions are given, as they are now.

    Args:
        groups: that of the first step first
        once: modules that the same program was seen to leave in order are not judged again

    Attributes:
        keepers: modules that keep something without consequences, by address
    """

    def __init__(self, groups: list[StepGroup], *, once: bool = False):
        self._groups, self._once, self._judged = groups, once, False
        self._inputs = [
            (group, number, leaf, version_of(leaf))
            for group in groups
            for number, leaf in enumerate(pytree.tree_leaves(group.xs) if group.xs is not None else ())
        ]
        self._used: set[Any] = set()
        reached = [modules_of(group.function, self._used) for group in groups]
        self._reached = [[id(root) for root in roots] for roots in reached]  # for each group
        self._roots: dict[
            int, tuple[nn.Module, list[nn.Module]]
        ] = {}  # by address, with those inside that are to be judged
        self._snapshots: dict[int, Snapshot] = {}  # by address of the module: many groups may share one
        self.keepers: dict[int, nn.Module] = {}
        for number, root in {id(root): root for roots in reached for root in roots}.items():
            known = _keepers_in(root, self._used) if once else None
            modules = inside(root, self._used) if known is None else []
            self._roots[number] = root, modules
            self._snapshots |= {id(module): Snapshot(module) for module in modules if id(module) not in self._snapshots}
            self.keepers |= {id(module): module for module in known or ()}

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that the steps reach, without those inside of them."""
        return [root for root, _ in self._roots.values()]

    @torch.no_grad()
    def look_at_first(self, state: Tensor, x: Any, first: Tensor) -> None:
        """Raise where the first step, taken just now, has left something behind that a second call depends on, or changes.

        All else that it has left is as in the loop, and stays.

        Args:
            state: [B, D], from which it led to ``first`` [B, D] by the input ``x``
        """
        self._first = state, x, first
        self._check_inputs()
        if len(self._groups) > 1:
            for snapshot in self._snapshots.values():
                if snapshot.is_lazy():
                    raise SideEffect(_is_yet_to_be_made(snapshot.module))
        changed = [snapshot for snapshot in self._snapshots.values() if snapshot.written() or snapshot.replaced()]
        self._snapshots |= {
            number: Snapshot(module) for number, module in self.keepers.items()
        }  # which are not judged again
        group = self._groups[0]
        if not changed or group.module is not None:  # a copy stands for several modules: none of them has been called
            return
        written, replaced = _written(changed), _replaced(changed)
        if is_capturing(state.device):
            if written:
                raise SideEffect(_writes(*written[0]))
            return
        after = [Snapshot(snapshot.module, snapshot.written()) for snapshot in changed]
        second = _call(group, state, x)
        again = _written(after)
        if again:
            for each in (after, changed):  # parameters are as the first call has left them, batch statistics as before
                rewind(each)
        restore(after)
        if again:
            raise SideEffect(_writes(*again[0]))
        if second is not None and not close(second, first):  # an error the solve will meet, too, and leave as it is
            third = _call(group, state, x)
            restore(after)
            if third is not None and close(third, second):  # else it is random, which the solve will say
                restore(after if written else changed)
                raise SideEffect(_keeps(*(replaced or written)[0]))
        self.keepers |= {id(module): module for module, _ in replaced}
        self._snapshots |= {id(snapshot.module): snapshot for snapshot in after}

    def last_look(self, error: BaseException | None = None) -> None:
        """Raise where calls since have left something behind that other calls depend on; other traces of them are removed.

        Args:
            error: by which the solve has ended. Of the step's own, it is replaced only where what was kept may be its cause
        """
        if self._judged or (error is not None and (is_out_of_memory(error) or not isinstance(error, Exception))):
            return
        self._judged = True
        try:
            self._judge(error)
        except SideEffect:
            for root, _ in self._roots.values():
                _HARMLESS.pop(root, None)
            raise
        if self._once and error is None:
            for root, modules in self._roots.values():
                if modules:
                    _HARMLESS[root] = self._used, [_facts(module, id(module) in self.keepers) for module in modules]
        self._snapshots = {number: snapshot for number, snapshot in self._snapshots.items() if number in self.keepers}

    def restore(self) -> None:
        """Undo what all calls but the first have replaced."""
        restore(self._snapshots.values())

    def _judge(self, error: BaseException | None) -> None:
        every, failed = self._snapshots.values(), isinstance(error, StepError)
        own_error = error is not None and not failed
        probed: list[Snapshot] = []
        if failed:  # a transform fails where a plain call writes, even to the same values, and says nothing of that
            probed = [
                Snapshot(snapshot.module, {**snapshot.module._parameters, **snapshot.module._buffers})
                for snapshot in every
            ]
            for group in self._groups[1:]:
                _call(group, self._first[2], group.inputs(-1))
        if not own_error:
            self._check_inputs()
        replaced = {number: snapshot for number, snapshot in self._snapshots.items() if snapshot.replaced()}
        self.keepers |= {number: snapshot.module for number, snapshot in replaced.items()}
        names = _replaced(replaced.values())
        written = [
            (snapshot.module, name)
            for snapshot in every
            for name in (snapshot.counted() if failed else snapshot.written())
        ]
        rewind(probed)
        if written:  # and would be again, if it were called with what it held before
            restore(every)
            rewind(every)
            if not own_error:
                raise SideEffect(_writes(*written[0]))
        elif replaced and not is_capturing(self._first[0].device) and self._matters(replaced):
            raise SideEffect(_keeps(*names[0]))

    def _check_inputs(self) -> None:
        for group, number, leaf, version in self._inputs:
            if version_of(leaf) != version:
                self.restore()
                raise SideEffect(_written_to(group, number))

    @torch.no_grad()
    def _matters(self, replaced: dict[int, Snapshot]) -> bool:
        """Whether a step gives another result now than from what its modules held before, which they hold again afterwards.

        All calls are on states of the loop: the step may not take others, as where it finds an index in them.
        """
        roots = {number for number, (_, modules) in self._roots.items() if any(id(m) in replaced for m in modules)}
        state, x, first = self._first
        calls: list[tuple[partial[Tensor | None], Tensor | None]] = []  # and what they gave before, where that is known
        for group, reached in zip(self._groups, self._reached, strict=True):
            if not roots.isdisjoint(reached):
                real = group is self._groups[0] and group.module is None
                # What the first of several modules has left in their copy is right for it: it is the last one that must agree.
                here, given = (state, x) if real else (first, group.inputs(-1))
                calls.append((partial(_call, group, here, given), first if real else None))
        now = [call() for call, _ in calls]
        restore(replaced.values())
        fresh = [call() for call, _ in calls]
        restore(replaced.values())
        for (call, before), a, b in zip(calls, now, fresh, strict=True):
            if b is not None and (a is None or not close(a, b)):
                again = call() if before is None else before
                if again is not None and close(again, b):  # else it is random
                    restore(replaced.values())
                    return True
        restore(replaced.values())
        return False


def _call(group: StepGroup, state: Tensor, x: Any) -> Tensor | None:
    try:
        return group.call(state.clone(), x)
    except Exception as error:  # what was kept of a call on all steps at once may be of no use in another
        if is_out_of_memory(error):
            raise
        return None


#: Of roots that were found to be in order: what their program used, since another one may call another part; and for every
#: module inside, its mode, its own modules, and whether it keeps something.
_HARMLESS: WeakKeyDictionary[nn.Module, tuple[set[Any], list[tuple[ref[nn.Module], bool, list[int], bool]]]]
_HARMLESS = WeakKeyDictionary()


def _facts(module: nn.Module, keeps: bool) -> tuple[ref[nn.Module], bool, list[int], bool]:
    return ref(module), module.training, [*map(id, module._modules.values())], keeps


def _keepers_in(root: nn.Module, used: set[Any]) -> list[nn.Module] | None:
    """Those inside a root that keep something without consequences; None where that is not known, or no longer."""
    before, known = _HARMLESS.get(root, (None, []))
    if before != used:
        return None
    keepers = []
    for each, mode, inner, keeps in known:
        module = each()
        if module is None or module.training is not mode or len(module._modules) != len(inner):
            return None
        if inner and [*map(id, module._modules.values())] != inner:
            return None
        if keeps:
            keepers.append(module)
    return keepers


def _written(every: Iterable[Snapshot]) -> list[tuple[nn.Module, str]]:
    return [(snapshot.module, name) for snapshot in every for name in snapshot.written()]


def _replaced(every: Iterable[Snapshot]) -> list[tuple[nn.Module, str]]:
    return [(snapshot.module, name) for snapshot in every for name in snapshot.replaced()]


def changes_in_place(name: str) -> str:
    return f"step: changes {name} in place, which would overwrite the solver's states; use an operation that returns a new tensor"


def _written_to(group: StepGroup, number: int) -> str:
    name = pytree.tree_flatten_with_path(group.xs)[0][number][0][-1:]
    if group.module is None or not isinstance(name[0], pytree.MappingKey):
        return changes_in_place("xs")
    path, _, name = name[0].key.rpartition(".")
    return _writes(group.module.get_submodule(path), name)


def _writes(module: nn.Module, name: str) -> str:
    kind = type(module).__name__
    if name in module._buffers:
        return (
            f"step: changes the buffer {name!r} of a {kind} at every call (batch statistics or a power iteration in train mode?), and "
            "would leave it otherwise than the loop does. Call .eval()"
        )
    what = "parameter" if name in module._parameters else "tensor"
    return (
        f"step: changes the {what} {name!r} of a {kind} in place, and would leave it otherwise than the loop does. Do "
        "that before the solve; where the first call sets it, let the loop do that once: solver=Loop()"
    )


def _keeps(module: nn.Module, name: str) -> str:
    return (
        f"step: a {type(module).__name__} keeps {name!r} from one call to the next, and its result depends on it, which would not "
        "be as in the loop. Hand over in xs what differs between steps, and compute what does not before the solve; what the first "
        "call sets for good, let the loop set once: solver=Loop()"
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
