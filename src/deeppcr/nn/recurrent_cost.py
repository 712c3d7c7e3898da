"""Whether a recurrent layer is faster in parallel or by PyTorch's own kernel: the one place with numbers.

Shapes: T steps, B rows, H the hidden size.
"""

from __future__ import annotations

from functools import lru_cache

# Seconds on an H200, as a caller waits for them; of pairs the first is forward, the second with the backward pass. Fitted to medians by
# benchmarks/recurrent_fit.py, which prints all of these tables anew.

#: A call in parallel, whatever it computes.
_LAUNCHES = (0.0012, 0.0019)
#: A step of one row in parallel, by kind and for states of up to so many numbers; wider ones have no kernels, or none that were measured.
#: What was measured with the backward pass alone is taken for no faster forward.
_STEPS: dict[str, dict[int, tuple[float, float]]] = {
    "RNN_TANH": {
        8: (2.6e-09, 2.6e-09),
        16: (3e-09, 3e-09),
        32: (3.9e-09, 7.2e-09),
        64: (1.4e-08, 3.9e-08),
        128: (9.7e-08, 3.4e-07),
    },
    "GRU": {8: (2.8e-09, 4.5e-09), 16: (7.1e-09, 7.1e-09), 32: (9e-09, 2.6e-08), 64: (4.1e-08, 1.8e-07)},
    "LSTM": {16: (3.1e-09, 6.8e-09), 32: (4.1e-09, 1.4e-08), 64: (2e-08, 5.5e-08), 128: (1.6e-07, 4.9e-07)},
}
#: A call of PyTorch's kernel where it has little to compute: the device does so meanwhile.
_TORCH_LAUNCHES = (0.00028, 0.0012)
#: A step by PyTorch's kernel, and each row of it.
_TORCH_STEPS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "RNN_TANH": ((4.2e-07, 3.2e-09), (9.1e-07, 7.3e-09)),
    "GRU": ((5.4e-07, 1.5e-09), (1.1e-06, 4.2e-08)),
    "LSTM": ((5.3e-07, 6.3e-10), (1.1e-06, 1.1e-08)),
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
