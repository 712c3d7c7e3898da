"""Whether a recurrent layer is faster in parallel or by PyTorch's own kernel: the one place with numbers.

Shapes: T steps, B rows, H the hidden size.
"""

from __future__ import annotations

from functools import lru_cache

# Seconds on an H200, as a caller waits for them; of pairs the first is forward, the second with the backward pass. Fitted to medians by
# benchmarks/recurrent_fit.py, which prints all of these tables anew.

#: A call in parallel, whatever it computes.
_LAUNCHES = (1.2e-3, 1.9e-3)
#: A step of one row in parallel, by kind and for states of up to so many numbers; wider ones have no kernels, or none that were measured.
#: What was measured with the backward pass alone is taken for no faster forward.
_STEPS: dict[str, dict[int, tuple[float, float]]] = {
    "RNN_TANH": {
        8: (2.6e-9, 2.6e-9),
        16: (3e-9, 3e-9),
        32: (3.9e-9, 7.2e-9),
        64: (14e-9, 39e-9),
        128: (97e-9, 0.34e-6),
    },
    "GRU": {8: (2.8e-9, 4.5e-9), 16: (7.1e-9, 7.1e-9), 32: (9e-9, 26e-9), 64: (41e-9, 0.18e-6)},
    "LSTM": {16: (3.1e-9, 6.8e-9), 32: (4.1e-9, 14e-9), 64: (20e-9, 55e-9), 128: (0.16e-6, 0.49e-6)},
}
#: A call of PyTorch's kernel where it has little to compute: the device does so meanwhile.
_TORCH_LAUNCHES = (0.28e-3, 1.2e-3)
#: A step by PyTorch's kernel, and each row of it.
_TORCH_STEPS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "RNN_TANH": ((0.42e-6, 3.2e-9), (0.91e-6, 7.3e-9)),
    "GRU": ((0.54e-6, 1.5e-9), (1.1e-6, 42e-9)),
    "LSTM": ((0.53e-6, 0.63e-9), (1.1e-6, 11e-9)),
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
