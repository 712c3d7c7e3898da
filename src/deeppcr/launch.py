"""Launching kernels that were compiled before, without Triton's own launch, which takes longer than most kernels here.

``launch`` launches one. ``repeat`` makes all launches of a call again for other tensors that lie in memory alike: to find out anew
how a small system is cut up takes longer than to solve it. ``compile_ahead`` compiles all kernels of a call side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import JITFunction, knobs

from .compiling import Asked, compile_side_by_side

_MOST = 4096
#: By all that a kernel is compiled for: see ``launch``.
_compiled: dict[tuple[Any, ...], Any] = {}
#: By what the launches of a call depend on: see ``repeat``.
_noted: dict[Hashable, Noted | None] = {}
_UNKNOWN: Any = object()


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    warps: int,
    integers: tuple[Any, ...] = (),
    registers: int | None = None,
) -> None:
    """Launch so many programs of a kernel on the device of its first argument, the current one.

    Triton compiles a kernel for its constants and options, for the dtype of every tensor and whether it begins at a multiple
    of 16 bytes, and for what it finds out about an integer: is it 1, a multiple of 16, more than 32 bits. To find that out
    at every launch takes longer than most kernels here. So a caller says it: what may differ between launches with the same
    constants is in ``integers``.

    Args:
        kernel: by ``triton.jit``
        arguments: tensors and numbers, a tensor first; float32 and ``aligned`` as far as ``integers`` do not tell
        constants: the kernel's last parameters, all of them ``tl.constexpr``
        warps: of a program
        integers: those of the arguments that the kernel is specialised on, and whatever else it is compiled for
        registers: the most of a thread; None: as many as the compiler likes
    """
    if programs == 0:
        return
    device = arguments[0].get_device()
    # By its id: a kernel's own hash is that of its source text.
    key = (id(kernel), device, constants, warps, integers, registers)
    compiled = _compiled.get(key)
    if _calls.ahead is not None:
        if compiled is None and isinstance(kernel, JITFunction):  # by the interpreter nothing is compiled
            _calls.ahead[key] = Asked(kernel, programs, (*arguments, *constants), warps, registers)
        return
    if compiled is None:
        compiled = Asked(kernel, programs, (*arguments, *constants), warps, registers).launch()
        if compiled is not None:  # by the interpreter nothing is
            _remember(_compiled, key, compiled)
    else:
        # By pointers: of a tensor the launcher would ask where it lies, and the driver whether that is true.
        given = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        table = (*_head(compiled, programs), *given, *constants)
        _launch_all([(compiled, _all_of, compiled.run, _all_of, None)], (current_stream(device), *table), is_watched())
    if _calls.noting is not None:
        _calls.noting.append((compiled, programs, (*arguments, *constants)))


def compile_ahead(*makes: Callable[[], Any]) -> None:
    """Compile what calls would launch, and launch nothing: side by side, since the compiler takes seconds for a long kernel.

    What it refuses it refuses again where that is launched, and who launches it is told.

    Args:
        makes: each makes launches, of what its tensors hold whatever that is
    """
    assert _calls.noting is None, "a call that is noted launches what it has"
    outer, _calls.ahead = _calls.ahead, {}
    try:
        for make in makes:
            make()
        found = _calls.ahead
    finally:
        _calls.ahead = outer
    compile_side_by_side(found.values())


def compiles_ahead() -> bool:
    """Whether launches are looked at, and not made."""
    return _calls.ahead is not None


#: Of what a compiled kernel's own ``run`` takes: where the stream stands, and the first argument of the kernel.
_STREAM, _FIRST = 3, 9


def _head(compiled: Any, programs: int) -> tuple:
    """What ``run`` takes before the arguments of the kernel, but for the stream."""
    return programs, 1, 1, compiled.function, compiled.packed_metadata, None, None, None


def _all_of(table: tuple) -> tuple:
    """What ``run`` takes, of the stream and all else in order."""
    return *table[1 : 1 + _STREAM], table[0], *table[1 + _STREAM :]


def _launch_all(launches: Sequence[tuple], table: Sequence[Any], watched: bool) -> None:
    """Each launch takes what it needs from one table: that of all launches is looked up before the first, and none is put together in Python."""
    for compiled, taken, function, outer, inner in launches:
        if watched:
            arguments = taken(table)
            compiled[arguments[:_STREAM]](*arguments[_FIRST:])
        elif inner is None:  # what that does, but for the hooks and what they are told
            function(*outer(table))
        else:
            function(*outer(table), inner(table))


class _Mark(NamedTuple):
    """Stands for an argument of a launcher: the how manieth."""

    number: int


class _Past(NamedTuple):
    """What Triton's launcher, a function of Python, hands on to one of C: it is called directly where a launch is made again.

    Attributes:
        function: that of C
        outer: what it is called with: marks, and things that are the same in all launches
        inner: marks that come last, as one tuple; None where there is no such
    """

    function: Any
    outer: list[Any]
    inner: list[_Mark] | None

    @staticmethod
    def of(run: Any, arguments: int) -> _Past | None:
        """Of a launcher that takes so many arguments; it is asked, as it differs from version to version. None where it does more."""
        if not hasattr(run, "launch") or any(
            getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size")
        ):
            return None
        asked, calls = copy(run), []  # a copy: others may launch meanwhile
        asked.launch = lambda *given: calls.append(given)
        try:
            asked(*map(_Mark, range(arguments)))
        except Exception:  # it looks at what it is given
            return None
        if len(calls) != 1 or not calls[0]:
            return None
        *outer, last = calls[0]
        inner = list(last) if type(last) in (tuple, list) else None
        outer = outer if inner is not None else [*outer, last]
        numbers = [each.number for each in (*outer, *(inner or ())) if type(each) is _Mark]
        whole = inner is None or (len(inner) > 1 and all(type(each) is _Mark for each in inner))
        if not whole or sorted(numbers) != list(range(arguments)):  # some stand elsewhere
            return None
        return _Past(run.launch, outer, inner)


def _remember(cache: dict, key: Hashable, value: Any) -> None:
    if len(cache) >= _MOST:
        cache.clear()
    cache[key] = value


class _Calls(threading.local):
    """The launches of the call that this thread notes; and the kernels that it is going to compile, by what they are compiled for."""

    noting: list[tuple[Any, int, tuple]] | None = None
    ahead: dict[Hashable, Asked] | None = None


_calls = _Calls()


class _Computes(TorchDispatchMode):
    """Sees what PyTorch does between launches: what it computes, they alone do not repeat.

    Attributes:
        seen: whether it did more than to make tensors, not filled, and to look at them
        made: the tensors that it made. Others are copies, whatever made them: in inference mode ``contiguous`` seems to be a look
    """

    def __init__(self):
        super().__init__()
        self.seen, self.made = False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__:
            self.made.append(found)
        elif not func.is_view:
            self.seen = True
        return found


class _Place(NamedTuple):
    """An address: in which tensor of a call, and how far from where that begins."""

    slot: int
    offset: int


class _Launch(NamedTuple):
    """A launch with all that ``run`` takes but for the stream: numbers, and places where it takes addresses."""

    compiled: Any
    arguments: tuple[Any, ...]


def repeat(key: Hashable, tensors: tuple[Tensor, ...], make: Callable[[], Tensor | None]) -> Tensor | None:
    """What ``make`` does by launches alone: by the same launches again, where a call under this key was noted.

    Args:
        key: what the launches depend on: shapes, strides, device and beginnings of the tensors, and settings
        tensors: that each call brings anew, on the current device, each once
        make: makes the launches. They work on these tensors, on the one that it returns, if any, contiguous and of the dtype of
            the last of these, and on memory that was made for them and holds nothing of later use
    """
    known = _noted.get(key, _UNKNOWN)
    if known is None:
        return make()
    if known is not _UNKNOWN:
        return known.again(tensors[-1], *map(Tensor.data_ptr, tensors))
    assert _calls.noting is None, "a call that is noted makes no other one"
    _calls.noting = []
    try:
        with _Computes() as computes:
            result = make()
        noted = None if computes.seen else Noted.of(_calls.noting, tensors, result, computes.made)
    finally:
        _calls.noting = None
    _remember(_noted, key, noted)
    return result


def noted(key: Hashable) -> Noted | None:
    """The launches of calls under a key, where they can be made again."""
    return _noted.get(key)


class Noted:
    """The launches of one call. Memory in them that is none of its tensors' is scratch: in later calls one piece.

    Attributes:
        early, late: launches, by what they take from a table (see ``_launch_all``): the stream, what is the same in all calls, and addresses:
            of scratch memory, of the tensors, of what lies inside of them, of what lies in the result
        fixed: what is the same in all calls
        inside, offsets, made: addresses inside of a tensor, and of the result: in which, and how far
    """

    __slots__ = ("_device", "_early", "_fixed", "_inside", "_late", "_made", "_offsets", "_scratch", "_shape")

    def __init__(self, launches: list[_Launch], given: int, shape: tuple[int, ...] | None, scratch: int, device: int):
        """``given``: how many tensors a call brings."""
        self._shape, self._scratch, self._device = shape, scratch, device
        everything = [each for launch in launches for each in launch.arguments]
        places = list(dict.fromkeys(each for each in everything if isinstance(each, _Place)))
        inside = [each for each in places if each.slot <= given and each.offset]
        self._inside, self._offsets = [each.slot for each in inside], [each.offset for each in inside]
        self._made = [each for each in places if each.slot > given]
        whole = [_Place(slot, 0) for slot in range(1 + given)]
        pasts = [_Past.of(launch.compiled.run, len(launch.arguments) + 1) for launch in launches]
        constant = [each for past in pasts if past is not None for each in past.outer if type(each) is not _Mark]
        every = [*(each for each in everything if not isinstance(each, _Place)), *constant]
        fixed = {id(each): each for each in every}  # which tells 1 from True
        self._fixed: list[Any] = list(fixed.values())
        at = {key: 1 + number for number, key in enumerate((*fixed, *whole, *inside, *self._made))}

        def entry(launch: _Launch, past: _Past | None) -> tuple:
            places = [at[each if isinstance(each, _Place) else id(each)] for each in launch.arguments]
            places.insert(_STREAM, 0)
            taken = itemgetter(*places)
            if past is None:
                return launch.compiled, taken, launch.compiled.run, taken, None
            outer = [places[each.number] if type(each) is _Mark else at[id(each)] for each in past.outer]
            inner = None if past.inner is None else itemgetter(*[places[each.number] for each in past.inner])
            return launch.compiled, taken, past.function, itemgetter(*outer), inner

        waiting = [
            any(each in self._made for each in launch.arguments if isinstance(each, _Place)) for launch in launches
        ]
        early = waiting.index(True) if True in waiting else len(launches)
        entries = list(map(entry, launches, pasts))
        self._early, self._late = entries[:early], entries[early:]

    @staticmethod
    def of(
        launches: list[tuple[Any, int, tuple[Any, ...]]],
        tensors: tuple[Tensor, ...],
        result: Tensor | None,
        made: list[Tensor],
    ) -> Noted | None:
        """None where they cannot be made again: nothing was compiled, a view may be one of two tensors, or a kernel was given memory
        that is neither theirs nor was ``made`` for it."""
        every, like = tensors if result is None else (*tensors, result), tensors[-1]
        # Scratch memory is the first place, the result the last: it may still have to be made. A tensor is known by itself, wherever it
        # lies; a view of one by the memory that it shares with it, and with no other.
        itself = {id(tensor): 1 + slot for slot, tensor in enumerate(every)}
        if len(itself) < len(every) or any(compiled is None for compiled, *_ in launches):
            return None
        homes, shared = {}, set()
        for slot, tensor in enumerate(every):
            if homes.setdefault(_storage(tensor), (1 + slot, tensor.data_ptr()))[0] != 1 + slot:
                shared.add(_storage(tensor))
        found, scratch, own = [], 0, {_storage(tensor) for tensor in made}
        for compiled, programs, arguments in launches:
            placed: list[Any] = []
            for argument in arguments:
                if id(argument) in itself:
                    placed.append(_Place(itself[id(argument)], 0))
                elif isinstance(argument, Tensor):
                    home = _storage(argument)
                    if home in shared:
                        return None
                    if home not in homes:
                        if home not in own:
                            return None
                        homes[home] = 0, home - scratch
                        scratch += -(-argument.untyped_storage().nbytes() // 128) * 128  # a line of the cache each
                    slot, begins = homes[home]
                    placed.append(_Place(slot, argument.data_ptr() - begins))
                else:
                    placed.append(argument)
            found.append(_Launch(compiled, (*_head(compiled, programs), *placed)))
        shape = None if result is None else tuple(result.shape)
        return Noted(found, len(tensors), shape, -(-scratch // like.element_size()), like.get_device())

    def again(self, like: Tensor, *places: int) -> Tensor | None:
        """For tensors that lie at these places; a result is of the dtype of one of them."""
        watched, result = is_watched(), None
        scratch = like.new_empty(self._scratch) if self._scratch else None  # which is freed in the order of the stream
        places = (0 if scratch is None else scratch.data_ptr(), *places)
        inside = map(add, map(places.__getitem__, self._inside), self._offsets)
        table = [current_stream(self._device), *self._fixed, *places, *inside]
        _launch_all(self._early, table, watched)
        if self._shape is not None:  # made while the first kernels run
            result = like.new_empty(*self._shape)
            begins = result.data_ptr()
            table += [begins + offset for _, offset in self._made]
            _launch_all(self._late, table, watched)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``integers`` for tensors of any dtype that begin anywhere: all that a kernel may be compiled for."""
    return tuple([each if type(each) is int else (each.dtype, each.data_ptr() % 16 == 0) for each in arguments])


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def is_watched() -> bool:
    """Whether a profiler wants to be told of every launch of Triton's."""
    hook: Any = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def cdiv(x: int, y: int) -> int:
    """Rounded up. As Triton's, which is made for kernels and takes ten times as long; so is the next."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest one from ``n`` on, which is positive."""
    return 1 << (n - 1).bit_length()
