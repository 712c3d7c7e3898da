"""How a user's nest of state tensors lies in one flat tensor.

Shapes: B rows (all batch dimensions in one), D the state of a row packed flat. Inside the library a trajectory is
one real tensor [L, B, D]; nests of tensors are packed and unpacked here, complex numbers as pairs of a real and an imaginary part: a
step need not be holomorphic, and its derivative is one of real numbers.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime import is_capturing


@dataclass(frozen=True)
class Layout:
    """A nest of tensors [*batch, *state] as one [B, D] tensor."""

    spec: pytree.TreeSpec
    shapes: tuple[torch.Size, ...]  # of each leaf, without its batch dimensions
    dtypes: tuple[torch.dtype, ...]  # of each leaf: ``dtype``, or its complex counterpart
    batch_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(z0: Any, batch_dims: int | None) -> Layout:
        """The layout of an initial state; raises where it is not a nest of like floating tensors."""
        leaves, spec = pytree.tree_flatten(z0)
        if not leaves:
            raise ValueError("z0: has no tensor in it")
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"z0: expected a tensor, or tensors in a tuple or dict, found {type(leaf).__name__}"
                    + (" (use torch.tensor(z0))" if isinstance(leaf, (int, float)) else hint_of_array(leaf, "z0"))
                )
            if not leaf.dtype.is_floating_point and leaf.dtype not in (torch.complex64, torch.complex128):
                hint = " (use .float(); deeppcr.scan carries integers along as they are)"
                if spec.is_leaf() or leaf.dtype.is_complex:
                    hint = "" if leaf.dtype.is_complex else " (use z0.float())"
                raise TypeError(f"z0: expected a floating dtype, complex64 or complex128, got {leaf.dtype}{hint}")
            if leaf.layout is not torch.strided:
                raise TypeError(f"z0: expected a dense tensor, got {leaf.layout} (use z0.to_dense())")
            if leaf.dtype.to_real() != leaves[0].dtype.to_real() or leaf.device != leaves[0].device:
                raise TypeError(
                    f"z0: its tensors must share one dtype and device, got {describe(z0)}: convert those that differ, by .to(...)"
                )
        whole = isinstance(batch_dims, int) and not isinstance(batch_dims, bool)
        if batch_dims is not None and not (whole and batch_dims >= 0):
            raise ValueError(f"batch_dims: expected a whole number from 0, got {batch_dims!r}")
        if batch_dims is None:
            batch_dims = _guess_batch_dims(leaves, z0)
        batch_shape = leaves[0].shape[:batch_dims]
        for leaf in leaves:
            if leaf.ndim < batch_dims:
                raise ValueError(
                    f"z0: batch_dims={batch_dims} takes {batch_dims} leading dimensions of every tensor for rows, got {describe(z0)}"
                )
            if leaf.shape[:batch_dims] != batch_shape:
                raise ValueError(
                    f"z0: with batch_dims={batch_dims} every tensor must begin with the same batch shape, "
                    f"got {describe(z0)}"
                )
            if leaf.numel() == 0:
                raise ValueError(f"z0: is empty: {describe(z0)}")
            if is_capturing(leaf.device):
                continue
            if leaf.is_meta:
                raise TypeError("z0: is on the meta device, which holds no values; a solve decides by them")
            if leaf.dtype.itemsize < 2:  # with which PyTorch hardly computes
                raise TypeError(
                    f"z0: {leaf.dtype} is for keeping numbers, not for computing with them; z0.bfloat16() is the next"
                )
        shapes = tuple(leaf.shape[batch_dims:] for leaf in leaves)
        dtypes = tuple(leaf.dtype for leaf in leaves)
        return Layout(spec, shapes, dtypes, batch_shape, dtypes[0].to_real(), leaves[0].device)

    @cached_property
    def rows(self) -> int:
        return self.batch_shape.numel()

    @cached_property
    def parts(self) -> list[int]:
        """Of each leaf, how many real numbers one of its numbers is."""
        return [2 if dtype.is_complex else 1 for dtype in self.dtypes]

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() * parts for shape, parts in zip(self.shapes, self.parts, strict=True)]

    @cached_property
    def width(self) -> int:
        return sum(self.sizes)

    def pack(self, nest: Any, lead: int = 0) -> Tensor:
        """Leaves [*lead, *batch, *state] to [*lead, B, D]; B may differ from ``rows``."""
        return self.pack_leaves([nest] if isinstance(nest, Tensor) else pytree.tree_leaves(nest), lead)

    def pack_leaves(self, leaves: Sequence[Tensor], lead: int = 0) -> Tensor:
        if self._is_flat:
            return leaves[0]
        if 2 in self.parts:
            leaves = [_as_pairs(leaf) if parts == 2 else leaf for leaf, parts in zip(leaves, self.parts, strict=True)]
        flat = [
            # Not even a view where it lies so already: to make one takes as long as a launch.
            leaf if leaf.ndim == lead + 2 and leaf.shape[-1] == size else leaf.reshape((*leaf.shape[:lead], -1, size))
            for leaf, size in zip(leaves, self.sizes, strict=True)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)

    def unpack(self, packed: Tensor, batch_shape: tuple[int, ...] | None = None) -> Any:
        """[*lead, B, D] to leaves [*lead, *batch, *state]."""
        return self.nest(self.leaves(packed, batch_shape))

    def leaves(self, packed: Tensor, batch_shape: tuple[int, ...] | None = None) -> list[Tensor]:
        """The same, one after the other."""
        if batch_shape is None and self._is_flat:
            return [packed]
        batch = self.batch_shape if batch_shape is None else batch_shape
        return [
            # Of rows [B] a state [n] lies so already.
            part
            if parts == len(batch) == len(shape) == 1
            else _shaped(part, (*packed.shape[:-2], *batch, *shape), parts)
            for part, shape, parts in zip(self.split(packed), self.shapes, self.parts, strict=True)
        ]

    @cached_property
    def _is_flat(self) -> bool:
        """Whether leaves lie as they are packed: even a view takes as long to make as a launch."""
        return len(self.shapes) == 1 and self.parts == [1] and len(self.batch_shape) == 1 and len(self.shapes[0]) == 1

    def nest(self, leaves: Sequence[Tensor]) -> Any:
        """Leaves in the structure of the state."""
        if self.spec.is_leaf():
            return leaves[0]
        return tuple(leaves) if self.is_tuple else pytree.tree_unflatten(list(leaves), self.spec)

    @cached_property
    def is_tuple(self) -> bool:
        """Whether the state is a plain tuple of tensors, which PyTorch takes long to build."""
        return self.spec.type is tuple and self._is_shallow

    @cached_property
    def _is_shallow(self) -> bool:
        """Whether one container holds all tensors; one that holds a tensor in another has as many entries."""
        return self.spec.num_nodes == 1 + len(self.shapes)

    def norms(self, packed: Tensor) -> Tensor:
        """The largest magnitude in each leaf: [..., B, D] to [..., B, leaves]."""
        if len(self.shapes) == 1:
            return packed.abs().amax(-1, keepdim=True)
        return torch.stack([part.abs().amax(-1) for part in self.split(packed)], -1)

    def spread(self, norms: Tensor) -> Tensor:
        """What belongs to leaves, to all of their numbers: [..., leaves] to [..., D], or to what broadcasts to it."""
        if len(self.shapes) == 1:
            return norms
        return torch.cat([norms[..., i : i + 1].expand(*norms.shape[:-1], n) for i, n in enumerate(self.sizes)], -1)

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """[..., D] to the leaves' parts."""
        return (packed,) if len(self.shapes) == 1 else packed.split_with_sizes(self.sizes, -1)

    def in_order(self, nest: Any) -> Any:
        """A nest whose dictionaries may have their keys in another order, in the order of the state; any other as it is."""
        try:
            return pytree.tree_unflatten(self.spec.flatten_up_to(nest), self.spec)
        except ValueError:
            return nest

    def fitting(self, nest: Any, batch_shape: tuple[int, ...] | None = None) -> Sequence[Tensor] | None:
        """The leaves of a state that a step returned; None where it is none, of which ``complaint`` knows more.

        Of every step, so in less time than one takes: nests of PyTorch's are taken apart for other containers than a tuple or a dict.
        """
        expected = self._expected if batch_shape is None else self._expected_for(batch_shape)
        if self._keys is None:
            return (nest,) if _is_like(nest, *expected[0]) else None
        if self._keys and type(nest) is self.spec.type and len(nest) == len(self._keys):
            try:
                leaves: Any = nest if type(nest) is tuple else [nest[key] for key in self._keys]
            except KeyError:
                return None
        else:
            leaves, spec = pytree.tree_flatten(nest)
            if spec != self.spec:
                return None
        for leaf, (shape, dtype, device) in zip(leaves, expected, strict=True):
            if not _is_like(leaf, shape, dtype, device):
                return None
        return leaves

    @cached_property
    def _keys(self) -> Sequence[Any] | None:
        """Of the leaves of a tuple or a dict of tensors; none of any other nest, None where the state is a tensor."""
        if self.spec.is_leaf():
            return None
        if self.is_tuple:
            return range(len(self.shapes))
        return list(self.spec.context) if self.spec.type is dict and self._is_shallow else ()

    @cached_property
    def _expected(self) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
        return self._expected_for(self.batch_shape)

    def _expected_for(self, batch_shape: tuple[int, ...]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
        leaves = zip(self.shapes, self.dtypes, strict=True)
        return [(torch.Size((*batch_shape, *shape)), dtype, self.device) for shape, dtype in leaves]

    def complaint(self, nest: Any, batch_shape: tuple[int, ...]) -> str | None:
        """What is wrong with a state that a step returned, or None."""
        leaves, spec = pytree.tree_flatten(nest)
        expected = [torch.Size((*batch_shape, *shape)) for shape in self.shapes]
        if not all(isinstance(leaf, Tensor) for leaf in leaves) or spec != self.spec:
            what = "structure"
        elif [leaf.shape for leaf in leaves] != expected:
            what = "shape"
        elif any(leaf.dtype != dtype for leaf, dtype in zip(leaves, self.dtypes, strict=True)):
            what = "dtype"
        elif any(leaf.device != self.device for leaf in leaves):
            what = "device"
        else:
            return None
        wanted = [
            f"{_short(dtype)}{list(shape)} on {self.device}" for dtype, shape in zip(self.dtypes, expected, strict=True)
        ]
        if nest is None:
            return f"returns None, not a state like {_written(wanted, self.spec)}; is its return statement missing?"
        if what == "structure":  # containers and, for dictionaries, the order of keys
            got = _written([_one(leaf) for leaf in leaves], spec)
            hint = ". Return the containers and keys that z0 has"
            if isinstance(nest, (tuple, list)) and len(nest) == 2 and self.complaint(nest[0], batch_shape) is None:
                hint = (
                    ". A step that returns its state and something beside it: deeppcr.scan, or return the state alone"
                )
            return f"changes the state's structure: expected {_written(wanted, self.spec)}, got {got}{hint}"
        if what == "shape" and all(map(_broadcasts, expected, [leaf.shape for leaf in leaves])):
            shapes = " and ".join(str(list(leaf.shape)) for leaf in leaves)
            hint = f". It was broadcast: begin with a z0 of {shapes}, as the steps return it"
            return f"changes the state's shape: expected {', '.join(wanted)}, got {describe(nest)}{hint}"
        return f"changes the state's {what}: expected {', '.join(wanted)}, got {describe(nest)}"


def not_finite_in(z0: Any) -> Literal["NaN", "an infinity"] | None:
    """What an initial state holds that is no number; None where all are, or nobody can look."""
    leaves = [leaf for leaf in pytree.tree_leaves(z0) if not is_capturing(leaf.device)]
    # What is not finite makes a sum so, which takes a quarter of the time; a large sum may be so by itself.
    if all(isfinite(leaf.detach().sum().item()) for leaf in leaves) or all(
        torch.isfinite(leaf).all() for leaf in leaves
    ):
        return None
    return "NaN" if any(torch.isnan(leaf).any() for leaf in leaves) else "an infinity"


def refuse_not_finite(z0: Any, *, infinities: bool = False) -> None:
    """Raise where Newton's method has nothing to start from: a difference of infinities is none. NaN is as a rule a mistake.

    Args:
        infinities: are no reason to
    """
    held = not_finite_in(z0)
    if held == "NaN" or (held is not None and not infinities):
        raise ValueError(starts_the_loop_alone(held))


def starts_the_loop_alone(held: str) -> str:
    """Said of a z0 that holds NaN or an infinity."""
    by_default = "" if held == "NaN" else ", or none"
    return f"z0: holds {held}, from which the plain loop alone can start: solver=Loop(){by_default}"


# Copies, since a complex view of a real tensor asks for memory that begins and goes on by even numbers; so do the derivatives of views.


def _as_pairs(numbers: Tensor) -> Tensor:
    """Complex numbers [...] as their real and imaginary parts [..., 2]."""
    return torch.stack((numbers.real, numbers.imag), -1)


def _shaped(part: Tensor, shape: tuple[int, ...], parts: int) -> Tensor:
    """Packed numbers of a leaf as the leaf."""
    return torch.complex(*part.reshape((*shape, 2)).unbind(-1)) if parts == 2 else part.reshape(shape)


def _is_like(leaf: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == shape and leaf.dtype is dtype and leaf.device == device


def _guess_batch_dims(leaves: list[Tensor], z0: Any) -> int:
    """0 if every tensor has at most one dimension, 1 if every one has more; of a mean [n] beside a covariance [n, n], who knows?"""
    several = [leaf.ndim > 1 for leaf in leaves]
    if any(several) and not all(several):
        whole = sum(leaf.numel() for leaf in leaves)
        leads = {leaf.shape[:1] for leaf in leaves}
        rows = leads.pop().numel() if len(leads) == 1 else 0
        as_rows = (
            f"{rows} rows of {whole // rows} numbers each" if rows else "rows, which these shapes do not have in common"
        )
        raise ValueError(
            f"batch_dims: must be given where tensors of z0 have one dimension and others have more, as {describe(z0)}: "
            f"batch_dims=0 reads one state of {whole} numbers, batch_dims=1 reads {as_rows}"
        )
    return int(any(several))


def _written(leaves: list[str], spec: pytree.TreeSpec) -> str:
    """A nest with its containers: ``{'a': float32[3] on cpu, 'b': (int, int)}``; many leaves are dots."""
    texts = leaves if len(leaves) <= 4 else ["."] * len(leaves)
    return repr(pytree.tree_unflatten([_Text(text) for text in texts], spec))


class _Text(str):
    """Is written without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a tensor of one shape becomes one of the other, with other numbers in it."""
    aligned = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(a in (1, b) for a, b in aligned)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{_short(leaf.dtype)}{list(leaf.shape)} on {leaf.device}"
    return type(leaf).__name__


def note_call(error: BaseException, number: int, z: Any, *x: Any, hint: str = "") -> None:
    """Add to an error of the step how it was called: often with something else than its author expects. In a note: so
    it stays the error that it is.

    Args:
        number: of the step, from 0
        z, x: what it was given
        hint: what may be wrong
    """
    given = f"step(z) with z: {describe(z)}"
    if x:
        given = f"step(z, x) with z: {describe(z)}, x = xs[{number}]: {describe(x[0])}"
    error.add_note(f"deeppcr called {given} (step {number + 1}){hint}")


def hint_of_batch_first(xs: Any, batch: torch.Size) -> str:
    """What may be wrong with xs beside states of such a batch: where they seem to lie [batch, steps, ...]; else nothing."""
    for leaf in pytree.tree_leaves(xs):
        if batch and isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[0] == batch[0] != leaf.shape[1]:
            return (
                f". The first dimension of xs is taken for steps; here it is {leaf.shape[0]}, which is how many rows z0 has: if xs is "
                f"{list(leaf.shape)} = [batch, steps, ...], hand over xs.transpose(0, 1)"
            )
    return ""


def hint_of_array(value: Any, name: str) -> str:
    """What to write instead of an array of NumPy, or the like."""
    return f" (use torch.as_tensor({name}))" if hasattr(value, "__array__") else ""


def describe(nest: Any) -> str:
    """Shapes, dtypes and devices of a nest, for messages."""
    leaves, spec = pytree.tree_flatten(nest)
    if len(leaves) > 4:
        return f"{len(leaves)} leaves, the first {_one(leaves[0])}"
    return _one(leaves[0]) if spec.is_leaf() else f"({', '.join(map(_one, leaves))})"
