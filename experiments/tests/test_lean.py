"""The paper's algorithm in plain PyTorch gives what the library gives by the same method, and what the loop gives."""

import pytest
import torch

import deeppcr
from deeppcr_paper import lean, mlp_printed
from deeppcr_paper.experiment import Context
from deeppcr_paper.mlp import Network
from deeppcr_paper.mlp_timing import solver

LENGTHS = (1, 2, 3, 7, 8, 9, 64, 65)


def double(length, width, activation="relu"):
    return Network.make(length, width, "cpu", 3, activation).double()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [1, 3])
def test_the_reduction_is_that_of_the_library_and_of_the_loop(length, width):
    generator = torch.Generator().manual_seed(length)
    blocks = torch.randn(length, width, width, dtype=torch.float64, generator=generator)
    rhs = torch.randn(length, width, dtype=torch.float64, generator=generator)
    found = lean.reduce(blocks.clone(), rhs.clone())
    library = deeppcr.linear.solve(deeppcr.linear.Dense(blocks), rhs, solver=deeppcr.PCR())
    z, loop = torch.zeros_like(rhs[0]), []
    for block, b in zip(blocks, rhs, strict=True):
        z = block @ z + b
        loop.append(z)
    torch.testing.assert_close(found, library, rtol=1e-10, atol=1e-10 * library.abs().max().item())
    torch.testing.assert_close(found, torch.stack(loop), rtol=1e-10, atol=1e-10 * library.abs().max().item())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_newton_takes_the_librarys_iterations_to_the_librarys_states(length, activation):
    network = double(length, 5, activation)
    newton = lean.Newton(lean.DeepMLP(network))
    states = newton().clone()
    library = network.parallel(solver(network, "printed", capture=False))
    assert newton.iterations == int(library.iterations.max())
    torch.testing.assert_close(states.unsqueeze(1), library.states, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(states.unsqueeze(1), torch.stack(network.loop()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(newton(), states, rtol=0, atol=0)  # a second call begins anew


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("every", [False, True])
def test_gradients_are_those_of_autograd(length, every):
    network = double(length, 4, "tanh").trainable()
    states = torch.cat(network.loop())
    expected = torch.autograd.grad(states.sum() if every else states[-1].sum(), network.tensors)
    found = lean.Backward(network.double(), states.detach(), every=every)()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_cell_times_every_column_equally_often():
    settings = mlp_printed.QUICK
    record = mlp_printed.measure_cell({"activation": "relu", "L": 9, "w": 3}, settings, Context(torch.device("cpu")))
    for way in ("forward", "backward"):
        assert {entry["status"] for entry in record[way].values()} == {"ok"}
        (count,) = {len(entry["seconds"]) for entry in record[way].values()}
        assert settings.fewest <= count <= settings.most
    assert record["forward"]["printed"]["iterations"] >= 1
    summary = mlp_printed.EXPERIMENT.summarise([{"activation": "relu", "L": 9, "w": 3, **record}])
    assert [(entry["direction"], entry["column"]) for entry in summary["entries"]] == [
        ("forward", "printed"),
        ("backward", "printed"),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_iteration_in_a_graph_is_the_same():
    network = Network.make(65, 5, "cuda", 3, "relu")
    eager, graph = (lean.Newton(lean.DeepMLP(network), graph=each) for each in (False, True))
    torch.testing.assert_close(eager(), graph())
    assert eager.iterations == graph.iterations
    states = eager().clone()
    for one, other in zip(lean.Backward(network, states)(), lean.Backward(network, states, graph=True)(), strict=True):
        torch.testing.assert_close(one, other)
