"""One step function evaluated, and differentiated, at many steps at once.

Shapes: N steps at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from ..runtime import as_written, in_functorch, is_out_of_memory, tensors_in
from ..warned import catching_warnings
from .forward_mode import pushed_forward
from .layout import Layout
from .vmapped import Refusals, vmap_over_steps

#: Raised by PyTorch's transforms where they do not cover an operation; a genuine mistake of the step's has already
#: shown itself when the first step was called plainly.
_NO_GRAPH = "does not require grad and does not have a grad_fn"
#: Said where torch.vmap has no rule for an operation.
_FALLS_BACK = "There is a performance drop"
#: So begins the note of it.
TAKEN_APART = "torch.vmap takes"
TRANSFORM_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


#: PyTorch's forward mode knows one level for the whole process: two threads inside it at once get in each other's way.
_FORWARD_MODE = threading.Lock()


@cache
def _load_rules() -> None:
    """PyTorch's rules of forward mode: to load them warns of code of its own, which those who make errors of warnings are not to meet."""
    with catching_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._decomp.decompositions_for_jvp")


class StepError(ValueError):
    """The step function does something that a step must not do."""

    #: As ``deeppcr.check`` calls it.
    kind = "error"


class RandomStep(StepError):
    """The step draws random numbers."""

    kind = "random"

    def __init__(
        self,
        message: str = "step: draws random numbers; call .eval() where that is dropout, else draw them before the solve and hand them over in xs",
    ):
        super().__init__(message)


def _must_propagate(error: BaseException) -> bool:
    return isinstance(error, StepError) or is_out_of_memory(error)


