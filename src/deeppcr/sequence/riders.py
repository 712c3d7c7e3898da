"""What is handed from step to step beside the state: counters and masks, whose course does not depend on it.

The first step is taken under watch: every operation is recorded with what its result depends on. What does not depend on the state is
then known for all steps before any of them is solved for: all at once where it adds up or is gathered along the way, else by a loop
over those few operations alone.

Shapes: L steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime import Watcher, tensors_in

#: Read of a tensor its shape alone.
_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
#: Hand a tensor's values or its memory to the host, and no operation tells of that.
_HANDED_OUT = {"tolist", "numpy", "__array__", "__dlpack__"}
_IN_PLACE = "is made by changing a tensor in place"


class DependsOnState(Exception):
    """The course of what is handed on cannot be known before the state is; the message says why."""


@dataclass(frozen=True)
class _Made:
    """Stands for the tensor of that number in a recording."""

    number: int


@dataclass(frozen=True)
class _Operation:
    function: Any
    arguments: list[Any]  # flat, each tensor that depends on a source as _Made
    spec: pytree.TreeSpec | None  # of args and kwargs; None where they are flat
    results: list[int | None]  # numbers of the tensors that it made

    def __call__(self, arguments: list[Any]) -> list[Any]:
        if self.spec is None:
            found = self.function(*arguments)
        else:
            args, kwargs = pytree.tree_unflatten(arguments, self.spec)
            found = self.function(*args, **kwargs)
        return [found] if isinstance(found, Tensor) else pytree.tree_leaves(found)


class Recording(Watcher):
    """The operations of one call, and on which of its sources each tensor depends.

    Args:
        sources: tensors that share no memory
    """

    def __init__(self, sources: list[Tensor]):
        super().__init__()
        self._held: list[Tensor] = list(sources)  # so that no identity is given away twice
        self._numbers = {id(tensor): number for number, tensor in enumerate(sources)}
        self._reads: list[frozenset[int]] = [frozenset([number]) for number in range(len(sources))]
        # By address of memory that was changed: what it has come to depend on.
        self._written: dict[int, frozenset[int]] = {}
        self._changed: list[Tensor] = []  # held for the same reason
        self._maker: dict[int, _Operation] = {}
        self.looked_at: frozenset[int] = frozenset()  # sources whose values the program has seen
        self.random: bool = False

    def __enter__(self) -> Self:
        self._calls = _Calls(self)
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)
        del self._calls  # which refers to this: what is held here goes as soon as nobody needs it

    def reads(self, tensor: Tensor) -> frozenset[int]:
        """The numbers of the sources that a tensor depends on."""
        number = self._numbers.get(id(tensor))
        made = self._reads[number] if number is not None else frozenset()
        return made | self._written.get(_memory(tensor), frozenset())

    def was_changed(self, tensor: Tensor) -> bool:
        """Whether its memory was written to."""
        return _memory(tensor) in self._written

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        name = func.overloadpacket.__name__
        reads = frozenset().union(*(self.reads(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        if name in _LIKE:
            reads = frozenset()
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.looked_at |= reads
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            for tensor in (*_changed_by(func, args, kwargs), *tensors_in(found)):
                self._changed.append(tensor)
                self._written[_memory(tensor)] = self.reads(tensor) | reads
        elif reads:
            nested = len(leaves) != len(args) or any(isinstance(each, (list, tuple, dict)) for each in args)
            self._note(func, leaves, spec if kwargs or nested else None, found, reads)

    def _note(self, func: Any, leaves: list[Any], spec: Any, found: Any, reads: frozenset[int]) -> None:
        made: list[int | None] = []
        arguments = [self._stand_in(leaf) for leaf in leaves]
        operation = _Operation(func, arguments, spec, made)
        for tensor in pytree.tree_leaves(found):
            made.append(len(self._held) if isinstance(tensor, Tensor) else None)
            if isinstance(tensor, Tensor):
                self._numbers[id(tensor)] = len(self._held)
                self._maker[len(self._held)] = operation
                self._held.append(tensor)
                self._reads.append(reads)

    def _stand_in(self, leaf: Any) -> Any:
        known = isinstance(leaf, Tensor) and self.reads(leaf) and id(leaf) in self._numbers
        return _Made(self._numbers[id(leaf)]) if known else leaf

    def result(self, tensor: Tensor) -> _Made | Tensor:
        """A tensor that the call returned, to be asked for again; itself where it is the same at every step."""
        found = self._stand_in(tensor)
        if not isinstance(found, _Made) and self.reads(tensor):
            raise DependsOnState(_IN_PLACE)
        return found

    def sources_of(self, what: Any) -> frozenset[int]:
        return self.reads(self._held[what.number]) if isinstance(what, _Made) else frozenset()

    def maker(self, what: Any) -> _Operation | None:
        return self._maker.get(what.number) if isinstance(what, _Made) else None

    def again(self, wanted: list[_Made | Tensor]) -> Callable[[dict[int, Tensor]], list[Tensor]]:
        """What gives, of other sources by their numbers, what the call would have made of them."""
        order: dict[int, _Operation] = {}  # by its first result, each after those that it needs

        def visit(what: Any) -> None:
            if isinstance(what, _Made) and self.was_changed(self._held[what.number]):
                raise DependsOnState(_IN_PLACE)
            operation = self.maker(what)
            if operation is None or id(operation) in order:
                return
            for each in operation.arguments:
                visit(each)
            order[id(operation)] = operation

        for each in wanted:
            visit(each)

        def run(sources: dict[int, Tensor]) -> list[Tensor]:
            known = dict(sources)
            for operation in order.values():
                found = operation([known[each.number] if type(each) is _Made else each for each in operation.arguments])
                for number, tensor in zip(operation.results, found, strict=True):
                    if number is not None:
                        known[number] = tensor
            return [known[each.number] if isinstance(each, _Made) else each for each in wanted]

        return run


class _Calls(TorchFunctionMode):
    """Sees the calls by which the host gets at values though there is no operation to be recorded.

    Whatever it misses is found out later, by the step itself at all places: it saves solving for what is wrong.
    """

    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in _HANDED_OUT:
            self._recording.looked_at |= self._recording.reads(args[0])
        return func(*args, **(kwargs or {}))


def courses(
    call: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]],
    state: list[Tensor],
    riders: list[Tensor],
    inputs: list[Tensor],
) -> list[Tensor]:
    """What each rider is before every step and after the last, [L + 1, ...]; DependsOnState where that takes the states.

    Args:
        call: one step, of leaves of the state, riders and what it sees of the inputs; gives the riders after it
        state, riders: before the first step
        inputs: [L, ...] each
    """
    length, offset = len(inputs[0]), len(state)
    sources = [leaf.detach().clone() for leaf in (*state, *riders, *(leaf[0] for leaf in inputs))]
    try:
        with torch.no_grad(), Recording(sources) as recording:
            after = call(sources[:offset], sources[offset : offset + len(riders)], sources[offset + len(riders) :])
    except Exception as error:  # of the step itself: the loop will say it
        raise DependsOnState(f"may depend on the state: the step cannot be watched ({error})") from error
    if any(map(recording.was_changed, sources[offset : offset + len(riders)])):
        raise DependsOnState("is changed in place")
    results = [recording.result(tensor) for tensor in after]
    if recording.looked_at:
        raise DependsOnState("may depend on the state: the step looks at values of tensors")
    reads = [recording.sources_of(result) for result in results]
    if any(number < offset for each in reads for number in each):
        raise DependsOnState("depends on the state")
    if recording.random:
        raise DependsOnState("may be random: the step draws random numbers")

    before: dict[int, Tensor] = {offset + len(riders) + at: leaf.detach() for at, leaf in enumerate(inputs)}
    found: dict[int, Tensor] = {}  # by number of the source

    def settle(at: int) -> bool:
        number, result, start = offset + at, results[at], riders[at]
        try:
            if result == _Made(number):  # it stays what it is
                following = start.detach().expand(length, *start.shape)
            elif reads[at] <= before.keys():
                following = _at_all_steps(recording, result, before).expand(length, *start.shape)
            else:
                following = _gathered(recording, result, number, start, before, length)
        except (RuntimeError, ValueError):  # no vmap rule: the loop below needs none
            return False
        if following is None:
            return False
        found[number] = torch.cat([start.detach().unsqueeze(0), following])
        before[number] = found[number][:-1]
        return True

    left = list(range(len(riders)))
    while settled := [at for at in left if settle(at)]:
        left = [at for at in left if at not in settled]
    if left:
        take = recording.again([results[at] for at in left])
        needed = frozenset().union(*(reads[at] for at in left)) & before.keys()
        given, current = {number: before[number].unbind() for number in needed}, [riders[at].detach() for at in left]
        states = [current]
        for step in range(length):
            known = {number: values[step] for number, values in given.items()}
            current = take(known | {offset + at: value for at, value in zip(left, current, strict=True)})
            states.append(current)
        found |= {offset + at: torch.stack(each) for at, each in zip(left, zip(*states, strict=True), strict=True)}
    return [found[offset + at] for at in range(len(riders))]


def _at_all_steps(recording: Recording, wanted: Any, before: dict[int, Tensor]) -> Tensor:
    """[L, ...], or [1, ...] where it is the same at every step."""
    needed, run = sorted(recording.sources_of(wanted)), recording.again([wanted])
    if not needed:
        return run({})[0].unsqueeze(0)

    def one(*sources: Tensor) -> Tensor:
        return run(dict(zip(needed, sources, strict=True)))[0]

    return torch.vmap(one)(*(before[number] for number in needed))


def _gathered(
    recording: Recording, result: Any, number: int, start: Tensor, before: dict[int, Tensor], length: int
) -> Tensor | None:
    """[L, ...], after every step, of what an operation gathers from a start and from what is known; None where it is another."""
    operation = recording.maker(result)
    if operation is None or len(operation.arguments) != 2:  # of numbers or tensors; nor any keyword
        return None
    name, itself = operation.function.overloadpacket.__name__, _Made(number)
    gather = (_OF_TRUTHS if start.dtype is torch.bool else _OF_NUMBERS).get(name)
    first, second = operation.arguments
    other = second if first == itself else first if second == itself and name != "sub" else None
    if gather is None or other is None or not recording.sources_of(other) <= before.keys():
        return None
    if not isinstance(other, (Tensor, _Made)):
        other = torch.tensor(other, device=start.device)
    gathered = _at_all_steps(recording, other, before)
    gathered = gathered.reshape(len(gathered), *(1,) * (start.ndim + 1 - gathered.ndim), *gathered.shape[1:])
    return gather(start.detach(), gathered.to(start.dtype).expand(length, *start.shape))


# Integers wrap around as step by step: in the dtype that they have.
_OF_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda start, each: start + each.cumsum(0, dtype=start.dtype),
    "sub": lambda start, each: start - each.cumsum(0, dtype=start.dtype),
    "mul": lambda start, each: start * each.cumprod(0, dtype=start.dtype),
    "maximum": lambda start, each: torch.maximum(start, each.cummax(0).values),
    "minimum": lambda start, each: torch.minimum(start, each.cummin(0).values),
}
_OF_TRUTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bitwise_or": lambda start, each: start | (each.cumsum(0) > 0),
    "bitwise_and": lambda start, each: start & ((~each).cumsum(0) == 0),
    "bitwise_xor": lambda start, each: start ^ (each.cumsum(0) % 2 == 1),
}
_OF_TRUTHS |= {"logical_" + name.removeprefix("bitwise_"): gather for name, gather in _OF_TRUTHS.items()}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _changed_by(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that an operation writes to."""
    schema = func._schema.arguments
    given = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
    written = [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
    return tensors_in([given.get(name) for name in written])
