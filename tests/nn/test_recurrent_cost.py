"""When a recurrent layer is taken to be faster in parallel."""

import pytest

from deeppcr.nn.recurrent_cost import is_faster_in_parallel

#: What was measured on an H200, medians of calls: kind, steps, rows, hidden size, with a backward pass; ms in parallel, ms by PyTorch.
MEASURED = [
    ("GRU", 32768, 1, 16, True, 3.07, 37.0),
    ("GRU", 32768, 1, 32, True, 3.30, 38.1),
    ("GRU", 32768, 8, 16, True, 4.14, 53.5),
    ("GRU", 32768, 8, 32, True, 8.83, 53.1),
    ("GRU", 16384, 4, 32, True, 3.69, 21.0),
    ("GRU", 16384, 64, 64, True, 153.0, 83.4),
    ("GRU", 8192, 1, 16, True, 2.23, 7.91),
    ("GRU", 8192, 1, 32, True, 2.36, 8.00),
    ("GRU", 256, 1, 32, True, 1.95, 1.04),
    ("LSTM", 32768, 1, 16, True, 2.58, 35.2),
    ("LSTM", 32768, 8, 16, True, 4.81, 40.8),
    ("LSTM", 32768, 1, 32, True, 4.85, 35.3),
    ("LSTM", 32768, 8, 32, True, 15.3, 41.6),
    ("LSTM", 16384, 1, 32, True, 3.10, 16.2),
    ("LSTM", 256, 1, 8, True, 1.97, 1.11),
    ("LSTM", 4096, 64, 16, False, 1.95, 2.48),
    ("LSTM", 1024, 1, 32, False, 0.842, 0.557),
    ("LSTM", 64, 16, 8, False, 1.00, 0.289),
    ("RNN_TANH", 16384, 16, 16, True, 3.00, 17.1),
    ("RNN_TANH", 1024, 16, 32, True, 1.72, 1.13),
    ("RNN_TANH", 64, 1, 32, True, 1.92, 0.982),
    ("RNN_TANH", 64, 16, 16, True, 1.64, 0.950),
    ("RNN_TANH", 64, 64, 128, True, 2.56, 1.02),
    ("RNN_TANH", 16384, 64, 64, False, 12.7, 8.91),
    ("RNN_TANH", 4096, 4, 16, False, 0.714, 1.42),
    ("RNN_TANH", 256, 1, 32, False, 0.797, 0.269),
    ("RNN_TANH", 256, 16, 16, False, 0.655, 0.240),
]


@pytest.mark.parametrize(("kind", "steps", "rows", "hidden", "backward", "parallel", "torch"), MEASURED)
def test_choices_are_those_that_were_measured_to_be_right(kind, steps, rows, hidden, backward, parallel, torch):
    """Never much slower than PyTorch, and in parallel where that pays."""
    chosen, why = is_faster_in_parallel(kind, steps, rows, hidden, backward=backward)
    assert "PyTorch" in why
    if parallel > 1.05 * torch + 0.03:
        assert not chosen
    if torch >= 1.5 * parallel:
        assert chosen


def test_what_has_no_kernels_is_left_to_pytorch():
    for kind, hidden in (("GRU", 129), ("LSTM", 65), ("RNN_RELU", 129), ("GRU", 512)):
        found, why = is_faster_in_parallel(kind, 32768, 1, hidden, backward=True)
        assert not found
        assert "numbers is left to PyTorch's own kernel" in why


def test_more_rows_layers_and_width_never_speak_for_it():
    """It is chosen up to some number of rows, layers and channels, and from some number of steps on."""

    def choices(**sizes):
        usual = {"kind": "GRU", "steps": 8192, "rows": 2, "hidden": 16, "layers": 1, "backward": True}
        name, values = sizes.popitem()
        return [is_faster_in_parallel(**usual | {name: value})[0] for value in values]

    powers = [2**k for k in range(20)]
    for name in ("rows", "layers", "hidden"):
        found = choices(**{name: powers})
        assert found == sorted(found, reverse=True)
        assert found[0]
        assert not found[-1]
    found = choices(steps=powers)
    assert found == sorted(found)
    assert found[-1]
    assert not found[0]
