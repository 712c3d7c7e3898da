"""A step on one row as graphs of primitive operations: its values, its tangents, its cotangents.

The step is traced on stand-ins without memory, and decomposed. What does not depend on the state (projections of the inputs) is
taken out of it. PyTorch differentiates the graph of the rest, so that its rules for derivatives are the ones that count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime import as_written
from ..sequence.evaluate import first_line
from ..sequence.layout import Layout
from .expressions import NotCovered
from .operations import DECOMPOSITIONS, check_dtypes, is_mutation

#: Of whoever traces or writes code, one at a time: PyTorch keeps the table of decompositions in a global variable.
TRACING = threading.RLock()
#: So many inputs and closures with as many rows as the state may be tried in every combination.
_MOST_TRIED = 8
_DATA: Any = vars(torch._C.TensorBase)["data"].__get__

#: Of more, to write down the derivatives alone takes ten seconds, and to compile them minutes. (An ODE by four stages has 60 to 90.)
_MOST_OPERATIONS = 800


@dataclass(frozen=True)
class OneRow:
    """A step on one row.

    Attributes:
        graph: (leaves of the state, of the inputs, closures) to the leaves of the next state, each [1, ...] where it has rows
        states, inputs: how many leaves there are
        closures: the tensors that the step closes over
        has_rows: of every input leaf and closure, whether its first dimensions are the rows
    """

    graph: fx.GraphModule
    states: int
    inputs: int
    closures: tuple[Tensor, ...]
    has_rows: tuple[bool, ...]
    batch_dims: int

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.graph.nodes)

    @property
    def given_nodes(self) -> list[fx.Node]:
        """Those of what the graph is given: of the state, of the inputs, closures."""
        return [node for node in self.nodes if node.op == "placeholder"]

    @property
    def state_nodes(self) -> list[fx.Node]:
        return self.given_nodes[: self.states]

    @property
    def outside_nodes(self) -> list[fx.Node]:
        """Those of the inputs and closures."""
        return self.given_nodes[self.states :]

    def sources(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """What differs from step to step, and what differs from row to row."""
        outside = self.outside_nodes
        return outside[: self.inputs], [node for node, rows in zip(outside, self.has_rows, strict=True) if rows]


class StandIns(TorchFunctionMode):
    """Meanwhile the tensors that a function closes over are replaced; those that are not known yet, by stand-ins of their own."""

    def __init__(self, known: dict[int, Tensor], new: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self._known, self._new = known, new
        self.met: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_grad_enabled():  # which leaves no mark in a graph
            raise NotCovered("a step that switches gradients off is not covered")
        given, named = pytree.tree_map_only(Tensor, self._replace, (args, kwargs or {}))
        # What ``tensor.data`` cuts off leaves no mark in a graph either, but can be said in a way that does.
        return given[0].detach() if func == _DATA else func(*given, **named)

    def _replace(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is not None:
            return known
        if self._new is None or isinstance(tensor, FakeTensor):
            return tensor
        self.met.append(tensor)
        stand_in = self._known[id(tensor)] = self._new(tensor)
        return stand_in


def one_row(step: Callable[..., Any], layout: Layout, inputs: Any) -> OneRow:
    """Trace a step.

    Args:
        inputs: what it sees of xs at one step; None where there are none

    Raises:
        NotCovered: the step cannot be traced, or rows cannot be told apart
    """
    if torch.is_autocast_enabled(layout.device.type):
        raise NotCovered("autocast is not covered")
    if any(dtype.is_complex for dtype in layout.dtypes):
        raise NotCovered("complex states are not covered")
    call, given = on_leaves(step, layout, inputs)
    try:
        with FakeTensorMode(), torch.enable_grad():
            row = _traced(call, layout, given)
    except NotCovered:
        raise
    except Exception as error:  # whatever a step may do that stand-ins cannot: look at values, call other libraries
        raise NotCovered(f"the step cannot be traced ({type(error).__name__}: {first_line(error)})") from error
    operations = sum(node.op == "call_function" for node in row.nodes)
    if operations > _MOST_OPERATIONS:
        raise NotCovered(f"a step of {operations:,} operations is not covered (up to {_MOST_OPERATIONS})")
    with torch.inference_mode(False):  # where nobody could differentiate what was made in it
        for name, constant in list(row.graph.named_buffers()):
            setattr(row.graph, name, constant.clone())
    return row


def on_leaves(
    step: Callable[..., Any], layout: Layout, inputs: Any
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A step as a function of the leaves of its state and of its inputs, to the leaves of the next state; and those of ``inputs``.

    Raises:
        NotCovered: they are not all tensors
    """
    given, spec = ([], None) if inputs is None else pytree.tree_flatten(inputs)
    if not all(isinstance(leaf, Tensor) for leaf in given):
        raise NotCovered("xs that are not tensors are not covered")

    def call(state: Iterable[Tensor], leaves: Iterable[Tensor]) -> list[Tensor]:
        z = pytree.tree_unflatten(list(state), layout.spec)
        found = step(z) if inputs is None else step(z, pytree.tree_unflatten(list(leaves), spec))  # pyright: ignore[reportArgumentType]
        return pytree.tree_leaves(layout.in_order(found))

    return call, given


