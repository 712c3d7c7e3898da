"""Launching kernels that were compiled before, without Triton's inspection of every argument.

That inspection takes longer than most kernels here. It is needed once for every way a kernel is compiled: for its
constants, for the kind of every pointer, and for the integers that it is specialised on. The first two do not change
between calls with the same constants where all tensors are float32 and begin at multiples of 16 bytes (see
``aligned``); the integers are part of the key, and so is whatever else may differ.

A call that launches several kernels for tensors of the same shapes, strides and device does so with the same numbers
every time: only its pointers are new. ``Launches`` makes the launches of a call, notes them, and makes them again, by a
function in which they are written out: to go through lists of arguments would take as long as to launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs

_MOST = 4096
#: Where the stream and a kernel's own arguments stand among those of Triton's launcher.
_STREAM, _OWN = 3, 9
_compiled: dict[tuple, Any] = {}


class Launches:
    """Makes the launches of one call, and notes them where every tensor in them is known: a kernel that was compiled,
    tensors that each call brings anew, parts of them, and scratch memory.

    Args:
        tensors: those that each call brings anew, beginning at multiples of 16 bytes

    Attributes:
        noted: what ``again`` makes; None where a launch cannot be repeated
    """

    __slots__ = ("_alive", "_device", "_early", "_late", "_places", "_scratch", "_shape", "_slots", "noted")

    def __init__(self, *tensors: Tensor):
        self._places: dict[int, tuple[int, int]] = {id(tensor): (slot, 0) for slot, tensor in enumerate(tensors)}
        self._alive = [*tensors]  # as long as launches are noted, so that no other tensor takes their ids
        self._slots, self._scratch = len(tensors), 0
        self._device: Any = tensors[0].device if tensors else None
        self._shape = tuple(tensors[-1].shape) if tensors else ()
        self.noted: list[tuple] | None = []

    def empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch memory: later calls have all of it in one piece."""
        tensor = empty(like, *shape, dtype=dtype)
        self._places[id(tensor)] = self._slots, 4 * self._scratch
        self._alive.append(tensor)
        self._scratch += -(-tensor.nbytes // 128) * 32  # every piece begins at a line of the cache
        return tensor

    def part(self, of: Tensor, part: Tensor) -> Tensor:
        """``part``, which begins in the tensor ``of`` unless it is a copy: known if that one is."""
        if id(of) in self._places and part.untyped_storage()._cdata == of.untyped_storage()._cdata:
            slot, offset = self._places[id(of)]
            further = part.data_ptr() - of.data_ptr() if part.numel() else 0  # an empty tensor lies nowhere
            self._places[id(part)] = slot, offset + further
            self._alive.append(part)
        return part

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple,
        constants: tuple,
        *,
        warps: int,
        integers: tuple = (),
        registers: int | None = None,
    ) -> None:
        """Launch so many programs of a kernel.

        Args:
            kernel: by ``triton.jit``
            arguments: tensors and numbers
            constants: the kernel's last parameters, all of them ``tl.constexpr``
            warps: of a program
            integers: those of the arguments that the kernel is specialised on, and whatever else it is compiled for
            registers: the most of a thread; None: as many as the compiler likes
        """
        if programs == 0:
            return
        device = torch.cuda.current_device() if arguments[0].is_cuda else None
        # By its id: a kernel's own hash is that of its source text.
        key = (id(kernel), constants, warps, integers, registers, device)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments, *constants)
        else:
            options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
            compiled = kernel[(programs,)](*arguments, *constants, **options)
            if compiled is not None:  # by the interpreter nothing is compiled
                remember(_compiled, key, compiled)
        self._note(compiled, programs, [*arguments, *constants])

    def _note(self, compiled: Any, programs: int, arguments: list) -> None:
        pointers = []
        for at, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                pointers.append((at, *self._places.get(id(argument), (-1, 0))))
                arguments[at] = None
        if compiled is None or any(slot < 0 for _, slot, _ in pointers):
            self.noted = None
        elif self.noted is not None:
            first = [programs, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None]
            places = [(_OWN + at, *place) for at, *place in pointers]
            self.noted.append((compiled, compiled.run, first + arguments, places))

    def finished(self) -> bool:
        """No more launches are made for these tensors. Whether they can be made for others."""
        self._places, self._alive = {}, []
        if self.noted is None or self._device is None:
            return False
        slots = [[slot for _, slot, _ in places] for *_, places in self.noted]
        early = next((n for n, used in enumerate(slots) if self._slots - 1 in used), len(slots))
        self._early, self._late = (_written_out(part, self._slots) for part in (self.noted[:early], self.noted[early:]))
        return True

    def again(self, *pointers: int) -> None:
        """All launches anew, for other tensors of the same shapes and strides on the same device, the current one."""
        scratch = torch.empty(self._scratch, dtype=torch.float32, device=self._device) if self._scratch else None
        place = 0 if scratch is None else scratch.data_ptr()  # freed in the order of the stream
        if is_watched():
            self._again_watched(*pointers, place)
            return
        stream = current_stream(self._device.index)
        self._early(stream, place, *pointers)
        self._late(stream, place, *pointers)

    def again_for_new(self, like: Tensor, *others: int) -> Tensor:
        """``again`` where the last tensor is a new one, of the dtype of another: it is made while the first kernels run, which
        do without it as a rule."""
        # Faster than torch.empty, and no smaller: ``like`` is of float32 or wider.
        scratch = like.new_empty(self._scratch) if self._scratch else None
        place = 0 if scratch is None else scratch.data_ptr()
        watched, stream = is_watched(), current_stream(self._device.index)
        if not watched:
            self._early(stream, place, *others)
        last = like.new_empty(*self._shape)
        if watched:
            self._again_watched(*others, last.data_ptr(), place)
        else:
            self._late(stream, place, *others, last.data_ptr())
        return last

    def _again_watched(self, *pointers: int) -> None:
        """By Triton's own launch, which tells a profiler."""
        for compiled, _, template, places in self.noted or ():
            arguments = template.copy()
            for at, slot, offset in places:
                arguments[at] = pointers[slot] + offset
            compiled[tuple(arguments[:3])](*arguments[_OWN:])


