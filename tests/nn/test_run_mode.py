"""Which way a module of PyTorch's kind runs, and what kind of cell it is: two things, of which PyTorch calls the second ``mode``."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import deeppcr.nn as ours

KINDS = ["RNN", "GRU", "LSTM"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["auto", "parallel", "sequential"])
def test_a_way_is_no_kind_of_cell(kind, way):
    module = getattr(ours, kind)(3, 4)
    before = module.mode
    with pytest.raises(ValueError, match=f"run_mode = '{way}'"):
        module.mode = way
    assert module.mode == before
    module.run_mode = way
    assert module.run_mode == way


@pytest.mark.usefixtures("whole_float32")
@pytest.mark.parametrize("reset", [False, True])
def test_a_cell_of_another_kind_is_made_anew(reset, device):
    module, x = ours.RNN(3, 4, mode="parallel", device=device), torch.randn(30, 2, 3, device=device)
    given = {"reset": torch.rand(30, 2, device=device) < 0.2} if reset else {}
    tanh = module(x, **given)[0]
    module.mode = "RNN_RELU"
    relu = module(x, **given)[0]
    assert (relu - tanh).abs().max() > 0.1
    assert torch.allclose(relu, module(x, mode="sequential", **given)[0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_values(kind):
    """By PyTorch's own kernel, which looks at none."""
    module = getattr(ours, kind)(3, 4, mode="parallel", device="meta")
    x = torch.empty(5, 2, 3, device="meta")
    assert module(x)[0].shape == (5, 2, 4)
    assert module(nn.utils.rnn.pack_sequence([x[:, 0]]))[0].data.shape == (5, 4)
    with FakeTensorMode():
        module = getattr(ours, kind)(3, 4, mode="parallel")
        assert module(torch.empty(5, 2, 3))[0].shape == (5, 2, 4)
