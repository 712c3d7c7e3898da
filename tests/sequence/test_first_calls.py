"""What a first call sets for good is no state that is kept: lazy modules, tables, parts that are made when they are needed."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Newton, StepError
from problems import relative_error
from sequence.keeping import Z0, Caching, KeepsItsWeight, SetByFirst, solve


def test_a_first_call_that_gives_another_result_than_the_next():
    class Warming(Caching):
        def forward(self, z):
            return (
                torch.tanh(self.linear(z))
                if self.mean is None and super().forward(z) is not None
                else super().forward(z)
            )

    with pytest.raises(StepError, match="a Warming keeps 'mean'"):
        solve(Warming(), Z0, length=20)


@pytest.mark.parametrize("kind", [Caching, SetByFirst])
def test_what_the_first_call_leaves_is_as_in_the_loop_and_stays(kind):
    module = kind()
    looped = deepcopy(module)
    solution, loop = solve(module, Z0, length=20), solve(looped, Z0, length=20, solver=deeppcr.Loop())
    assert relative_error(solution.states, loop.states) < 1e-5
    if kind is SetByFirst:
        assert module.done
        assert torch.equal(module.shift, looped.shift)
    again, loop = (solve(m, 2 * Z0, length=20, solver=s) for m, s in ((module, Newton()), (looped, deeppcr.Loop())))
    assert relative_error(again.states, loop.states) < 1e-5


@pytest.mark.parametrize("count", [1, 3], ids=["alone", "stacked"])
def test_parameters_that_a_later_module_of_a_list_sets_are_left_to_the_loop(count):
    layers = [nn.Tanh(), *(SetByFirst() for _ in range(count))]
    with pytest.raises(
        StepError, match=r"changes the parameter 'shift' of a SetByFirst.*solver=Loop|SetByFirst keeps 'done'"
    ):
        solve(layers, Z0, solver=deeppcr.Jacobi())
    layers = [nn.Tanh(), *(SetByFirst() for _ in range(count))]
    with pytest.raises(StepError, match=r"changes the parameter 'shift' of a SetByFirst.*solver=Loop.*not put back"):
        solve(layers, Z0)
    layers = [nn.Tanh(), *(SetByFirst() for _ in range(count))]
    loop = solve(layers, Z0, solver=deeppcr.Loop())
    assert torch.allclose(layers[1].shift, -Z0.tanh().mean(0))
    assert relative_error(solve(layers, Z0).states, loop.states) < 1e-5


@pytest.mark.parametrize("where", ["one step", "closure", "loop"])
def test_lazy_modules_are_made_by_the_first_call(where):
    def make():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()).eval()

    if where == "loop":
        layers = [nn.Tanh(), *(make() for _ in range(3))]
        step, settings = layers, {"solver": deeppcr.Loop()}
    else:
        layers, settings = [make()], {"length": 10}
        step = layers[0] if where == "one step" else lambda z: layers[0](z)
    states = solve(step, Z0, **settings).states
    for layer in layers[-1:]:
        assert type(layer[0]) is nn.Linear
        assert layer[0].in_features == 4
        assert layer[0].weight.shape == (4, 4)
        assert not layer[0]._forward_pre_hooks
        assert not hasattr(layer[0], "_initialize_hook")
        assert type(layer[1]) is nn.BatchNorm1d
    loop = solve(step, Z0, **settings | {"solver": deeppcr.Loop()})
    assert relative_error(states, loop.states) < 1e-5


def test_parameters_that_the_first_call_makes_and_later_ones_write_to():
    lazy = nn.LazyLinear(4)

    def step(z):
        after = torch.tanh(lazy(z))
        with torch.no_grad():
            lazy.weight.clamp_(max=0.3)
        return after

    with pytest.raises(StepError, match="changes the parameter 'weight' of a Linear in place"):
        solve(step, Z0, length=20, solver=deeppcr.Jacobi())


class LazyNorm(nn.Module):
    """Has a lazy part, and centres by what it first sees."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.LazyLinear(4), SetByFirst()

    def forward(self, z):
        return self.shift(torch.tanh(self.linear(z)))


