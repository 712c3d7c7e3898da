"""Whether a recurrent layer is faster in parallel or by PyTorch's own kernel: the one place with numbers.

Shapes: T steps, B rows, H the hidden size.
"""

from __future__ import annotations

from functools import lru_cache

# Seconds on an H200, as a caller waits for them; of pairs the first is forward, the second with the backward pass. Fitted to medians by
# benchmarks/recurrent_fit.py, which prints all of these tables anew.

#: A call in parallel, whatever it computes.
_LAUNCHES = (0.8e-3, 2.1e-3)
#: A step of one row in parallel, by kind and for states of up to so many numbers; wider ones have no kernels, or none that were measured.
#: What was measured with the backward pass alone is taken for no faster forward, and an RNN of 32 and 64 for no faster than a GRU
#: (whose two numbers forward are of an earlier measurement).
_STEPS: dict[str, dict[int, tuple[float, float]]] = {
    "RNN_TANH": {16: (3e-9, 3e-9), 32: (9.8e-9, 26e-9), 64: (11e-9, 140e-9)},
    "GRU": {16: (8.2e-9, 8.2e-9), 32: (9.8e-9, 26e-9), 64: (49e-9, 140e-9)},
    "LSTM": {32: (4.1e-9, 11e-9), 64: (58e-9, 58e-9)},
}
#: A call of PyTorch's kernel where it has little to compute: the device does so meanwhile.
_TORCH_LAUNCHES = (0.27e-3, 1e-3)
#: A step by PyTorch's kernel, and each row of it. (Of a GRU also by earlier measurements: forward, and of 64 rows with the backward pass.)
_TORCH_STEPS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "RNN_TANH": ((0.33e-6, 0.0033e-6), (0.52e-6, 0.033e-6)),
    "GRU": ((0.43e-6, 0.0025e-6), (1e-6, 0.047e-6)),
    "LSTM": ((0.3e-6, 0.0047e-6), (1e-6, 0.031e-6)),
}
#: So many rows were measured: more are taken to cost PyTorch no more.
_MOST_ROWS = 64
#: Parallel passes are taken only where they are expected to be faster by this factor: what is expected is off by as much.
_MARGIN = 1.2


def numbers_of(kind: str, hidden: int) -> int:
    """Of a state: kernels are as wide."""
    return 2 * hidden if kind == "LSTM" else hidden


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
    measured = "RNN_TANH" if kind == "RNN_RELU" else kind
    steps_of, numbers = _STEPS[measured], numbers_of(kind, hidden)
    fitting = next((width for width in steps_of if numbers <= width), None)
    if fitting is None:
        return False, f"a state of more than {max(steps_of)} numbers is left to PyTorch's own kernel"
    ours = layers * (_LAUNCHES[backward] + steps_of[fitting][backward] * steps * rows)
    step, row = _TORCH_STEPS[measured][backward]
    theirs = max(_TORCH_LAUNCHES[backward], (step + row * min(rows, _MOST_ROWS)) * steps)
    why = f"expected: {1e3 * ours:.2g} ms in parallel, {1e3 * theirs:.2g} ms by PyTorch's own kernel"
    return _MARGIN * ours < theirs, why
