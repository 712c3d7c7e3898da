"""Whether a recurrent layer is faster in parallel or by PyTorch's own kernel: the one place with numbers.

Shapes: T steps, B rows, H the hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

#: Seconds of PyTorch's kernel for a step, forward, and with the backward pass. Measured on an H200 for a GRU with hidden sizes of 16 and
#: 32 and one row, where a step takes least: 7 and 15 ms for 16,384 steps. More rows and wider states take longer, and are taken for as fast.
_STEP = (0.43e-6, 0.92e-6)
#: Parallel passes are taken only where they are expected to be faster by this factor: between the points that were measured, and for what
#: was measured for a GRU alone, nobody knows better.
_MARGIN = 1.5


class _Pass(NamedTuple):
    """Seconds of a parallel pass: of its launches, whatever it computes, and of one step of one row."""

    launches: float
    step: float


#: Of kernels for states of up to so many numbers, forward and with the backward pass. Measured on an H200: GRUs of 16,384 steps with
#: hidden sizes of 16, 32 and 64 (0.44 and 1.1 ms, 0.56 and 1.3, 1.2 and 3.6), and of 32,768 steps with 8 rows and 32 (2.9 and 7.3 ms); an
#: LSTM of 16,384 steps and 16, whose state has 32 numbers (0.76 and 1.65).
_PASSES: dict[int, tuple[_Pass, _Pass]] = {
    32: (_Pass(0.4e-3, 22e-9), _Pass(0.9e-3, 46e-9)),
    64: (_Pass(0.4e-3, 49e-9), _Pass(0.9e-3, 165e-9)),
}
#: The same of a GRU, whose state of 32 numbers takes less than an LSTM's.
_GRU = (_Pass(0.4e-3, 9.8e-9), _Pass(0.9e-3, 24.5e-9))


@lru_cache(maxsize=4096)
def is_faster_in_parallel(
    kind: str, steps: int, rows: int, hidden: int, *, layers: int = 1, backward: bool
) -> tuple[bool, str]:
    """Whether, and why, on a GPU where the cell has kernels.

    Args:
        kind: "RNN_TANH", "RNN_RELU", "GRU" or "LSTM"
        layers: times directions. PyTorch's kernel may run them side by side, and is taken to lose no time by them
        backward: a backward pass is to come

    >>> (
    ...     is_faster_in_parallel("GRU", 16384, 1, 32, backward=True)[0],
    ...     is_faster_in_parallel("GRU", 128, 1, 32, backward=True)[0],
    ... )
    (True, False)
    """
    width = 2 * hidden if kind == "LSTM" else hidden
    fitting = next((size for size in _PASSES if width <= size), None)
    if fitting is None:
        return False, f"a state of more than {max(_PASSES)} numbers is left to PyTorch's own kernel"
    passes = _PASSES[fitting] if kind == "LSTM" or fitting > 32 else _GRU
    launches, step = passes[backward]
    ours, theirs = layers * (launches + step * steps * rows), _STEP[backward] * steps
    why = f"expected: {1e3 * ours:.2g} ms in parallel, {1e3 * theirs:.2g} ms by PyTorch's own kernel"
    return _MARGIN * ours < theirs, why