def test_lazy_modules_in_a_list_are_left_to_the_loop():
    layers = [LazyNorm() for _ in range(3)]
    with pytest.raises(
        StepError, match=r"a LazyLinear in the list has parameters that .* yet to make.*solver=Loop\(\)"
    ):
        solve(layers, Z0)
    states = solve(layers, Z0, solver=deeppcr.Loop()).states
    assert relative_error(solve(layers, Z0).states, states) < 1e-5
    assert torch.allclose(layers[1].shift.shift, -layers[1].linear(states[0]).tanh().mean(0), atol=1e-6)


def test_the_loop_takes_modules_that_keep_what_they_like():
    layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(4))
    assert solve(layers, Z0, solver=deeppcr.Loop()).states.isfinite().all()
    assert [layer.num_batches_tracked.item() for layer in layers] == [1] * 4


@pytest.mark.parametrize("gradient", [deeppcr.Implicit(), deeppcr.Unrolled()])
def test_what_a_later_step_sets_for_good_is_taken_once_it_is_set(gradient):
    kept, linear, z0 = KeepsItsWeight(), nn.Linear(4, 4), torch.randn(3, 4)
    steps = [lambda z: linear(z)] + [lambda z, i=i: kept(z) * (1 + i / 10) for i in range(4)]
    with pytest.raises(StepError, match=r"keeps 'weight'.*call the step once before the solve"):
        solve(steps, z0, gradient=gradient)
    kept.weight = None
    kept(z0)
    solve(steps, z0, gradient=gradient).states.sum().backward()
    found, kept.raw.grad = kept.raw.grad, None
    solve(steps, z0, solver=deeppcr.Loop()).states.sum().backward()
    torch.testing.assert_close(found, kept.raw.grad)


class Building(nn.Module):
    """Makes a part of itself at its first call."""

    def forward(self, z):
        if not hasattr(self, "part"):
            self.part = nn.Linear(4, 4)
        return torch.tanh(self.part(z))


def test_parts_that_a_first_call_makes():
    assert solve(Building(), Z0, length=5).result.name == "CONVERGED"
    with pytest.raises(StepError, match="a Building keeps 'part'"):
        solve([nn.Tanh(), Building()], Z0)


def test_the_loop_calls_each_step_once_and_keeps_its_states():
    calls = []

    def step(z):
        calls.append(len(z))
        return torch.tanh(z)

    deeppcr.solve(deeppcr.rowwise(step), torch.randn(3, 4), length=5, solver=deeppcr.Loop())
    assert calls == [3] * 5

    def late(z, x):
        return z.mul_(0.5) if x > 0 else 2 * z

    with pytest.raises(deeppcr.StepError, match="in place"):
        deeppcr.solve(late, torch.randn(3, 4), torch.tensor([0.0, 0.0, 1.0, 0.0]), solver=deeppcr.Loop())


def test_an_embedding_that_scales_its_rows_is_taken_once_it_no_longer_does():
    table, xs = nn.Embedding(5, 4, max_norm=0.5), torch.arange(10)[:, None].expand(10, 3) % 5

    def step(z, x):
        return 0.5 * torch.tanh(z) + table(x)

    loop = solve(step, Z0, xs, solver=deeppcr.Loop())  # which has scaled all rows
    with pytest.raises(StepError, match=r"changes the parameter 'weight' of an Embedding in place.*before the solve"):
        solve(step, Z0, xs)
    table.max_norm = None
    assert relative_error(solve(step, Z0, xs).states, loop.states) < 1e-5


def test_what_the_first_call_of_a_later_module_makes_is_left_to_the_loop():
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mask = nn.Linear(4, 4), None

        def forward(self, z):
            if self.mask is None:
                self.mask = 0.5 * torch.ones_like(z)
            return torch.tanh(self.linear(z)) * self.mask

    layers = [nn.Tanh(), *(Masking() for _ in range(3))]
    with pytest.raises(StepError, match=r"a Masking keeps 'mask'.*use solver=Loop\(\)"):
        solve(layers, Z0)
    loop = solve(layers, Z0, solver=deeppcr.Loop())
    assert relative_error(solve(layers, Z0).states, loop.states) < 1e-5
