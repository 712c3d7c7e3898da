"""What all recurrent modules share: layers and directions, how a batch lies, and one parallel solve for each.

Shapes: T steps, B rows, F features of the input, H the hidden size (P where outputs are projected), K layers times directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..bounded import Bounded
from ..distributed.ranks import Ranks, Trouble
from ..newton import USUAL, Loop, Newton
from ..runtime import is_capturing, is_transformed, outside_of_graph, unseen_by_compiler
from ..sequence.words import read_backwards
from ..solution import Solution
from .arguments import Mode, check_mode, check_newton, complaint_of
from .cells import Cell, Restarting, Weights
from .operated_recurrent import OperatedRecurrent
from .ragged import Documents, Padding, begins_backwards, reversed_in_time
from .repeated import Repeating
from .report import looped

_AS_IT_IS = nullcontext()
#: Initial states that are kept: how many, and of how many numbers at most.
_MOST_ZEROS, _SMALL = 16, 2**16


class Recurrent(OperatedRecurrent):
    """Layers of a cell, in one direction or both, as in ``torch.nn``. A mixin: whose attributes it reads are those of ``nn.RNNBase``.

    What is not given to ``__init__`` has its default in the class, so that a module of ``torch.nn`` may become one of these and back.

    Attributes:
        run_mode: "auto", "parallel" or "sequential". (``mode`` is PyTorch's own name for the kind of a cell.)
        newton: settings of the parallel mode
    """

    input_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool

    _cell_type: type[Cell]
    run_mode: Mode = "auto"
    newton: Newton = USUAL
    #: How the last pass went: a solution for each layer and direction, or what makes them; or of one by PyTorch its steps, rows, device and why.
    _passed: tuple[Solution, ...] | Callable[[], tuple[Solution, ...]] | tuple[int, int, torch.device, str] = ()
    #: By layer and direction, and whether it restarts: the weights that a cell was made of, and the cell.
    _cells: dict[tuple[int, bool], tuple[tuple[Tensor, ...], Any]] | None = None
    #: Initial states that nobody gave, by what they are like: nobody writes to them.
    _zeros: Bounded | None = None

    def __init__(self, *args: Any, mode: Mode = "auto", newton: Newton | None = None, **options: Any):
        super().__init__(*args, **options)
        self.run_mode, self.newton = check_mode(mode), USUAL if newton is None else check_newton(newton)

    def forward(
        self,
        input: Any,
        hx: Any = None,
        *,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mode: Mode | None = None,
        mesh: Any = None,
    ) -> Any:
        """As in ``torch.nn``: the outputs of all steps, and the last states.

        Args:
            input: [T, B, F], [B, T, F] with batch_first, [T, F] without a batch, or a PackedSequence
            hx: the initial states, [K, B, H], or of an LSTM two of them; zero by default
            reset: [T, B], [B, T] with batch_first, [T] without a batch: True where a row's state is zero before the step, as at the first
                step of an episode. The row's own initial state, which may stand in the middle of one, is not come back to
            cu_seqlens: [N + 1], integers: the input is [S, F], N sequences one after the other, of which number n begins at cu_seqlens[n];
                the last number is S. Outputs are [S, H], states [K, N, H]
            mode: overrides the module's for this call
            mesh: a one-dimensional DeviceMesh over whose ranks the steps are spread: the input, and ``reset``, are this rank's part of them,
                as many as it has or none, ``hx`` is the same everywhere; outputs are this rank's, and the last states those of the
                whole. It is the parallel mode, but for mode="sequential": one rank after the other
        """
        chosen = check_mode(self.run_mode if mode is None else mode)
        if mesh is not None:
            return self._over_ranks(Ranks.of(mesh), input, hx, reset, cu_seqlens, chosen)
        if torch.compiler.is_compiling() and (why := self._ends_graph(input, hx, cu_seqlens)):
            eagerly = outside_of_graph(self.forward, why)
            return eagerly(input, hx, reset=reset, cu_seqlens=cu_seqlens, mode=chosen)
        if cu_seqlens is not None:
            if reset is not None:
                raise ValueError("reset: sequences by cu_seqlens begin anew by themselves; give one of the two")
            documents = Documents.of(input, cu_seqlens)
            output, last = self._run(documents.packed(input), hx, None, chosen)
            return documents.in_sequence(output), last
        if reset is not None:
            self._check_reset(reset, input)
        if torch.compiler.is_compiling():
            return self._run_in_graph(input, hx, reset, chosen)
        return unseen_by_compiler(self._run_or_replay)(input, hx, reset, chosen)

    def _run_or_replay(self, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Any:
        """``_run``; a call that repeats one by kernels, by CUDA graphs."""
        call = Repeating.of(self, input, hx, reset, mode) if Repeating.owner_of(self) is not None else None
        found = None if call is None else call.replayed()
        if found is None:
            found = self._run(input, hx, reset, mode)
            if call is not None:
                call.learn()
            else:
                Repeating.owner_of(self)  # which is noted once a call went by kernels
        return found

    def _run(self, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Any:
        raise NotImplementedError

    def _newton_in(self, mode: Mode) -> Newton:
        """Settings of a solve in a mode that is not sequential, outside of a capture."""
        return self.newton

    def _over_ranks(self, ranks: Ranks, input: Any, hx: Any, reset: Any, cu_seqlens: Any, mode: Mode) -> Any:
        trouble = Trouble()
        with trouble.kept():
            if cu_seqlens is not None or isinstance(input, PackedSequence):
                raise ValueError("input: with a mesh, expected a tensor: the steps of all rows are cut up alike")
            if reset is not None and self.bidirectional:
                raise ValueError("reset: with a mesh, in one direction alone")
            if (wrong := complaint_of(self, input, hx, least=0)) is not None:
                raise wrong
            if reset is not None:
                self._check_reset(reset, input)
        ranks.agree(trouble.error)
        return self._by_solve(input, hx, reset, Loop() if mode == "sequential" else self.newton, ranks=ranks)

    def _check_reset(self, reset: Any, input: Any) -> None:
        if isinstance(input, PackedSequence):
            raise ValueError("reset: the sequences of a PackedSequence begin anew by themselves; give a tensor")
        if not isinstance(reset, Tensor) or reset.dtype is not torch.bool:
            came = reset.dtype if isinstance(reset, Tensor) else type(reset).__name__
            raise TypeError(f"reset: expected a tensor of booleans, got {came}")
        if isinstance(input, Tensor) and reset.shape != input.shape[:-1]:
            raise ValueError(
                f"reset: expected one for each step and row, {list(input.shape[:-1])}, got {list(reset.shape)}"
            )
        if isinstance(input, Tensor) and reset.device != input.device:
            raise ValueError(f"reset: expected it on {input.device}, where the input is, got {reset.device}")

    # How a batch lies.

    def _by_solve(
        self,
        input: Any,
        hx: Any,
        reset: Tensor | None,
        solver: Newton | Loop | None,
        *,
        kernels: bool = False,
        ranks: Ranks | None = None,
    ) -> Any:
        """A solve for each layer and direction, of arguments that are known to be right.

        Args:
            kernels: raise NoKernels where a cell has none
            ranks: over which the steps are spread
        """
        solutions, directions = [], 2 if self.bidirectional else 1

        def run(at: int, x: Tensor, start: tuple[Tensor, ...], reset: Tensor | None, lengths: Tensor | None) -> Any:
            forwards = at % directions == 0
            turned = None if forwards or ranks is not None else len(x) if lengths is None else lengths
            order = ranks if ranks is None or forwards else ranks.reversed()
            with _AS_IT_IS if turned is None else read_backwards(turned):
                how = {"lengths": lengths, "solver": solver, "mesh": order, "kernels": kernels}
                solution = self._solve(at, x, start, reset, **how)
            solutions.append(solution.in_short())
            if ranks is None:
                return solution.states, None
            return solution.states, tuple(leaf.unsqueeze(0) for leaf in pytree.tree_leaves(solution.final))

        found = self._by_layers(input, hx, reset, run)
        self.__dict__["_passed"] = tuple(solutions)
        return found

    def _by_layers(self, input: Any, hx: Any, reset: Tensor | None, run: Callable[..., Any]) -> Any:
        """
        Args:
            run: of a layer in one direction, from its number, inputs [T, B, F], start, resets and lengths to its states, and the
                last ones [1, B, H] where those are another rank's, else None
        """
        if isinstance(input, PackedSequence):
            padding = Padding.of(input)
            starts = self._starts(hx, len(padding.lengths), input.data)
            if input.sorted_indices is not None and hx is not None:
                starts = tuple(leaf.index_select(1, input.sorted_indices) for leaf in starts)
            alike = bool(padding.lengths[-1] == padding.steps)
            lengths = None if alike else padding.lengths
            output, last = self._layers(padding.pad(input.data), starts, None, lengths, run)
            if input.unsorted_indices is not None:
                last = tuple(leaf.index_select(1, input.unsorted_indices) for leaf in last)
            return input._replace(data=padding.pack(output)), self._nested(last)
        batched = input.ndim == 3
        rows = 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(rows)
        if reset is not None and not batched:
            reset = reset.unsqueeze(rows)
        if self.batch_first:
            x, reset = x.transpose(0, 1), None if reset is None else reset.T
        if not batched and hx is not None:
            hx = hx.unsqueeze(1) if isinstance(hx, Tensor) else tuple(leaf.unsqueeze(1) for leaf in hx)
        output, last = self._layers(x, self._starts(hx, x.shape[1], x), reset, None, run)
        if self.batch_first:
            output = output.transpose(0, 1)
        if batched:
            return output, self._nested(last)
        return output.squeeze(rows), self._nested(tuple(leaf.squeeze(1) for leaf in last))

    def _widths(self) -> tuple[int, ...]:
        """Of the tensors of a state."""
        return (self.hidden_size,)

    def _starts(self, hx: Any, rows: int, like: Tensor) -> tuple[Any, ...]:
        """The initial states as a tuple, [K, B, H] each, or K of [B, H]."""
        if hx is None:
            count = len(self._all_weights)
            return tuple([[self._nothing((rows, width), like)] * count for width in self._widths()])
        return (hx,) if isinstance(hx, Tensor) else tuple(hx)

    def _nothing(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros. On a GPU the same again: to have them filled takes longer than a kernel of a short pass."""
        # What a compiler, a transform, an observer or a graph of the caller sees is made anew, and belongs to it.
        alone = type(like) is Tensor and like.is_cuda and not (torch.compiler.is_compiling() or is_transformed())
        if not alone or torch._C._len_torch_dispatch_stack() or is_capturing(like.device) or math.prod(shape) > _SMALL:
            return like.new_zeros(shape)
        kept = self._zeros
        if kept is None:
            kept = self.__dict__["_zeros"] = Bounded(_MOST_ZEROS)
        # On another stream they might be read before they are filled.
        kind = *shape, like.dtype, like.device, torch._C._cuda_getCurrentRawStream(like.get_device())
        found = kept.get(kind)
        if found is None:
            with torch.inference_mode(False):  # which a backward pass may keep
                kept.put(kind, found := torch.zeros(shape, dtype=like.dtype, device=like.device))
        return found

    @staticmethod
    def _nested(leaves: tuple[Tensor, ...]) -> Any:
        return leaves[0] if len(leaves) == 1 else leaves

    # One layer after the other.

    def _layers(
        self,
        x: Tensor,
        starts: tuple[Any, ...],
        reset: Tensor | None,
        lengths: Tensor | None,
        run: Callable[..., Any],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """
        Args:
            x: [T, B, F]
            starts: [K, B, H] each, or K of [B, H]
            reset: [T, B]
            lengths: [B]
            run: as ``_by_layers`` is given it

        Returns:
            the outputs of the last layer [T, B, directions * H], and the last states [K, B, H]
        """
        directions = 2 if self.bidirectional else 1
        dtype, last = self._dtype_of_outputs(x, starts[0][0]), []
        resets = [reset, None if reset is None or directions == 1 else begins_backwards(reset)]
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                at = directions * layer + direction
                seen = x if direction == 0 else reversed_in_time(x, lengths)
                start = tuple([leaf[at] for leaf in starts])
                found, final = run(at, seen, start, resets[direction], lengths)
                states = (found,) if isinstance(found, Tensor) else found
                last.append(tuple([leaf[-1:] for leaf in states]) if final is None else final)
                # Of a state of several tensors each is a view of all of them.
                output = states[0] if len(states) == 1 else states[0].contiguous()
                outputs.append(output if direction == 0 else reversed_in_time(output, lengths))
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            x = x if x.dtype is dtype else x.to(dtype)
            if self.dropout and layer < self.num_layers - 1:
                x = dropout(x, self.dropout, self.training)
        # Copied even if there is one only: who writes to outputs does not mean these, and PyTorch's are no views.
        ends = [torch.cat(leaves) for leaves in zip(*last, strict=True)]
        return x, tuple([leaf if leaf.dtype is dtype else leaf.to(dtype) for leaf in ends])

    def _dtype_of_outputs(self, x: Tensor, start: Tensor) -> torch.dtype:
        """Under autocast that of autocast."""
        return self._dtype_of_autocast(x.device) or x.dtype

    def _solve(self, at: int, x: Tensor, start: tuple[Tensor, ...], reset: Tensor | None, **how: Any) -> Solution:
        """One layer in one direction; ``how``: as ``solve_steps`` is told.

        Steps are taken in float32 at least, also under autocast: Newton's method compares small differences.
        """
        weights = self._weights(at)
        dtype = torch.promote_types(weights["weight_hh"].dtype, torch.float32)
        mixed = self._dtype_of_autocast(x.device)
        with _AS_IT_IS if mixed is None else torch.autocast(x.device.type, mixed):
            xs: Any = self._cell_type.project(x, weights)
        xs = xs if xs.dtype is dtype else xs.to(dtype)
        step = self._step(at, weights, dtype, restarting=reset is not None)
        if reset is not None:
            xs = (xs, reset)
        z0 = self._nested(tuple([leaf if leaf.dtype is dtype else leaf.to(dtype) for leaf in start]))
        with _AS_IT_IS if mixed is None else torch.autocast(x.device.type, enabled=False):
            return self._solve_steps(step, z0, xs, **how)

    def _weights(self, at: int) -> Weights:
        # Of parameters as they are: a module is asked for an attribute in vain before it looks there.
        known: dict[str, Any] = self._parameters
        names = self._all_weights[at]
        return {name.partition("_l")[0]: known[name] if name in known else getattr(self, name) for name in names}

    def _step(self, at: int, weights: Weights, dtype: torch.dtype, *, restarting: bool) -> Any:
        """The cell of a layer in one direction; the same as long as its weights are: what is known of a step is found by it."""
        kept = self._cells
        if kept is None:
            kept = self.__dict__["_cells"] = {}
        given = tuple(weights.values())
        known, as_they_are = kept.get((at, restarting)), all(each.dtype == dtype for each in given)
        # A module that changes its precision keeps its parameters, which hold other data then.
        if known is not None and as_they_are and len(known[0]) == len(given) and all(map(is_, known[0], given)):
            return known[1]
        cell = self._cell({name: each.to(dtype) for name, each in weights.items()})
        if restarting:
            cell = Restarting(cell)
        if as_they_are:  # copies in another precision are of this call
            kept[at, restarting] = given, cell
        return cell

    def _cell(self, weights: Weights) -> Any:
        return self._cell_type(weights)

    # How it went.

    @property
    def solutions(self) -> tuple[Solution, ...]:
        """How the last pass went that was not compiled, one for each layer and direction in the order of the weights; states are not kept."""
        passed: Any = self._passed
        if callable(passed):
            passed = self.__dict__["_passed"] = passed()
        if passed and not isinstance(passed[0], Solution):
            return (looped(*passed),) * len(self._all_weights)
        return passed

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or what is written to a file: how a pass went, and cells, are no part of a module."""
        inherited: Any = getattr(super(), "__getstate__", None)
        state = dict(self.__dict__ if inherited is None else inherited())
        for name in ("_passed", "_cells", "_known", "_zeros"):
            state.pop(name, None)
        return state

    def extra_repr(self) -> str:
        said = super().extra_repr()
        return f"{said}, mode={self.run_mode}" if self.run_mode != "auto" else said
