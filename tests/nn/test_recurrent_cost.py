"""When a recurrent layer is taken to be faster in parallel."""

import pytest

from deeppcr.nn.recurrent_cost import is_faster_in_parallel


@pytest.mark.parametrize(
    ("kind", "steps", "rows", "hidden", "faster"),
    [
        ("GRU", 16384, 1, 16, True),  # measured: 1.1 ms against 15
        ("GRU", 16384, 1, 64, True),  # 3.6 against 15
        ("GRU", 32768, 8, 32, True),  # 7.3 against 52
        ("LSTM", 16384, 1, 16, True),  # 1.65 against more than 15
        ("GRU", 1024, 1, 16, False),  # launches take as long
        ("GRU", 16384, 64, 32, False),
        ("GRU", 65536, 1, 65, False),
        ("LSTM", 65536, 1, 33, False),
        ("GRU", 65536, 1, 512, False),
    ],
)
def test_choices_with_a_backward_pass(kind, steps, rows, hidden, faster):
    found, why = is_faster_in_parallel(kind, steps, rows, hidden, backward=True)
    assert found is faster
    assert "PyTorch" in why


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
