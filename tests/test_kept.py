"""Modules that keep something from one call to the next are refused where that matters, and left alone where not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import deeppcr
from deeppcr import StepError, check, solve
from deeppcr.sequence import Sequence
from problems import relative_error

Z0 = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def normed():
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh())


class Caching(nn.Module):
    """Takes the mean of what it first sees for that of all it will see."""

    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), None

    def forward(self, z):
        if self.mean is None:
            self.mean = z.detach().mean(0)
        return torch.tanh(self.linear(z)) + self.mean


class Remembering(nn.Module):
    """Keeps what it saw, in several ways; nothing depends on it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen, self.table, self.log = nn.Linear(4, 4), 0, None, {}, []
        self.register_buffer("scale", None, persistent=False)

    def forward(self, z):
        self.calls, self.seen = self.calls + 1, z.detach()
        self.table[z.shape] = self.scale = torch.full((4,), 0.5)
        self.log.append(1)
        return torch.tanh(self.linear(z)) * self.scale


class Numbering(nn.Module):
    """Its result depends on entries of a container that it adds to."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), []

    def forward(self, z):
        self.calls.append(1)
        return torch.tanh(self.linear(z)) / len(self.calls)


def as_method(module):
    class Holder:
        def __init__(self):
            self.module = module

        def step(self, z):
            return self.module(z)

    return Holder().step


@pytest.mark.parametrize(
    "step",
    [
        lambda: normed(),
        lambda: (lambda module: lambda z: module(z))(normed()),
        lambda: as_method(normed()),
        lambda: partial(lambda module, z: module(z), normed()),
        lambda: deeppcr.rowwise(normed()),
    ],
    ids=["module", "closure", "method", "partial", "rowwise"],
)
def test_buffers_that_change_are_named_wherever_the_module_is_held(step):
    with pytest.raises(StepError, match=r"changes the buffer '_u' of a _SpectralNorm.*\.eval\(\)"):
        solve(step(), Z0, length=40)


def test_lists_of_modules_with_buffers_that_change(device):
    layers, z0 = nn.ModuleList(normed() for _ in range(6)).to(device), Z0.to(device)
    with pytest.raises(StepError, match=r"changes the buffer '_u'.*\.eval\(\)"):
        solve(layers, z0)
    with pytest.raises(StepError, match="changes the buffer"):
        deeppcr.nn.Sequential(*layers, mode="parallel")(z0)
    assert solve(layers.eval(), z0).result.name == "CONVERGED"
    norms = [nn.BatchNorm1d(4).to(device) for _ in range(6)]  # which are stacked, and so are their buffers
    with pytest.raises(StepError, match="changes the buffer 'num_batches_tracked' of a BatchNorm1d"):
        solve(norms, z0)


@pytest.mark.parametrize("kind", [Caching, Numbering])
def test_a_module_whose_result_depends_on_what_it_keeps_is_refused_and_left_as_it_was(kind):
    module, name = kind(), "mean" if kind is Caching else "calls"
    with pytest.raises(StepError, match=f"{kind.__name__} keeps '{name}' from one call to the next"):
        solve(module, Z0, length=20)
    assert not getattr(module, name)
    (finding,) = check(module, Z0, length=20)
    assert finding.kind == "side effect"


@pytest.mark.parametrize("others", [[nn.Tanh()], [nn.Linear(4, 4), nn.Linear(4, 4)]], ids=["alone", "stacked"])
@pytest.mark.parametrize("count", [1, 3])
def test_modules_that_are_not_the_first_of_a_list_are_looked_at_too(others, count):
    with pytest.raises(StepError, match="Caching keeps 'mean'"):
        solve([*others, *(Caching() for _ in range(count))], Z0)


def test_buffers_that_change_later_in_a_list_are_found():
    with pytest.raises(StepError, match="changes the buffer"):
        solve([nn.Tanh(), normed(), normed()], Z0)


def test_what_is_kept_and_never_used_is_no_reason_to_refuse():
    module = Remembering()
    for step in (module, [Remembering() for _ in range(8)]):
        settings = {} if isinstance(step, list) else {"length": 20}
        loop = solve(step, Z0, solver=deeppcr.Loop(), **settings)
        assert relative_error(solve(step, Z0, **settings).states, loop.states) < 1e-5
    assert check(module, Z0, length=20) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*deprecated.*")
def test_scripted_modules_are_not_looked_into():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)).eval()
    states = solve(torch.jit.trace(layer, Z0), Z0, length=10).states
    assert relative_error(states, solve(layer, Z0, length=10).states) < 1e-5


def test_the_loop_takes_modules_that_keep_what_they_like():
    layers = nn.ModuleList(normed() for _ in range(4))
    assert solve(layers, Z0, solver=deeppcr.Loop()).states.isfinite().all()


def test_where_solves_repeat_a_module_is_looked_at_once_in_train_mode_and_once_in_eval_mode(monkeypatch):
    module = normed().eval()
    Sequence(module, Z0, length=5, traced=True)
    with monkeypatch.context() as patch:
        patch.setattr(deeppcr.kept, "_Held", None)  # which cannot be called
        Sequence(module, Z0, length=5, traced=True)
    with pytest.raises(StepError, match="changes the buffer"):
        Sequence(module.train(), Z0, length=5, traced=True)
    with pytest.raises(StepError, match="changes the buffer"):  # and has not become harmless by being refused
        Sequence(module, Z0, length=5, traced=True)


def test_inputs_that_a_later_step_changes():
    xs = torch.ones(8, 3, 4)
    xs[5] = 2

    def step(z, x):
        return torch.tanh(z + (x.mul_(0.5) if x.sum() > 12 else x))

    with pytest.raises(StepError, match="changes xs in place"):
        solve(step, Z0, xs, solver=deeppcr.Jacobi())
