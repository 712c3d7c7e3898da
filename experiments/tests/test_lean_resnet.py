"""A residual network's pass as printed, in plain PyTorch: the library's by the same method, the loop's, and autograd's gradients."""

import copy

import pytest
import torch
from torch.nn import functional

import deeppcr
from deeppcr_paper import lean
from deeppcr_paper.lean_resnet import Pass
from deeppcr_paper.resnet import Settings, newton

SIZES = [(1, 1), (4, 4), (6, 2), (12, 4), (68, 4), (132, 4)]


def network(depth, skip, activation="tanh"):
    torch.manual_seed(depth)
    how = {"mode": "parallel", "newton": newton(Settings()), "warm_start": True}
    return deeppcr.nn.ResNet(7, 5, depth, 3, skip, activation, **how).double()


def gradients(net, scores):
    functional.cross_entropy(scores, torch.arange(len(scores)) % 3).backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(("depth", "skip"), SIZES)
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_one_row_takes_the_librarys_iterations_to_the_librarys_scores(depth, skip, activation):
    """From z0 repeated, then from the last states: with one row both stop by the same residual."""
    library = network(depth, skip, activation)
    ours = copy.deepcopy(library)
    run = Pass(ours, 1)
    for number in range(3):
        x = torch.randn(1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        expected, found = library(x), run(x)
        assert run.newton.iterations == int(library.solution.iterations.max())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(ours.activations, library.activations, rtol=1e-9, atol=1e-11)
        for one, other in zip(gradients(ours, found), gradients(library, expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("depth", "skip"), SIZES)
@pytest.mark.parametrize("rows", [2, 5])
def test_rows_are_those_of_the_loop_and_gradients_those_of_autograd(depth, skip, rows, monkeypatch):
    monkeypatch.setattr(lean, "TOLERANCE", 1e-13)
    net = network(depth, skip)
    run, x = Pass(net, rows), torch.randn(rows, 7, dtype=torch.float64)
    found = run(x)
    assert run.newton.is_met
    expected = net(x, mode="sequential")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    for one, other in zip(gradients(net, found), gradients(net, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_a_pass_that_does_not_meet_its_test_says_so(monkeypatch):
    monkeypatch.setattr(lean, "MOST", 1)
    run = Pass(network(64, 4), 2)
    run(torch.randn(2, 7, dtype=torch.float64))
    assert (run.newton.iterations, run.newton.is_met) == (1, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_in_graphs_train_the_same_network():
    """From the first step, which no graph has, to steps after weights have changed."""
    net = network(64, 4, "relu").float().cuda()
    both = {graph: copy.deepcopy(net) for graph in (False, True)}
    for graph, each in both.items():
        run, optimiser = Pass(each, 6, graph=graph), torch.optim.SGD(each.parameters(), lr=1e-2)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for number in range(5):
                x = torch.randn(6, 7, generator=torch.Generator().manual_seed(number)).cuda()
                functional.cross_entropy(run(x), torch.arange(6, device="cuda") % 3).backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
        stream.synchronize()
        assert (run.newton is run._recorded) == graph
    for one, other in zip(both[False].parameters(), both[True].parameters(), strict=True):
        torch.testing.assert_close(one, other)
