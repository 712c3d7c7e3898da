"""``RNN``, ``GRU`` and ``LSTM`` of ``torch.nn``, in parallel over their steps.

Shapes: T steps, B rows, F features of the input, H the hidden size (P where outputs are projected), K layers times directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence

from ..bounded import Bounded
from ..newton import Newton
from ..runtime import has_kernels, has_tangent, in_functorch, is_capturing
from ..solution import Result
from ..stopping import UpdateTest
from ..ways.fused import covers
from .arguments import ASKED, EMPTY, MODES, Mode, complaint_of
from .cells import Cell, ElmanCell, GRUCell, LSTMCell, Weights
from .operator import operated
from .ragged import Episodes, is_sorted
from .recurrent import Recurrent
from .recurrent_cost import is_faster_in_parallel
from .steps import NoKernels

#: Kinds of calls that are remembered of a module.
_MOST_KINDS = 64
#: After a solve that the loop had to finish, so many calls of its kind are left to PyTorch: parameters change, so it is tried again.
_PATIENCE = 64
_SETTINGS = "there are no kernels for these settings of Newton's method"
_CAPTURED = (
    "what can be captured is newton=Newton(stop=FixedIterations(n)), once kernels were made outside of a capture"
)
#: cuDNN refuses as many steps (CUDNN_STATUS_NOT_SUPPORTED), whatever else is asked for.
_TOO_LONG = 65_536
_FIRST = "the first of its kind: kernels are made for what comes again"
_DONE = (Result.CONVERGED, Result.PRECISION_FLOOR, Result.ITERATIONS_DONE)


class _Known(NamedTuple):
    """What is known of a kind of call.

    Attributes:
        why: PyTorch's kernel is taken; empty where ours are
        calls: for how many more
        made: there are kernels
    """

    why: str = ""
    calls: float = 0
    made: bool = False


def _has_no_values(input: Any) -> bool:
    """Whether it stands for a tensor: for its shape, its dtype and its device alone."""
    data = input.data if isinstance(input, PackedSequence) else input
    return isinstance(data, FakeTensor) or (isinstance(data, Tensor) and data.is_meta)


class TorchLike(Recurrent):
    """What the three share: PyTorch's own kernel is the sequential mode, and says what is wrong with an argument."""

    mode: str
    check_input: Callable[[Tensor, Tensor | None], None]
    check_forward_args: Callable[[Tensor, Any, Tensor | None], None]
    #: By kind of call, what is known of it.
    _known: Bounded | None = None

    def _dtype_of_autocast(self, device: torch.device) -> torch.dtype | None:
        """What PyTorch's own kernels compute in: on a GPU float16, whichever was asked for."""
        asked = super()._dtype_of_autocast(device)
        return torch.float16 if asked is not None and device.type == "cuda" else asked

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mode":
            if value in MODES:
                raise ValueError(
                    f"mode: of a module of torch.nn that is the kind of its cell; how this one runs is run_mode = {value!r}"
                )
            self.__dict__.pop("_cells", None)  # which are of the kind that it was
        super().__setattr__(name, value)

    def _run(self, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Any:
        why, kind = ASKED if mode == "sequential" else "", None
        if mode == "auto":
            why, kind = self._why_by_torch(input, reset)
        elif mode == "parallel" and _has_no_values(input):
            why = "there are no values to look at"
        if why and reset is None and isinstance(input, Tensor):  # which PyTorch looks at itself
            return self._by_torch(input, hx, None, why)
        if not self._is_proper(input, hx):
            return self._improper(input, hx, reset)
        if not why and not _is_finite(hx):
            why = "hx holds values that are not finite"
        if not why:
            try:
                newton = self.newton if is_capturing(self._size_of(input)[2]) else self._newton_in(mode)
                found = self._by_solve(input, hx, reset, newton, kernels=mode == "auto")
            except NoKernels as reason:
                why = f"there are no kernels: {reason}"
                if kind is not None and not reason.passing:
                    self._remember(kind, _Known(why, math.inf))
            else:
                if kind is not None:
                    self._learn(kind)
                return found
        return self._by_torch(input, hx, reset, why)

    def _newton_in(self, mode: Mode) -> Newton:
        """In auto mode a fixed number of passes is for a capture: calls outside of one, which make the kernels for it, look when they are done."""
        newton = self.newton
        return newton if mode != "auto" or newton.stop.fixed is None else replace(newton, stop=UpdateTest())

    # PyTorch's own kernel.

    def _is_proper(self, input: Any, hx: Any) -> bool:
        """Whether arguments are such as PyTorch takes, and there is something to compute."""
        if complaint_of(self, input, hx) is not None:
            return False
        if isinstance(input, PackedSequence):
            return is_sorted(input) and bool(input.data.numel())
        return bool(input.numel())

    def _improper(self, input: Any, hx: Any, reset: Tensor | None) -> Any:
        """PyTorch says what is wrong, or that nothing is: an empty batch."""
        if isinstance(input, PackedSequence):
            # Of a packed LSTM's, PyTorch itself looks at nothing, and computes something.
            if hx is None:
                self.check_input(input.data, input.batch_sizes)
            else:
                self.check_forward_args(input.data, hx, input.batch_sizes)
        found = super(Recurrent, self).forward(input, hx)
        data = input.data if isinstance(input, PackedSequence) else input
        if reset is not None and data.numel():
            raise TypeError("hx: with reset, expected the dtype and the device of the input")
        self._looped(input, EMPTY if not data.numel() else ASKED)
        return found

    def _by_torch(self, input: Any, hx: Any, reset: Tensor | None, why: str) -> Any:
        found = super(Recurrent, self).forward(input, hx) if reset is None else self._by_episodes(input, hx, reset)
        self._looped(input, why)
        return found

    def _looped(self, input: Any, why: str) -> None:
        self.__dict__["_passed"] = (*self._size_of(input), why)

    def _size_of(self, input: Any) -> tuple[int, int, torch.device]:
        """Steps, rows, and where."""
        if isinstance(input, PackedSequence):
            return len(input.batch_sizes), int(input.batch_sizes[0]), input.data.device
        if input.ndim == 2:
            return input.shape[0], 1, input.device
        steps, rows = input.shape[:2][:: -1 if self.batch_first else 1]
        return steps, rows, input.device

    def _by_episodes(self, input: Tensor, hx: Any, reset: Tensor) -> Any:
        """PyTorch's kernel knows no resets, but sequences of different lengths: all pieces of all rows."""
        steps, rows, _ = self._size_of(input)
        directions = 2 if self.bidirectional else 1
        batched = input.ndim == 3
        by_step = reset.view(steps, 1) if not batched else reset.T if self.batch_first else reset
        row_by_row = input if self.batch_first or not batched else input.transpose(0, 1)
        episodes = Episodes.of(by_step)
        start = None
        if hx is not None:
            leaves = [hx] if isinstance(hx, Tensor) else hx
            leaves = leaves if batched else [leaf.unsqueeze(1) for leaf in leaves]
            start = self._nested(tuple(episodes.starts(leaf, directions) for leaf in leaves))
        packed = episodes.documents.packed(row_by_row.reshape(steps * rows, -1))
        outputs, ends = super(Recurrent, self).forward(packed, start)
        output = episodes.documents.in_sequence(outputs)
        ends = tuple(episodes.ends(leaf, directions) for leaf in ([ends] if isinstance(ends, Tensor) else ends))
        if not batched:
            return output, self._nested(tuple(leaf.squeeze(1) for leaf in ends))
        output = output.unflatten(0, (rows, steps))
        return output if self.batch_first else output.transpose(0, 1).contiguous(), self._nested(ends)

    # Which way, where it is to be chosen.

    def _why_by_torch(self, input: Any, reset: Tensor | None) -> tuple[str, tuple | None]:
        """Why not in parallel, empty where it is; and the kind of call, as far as it came to that. Most calls are asked, and few are in
        parallel: what decides for most comes first."""
        x = input.data if isinstance(input, PackedSequence) else input
        if not isinstance(x, Tensor) or x.ndim not in (2, 3):
            return "no such input is known", None
        if not has_kernels(x.device):
            return "without a GPU and Triton PyTorch's own kernel wins", None
        (steps, rows, device), backward = self._size_of(input), self._goes_back(x)
        only = _is_too_long(steps, x)  # for PyTorch's own kernel: ours are not the faster ones, they are all there is
        if not only:
            sizes, layers = (steps, rows, self.hidden_size), len(self._all_weights)
            faster, why = is_faster_in_parallel(self.mode, *sizes, layers=layers, backward=backward)
            if not faster:
                return why, None
        if in_functorch() or has_tangent(x) or torch._C._get_tracing_state() is not None:
            return "a transform, a tangent or a trace is at work", None
        if not _has_kernels_for(self.newton, capturing := is_capturing(device)):
            return _SETTINGS if not capturing else _CAPTURED, None
        weight = getattr(self, self._all_weights[0][1])
        # What decides about kernels: all but the length and what tensors hold.
        kind = rows, device, x is not input, reset is not None, weight.dtype, backward
        known = None if self._known is None else self._known.get(kind)
        if known is None:
            self._remember(kind, known := _Known())
            if not only:
                return _FIRST, kind
        if capturing and not known.made:
            return _CAPTURED, kind
        if only:
            return known.why if known.calls == math.inf else "", kind  # for good: there are no kernels
        if known.calls > 0:
            left = known.calls - 1
            self._remember(kind, known._replace(why=known.why if left else "", calls=left))
        return known.why, kind

    def _goes_back(self, x: Tensor) -> bool:
        """Whether a backward pass may come."""
        return torch.is_grad_enabled() and (x.requires_grad or getattr(self, self._all_weights[0][1]).requires_grad)

    def _remember(self, kind: tuple, known: _Known) -> None:
        if self._known is None:
            self.__dict__["_known"] = Bounded(_MOST_KINDS)
        assert self._known is not None
        self._known.put(kind, known)

    def _learn(self, kind: tuple) -> None:
        """After a solve: where the loop had to finish it, PyTorch's is the faster one."""
        ended = [each for each in self.solutions if each.result not in _DONE]
        why = f"an earlier solve of its kind ended so: {ended[0].description}" if ended else ""
        self._remember(kind, _Known(why, _PATIENCE if ended else 0, made=True))


def _has_kernels_for(newton: Newton, capturing: bool) -> bool:
    """Whether kernels do what these settings ask for: while a graph is captured, only a fixed number of passes."""
    if newton.stop.fixed is not None:
        return covers(replace(newton, stop=UpdateTest()))
    return not capturing and covers(newton)


def _is_too_long(steps: int, x: Tensor) -> bool:
    return steps >= _TOO_LONG and x.is_cuda and torch.backends.cudnn.is_acceptable(x)


def _is_finite(hx: Any) -> bool:
    """Newton's method needs a start; while a graph is captured, nobody can look."""
    leaves = () if hx is None else (hx,) if isinstance(hx, Tensor) else hx
    return all(is_capturing(leaf.device) or in_functorch() or bool(leaf.isfinite().all()) for leaf in leaves)


@operated
class RNN(TorchLike, nn.RNN):
    """``torch.nn.RNN``, in parallel over its steps: ``h_t = f(W x_t + b + U h_{t-1} + c)``, f being tanh or ReLU.

    Args:
        args, options: those of ``torch.nn.RNN``
        mode, newton: as for ``GRU``

    >>> import torch, deeppcr.nn
    >>> rnn = deeppcr.nn.RNN(3, 8, nonlinearity="relu", mode="parallel")
    >>> outputs, last = rnn(torch.randn(50, 2, 3))
    >>> outputs.shape, last.shape
    (torch.Size([50, 2, 8]), torch.Size([1, 2, 8]))
    """

    nonlinearity: str

    _cell_type: type[Cell] = ElmanCell

    def _cell(self, weights: Weights) -> ElmanCell:
        # By the attribute that PyTorch's own kernel goes by.
        return ElmanCell(weights, torch.tanh if self.mode == "RNN_TANH" else torch.relu)

    def _options_in_words(self) -> str:
        return f"nonlinearity='{'tanh' if self.mode == 'RNN_TANH' else 'relu'}', "


@operated
class GRU(TorchLike, nn.GRU):
    """``torch.nn.GRU``, in parallel over its steps: the same arguments, shapes, outputs, parameters and ``state_dict``.

    Under autocast, and with parameters in half precision, steps are taken in float32, and outputs have the dtype that PyTorch's have.
    The attribute ``mode`` is PyTorch's own name for the kind of the cell; ours is ``run_mode``. ``solutions`` tells how the last pass
    went. Second derivatives, ``torch.jit.trace``: ``mode="sequential"``; TorchScript: ``deeppcr.nn.revert``.

    Args:
        args, options: those of ``torch.nn.GRU``
        mode: "parallel"; "sequential", by PyTorch's own kernel; or "auto": by PyTorch's on a CPU, and on a GPU whichever is expected to
            take less time, as far as the cell has kernels; so are sequences that cuDNN refuses, of 65,536 steps and more, at any cost
        newton: settings of the parallel mode

    >>> import torch, deeppcr.nn
    >>> gru = deeppcr.nn.GRU(3, 8, num_layers=2, bidirectional=True, mode="parallel")
    >>> x = torch.randn(100, 4, 3)
    >>> outputs, last = gru(x)
    >>> outputs.shape, last.shape, torch.allclose(outputs, gru(x, mode="sequential")[0], atol=1e-5)
    (torch.Size([100, 4, 16]), torch.Size([4, 4, 8]), True)

    Rows that begin anew here and there, and sequences one after the other:

    >>> reset = torch.rand(100, 4) < 0.05
    >>> outputs, last = gru(x, reset=reset)
    >>> outputs, last = gru(torch.randn(30, 3), cu_seqlens=torch.tensor([0, 7, 30]))
    >>> outputs.shape, last.shape
    (torch.Size([30, 16]), torch.Size([4, 2, 8]))
    """

    _cell_type: type[Cell] = GRUCell

    def _dtype_of_outputs(self, x: Tensor, start: Tensor) -> torch.dtype:
        # On a CPU, PyTorch's GRU adds gates in half precision to a state that stays as it was.
        return start.dtype if x.device.type == "cpu" else super()._dtype_of_outputs(x, start)


@operated
class LSTM(TorchLike, nn.LSTM):
    """``torch.nn.LSTM``, in parallel over its steps, with projections (``proj_size``) as well.

    Args:
        args, options: those of ``torch.nn.LSTM``
        mode, newton: as for ``GRU``

    >>> import torch, deeppcr.nn
    >>> lstm = deeppcr.nn.LSTM(3, 8, mode="parallel")
    >>> outputs, (h, c) = lstm(torch.randn(50, 2, 3))
    >>> outputs.shape, h.shape, c.shape
    (torch.Size([50, 2, 8]), torch.Size([1, 2, 8]), torch.Size([1, 2, 8]))
    """

    proj_size: int

    _cell_type: type[Cell] = LSTMCell

    def _widths(self) -> tuple[int, ...]:
        return self.proj_size or self.hidden_size, self.hidden_size

    def _options_in_words(self) -> str:
        return f"proj_size={self.proj_size}, "