def _written_out(noted: list[tuple], slots: int) -> Callable[..., None]:
    """These launches as a function of the stream, the pointer to scratch memory (the last slot), and those of all slots;
    where none of them needs the tensor before that, its pointer may be left out."""
    names: dict[str, Any] = {}

    def written(value: Any) -> str:
        if type(value) in (int, bool, type(None)):
            return repr(value)
        names[f"v{len(names)}"] = value
        return f"v{len(names) - 1}"

    calls = []
    for _, run, template, places in noted:
        arguments = [written(value) for value in template]
        arguments[_STREAM] = "stream"
        for at, slot, offset in places:
            arguments[at] = f"p{slot} + {offset}" if offset else f"p{slot}"
        calls.append(f"{written(run)}({', '.join(arguments)})")
    pointers = ", ".join(f"p{slot}" for slot in (slots, *range(slots)))
    return eval(f"lambda stream, {pointers}=0: ({''.join(call + ', ' for call in calls)})", names)


def repeat(noted: dict[Any, Launches], key: Any, tensors: tuple[Tensor, ...], make: Callable[[Launches], None]) -> None:
    """Make the launches of a call: again as they were noted under ``key``, or for the first time by ``make``.

    Args:
        noted: where they are noted
        key: what the launches depend on: shapes, strides and device of the tensors, and settings
        tensors: those that each call brings anew, beginning at multiples of 16 bytes, on the current device
        make: makes the launches; the only tensors in them are these, their parts, and scratch memory
    """
    known = noted.get(key)
    if known is not None:
        known.again(*[tensor.data_ptr() for tensor in tensors])
        return
    # One tensor in two places cannot be told from two, as another call may have there: then nothing is noted.
    launches = Launches(*tensors) if len({*map(id, tensors)}) == len(tensors) else Launches()
    make(launches)
    if launches.finished():
        remember(noted, key, launches)


def remember(cache: dict, key: Any, value: Any) -> None:
    """Keep a value in a cache of bounded size."""
    if len(cache) >= _MOST:
        cache.clear()
    cache[key] = value


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of a shape; given as a tuple or a ``torch.Size``, torch takes up to twice as long to read it."""
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def is_watched() -> bool:
    """Whether a profiler wants to be told of every launch of Triton's."""
    hook: Any = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