class StepGroup:
    """Steps that share one function. ``way`` and ``derivative`` record how it turned out they can be evaluated.

    Args:
        function: ``function(z, x)``, or ``function(z)`` where xs is None
        xs: a nest of tensors [steps of the group, ...], or None
        layout: of the state
        rowwise: every leaf of xs is [steps, B, ...] and any number of rows may come
        one_by_one: never try to evaluate several steps at once
        module: whose parameters and buffers stand in xs, by name
    """

    def __init__(
        self,
        function: Callable[..., Any],
        xs: Any,
        layout: Layout,
        *,
        rowwise: bool = False,
        one_by_one: bool = False,
        module: nn.Module | None = None,
    ):
        self.function: Callable[..., Any] = function
        self.xs: Any = xs
        self.layout: Layout = layout
        self.module: nn.Module | None = module
        self.way = "rowwise" if rowwise else "loop" if one_by_one else "vmap"
        self.derivative: str = "none"
        self.notes: list[str] = []
        self._heard: set[str] = set()
        self._is_tried = False  # all of its operations have been seen under torch.vmap
        self._falls_back = False  # torch.vmap has no rule for an operation
        self._shares_tangents = True  # where they are the same at every step
        self._usable = list(_DERIVATIVES)
        self._candidates = list(self._usable)

    def differentiate_as_autograd(self) -> None:
        """By reverse mode, which sees where a step switches gradients off: to forward mode that is one more operation."""
        self._usable = [each for each in _DERIVATIVES if each.startswith("reverse")]
        self._candidates = list(self._usable)

    def inputs(self, index: int | slice | Tensor) -> Any:
        """What the step sees of xs, at one step or at several."""
        return entry_of(self.xs, index)

    def call(self, state: Tensor, x: Any, batch_shape: tuple[int, ...] | None = None) -> Tensor:
        """One step: [B, D] to [B, D]."""
        nest = self.layout.unpack(state, batch_shape)
        try:
            with as_written() if in_functorch() else nullcontext():
                output = self.function(nest) if self.xs is None else self.function(nest, x)
        except RuntimeError as error:
            if _NO_GRAPH not in str(error):
                raise
            raise StepError(
                "step: differentiates by torch.autograd.grad or backward, which see no graph where the solver evaluates it; use "
                f"torch.func.grad or torch.func.vjp ({error})"
            ) from error
        return self.layout.pack_leaves(returned(self.layout, output, x, batch_shape))

    def values(self, previous: Tensor, index: slice | Tensor) -> Tensor:
        """All steps in ``index``, each from its own state: [N, B, D] to [N, B, D]."""
        xs = self.inputs(index)
        if self.way == "vmap":
            try:
                function = self.call if xs is not None else lambda state: self.call(state, None)
                seen = None if self._is_tried else Refusals()
                with self._noting("values"), seen or nullcontext():
                    found = vmap_over_steps(function, previous, xs)
                if seen is not None and seen.last is not None:
                    raise RuntimeError(seen.last)
                self._is_tried = True
                return found
            except TRANSFORM_ERRORS as error:
                self._leave_vmap(error)
        if self.way == "rowwise":
            fold = self.fold(xs)
            return fold(previous.flatten(0, 1)).unflatten(0, previous.shape[:2])
        found = []
        for z, x in zip(previous, _entries(xs, len(previous)), strict=True):
            try:
                found.append(self.call(z, x))
            except Exception as error:
                _note_state(error, len(found), len(previous))
                raise
        return torch.stack(found)

    def push(self, previous: Tensor, tangents: Tensor, index: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Values and Jacobian-vector products.

        Args:
            previous: [N, B, D]
            tangents: [N, K, B, D], or [1, K, B, D] for the same at every step

        Returns:
            [N, B, D] and [N, K, B, D]
        """
        xs = self.inputs(index)
        _load_rules()
        while True:
            self.derivative = self._candidates[0]
            try:
                with _FORWARD_MODE:
                    if self.way == "vmap":
                        with self._noting(self.derivative):
                            values, pushed = self._push_vmap(previous, tangents, xs)
                    elif self.way == "rowwise":
                        values, pushed = self._push_rowwise(previous, tangents, xs)
                    else:
                        values, pushed = self._push_loop(previous, tangents, xs)
                # Forward mode promotes the tangents of tensors without dimensions that a Python number scales.
                return values, pushed.to(values.dtype)
            except TRANSFORM_ERRORS as error:
                if _must_propagate(error):
                    raise
                if self.way == "vmap" and tangents.shape[0] == 1 and self._shares_tangents:
                    self._shares_tangents = False  # which what is written in place may be too small for
                elif len(self._candidates) > 1:
                    self._shares_tangents = True
                    self.notes.append(f"no {self.derivative} derivative of the step ({first_line(error)})")
                    self._candidates.pop(0)
                elif self.way == "vmap":
                    self._leave_vmap(error)
                    self._candidates = list(self._usable)
                else:
                    self._let_raise(previous, index)
                    raise StepError(
                        "step: cannot be differentiated by torch.func, forward or reverse (NumPy inside, side effects, batch statistics in train "
                        "mode, a custom function without setup_context?). Write it in operations of PyTorch; Loop, Jacobi, Picard and "
                        f"GivenJacobian need no derivative. {first_line(error)}"
                    ) from error

    def _let_raise(self, previous: Tensor, index: slice | Tensor) -> None:
        """What the step itself has to complain of, where it is not differentiated, comes through as it is.

        It sees its inputs themselves, no copies: what it writes to them is found.
        """
        if isinstance(index, Tensor):
            steps = index.tolist()
        else:
            first, stride = index.start or 0, index.step or 1
            steps = range(first, first + stride * len(previous), stride)
        with torch.no_grad():
            for number, (state, step) in enumerate(zip(previous, steps, strict=True)):
                try:
                    self.call(state, self.inputs(step))
                except Exception as error:
                    if "functorch" in str(error):  # of a tensor that the step kept while it was transformed
                        return
                    _note_state(error, number, len(previous))
                    raise

    def push_alone(self, state: Tensor, tangent: Tensor, x: Any) -> Tensor:
        """The Jacobian-vector product [B, D] of one step as the loop takes it, by forward mode."""
        with _FORWARD_MODE:
            return pushed_forward(lambda z: self.call(z, x), state, tangent)[1]

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """PyTorch warns at every call of an operation that torch.vmap takes step by step: that is a note of the plan, told once."""
        if what in self._heard and not self._falls_back:
            yield
            return
        self._heard.add(what)
        with catching_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=_FALLS_BACK)
            yield
        for each in caught:
            if not str(each.message).startswith(_FALLS_BACK):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            elif not self._falls_back:
                self._falls_back = True
                operation = str(each.message).partition(" for ")[2].partition(". ")[0]
                self.notes.append(
                    f"{TAKEN_APART} {operation or 'an operation'} one step at a time, which is slow: if steps take any "
                    "number of rows, deeppcr.rowwise(step)"
                )

    def _leave_vmap(self, error: Exception) -> None:
        if _must_propagate(error):
            raise error
        if "randomness" in str(error):
            raise RandomStep from error
        self.way = "loop"
        self.notes.append(
            f"torch.vmap does not cover the step ({first_line(error)}): its steps are evaluated one by one; "
            "deeppcr.rowwise(step) may help"
        )

    def fold(self, xs: Any) -> Callable[[Tensor], Tensor]:
        """Several steps as more rows of one call."""
        folded = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), xs) if xs is not None else None
        rest = self.layout.batch_shape[1:]
        return lambda rows: self.call(rows, folded, (rows.shape[0] // rest.numel(), *rest))

    def _push_vmap(self, previous: Tensor, tangents: Tensor, xs: Any) -> tuple[Tensor, Tensor]:
        def one(z, x, t):
            return _DERIVATIVES[self.derivative](lambda state: self.call(state, x), z, t)

        shared = tangents.shape[0] == 1 and self._shares_tangents
        each = tangents[0] if shared else tangents.expand(previous.shape[0], -1, -1, -1)
        return vmap(one, in_dims=(0, None if xs is None else 0, None if shared else 0))(previous, xs, each)

    def _push_rowwise(self, previous: Tensor, tangents: Tensor, xs: Any) -> tuple[Tensor, Tensor]:
        steps, rows = previous.shape[:2]
        folded = tangents.expand(steps, -1, -1, -1).transpose(0, 1).flatten(1, 2)
        values, pushed = _DERIVATIVES[self.derivative](self.fold(xs), previous.flatten(0, 1), folded)
        return values.unflatten(0, (steps, rows)), pushed.unflatten(1, (steps, rows)).transpose(0, 1)

    def _push_loop(self, previous: Tensor, tangents: Tensor, xs: Any) -> tuple[Tensor, Tensor]:
        each = tangents.expand(previous.shape[0], -1, -1, -1)
        pairs = [
            _DERIVATIVES[self.derivative](lambda state, n=n: self.call(state, entry_of(xs, n)), z, t)
            for n, (z, t) in enumerate(zip(previous, each, strict=True))
        ]
        values, pushed = zip(*pairs, strict=True)
        return torch.stack(values), torch.stack(pushed)


def _entries(xs: Any, count: int) -> list[Any]:
    """Of a nest of tensors [L, ...] its L entries; where there is no tensor in it, it is the same ``count`` times."""
    leaves, spec = pytree.tree_flatten(xs)
    if xs is None or not leaves:
        return [xs] * count
    return [pytree.tree_unflatten(each, spec) for each in zip(*(leaf.unbind() for leaf in leaves), strict=True)]


def entry_of(xs: Any, index: int | slice | list[int] | Tensor) -> Any:
    """What a step, or several, see of a nest of tensors [L, ...]; None where there is none."""
    return None if xs is None else pytree.tree_map(lambda leaf: leaf[index], xs)


def _note_state(error: Exception, number: int, count: int) -> None:
    """Say of what a step raised that it did so by itself, at one of the states [N, ...] of an iteration."""
    if not isinstance(error, StepError):
        error.add_note(
            f"deeppcr: the step raised this by itself, at entry {number + 1} of {count} states that an iteration came to; where the loop "
            "does not come to such a state, solver=deeppcr.Loop() takes its steps"
        )


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:120]


def returned(layout: Layout, output: Any, x: Any, batch_shape: tuple[int, ...] | None = None) -> Sequence[Tensor]:
    """The leaves of the state that a step returned; StepError where it is none.

    Args:
        x: what it was given beside its state
        batch_shape: where it is another than the layout's
    """
    leaves = layout.fitting(output, batch_shape)
    if leaves is not None:
        return leaves
    output = layout.in_order(output)
    complaint = layout.complaint(output, layout.batch_shape if batch_shape is None else batch_shape)
    if complaint is not None:
        raise StepError(f"step: {complaint}{_hint(complaint, x, layout.dtype)}")
    return pytree.tree_leaves(output)


def _hint(complaint: str, x: Any, dtype: torch.dtype) -> str:
    if "state's dtype" in complaint:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return "; autocast is on: give z0 the dtype that the step returns, or cast inside the step"
        dtypes = (leaf.dtype for leaf in tensors_in(x) if leaf.is_floating_point())
        if other := next((each for each in dtypes if each != dtype), None):
            return f"; its x has {str(other).removeprefix('torch.')}: give xs the dtype of z0"
        return "; return it .to(z.dtype), or give z0 the dtype that the step returns"
    if "state's shape" in complaint and "broadcast" not in complaint:
        return (
            ". A step maps a state to one of the same shape. If every step sees all earlier ones (as in a DenseNet), "
            "the equations are not bidiagonal and cannot be solved this way; a window of them can: deeppcr.with_history"
        )
    return ""


# Ways to get Jacobian-vector products of `call` at z [R, D] along tangents [K, R, D]: values [R, D], products [K, R, D].
# Forward mode is the innermost transform: other nestings fail for recurrent cells.


def _forward(call, z, tangents):
    values, products, *_ = vmap(lambda t: pushed_forward(call, z, t))(tangents)
    return values[0], products  # the values do not depend on the tangent: all K of them are one (expanded) tensor


def _forward_each(call, z, tangents):
    values, products = zip(*(pushed_forward(call, z, t) for t in tangents), strict=True)
    return values[0], torch.stack(products)


def _reverse(call, z, tangents):
    values, pull, *_ = vjp(call, z)
    (rows,) = vmap(pull)(_one_cotangent_per_output(z))
    return values, torch.einsum("irj,krj->kri", rows, tangents)


def _reverse_each(call, z, tangents):
    values, pull, *_ = vjp(call, z)
    rows = torch.stack([pull(cotangent)[0] for cotangent in _one_cotangent_per_output(z)])
    return values, torch.einsum("irj,krj->kri", rows, tangents)


def _one_cotangent_per_output(z: Tensor) -> Tensor:
    width = z.shape[-1]
    return torch.eye(width, dtype=z.dtype, device=z.device).unsqueeze(1).expand(width, *z.shape)


_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward, one tangent at a time": _forward_each,
    "reverse": _reverse,
    "reverse, one cotangent at a time": _reverse_each,
}