def _traced(call: Callable, layout: Layout, given: list[Tensor]) -> OneRow:
    def like(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    batch = layout.batch_shape
    whole = [torch.empty((*batch, *shape), dtype=layout.dtype, device=layout.device) for shape in layout.shapes]
    seen = [like(leaf) for leaf in given]
    collecting = StandIns({}, like)
    with collecting:
        call(whole, seen)
    closures = collecting.met
    ones = (1,) * len(batch)
    state = [torch.empty((*ones, *shape), dtype=layout.dtype, device=layout.device) for shape in layout.shapes]
    outside = [*given, *closures]

    def stand_ins(has_rows: Iterable[bool]) -> list[Tensor]:
        return [
            torch.empty((*ones, *leaf.shape[len(batch) :]), dtype=leaf.dtype, device=leaf.device)
            if rows
            else like(leaf)
            for leaf, rows in zip(outside, has_rows, strict=True)
        ]

    def function(*leaves: Tensor) -> list[Tensor]:
        beyond = leaves[len(state) + len(given) :]
        with StandIns({id(tensor): one for tensor, one in zip(closures, beyond, strict=True)}):
            return call(leaves[: len(state)], leaves[len(state) : len(state) + len(given)])

    with _quietly():
        has_rows = _which_have_rows(lambda rows: function(*state, *stand_ins(rows)), state, outside, batch)
    traced = _without_mutations(function, *state, *stand_ins(has_rows))
    if any(is_mutation(node) for node in traced.graph.nodes):
        # Of PyTorch's own formulas some (of a GRU's cell) change tensors in place, which shows once they are taken apart.
        traced = _without_mutations(traced, *state, *stand_ins(has_rows))
    _tidy(traced)
    check_dtypes(traced.graph)
    return OneRow(traced, len(state), len(given), tuple(closures), has_rows, len(batch))


def _without_mutations(function: Callable, *stand_ins: Tensor) -> fx.GraphModule:
    functional = torch.func.functionalize(function, remove="mutations")
    # What the user compiled, PyTorch refuses to trace before it asks how to run it.
    compiles = "torch._dynamo" in sys.modules
    allowed = torch._dynamo.config.patch(error_on_nested_fx_trace=False) if compiles else nullcontext()
    with as_written(), allowed:
        return make_fx(functional, decomposition_table=DECOMPOSITIONS, tracing_mode="fake")(*stand_ins)


def _which_have_rows(
    call: Callable[[tuple[bool, ...]], list[Tensor]], state: list[Tensor], outside: list[Tensor], batch: torch.Size
) -> tuple[bool, ...]:
    """Of which tensors from outside one row belongs to one row of the state: the fewest by which one row gives one row."""
    wanted = [leaf.shape for leaf in state]
    able = [i for i, leaf in enumerate(outside) if batch.numel() > 1 and leaf.shape[: len(batch)] == batch]
    if len(able) > _MOST_TRIED:
        raise NotCovered(f"{len(able)} tensors with as many rows as the state are not covered")
    failure: Exception | None = None
    for count in range(len(able) + 1):
        for chosen in combinations(able, count):
            has_rows = tuple(i in chosen for i in range(len(outside)))
            try:
                if [leaf.shape for leaf in call(has_rows)] == wanted:
                    return has_rows
            except Exception as error:  # shapes that do not fit
                failure = error
    raise NotCovered("rows of what the step closes over cannot be told apart") from failure


@contextmanager
def _quietly() -> Iterator[None]:
    """Stand-ins log what does not fit, which is expected while shapes are tried."""
    was, fake_tensor.log.disabled = fake_tensor.log.disabled, True
    try:
        yield
    finally:
        fake_tensor.log.disabled = was


def _tidy(traced: fx.GraphModule) -> None:
    """Tensors are made on the CPU, where derivatives are traced; and nothing is computed in vain."""
    graph = traced.graph
    for node in list(graph.nodes):
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    graph.eliminate_dead_code()
    traced.recompile()
