"""What modules do under ``torch.compile`` and ``torch.export``: one graph for any number of rows and steps, whichever way they run."""

import pytest
import torch

import deeppcr
from compiling import compiled_and_counted, value_and_gradients
from deeppcr import nn as ours
from kernel_support import thorough

NETWORKS = {"mlp": lambda: ours.MLP(5, 4, 6, 3), "resnet": lambda: ours.ResNet(5, 4, 6, 3, skip=3)}
KINDS = ["RNN", "GRU", "LSTM", "DiagonalGRU", "DiagonalLSTM"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mlp", "sequential"),
        ("resnet", "auto"),
        ("mlp", "parallel"),
        ("resnet", "parallel"),
        *thorough(("mlp", "auto"), ("resnet", "sequential")),
    ],
)
def test_networks_in_one_graph_for_any_number_of_rows(kind, mode):
    net = NETWORKS[kind]().double()
    net.mode = mode
    compiled, graphs = compiled_and_counted(net)
    for rows in (65, 2, 3, 64):
        x = torch.randn(rows, 5, dtype=torch.float64)
        found = value_and_gradients(compiled, x, changing=1)
        torch.testing.assert_close(found, value_and_gradients(net, x))
    assert len(graphs) == 1


@pytest.fixture
def allow_rnn():
    """PyTorch refuses to look at what is derived from its recurrent modules, unless it is told to."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def value_and_all_gradients(module, x, *others, **options):
    """The gradients of weights, too."""
    torch._dynamo.mark_dynamic(x, (0, 1))
    outputs, ends = module(x, *others, **options)
    ends = (ends,) if isinstance(ends, torch.Tensor) else ends
    loss = outputs.sin().sum() + sum(i * leaf.cos().sum() for i, leaf in enumerate(ends, 1))
    leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
    return outputs, *ends, *torch.autograd.grad(loss, leaves)


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, "parallel") for kind in KINDS] + [("GRU", "sequential"), ("LSTM", "auto"), ("DiagonalLSTM", "sequential")],
)
def test_recurrent_modules_in_one_graph_for_any_number_of_rows_and_steps(kind, mode):
    module = getattr(ours, kind)(3, 4, dtype=torch.float64, mode=mode)
    compiled, graphs = compiled_and_counted(module)
    for steps, rows in ((9, 4), (5, 2), (30, 3)):
        x = torch.randn(steps, rows, 3, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(value_and_all_gradients(compiled, x), value_and_all_gradients(module, x))
    assert len(graphs) == 1


OPTIONS = {
    "deep": ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}, {}),
    "projected": ("LSTM", {"proj_size": 2, "bias": False, "num_layers": 2}, {}),
    "relu": ("RNN", {"nonlinearity": "relu", "bidirectional": True}, {}),
    "diagonal": ("DiagonalLSTM", {"num_layers": 2, "bias": False, "bidirectional": True}, {}),
    "settings": ("GRU", {"newton": deeppcr.Newton(rtol=1e-12, chunk=4, linear=deeppcr.PCR())}, {}),
}


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize("mode", ["parallel", *thorough("sequential", "auto")])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_recurrent_modules(name, started, mode):
    """With initial states and resets, and without."""
    kind, options, call = OPTIONS[name]
    module = getattr(ours, kind)(3, 4, dtype=torch.float64, mode=mode, **options)
    compiled, graphs = compiled_and_counted(module)
    x = torch.randn(7, 3, 3, dtype=torch.float64, requires_grad=True)
    hx = None
    if started:
        count, rows = len(module._all_weights), x.shape[0 if module.batch_first else 1]
        hx = tuple(torch.randn(count, rows, width, dtype=torch.float64) for width in module._widths())
        for leaf in hx:
            torch._dynamo.mark_dynamic(leaf, 1)
        hx = hx[0] if len(hx) == 1 else hx
        call = {"reset": torch.rand(7, 3) < 0.3}
        torch._dynamo.mark_dynamic(call["reset"], (0, 1))
    torch.testing.assert_close(
        value_and_all_gradients(compiled, x, hx, **call), value_and_all_gradients(module, x, hx, **call)
    )
    assert len(graphs) == 1
