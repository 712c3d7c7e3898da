"""Elementwise recurrent layers: their formulas, gradients, and the ways to run them."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from deeppcr import Result
from deeppcr.nn import DiagonalGRU, DiagonalLSTM
from recurrent_problems import error, leaves_of


def gru_loop(module, x, h):
    """The formulas of the docstring, one step after the other: [T, B, F] to outputs and the last state."""
    outputs, (to_reset, to_update, to_new) = [], module.weight_hh_l0
    for gates in nn.functional.linear(x, module.weight_ih_l0, getattr(module, "bias_ih_l0", None)):
        r, u, n = gates.chunk(3, -1)
        reset, update = torch.sigmoid(r + to_reset * h), torch.sigmoid(u + to_update * h)
        new = torch.tanh(n + to_new * (reset * h))
        h = (1 - update) * h + update * new
        outputs.append(h)
    return torch.stack(outputs), h


def lstm_loop(module, x, state):
    outputs, (h, c), (to_forget, to_new, to_read), (see_forget, see_read) = (
        [],
        state,
        module.weight_hh_l0,
        module.weight_ch_l0,
    )
    for gates in nn.functional.linear(x, module.weight_ih_l0, getattr(module, "bias_ih_l0", None)):
        f, n, r = gates.chunk(3, -1)
        forget = torch.sigmoid(f + to_forget * h + see_forget * c)
        c = forget * c + (1 - forget) * torch.tanh(n + to_new * h)
        h = torch.sigmoid(r + to_read * h + see_read * c) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), h, c


@pytest.mark.parametrize("mode", ["parallel", "sequential", "auto"])
@pytest.mark.parametrize(("kind", "steps", "bias"), [(DiagonalGRU, 65, True), (DiagonalLSTM, 63, False)])
def test_formulas_and_gradients(kind, steps, bias, mode, device):
    module = kind(3, 5, bias=bias, mode=mode, dtype=torch.float64, device=device)
    x = torch.randn(steps, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    hx = [torch.randn(2, 5, dtype=torch.float64, device=device, requires_grad=True) for _ in module._widths()]
    if kind is DiagonalGRU:
        right = leaves_of(gru_loop(module, x, hx[0]))
    else:
        right = leaves_of(lstm_loop(module, x, hx))
    start = tuple(leaf.unsqueeze(0) for leaf in hx)
    output, last = module(x, start if len(start) == 2 else start[0])
    found = [output, *(leaf[0] for leaf in leaves_of(last))]
    assert all(error(one, other) < 1e-10 for one, other in zip(found, right, strict=True))
    seeds = [torch.randn_like(leaf) for leaf in right]
    gradients = [torch.autograd.grad(each, [x, *hx, *module.parameters()], seeds) for each in (found, right)]
    assert all(error(one, other) < 1e-10 for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", [DiagonalGRU, DiagonalLSTM])
def test_layers_directions_and_ragged_rows(kind, device):
    """As in the loop; and a row that is alone gives what it gives among others."""
    module = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64, device=device)
    x = torch.randn(3, 20, 3, dtype=torch.float64, device=device)
    outputs, last = module(x, mode="parallel")
    assert outputs.shape == (3, 20, 8)
    assert all(result is Result.CONVERGED for result in (each.result for each in module.solutions))
    assert error(outputs, module(x, mode="sequential")[0]) < 1e-10
    packed = pack_padded_sequence(x, torch.tensor([7, 20, 1]), batch_first=True, enforce_sorted=False)
    _, of_packed = module(packed, mode="parallel")
    for row, length in enumerate((7, 20, 1)):
        alone, own = module(x[row, :length], mode="sequential")
        assert alone.shape == (length, 8)
        assert all(
            error(leaf[:, row], each) < 1e-10 for leaf, each in zip(leaves_of(of_packed), leaves_of(own), strict=True)
        )
    assert leaves_of(last)[0].shape == (4, 3, 4)
    reset = torch.rand(3, 20, device=device) < 0.2
    assert error(module(x, reset=reset, mode="parallel")[0], module(x, reset=reset, mode="sequential")[0]) < 1e-10


def test_parameters_lie_and_begin_as_documented():
    module = DiagonalLSTM(16, 64, num_layers=2)
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    assert shapes["weight_ih_l0"] == (192, 16)
    assert shapes["weight_ih_l1"] == (192, 64)
    assert shapes["weight_hh_l1"] == (3, 64)
    assert shapes["weight_ch_l1"] == (2, 64)
    assert module.weight_ih_l0.abs().max() <= 0.25
    assert 0.1 < module.weight_hh_l0.std() < 0.15
    assert not module.bias_ih_l0.any()
    twin = DiagonalLSTM(16, 64, num_layers=2)
    twin.load_state_dict(module.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(5, 2, 4),), r"input: expected \[T, B, 3\] or \[T, 3\], T not 0, got \[5, 2, 4\]"),
        ((torch.randn(0, 2, 3),), "input: expected"),
        (([1.0],), "input: expected a tensor or a PackedSequence, got list"),
        (
            (torch.randn(5, 2, 3).double(),),
            "input: expected torch.float32, the dtype of the weights, got torch.float64",
        ),
        ((torch.randn(5, 2, 3), torch.zeros(1, 3, 4)), r"hx: expected \[1, 2, 4\], got \[1, 3, 4\]"),
        ((torch.randn(5, 2, 3), torch.zeros(1, 2, 4).double()), "hx: expected torch.float32"),
        ((torch.randn(5, 2, 3), (torch.zeros(1, 2, 4),) * 2), "hx: expected a tensor, got tuple"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DiagonalGRU(3, 4)(*arguments)


@pytest.mark.parametrize("sizes", [[2, 1, 2], [1, 2, 2], [2, 2], [5, 0]])
def test_a_packed_sequence_that_nobody_packed(sizes):
    with pytest.raises(ValueError, match="expected batch_sizes that never grow"):
        DiagonalGRU(3, 4)(PackedSequence(torch.randn(5, 3), torch.tensor(sizes)))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="dropout: expected a probability"):
        DiagonalGRU(3, 4, dropout=2)
    with pytest.raises(ValueError, match="hidden_size: at least 1"):
        DiagonalGRU(3, 0)
    with pytest.raises(ValueError, match="mode: expected one of"):
        DiagonalGRU(3, 4, mode="fast")
    with pytest.warns(UserWarning, match="dropout: it comes between layers"):
        DiagonalGRU(3, 4, dropout=0.5)
