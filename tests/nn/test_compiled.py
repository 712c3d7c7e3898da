"""What modules do under ``torch.compile`` and ``torch.export`` where no kernels are at work: one graph for any number of rows or steps."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from compiling import compiled_and_counted, value_and_gradients
from deeppcr import nn as ours
from kernel_support import thorough

NETWORKS = {"mlp": lambda: ours.MLP(5, 4, 6, 3), "resnet": lambda: ours.ResNet(5, 4, 6, 3, skip=3)}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("mlp", "sequential"), ("resnet", "auto"), *thorough(("mlp", "auto"), ("resnet", "sequential"))],
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


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_are_exported_for_any_number_of_rows(kind):
    net = NETWORKS[kind]()
    run = export(net, (torch.randn(7, 5),), dynamic_shapes=({0: Dim("rows", min=2)},)).module()
    for rows in (2, 65):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), net(x))


def test_a_parallel_network_ends_the_graph():
    """It decides by values, as ``deeppcr.solve`` does."""
    net = ours.MLP(5, 4, 6, 3, mode="parallel")
    compiled, _ = compiled_and_counted(net, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"disable|skipped"):
        compiled(torch.randn(2, 5))


@pytest.mark.parametrize(("kind", "mode"), [("RNN", "auto"), ("GRU", "sequential"), ("LSTM", "auto")])
def test_recurrent_modules_compile_as_those_of_pytorch_do(kind, mode):
    """Which has them traced only if told to, and then step by step: every length has a graph of its own."""
    theirs = getattr(nn, kind)(3, 4)
    module = getattr(ours, kind)(3, 4, mode=mode)
    module.load_state_dict(theirs.state_dict())
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled, graphs = compiled_and_counted(module, backend="eager")
        for x in (torch.randn(5, 2, 3), torch.randn(3, 2, 3)):
            torch.testing.assert_close(compiled(x), theirs(x))
    assert len(graphs) == 2
