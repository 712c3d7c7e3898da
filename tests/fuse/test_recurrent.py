"""Recurrent modules by the kernels of their cells, and what ``mode="auto"`` makes of them."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from compiling import compiled_and_counted
from deeppcr import FixedIterations, Newton, Result
from deeppcr import nn as ours
from deeppcr.fuse.outputs import Outputs
from deeppcr.nn import operated_recurrent, steps, torch_like
from deeppcr.nn.cells import Restarting
from deeppcr.sequence.fingerprint import structure_of
from deeppcr.ways import judged
from deeppcr.ways.fused import Call
from kernel_support import error, thorough
from recurrent_problems import leaves_of

pytestmark = [pytest.mark.usefixtures("kernels", "whole_float32"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture
def fast(monkeypatch):
    """In parallel all is expected to be faster."""
    monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (True, ""))


def made(kind, hidden, device, dtype=torch.float64, **options):
    """A module of ours and its twin of PyTorch."""
    options |= {"device": device, "dtype": dtype}
    module = getattr(ours, kind)(2, hidden, **options)
    if not hasattr(nn, kind):
        return module, module
    plain = getattr(nn, kind)(2, hidden, **options)
    plain.load_state_dict(module.state_dict())
    return module, plain


def agree(found, right, module, plain, x):
    found, right = leaves_of(found), leaves_of(right)
    close = 1e-9 if x.dtype == torch.float64 else 1e-5
    assert all(error(one, other) < close for one, other in zip(found, right, strict=True))
    seeds = [torch.randn_like(leaf) for leaf in right]
    of_found = torch.autograd.grad(found, [x, *module.parameters()], seeds)
    of_right = torch.autograd.grad(right, [x, *plain.parameters()], seeds)
    assert all(error(one, other) < close for one, other in zip(of_found, of_right, strict=True))


@pytest.mark.parametrize(
    ("kind", "hidden", "way"),
    [
        ("RNN", 2, "narrow"),
        ("GRU", 9, "tiles"),
        ("DiagonalGRU", 3, "elementwise"),
        ("DiagonalLSTM", 3, "elementwise"),
        *thorough(("GRU", 3, "narrow"), ("LSTM", 2, "narrow"), ("LSTM", 9, "tiles"), ("RNN", 17, "tiles")),
    ],
)
def test_cells_have_kernels(kind, hidden, way, device):
    dtype = torch.float32 if way == "tiles" else torch.float64  # which tiles are not for
    module, plain = made(kind, hidden, device, dtype)
    x = torch.randn(9, 2, 2, dtype=dtype, device=device, requires_grad=True)
    found = None
    for _ in range(2):  # kernels come with the second solve of a kind
        found = module(x, mode="parallel")
    assert module.solutions[0].plan.evaluation == f"fused kernels ({way})"
    assert module.solutions[0].result is Result.CONVERGED
    assert module.solutions[0].iterations.shape == (2,)  # what is computed when it is asked for
    assert module.solutions[0].states is None
    assert module.solutions[0].z0 is None
    right = plain(x) if plain is not module else module(x, mode="sequential")
    agree(found, right, module, plain, x)


@pytest.mark.parametrize("kind", ["DiagonalGRU", "GRU"])
@pytest.mark.parametrize("wanted", ["all", "input", "weight_ih", "weight_hh", "start"])
def test_a_layer_is_one_node_of_autograd(wanted, kind, device):
    """Its projection, too; whichever gradients are asked for. PyTorch's GRU has a projection of its own."""
    module, plain = made(kind, 2, device, batch_first=True)
    x = torch.randn(2, 9, 2, dtype=torch.float64, device=device, requires_grad=wanted in ("all", "input"))
    start = torch.randn(1, 2, 2, dtype=torch.float64, device=device, requires_grad=wanted in ("all", "start"))
    for name, parameter in (*module.named_parameters(), *plain.named_parameters()):
        parameter.requires_grad_(wanted == "all" or name.startswith(wanted))
    leaves, plain_leaves = (
        [each for each in (x, start, *net.parameters()) if each.requires_grad] for net in (module, plain)
    )
    for _ in range(2):  # kernels come with the second solve of a kind
        outputs, _ = module(x, start, mode="parallel")
    assert module.solutions[0].plan.evaluation.startswith("fused kernels")
    seeds = torch.randn_like(outputs)
    reference = plain(x, start) if kind == "GRU" else plain(x, start, mode="sequential")
    right = torch.autograd.grad(reference[0], plain_leaves, seeds)
    for _ in range(2):
        found = torch.autograd.grad(outputs, leaves, seeds, retain_graph=True)
        assert all(error(one, other) < 1e-9 for one, other in zip(found, right, strict=True))
    nodes, todo = [], [outputs.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.append(node)
            todo += [each for each, _ in node.next_functions]
    assert sum("Apply" in node.name() for node in nodes) == 1
    assert not any("Product" in node.name() or "Mm" in node.name() for node in nodes)


@pytest.mark.parametrize(
    ("kind", "hidden", "mode"),
    [
        ("LSTM", 2, "parallel"),
        ("GRU", 2, "auto"),
        ("DiagonalLSTM", 3, "parallel"),
        *thorough(("GRU", 9, "parallel"), ("RNN", 2, "auto")),
    ],
)
def test_compiled_modules_have_kernels(kind, hidden, mode, fast, device, monkeypatch):
    """Forward and backward, in one graph: a backward pass knows the states, and neither solves for them nor needs Jacobians."""
    dtype = torch.float32 if hidden > 8 else torch.float64  # tiles are not for the latter
    module, _ = made(kind, hidden, device, dtype)
    module.run_mode = mode
    solved, solve = [], operated_recurrent.solve_steps
    monkeypatch.setattr(
        operated_recurrent, "solve_steps", lambda *call, **how: solved.append(solve(*call, **how)) or solved[-1]
    )
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled, graphs = compiled_and_counted(module)
        for calls in range(3):  # kernels come with the second one of a kind
            x = torch.randn(9, 2, 2, dtype=dtype, device=device, requires_grad=True)
            found = compiled(x)
            if calls:
                assert solved[-1].plan.evaluation.startswith("fused kernels")
                monkeypatch.setattr(judged, "Adjoint", None)
                monkeypatch.setattr(operated_recurrent, "_by_step", None)  # nor is it run again
            agree(found, module(x, mode="sequential"), module, module, x)
    assert len(graphs) == 1
    assert len(solved) == (2 if mode == "auto" else 3)


@pytest.mark.parametrize(("kind", "hidden"), [("DiagonalGRU", 3), ("RNN", 2), *thorough(("GRU", 9), ("LSTM", 9))])
def test_gradients_of_a_single_row_are_not_summed_over_rows(kind, hidden, device, monkeypatch):
    """They are written where they belong, in the dtype of what they are gradients of."""
    dtype = torch.float32 if hidden > 8 else torch.float64  # tiles are not for the latter
    module, plain = made(kind, hidden, device, dtype)
    x = torch.randn(9, 1, 2, dtype=dtype, device=device, requires_grad=True)
    written, of_bases = [], Outputs.of_bases
    monkeypatch.setattr(Outputs, "of_bases", lambda *given: written.append(given[0]) or of_bases(*given))
    module(x, mode="parallel")
    found = module(x, mode="parallel")
    agree(found, plain(x) if plain is not module else module(x, mode="sequential"), module, plain, x)
    assert len(written) == 3  # once to see whether the kernels fit, and once to compile them ahead
    assert all(not per_step for outputs in written for per_step, _ in outputs._summed)


def test_auto_looks_at_a_call_once(fast, device, monkeypatch):
    """To find out whether there are kernels, and to run them."""
    module, _ = made("RNN", 2, device)
    x = torch.randn(9, 2, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        looked, look = [], Call.__init__
        monkeypatch.setattr(Call, "__init__", lambda *given, **asked: looked.append(1) or look(*given, **asked))
        module(x)
    assert why(module).startswith("fused kernels")
    assert len(looked) == 1


@pytest.mark.parametrize("restarting", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "projected", "DiagonalGRU", "DiagonalLSTM"])
def test_cells_tell_all_that_they_depend_on(kind, bias, restarting, device):
    """A walk through what a cell holds finds no other tensors, and cells that do something else are told apart."""
    options = {"proj_size": 1} if kind == "projected" else {}
    module = getattr(ours, "LSTM" if options else kind)(2, 3, bias=bias, device=device, **options)
    cell = module._step(0, module._weights(0), torch.float32, restarting=restarting)
    told, tensors = structure_of(cell)
    walked = structure_of(lambda z, x: cell(z, x))[1]
    assert {id(each) for each in tensors} == {id(each) for each in walked}
    assert told == structure_of(cell)[0]
    tensors[0].requires_grad_(False)
    assert told != structure_of(cell)[0]
    tensors[0].requires_grad_()
    if kind == "RNN":
        module.mode = "RNN_RELU"
        other = module._cell(module._weights(0))
        assert told != structure_of(Restarting(other) if restarting else other)[0]


def test_ragged_rows_and_resets_have_kernels(device):
    module, plain = made("GRU", 2, device)
    x = torch.randn(7, 3, 2, dtype=torch.float64, device=device, requires_grad=True)

    def packed():
        return pack_padded_sequence(x, torch.tensor([3, 7, 1]), enforce_sorted=False)

    found = None
    for _ in range(2):
        found = module(packed(), mode="parallel")
    assert module.solutions[0].plan.evaluation.startswith("fused kernels")
    agree(found, plain(packed()), module, plain, x)
    reset = torch.zeros(7, 3, dtype=torch.bool, device=device)
    reset[[2, 3, 6], [0, 1, 1]] = True
    for _ in range(2):
        found = module(x, reset=reset, mode="parallel")
    assert module.solutions[0].plan.evaluation.startswith("fused kernels")
    agree(found, module(x, reset=reset, mode="sequential"), module, module, x)


def why(module):
    (solution,) = module.solutions
    return solution.plan.notes[-1] if solution.result is Result.LOOP else solution.plan.evaluation


def test_auto_takes_kernels_for_what_comes_again(fast, device):
    module, _ = made("GRU", 2, device)
    x = torch.randn(9, 2, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        expected = module(x)[0]
        assert why(module) == torch_like._FIRST
        found = module(x)[0]
        assert why(module).startswith("fused kernels")
        assert error(found, expected) < 1e-9
        module(x[:5])  # of another length, at once
        assert why(module).startswith("fused kernels")


def test_auto_leaves_to_pytorch_what_has_no_kernels(fast, device, monkeypatch):
    module, _ = made("LSTM", 5, device, proj_size=2)
    monkeypatch.setattr("deeppcr.nn.steps.require_kernels", refusing := Refusing())
    x = torch.randn(9, 2, 2, dtype=torch.float64, device=device)
    for _ in range(4):
        module(x)
    assert why(module) == "there are no kernels: of this kind"
    assert refusing.asked == 1


class Refusing:
    asked = 0

    def __call__(self, *arguments):
        self.asked += 1
        raise steps.NoKernels("of this kind")


def test_auto_waits_after_a_solve_that_the_loop_had_to_finish(fast, device, monkeypatch):
    monkeypatch.setattr(torch_like, "_PATIENCE", 2)
    module, plain = made("RNN", 1, device, nonlinearity="relu")
    monkeypatch.setattr(torch_like, "_DONE", ())  # no result is good enough
    x = torch.randn(9, 1, 2, dtype=torch.float64, device=device)
    ways = []
    with torch.no_grad():
        for _ in range(6):
            assert error(module(x)[0], plain(x)[0]) < 1e-9
            ways.append(why(module).startswith("fused kernels"))
    assert ways == [False, True, False, False, True, False]


@pytest.fixture
def slow(monkeypatch):
    """In parallel all is expected to be slower, and from nine steps on there is no other way."""
    monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (False, "slower"))
    monkeypatch.setattr(torch_like, "_is_too_long", lambda steps, x: steps >= 9)


def test_auto_takes_kernels_at_once_where_pytorch_has_none(slow, device, monkeypatch):
    module, plain = made("GRU", 2, device)
    x = torch.randn(9, 2, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        assert error(module(x)[0], plain(x)[0]) < 1e-9
        assert why(module).startswith("fused kernels")
        module(x[:8])
        assert why(module) == "slower"
        monkeypatch.setattr(torch_like, "_DONE", ())  # no result is good enough
        for _ in range(3):  # there is nothing to wait for
            module(x)
            assert why(module).startswith("fused kernels")


def test_what_neither_has_kernels_for_is_left_to_pytorch(slow, device, monkeypatch):
    """Whose own words come where it refuses; nobody traces the cell again for them."""
    module, _ = made("GRU", 2, device)
    monkeypatch.setattr("deeppcr.nn.steps.require_kernels", refusing := Refusing())
    for _ in range(3):
        module(torch.randn(9, 2, 2, dtype=torch.float64, device=device))
    assert why(module) == "there are no kernels: of this kind"
    assert refusing.asked == 1


def test_only_cudnn_refuses_long_sequences(device):
    long = torch.empty(1, 1, 1, device=device)
    refuses = device.type == "cuda" and torch.backends.cudnn.is_acceptable(long)
    assert torch_like._is_too_long(65_536, long) == refuses
    assert not torch_like._is_too_long(32_768, long)
    with torch.backends.cudnn.flags(enabled=False):
        assert not torch_like._is_too_long(65_536, long)


def test_auto_asks_what_takes_less_time(device):
    module, _ = made("GRU", 2, device)
    module(torch.randn(9, 2, 2, dtype=torch.float64, device=device))
    assert why(module).startswith("expected:")


def test_auto_in_a_capture_takes_what_was_made_before(fast, device, monkeypatch):
    """Whether something can be captured is asked of the settings; kernels are made outside."""
    capturing = []
    monkeypatch.setattr(torch_like, "is_capturing", lambda device: bool(capturing))
    module, _ = made("RNN", 1, device)
    x = torch.randn(9, 1, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        module(x)
        capturing.append(True)
        module.newton = Newton(stop=FixedIterations(3))
        module(x)
        assert why(module) == torch_like._CAPTURED
        capturing.clear()
        module(x)
        assert why(module).startswith("fused kernels")  # which look when they are done, outside of a capture
        assert module.solutions[0].result is Result.CONVERGED
        capturing.append(True)
        assert module._why_by_torch(x, None)[0] == ""
        module(x)
        assert module.solutions[0].result is Result.ITERATIONS_DONE
        module.newton = Newton()
        assert module._why_by_torch(x, None)[0] == torch_like._CAPTURED
