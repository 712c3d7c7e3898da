"""Modules that keep something from one call to the next are refused where that matters, and left alone where not."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import deeppcr
from deeppcr import Newton, StepError, check, solve
from deeppcr.newton import Outcome
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


def test_a_module_whose_result_depends_on_what_it_keeps_is_refused_and_left_as_it_was():
    module = Numbering()
    with pytest.raises(StepError, match="Numbering keeps 'calls' from one call to the next"):
        solve(module, Z0, length=20)
    assert module.calls == []
    (finding,) = check(module, Z0, length=20)
    assert finding.kind == "side effect"


class Late(nn.Module):
    """Its result depends on what it keeps, but not at once."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, z):
        self.calls += 1
        return torch.tanh(self.linear(z)) * (1 if self.calls < 4 else 1.01)


def test_what_matters_only_later_is_found_after_the_solve():
    module = Late()
    with pytest.raises(StepError, match="Late keeps 'calls'"):
        solve(module, Z0, length=20)
    assert module.calls == 2  # on the first state: all others are undone


class SetByFirst(nn.Module):
    """Sets a parameter by the first state that it sees."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift, self.done = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), False

    def forward(self, z):
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-z.mean(0))
            self.done = True
        return torch.tanh(self.linear(z + self.shift))


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
    with pytest.raises(StepError, match="side effects"):
        solve(layers, Z0)
    assert not layers[1].done
    loop = solve(layers, Z0, solver=deeppcr.Loop())
    assert torch.allclose(layers[1].shift, -Z0.tanh().mean(0))
    assert relative_error(solve(layers, Z0).states, loop.states) < 1e-5


def test_parameters_that_every_call_changes():
    class Drifting(SetByFirst):
        def forward(self, z):
            with torch.no_grad():
                self.shift.add_(0.1)
            return torch.tanh(self.linear(z + self.shift))

    module = Drifting()
    with pytest.raises(StepError, match="changes the parameter 'shift' of a Drifting in place"):
        solve(module, Z0, length=20)
    assert torch.allclose(module.shift, torch.tensor(0.1))  # as the first call, which is real, has left it


@pytest.mark.parametrize("where", ["one step", "closure", "list", "loop"])
def test_lazy_modules_are_made_by_the_first_call(where):
    def make():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()).eval()

    if where in ("list", "loop"):
        layers = [nn.Tanh(), *(make() for _ in range(3))]
        step, settings = layers, {"solver": deeppcr.Loop()} if where == "loop" else {}
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


def test_random_numbers_are_not_taken_for_a_state_that_is_kept():
    class Random(Remembering):
        def forward(self, z):
            return nn.functional.dropout(super().forward(z))

    with pytest.raises(StepError, match="draws random numbers"):
        solve(Random(), Z0, length=20)


@pytest.mark.parametrize("error", [RuntimeError("of its own"), torch.OutOfMemoryError("out of memory")])
def test_an_error_of_the_step_is_not_taken_for_a_state_that_it_keeps(error):
    class Failing(Remembering):
        def forward(self, z):
            result = super().forward(z)
            if self.calls > 1:
                raise error
            return result

    with pytest.raises((RuntimeError, StepError), match=str(error)):
        solve(Failing(), Z0, length=20)


def test_an_error_that_comes_of_what_is_kept_is_explained():
    class Failing(Remembering):
        def forward(self, z):
            result = super().forward(z)
            if self.calls > 1:
                raise RuntimeError("of its own")
            return result

    with pytest.raises(StepError, match="Failing keeps 'calls'"):
        solve([nn.Tanh(), Failing()], Z0)


def test_a_model_that_many_steps_share_is_looked_at_once(monkeypatch):
    net = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(50))
    looked_at = []
    original = deeppcr.kept._Held
    monkeypatch.setattr(deeppcr.kept, "_Held", lambda module: looked_at.append(module) or original(module))
    Sequence([lambda z, l=l: net[l](z) for l in range(50)], Z0)
    assert len(looked_at) == 151


class Large(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.rest, self.cell = nn.ModuleList(nn.Linear(1, 1) for _ in range(2000)), cell


def test_of_a_large_model_only_what_the_step_names_is_looked_at(monkeypatch):
    model = Large(normed())
    with pytest.raises(StepError, match="changes the buffer '_u'"):
        solve(lambda z: model.cell(z), Z0, length=20)
    looked_at = []
    original = deeppcr.kept._Held
    monkeypatch.setattr(deeppcr.kept, "_Held", lambda module: looked_at.append(module) or original(module))
    model.eval()
    Sequence(lambda z: model.cell(z), Z0, length=20)
    assert len(looked_at) < 10
    Sequence(lambda z: next(model.children()) and z, Z0, length=20)
    assert len(looked_at) < 250


def test_callables_that_are_no_functions_are_not_asked_for_what_they_hold():
    class Proxy:
        def __call__(self, z):
            return torch.tanh(z)

        def __getattr__(self, name):
            raise RuntimeError("nothing here")

        @property
        def __class__(self):
            raise RuntimeError("nothing here")

    class Dispatcher:
        __code__ = (lambda z: z).__code__

        def __call__(self, z):
            return torch.tanh(z)

    class Frozen(dict):
        def copy(self):
            raise TypeError("no copies")

    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.settings = Frozen(a=1)

        def forward(self, z):
            return torch.tanh(z)

    for held in (Proxy(), Dispatcher(), Configured()):
        assert solve(lambda z, held=held: held(z), Z0, length=10).result.name == "CONVERGED"


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
    layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(4))
    assert solve(layers, Z0, solver=deeppcr.Loop()).states.isfinite().all()
    assert [layer.num_batches_tracked.item() for layer in layers] == [1] * 4


def test_where_solves_repeat_a_module_is_looked_at_once_in_each_mode_of_all_inside(monkeypatch):
    module = normed().eval()
    Sequence(module, Z0, length=5, traced=True).check_kept()
    with monkeypatch.context() as patch:
        patch.setattr(deeppcr.kept, "_Held", None)  # which cannot be called
        Sequence(module, Z0, length=5, traced=True).check_kept()
    module[0].train()
    for _ in range(2):  # it has not become harmless by being refused
        with pytest.raises(StepError, match="changes the buffer"):
            Sequence(module, Z0, length=5, traced=True)


def test_a_module_is_not_harmless_before_the_last_look():
    module = Late()
    for _ in range(2):
        sequence = Sequence(module, Z0, length=5, traced=True)
        sequence.values(Z0.expand(5, -1, -1), range(5)), sequence.values(Z0.expand(5, -1, -1), range(5))
        with pytest.raises(StepError, match="Late keeps 'calls'"):
            sequence.check_kept()
        module.calls = 0


def test_the_last_look_is_also_taken_where_a_recording_gives_the_result(monkeypatch):
    states = solve(torch.tanh, Z0, length=5).states

    class Found:
        def solve(self, solver, sequence, guess, plan):
            sequence.step(0, Z0), sequence.step(0, Z0), sequence.step(0, Z0)
            ones = torch.ones(3, dtype=torch.long)
            return Outcome(states, [deeppcr.Result.CONVERGED] * 3, ones, 5 * ones, torch.zeros(1, 3)), torch.zeros(3)

    module = deeppcr.solve.__globals__
    monkeypatch.setitem(module, "graphs", Found())
    monkeypatch.setitem(module, "may_capture", lambda *_: True)
    with torch.no_grad(), pytest.raises(StepError, match="Late keeps 'calls'"):
        solve(Late(), Z0, length=5)


def test_inputs_that_a_later_step_changes():
    xs = torch.ones(8, 3, 4)
    xs[5] = 2

    def step(z, x):
        return torch.tanh(z + (x.mul_(0.5) if x.sum() > 12 else x))

    with pytest.raises(StepError, match="changes xs in place"):
        solve(step, Z0, xs, solver=deeppcr.Jacobi())


class KeepsItsWeight(nn.Module):
    """Finds what it multiplies with at its first call."""

    def __init__(self):
        super().__init__()
        self.raw, self.weight = nn.Parameter(0.3 * torch.randn(4, 4)), None

    def forward(self, z):
        if self.weight is None:
            self.weight = self.raw - self.raw.mT
        return torch.tanh(z @ self.weight) + 0.5 * z


def test_modules_of_a_list_do_not_use_what_the_first_one_keeps():
    steps = [KeepsItsWeight() for _ in range(6)]
    with torch.no_grad(), pytest.raises(StepError, match="KeepsItsWeight keeps 'weight'"):
        deeppcr.solve(steps, torch.randn(3, 4))


def test_what_was_kept_without_its_history_cuts_off_no_gradient():
    kept, linear, z0 = KeepsItsWeight(), nn.Linear(4, 4), torch.randn(3, 4)
    steps = [lambda z: linear(z)] + [lambda z, i=i: kept(z) * (1 + i / 10) for i in range(4)]
    deeppcr.solve(steps, z0).states.sum().backward()
    found = kept.raw.grad
    kept.raw.grad, kept.weight = None, None
    deeppcr.solve(steps, z0, solver=deeppcr.Loop()).states.sum().backward()
    torch.testing.assert_close(found, kept.raw.grad)


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
