"""The loop by a graph: the same as the plain loop, whatever changes between calls. Without a GPU a tape stands for CUDA graphs."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import deeppcr
from deeppcr import Loop, Newton, Result
from deeppcr.graphs import loop as recorded_loop
from deeppcr.graphs import record
from deeppcr.graphs.cache import captured_solves
from problems import Generator, mlp, plain_loop, relative_error
from tape import Tape

GRAPH = Loop(by="graph")


@pytest.fixture(autouse=True)
def forgetful(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    monkeypatch.setattr(recorded_loop, "_LONGEST", 8)
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()


@pytest.fixture
def recorded(monkeypatch):
    """How often something was recorded."""
    made = []
    before = recorded_loop.LoopRecording.__init__

    def init(self, *arguments):
        made.append(self)
        before(self, *arguments)

    monkeypatch.setattr(recorded_loop.LoopRecording, "__init__", init)
    return made


def steps_with_nests(make, length, rows):
    weight = make.normal(4, 4) / 2

    def step(z, x):
        a, b = z["a"], z["b"]
        return {"a": torch.tanh(a @ weight + x[0]), "b": 0.5 * b + a.sum(-1, keepdim=True) * x[1]}

    xs = (
        make.normal(length, 4),
        make.normal(1, rows, 1).expand(length, rows, 1),
    )  # one of which is the same at every step
    return step, {"a": make.normal(rows, 4), "b": make.normal(rows, 1)}, xs


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_states_of_the_loop(length, dtype, device, recorded):
    step, z0, xs = steps_with_nests(Generator(0, dtype, device), length, 3)
    expected = plain_loop(step, z0, xs)
    for _ in range(3):
        solution = deeppcr.solve(step, z0, xs, solver=GRAPH)
        assert solution.result is Result.LOOP
        assert relative_error(solution.states, expected) <= 4 * torch.finfo(dtype).eps
        assert solution.iterations.tolist() == [0, 0, 0]
        assert solution.exact_steps.tolist() == [length] * 3
        assert "one step after the other, by a graph" in solution.plan.notes
    assert len(recorded) == len(captured_solves) == 1
    # Other inputs of the same kind.
    z0, xs = pytree.tree_map(lambda leaf: -0.5 * leaf, z0), pytree.tree_map(lambda leaf: leaf.neg(), xs)
    xs = xs[0], xs[1][:1].expand(length, 3, 1)
    assert relative_error(deeppcr.solve(step, z0, xs, solver=GRAPH).states, plain_loop(step, z0, xs)) < 1e-6
    assert len(recorded) == 1


def test_parts_are_of_equal_length(device, recorded):
    for length, expected in ((5, 5), (8, 8), (9, 5), (17, 6), (24, 8), (25, 7)):
        deeppcr.solve(torch.cos, torch.ones(2, device=device), length=length, solver=GRAPH)
        assert recorded[-1]._states.shape[0] == expected


@pytest.mark.parametrize(("allowed", "steps"), [(1, 1), (3 * 40, 3), (10**6, 7)])
def test_large_inputs_are_kept_for_fewer_steps(allowed, steps, device, recorded, monkeypatch):
    monkeypatch.setattr(recorded_loop, "_MOST_BYTES", allowed)
    z0, xs = torch.ones(2, device=device), torch.randn(21, 4, 2, device=device)  # 8 bytes and 32 a step
    step = lambda z, x: torch.sin(z) + x.sum(0)  # noqa: E731
    found = deeppcr.solve(step, z0, xs, solver=GRAPH).states
    assert relative_error(found, plain_loop(step, z0, xs)) < 1e-6
    assert recorded[-1]._states.shape[0] == steps
    assert recorded[-1].bytes <= max(allowed, 40) + z0.nbytes


def test_results_are_not_overwritten(device):
    z0 = torch.ones(3, device=device)
    kept = deeppcr.solve(torch.cos, z0, length=20, solver=GRAPH).states
    copy = kept.clone()
    deeppcr.solve(torch.cos, 2 * z0, length=20, solver=GRAPH)
    assert torch.equal(kept, copy)


def test_gradients_are_those_of_the_loop(device):
    make = Generator(0, torch.float64, device)
    step, z0, xs = steps_with_nests(make, 19, 3)
    weight = make.normal(4, 4) / 2

    def weighted(z, x):
        return step({"a": z["a"] @ weight, "b": z["b"]}, x)

    sources = [z0["a"].requires_grad_(), xs[0].requires_grad_(), weight.requires_grad_()]

    def gradients(solver):
        states = deeppcr.solve(weighted, z0, xs, solver=solver).states
        return torch.autograd.grad(states["a"].square().sum() + states["b"].sum(), sources)

    for _ in range(2):
        for mine, expected in zip(gradients(GRAPH), gradients(Loop()), strict=True):
            assert relative_error(mine, expected) < 1e-9
    unrolled = deeppcr.solve(weighted, z0, xs, solver=GRAPH, gradient=deeppcr.Unrolled()).states["a"]
    found, *_ = torch.autograd.grad(unrolled.square().sum(), sources)
    expected, *_ = torch.autograd.grad(
        deeppcr.solve(weighted, z0, xs, solver=Loop()).states["a"].square().sum(), sources
    )
    assert relative_error(found, expected) < 1e-9


class TestWhatChangesBetweenCalls:
    def make(self, device):
        make = Generator(0, torch.float64, device)
        return make.normal(3, 8), make.normal(20, 8), make.normal(8, 8) / 4

    def holds(self, step, z0, xs):
        found = deeppcr.solve(step, z0, xs, solver=GRAPH).states
        return relative_error(found, plain_loop(step, z0, xs)) < 1e-12

    def test_a_tensor_in_place(self, device, recorded):
        z0, xs, weight = self.make(device)
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        assert self.holds(step, z0, xs)
        weight.mul_(-0.5)
        assert self.holds(step, z0, xs)
        assert len(recorded) == 1

    def test_another_tensor(self, device, recorded):
        z0, xs, weight = self.make(device)
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        assert self.holds(step, z0, xs)
        before, weight = weight, -0.5 * weight
        assert self.holds(step, z0, xs)
        assert len(recorded) == 2
        weight = before
        assert self.holds(step, z0, xs)
        assert len(recorded) == 2

    def test_a_number(self, device, recorded):
        z0, xs, _ = self.make(device)
        factor = 1.0
        step = lambda z, x: factor * torch.tanh(z + x)  # noqa: E731
        assert self.holds(step, z0, xs)
        factor = 0.5
        assert self.holds(step, z0, xs)
        assert len(recorded) == 2

    def test_the_mode_of_a_module(self, device, recorded):
        z0, xs, _ = self.make(device)
        dropout = nn.Dropout().eval()
        step = lambda z, x: 0.5 * dropout(z) + x  # noqa: E731
        assert self.holds(step, z0, xs)
        dropout.train()
        with pytest.raises(RuntimeError, match="cannot record this step"):
            deeppcr.solve(step, z0, xs, solver=GRAPH)

    def test_shapes_and_dtypes(self, device, recorded):
        z0, xs, _ = self.make(device)
        step = lambda z, x: torch.sin(z + x)  # noqa: E731
        assert self.holds(step, z0, xs)
        assert self.holds(step, z0[:2], xs)
        assert self.holds(step, z0, xs[:13])
        found = deeppcr.solve(step, z0.float(), xs.float(), solver=GRAPH).states
        assert found.dtype == torch.float32
        assert len(recorded) == 4

    def test_behind_the_trace(self, device, recorded):
        """What no trace sees: the first step, taken for every call, shows it."""
        z0, xs, _ = self.make(device)
        hidden = {"factor": 0.5}

        class Hidden(torch.autograd.Function):
            @staticmethod
            def forward(ctx, z):
                return z * hidden["factor"]

        step = lambda z, x: Hidden.apply(z) + x  # noqa: E731
        assert self.holds(step, z0, xs)
        hidden["factor"] = 0.7
        assert self.holds(step, z0, xs)


def test_a_recording_that_no_longer_fits_is_made_anew(device, recorded, monkeypatch):
    z0, xs = torch.ones(2, device=device), torch.ones(20, 2, device=device)
    monkeypatch.setattr("deeppcr.sequence.trace.Trace.key", property(lambda trace: "the same"))
    factor = 0.5
    step = lambda z, x: factor * z + x  # noqa: E731
    deeppcr.solve(step, z0, xs, solver=GRAPH)
    factor = 0.7
    solution = deeppcr.solve(step, z0, xs, solver=GRAPH)
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-6
    assert len(recorded) == 2
    assert len(captured_solves) == 1


def test_chaos_and_values_that_are_not_finite(device):
    z0 = torch.full((3,), 0.3, device=device)
    step = lambda z: 4 * z * (1 - z)  # noqa: E731
    assert torch.equal(deeppcr.solve(step, z0, length=30, solver=GRAPH).states, plain_loop(step, z0, length=30))
    z0 = torch.tensor([[1.0], [2.0]], device=device)
    with pytest.warns(deeppcr.ConvergenceWarning, match="step 7 produced a value that is not finite") as caught:
        solution = deeppcr.solve(lambda z: torch.where(z > 1, z * z, z), z0, length=20, solver=GRAPH)
    assert caught[0].filename == __file__
    assert solution.results == (Result.LOOP, Result.NON_FINITE)
    with pytest.warns(deeppcr.ConvergenceWarning, match="step 1 produced"):  # which tells nothing of the recording
        assert deeppcr.solve(lambda z: 1e38 * z, 100 * z0, length=20, solver=GRAPH).states.isinf().all()


def test_what_cannot_be_recorded_is_said(device):
    z0, xs = torch.ones(2, 3, device=device), torch.ones(20, 3, device=device)
    with pytest.raises(RuntimeError, match=r"cannot record this step as a CUDA graph: it draws random numbers"):
        deeppcr.solve(lambda z, x: z + torch.rand_like(x), z0, xs, solver=GRAPH)
    with pytest.raises(RuntimeError, match=r"cannot record this step as a CUDA graph: it looks at values"):
        deeppcr.solve(lambda z, x: z + x * float(x.sum()), z0, xs, solver=GRAPH)
    with pytest.raises(RuntimeError, match="it is not one step function"):
        deeppcr.solve([torch.cos, torch.sin], z0, solver=GRAPH)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="watches its operations"):
        deeppcr.solve(lambda z, x: z + x, z0, xs, solver=GRAPH)
    assert len(captured_solves) == 0
    with pytest.raises(deeppcr.StepError):
        deeppcr.solve(lambda z, x: z.mul_(0.5) + x, z0, xs, solver=GRAPH)


def test_without_graphs_on_the_device(monkeypatch):
    monkeypatch.delitem(record.RECORDERS, "cpu", raising=False)
    with pytest.raises(ValueError, match=r'Loop\(by="graph"\) needs a CUDA device, and z0 is on cpu'):
        deeppcr.solve(torch.cos, torch.ones(2), length=5, solver=GRAPH)


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_on_the_device(device):
    with pytest.raises(ValueError, match="there is no kernel"):
        deeppcr.solve(torch.cos, torch.ones(2, device=device), length=5, solver=Loop(by="kernel"))
    with pytest.raises(ValueError, match='by: expected "python", "graph" or "kernel"'):
        Loop(by="fortran")


def test_beside_parallel_solves(device):
    """One cache holds both, and neither takes the other's."""
    problem = mlp(Generator(0, torch.float64, device), 20, 2, activation=torch.tanh)
    for _ in range(2):
        parallel, looped = problem.solve(solver=Newton()), problem.solve(solver=GRAPH)
        assert (parallel.result, looped.result) == (Result.CONVERGED, Result.LOOP)
        assert relative_error(parallel.states, looped.states) < 1e-9
    assert len(captured_solves) == 2


def test_cells_by_rows(device):
    cell = nn.GRUCell(3, 4, dtype=torch.float64, device=device).requires_grad_(False)
    xs, z0 = (
        torch.randn(20, 2, 3, dtype=torch.float64, device=device),
        torch.zeros(2, 4, dtype=torch.float64, device=device),
    )
    step = deeppcr.rowwise(lambda h, x: cell(x, h))
    found = deeppcr.solve(step, z0, xs, solver=GRAPH)
    assert relative_error(found.states, plain_loop(step, z0, xs)) < 1e-12
