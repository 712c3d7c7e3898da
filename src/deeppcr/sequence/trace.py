"""What a function does to tensors, as a value that can be compared: two calls with equal traces compute the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..runtime import Watcher, tensors_in

#: What the host would have to wait for, or what differs from call to call.
_UNREPEATABLE = {
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.data_dependent_output: "looks at values",
    torch.Tag.dynamic_output_shape: "makes tensors whose shapes depend on values",
}
#: What a kernel that PyTorch knows nothing of writes to.
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_PLAIN = (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Watch(Watcher):
    """Looks for operations that cannot be recorded and repeated.

    Attributes:
        refusal: what was found, or None
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.refusal: str | None = None

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        if self.refusal is not None:
            return
        self.refusal = _facts_of(func)[0]
        for tensor in tensors_in((args, kwargs, found)):
            if tensor.device != self.device and not _has_no_memory(tensor):
                self.refusal = f"it needs a tensor on {tensor.device} ({func})"


class Trace(Watch):
    """Every operation of one call of a function, with all that it depends on.

    Tensors stand in it by where they come from: an input, an operation before, or the outside (parameters, constants
    closed over). Those from the outside stand by their address: what is changed in place leaves the trace as it is, what is
    replaced changes it, and so does a Python number, a switch of a module's mode, or another branch.

    Attributes:
        refusal: why a recording of the operations could not stand for the function, or None
        outside: the addresses of the tensors from the outside
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.outside: set[int] = set()
        self._entries: list[Hashable] = []
        self._names: dict[int, Hashable] = {}  # of memory, by its address
        self._held: list[torch.UntypedStorage] = []  # so that no address is given away twice

    def run(self, code: Callable[..., Any], call: Callable[..., Any], *inputs: Any) -> Any:
        """``call(*inputs)``, traced. The inputs must share no memory with anything that the call knows of.

        Args:
            code: the function that the call is about
        """
        for leaf in tensors_in(inputs):
            self._name(leaf, ("input", len(self._names)))
        # What an operation's own derivative does is not traced, so another program is another function. All closures
        # that one place in a program makes are the same one: what they close over is traced.
        self._entries.append(getattr(code, "__code__", type(code)))
        with without_cast_cache(self.device.type), self:
            found = call(*inputs)
        # The same operations with another of their results returned are another function.
        self._entries += [self._encode(leaf) for leaf in pytree.tree_leaves(found)]
        # What was made on the way is given back, and another run may find its own tensors at the same addresses.
        self._names = {address: name for address, name in self._names.items() if address in self.outside}
        self._held = [storage for storage in self._held if storage.data_ptr() in self.outside]
        return found

    @property
    def key(self) -> Hashable:
        return tuple(self._entries)

    @property
    def structure(self) -> Hashable:
        """The key less the addresses of what comes from outside."""
        return _without(frozenset(self.outside), self.key)

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        if self.refusal is not None:
            return
        reason, changes = _facts_of(func)
        self.refusal = reason or _hides(func)
        self._entries.append((func, self._encode(args), *(self._encode(pair) for pair in kwargs.items())))
        given = [each for each in tensors_in((args, kwargs)) if not _has_no_memory(each)] if changes else ()
        if any(each.untyped_storage().data_ptr() in self.outside for each in given):
            self.refusal = f"it changes a tensor that it closes over ({func})"
        for tensor in (found,) if isinstance(found, Tensor) else tensors_in(found):
            self._name(tensor, ("made", len(self._names)))

    def _name(self, tensor: Tensor, name: Hashable) -> Hashable:
        """What the memory of a tensor is called: ``name``, unless it has one."""
        if _has_no_memory(tensor):
            return "nothing"
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            self.refusal = f"it works on a {type(tensor).__name__} ({tensor.layout})"
            return None
        if tensor.device != self.device:
            self.refusal = f"it needs a tensor on {tensor.device}"
            return None
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = self._names.get(address)
        if known is not None:
            return known
        self._held.append(storage)
        if name is None:  # from the outside
            name = address
            self.outside.add(address)
        self._names[address] = name
        return name

    def _encode(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            name = self._name(value, None)
            return name, value.storage_offset(), value.shape, value.stride(), value.dtype
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return tuple([self._encode(each) for each in value])
        if isinstance(value, float):
            return float, repr(value)  # which tells zeros apart, and NaN is NaN
        if not isinstance(value, _PLAIN):
            self.refusal = f"it hands a {type(value).__name__} to an operation"
            return None
        return type(value), value  # since True == 1


@contextmanager
def without_cast_cache(device_type: str) -> Iterator[None]:
    """Autocast keeps what it has cast: operations that took it from there would miss what becomes of the original."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        yield


@lru_cache(maxsize=1024)  # by operation: its tags take ten times as long as the rest of a look
def _facts_of(func: Any) -> tuple[str | None, bool]:
    """Why an operation cannot be recorded, or None; and whether it changes tensors in place."""
    name = func.overloadpacket.__name__
    reasons = [reason for tag, reason in _UNREPEATABLE.items() if tag in func.tags]
    if name == "lift_fresh":
        reasons.append("makes a tensor of Python numbers")
    return (f"it {reasons[0]} ({name})" if reasons else None), func._schema.is_mutable


def _hides(func: Any) -> str | None:
    """Why the trace of an operation does not tell all that it depends on, or None."""
    name = func.overloadpacket.__name__
    if func.namespace not in ("aten", "prims", "prim"):
        return f"it calls an operation whose inside cannot be seen ({name})"
    if name in _UNFILLED:
        return f"it makes a tensor that something else has to fill, unseen ({name})"
    return None


def _has_no_memory(tensor: Tensor) -> bool:
    """Forward mode compares layouts by tensors that have no memory, and says zero by such a one, on the CPU."""
    return tensor.is_meta or tensor._is_zerotensor()


def _without(addresses: frozenset[int], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_without(addresses, each) for each in value)
    return "outside" if isinstance(value, int) and value in addresses else value


class Products(Watcher):
    """The dtypes of all products that are made meanwhile: of matrices, convolutions, attention.

    Inside of itself a step or a network may round more than what it takes and returns, or holds, can tell. What has two factors and does
    not go number by number is a product, or at least computes: tables that are looked up and casts do not.
    """

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.convolves: bool = False  # whether one of them was a convolution, which has a precision of its own

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        first = found[0] if isinstance(found, (tuple, list)) and found else found
        if isinstance(first, Tensor) and first.is_floating_point() and torch.Tag.pointwise not in func.tags:
            factors = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
            if len(factors) > 1:
                self.dtypes.add(first.dtype)
                self.convolves |= "conv" in func.name()


def coarser_products(function: Callable[[], Any], dtype: torch.dtype) -> torch.dtype | None:
    """The coarsest dtype that a function multiplies in, where that is coarser than this one."""
    with torch.no_grad(), Products() as products:
        function()
    coarsest = max([*products.dtypes, dtype], key=lambda each: torch.finfo(each).eps)
    return coarsest if torch.finfo(coarsest).eps > torch.finfo(dtype).eps else None


@torch.no_grad()
def count_operations(function: Callable[[], Any]) -> int:
    """How many operations of PyTorch it is made of, but for views."""
    with _Count() as count:
        function()
    return count.operations


class _Count(Watcher):
    operations = 0

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        self.operations += all(each.alias_info is None for each in func._schema.returns)
