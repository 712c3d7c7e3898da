"""CUDA graphs of iterations: when they are made, kept and thrown away; and the precision they run in."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..captured import CLEARED
from ..recording import RECORDING, no_collection
from .denoiser import reachable

#: The settings of precision belong to the process: one thread at a time changes them.
_PRECISION = threading.RLock()
#: What every module has, and what is looked at by itself.
_INNER = frozenset(vars(nn.Module()))
#: what is known by its value
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
#: what is known by its identity alone
_WHOLE = (type, ModuleType, nn.Module)
#: arrays of so many bytes are looked at
_SMALL = 1024


class Cache:
    """A few things by key, the latest used last. One that is in use is not in it: two calls at once never share one."""

    def __init__(self, most: int = 4):
        self.most = most
        self._kept: OrderedDict[tuple, Any] = OrderedDict()
        self._watched: set[int] = set()
        # What is thrown away may be the last to hold an owner, whose end is then told to the thread that is here already.
        self._lock = threading.RLock()
        CLEARED.add(self)

    def take(self, key: tuple) -> Any:
        with self._lock:
            return self._kept.pop(key, None)

    def put(self, key: tuple, value: Any) -> None:
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)

    def forget_with(self, owner: Any) -> None:
        """Drop all keys that begin with a fingerprint of ``owner`` when it is no more."""
        if id(owner) not in self._watched:
            with contextlib.suppress(TypeError):  # not everything can be watched: such is kept alive by its fingerprint
                weakref.finalize(owner, _forget, weakref.ref(self), id(owner))
                self._watched.add(id(owner))

    def forget(self, owner: int) -> None:
        with self._lock:
            self._watched.discard(owner)
            for key in [each for each in self._kept if each[0][0] == owner]:
                self._kept.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self):
        return Cache, (self.most,)  # copies and pickles of a solver start without graphs


def _forget(cache: weakref.ref[Cache], owner: int) -> None:
    found = cache()
    if found is not None:
        found.forget(owner)


def owner_of(function: Callable) -> Any:
    """What a denoiser is known by: itself, or what a method is bound to, since methods are made anew at every look."""
    return getattr(function, "__self__", function)


def fingerprint(function: Callable) -> tuple:
    """What graphs of a denoiser depend on: where its tensors lie, and the plain values that it and its closure hold.

    What tensors hold does not matter, for a graph reads them when it is replayed: but for a single number on the CPU, which is
    an argument of the kernels. Not seen: what objects with slots hold, closures of functions that a module holds, large arrays of
    NumPy that are changed in place, and a class whose ``forward`` is replaced.
    """
    found: list[Any] = [id(owner_of(function)), type(function), getattr(function, "__func__", None)]
    waiting, seen = reachable(function), set()
    while waiting:  # by itself, not by ``modules()``: this is done at every call
        value = waiting.pop()
        if not isinstance(value, nn.Module):
            found.append(_mark(value))
        elif id(value) not in seen:  # a module may know its parent
            seen.add(id(value))
            hooks = (*value._forward_hooks.values(), *value._forward_pre_hooks.values())
            found += [type(value), value.training, *map(_mark, hooks)]
            held = vars(value)
            found += [_mark(held[name]) for name in sorted(held.keys() - _INNER)]
            found += [_mark(each) for each in (*value._parameters.values(), *value._buffers.values())]
            waiting += [each for each in value._modules.values() if each is not None]
    return tuple(found)


class Same:
    """Equal where the same object is meant, as long as it lives: what is gone is equal to nothing.

    It keeps nothing alive that can be watched: what a module holds may hold the module.
    """

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any):
        self._hash = id(value)
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value() is other._value() is not None

    def __hash__(self) -> int:
        return self._hash


def _mark(value: Any, depth: int = 3) -> Hashable:
    if type(value) in PLAIN:  # most are: the quickest way to know
        return value
    if isinstance(value, Tensor):
        held = repr(value.item()) if value.ndim == 0 and value.is_cpu else None  # as text NaN equals itself
        return value.data_ptr(), value.shape, value.stride(), value.dtype, held
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_mark(each, depth) for each in value)
    if isinstance(value, dict):
        return tuple((_mark(name, depth), _mark(each, depth)) for name, each in value.items())
    if isinstance(value, MethodType):  # made anew at every look
        return _mark(value.__self__, depth), Same(value.__func__)
    inside = getattr(value, "__dict__", None)
    if depth and inside and isinstance(inside, dict) and not isinstance(value, _WHOLE):
        return Same(value), tuple((name, _mark(each, depth - 1)) for name, each in inside.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_mark(each, depth) for each in value)
    array: Any = value
    if type(array).__module__ == "numpy" and getattr(array, "nbytes", math.inf) <= _SMALL:
        return str(array.dtype), array.shape, array.tobytes()
    return Same(value)


def layout_of(nest: Any) -> Hashable:
    """Shapes and dtypes of a nest of tensors."""
    leaves, spec = pytree.tree_flatten(nest)
    return str(spec), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


class Replayed:
    """Calls of a few functions with a few arguments, each captured after it was first called.

    A function, ``function(*key)``, works on buffers that stay where they are. It comes with each call: kept here, it would
    hold the buffers, and they this, until a collector of garbage comes by. It is known by its name.

    Args:
        device: a CUDA device
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.refusal: str | None = None
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, function: Callable[..., None], *key: Any) -> None:
        name = (function.__name__, *key)
        graph = self._graphs.get(name)
        if graph is not None:
            graph.replay()
        elif self.refusal is not None:
            function(*key)
        else:
            self._capture(name, function, key)

    def _capture(self, name: tuple, function: Callable[..., None], key: tuple) -> None:
        """Call it on a stream of its own, which also lets libraries set themselves up there; then capture it."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function(*key)
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    RECORDING,
                    no_collection(),
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    function(*key)
            except RuntimeError as error:  # the host waits somewhere in the denoiser, say
                self.refusal = str(error).strip().split("\n")[0][:120]
                return
            finally:  # a capture that fails does not always leave its stream
                torch.cuda.set_stream(current)
                current.wait_stream(self._stream)
        self._graphs[name] = graph


@contextlib.contextmanager
def full_precision(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """Products and convolutions in float32 proper, or in TF32, on a GPU; what was set before is put back.

    PyTorch has these settings twice, in an old and a new way, and refuses to tell the old ones where both were used.
    """
    if device.type != "cuda":
        yield
        return
    with _PRECISION, _precision("tf32" if tf32 else "ieee"):
        yield


@contextlib.contextmanager
def _precision(wanted: str) -> Iterator[None]:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    told = products.fp32_precision, convolutions.fp32_precision
    if told == (wanted, wanted):
        yield
        return
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if wanted == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = wanted == "tf32"
    except RuntimeError:
        before = None
    products.fp32_precision = convolutions.fp32_precision = wanted
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]
        products.fp32_precision, convolutions.fp32_precision = told
