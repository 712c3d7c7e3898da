"""Modules that keep something from one call to the next are refused where that matters, and left alone where not."""

from collections import deque
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import ModuleType

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

    def __init__(self, last=3):
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(4, 4), 0, last

    def forward(self, z):
        self.calls += 1
        return torch.tanh(self.linear(z)) * (1 if self.calls <= self.last else 1.01)


@pytest.mark.parametrize("last", [2, 3, 4])
def test_what_matters_only_later_is_found_after_the_solve(last):
    module = Late(last)
    with pytest.raises(StepError, match="Late keeps 'calls'"):
        solve(module, Z0, length=20)
    assert module.calls == 1  # the first: all others are undone


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
    with pytest.raises(StepError, match=r"changes the parameter 'shift' of a SetByFirst.*solver=Loop"):
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
    assert not layers[1].shift.done
    states = solve(layers, Z0, solver=deeppcr.Loop()).states
    assert relative_error(solve(layers, Z0).states, states) < 1e-5
    assert torch.allclose(layers[1].shift.shift, -layers[1].linear(states[0]).tanh().mean(0), atol=1e-6)


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
    original = deeppcr.sequence.purity.Snapshot
    monkeypatch.setattr(
        deeppcr.sequence.purity, "Snapshot", lambda module: looked_at.append(module) or original(module)
    )
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
    original = deeppcr.sequence.purity.Snapshot
    monkeypatch.setattr(
        deeppcr.sequence.purity, "Snapshot", lambda module: looked_at.append(module) or original(module)
    )
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
    Sequence(module, Z0, length=5, traced=True).check_purity()
    with monkeypatch.context() as patch:
        patch.setattr(deeppcr.sequence.purity, "Snapshot", None)  # which cannot be called
        Sequence(module, Z0, length=5, traced=True).check_purity()
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
            sequence.check_purity()
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


class Seeing(nn.Module):
    """Keeps what it last saw, and fails when told to."""

    def __init__(self, error=None):
        super().__init__()
        self.linear, self.seen, self.log, self.error = nn.Linear(4, 4), None, [], error

    def forward(self, z):
        self.seen = z.detach()
        self.log.append(self.seen)
        if self.error is not None and self.seen.shape == Z0.shape and not _is_plain(self.seen):
            raise self.error
        return torch.tanh(self.linear(z))


def _is_plain(tensor):
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _solve_and_pull(step, **settings):
    solve(step, Z0, length=30, **settings).states.sum().backward()


@pytest.mark.filterwarnings("ignore:Newton stopped")
@pytest.mark.parametrize(
    "call",
    [
        lambda step: solve(step, Z0, length=30),
        _solve_and_pull,
        lambda step: _solve_and_pull(step, gradient=deeppcr.Unrolled()),
        lambda step: _solve_and_pull(step, solver=Newton(max_iterations=1)),
        lambda step: solve(step, Z0, length=30, solver=Newton(max_iterations=1), on_failure="return"),
        lambda step: check(step, Z0, length=30),
        lambda step: solve(deeppcr.rowwise(lambda z: step(z) - z.mean(0)), Z0, length=30),
        lambda step: solve(deeppcr.rowwise(step), Z0, length=30),
    ],
    ids=["solve", "backward", "unrolled", "finished by loop", "returned", "check", "refused", "rowwise"],
)
def test_modules_are_left_as_a_first_call_leaves_them(call):
    module = Seeing()
    with suppress(StepError):  # of rows that influence each other
        call(module)
    assert len(module.log) == 1
    assert _is_plain(module.seen)
    assert torch.equal(module.seen, Z0)


@pytest.mark.parametrize(
    "error", [KeyError("of its own"), KeyboardInterrupt(), torch.OutOfMemoryError("out of memory")]
)
def test_modules_are_left_as_a_first_call_leaves_them_by_any_error(error):
    module = Seeing(error)
    with pytest.raises(type(error)):
        solve(module, Z0, length=30, solver=deeppcr.Jacobi())
    assert len(module.log) == 1
    assert torch.equal(module.seen, Z0)


def test_modules_are_left_as_a_first_call_leaves_them_by_a_folded_call_that_is_stopped():
    module = Seeing()

    def step(z):
        after = module(z)
        if len(z) > 3:
            raise KeyboardInterrupt
        return after

    with pytest.raises(KeyboardInterrupt):
        solve(deeppcr.rowwise(step), Z0, length=5)
    assert torch.equal(module.seen, Z0)


def test_what_is_kept_only_with_gradients_is_undone():
    class Watching(Seeing):
        def forward(self, z):
            if torch.is_grad_enabled():
                return super().forward(z)
            return torch.tanh(self.linear(z))

    module = Watching()
    solve(module, Z0, length=5).states.sum().backward()
    assert torch.equal(module.seen, Z0)


def test_a_solve_that_is_refused_leaves_parameters_alone_that_its_transforms_could_not_write():
    layers = [nn.Tanh(), SetByFirst()]
    with pytest.raises(StepError, match="changes the parameter 'shift'"):
        solve(layers, Z0)
    assert not layers[1].shift.any()


def test_a_backward_pass_leaves_what_was_kept_since_the_solve():
    module = Seeing()
    solution = solve(module, Z0, length=30)
    module(2 * Z0)
    solution.states.sum().backward()
    assert torch.equal(module.seen, 2 * Z0)
    assert len(module.log) == 2


@pytest.mark.filterwarnings("ignore:Newton stopped")
@pytest.mark.parametrize("settings", [{}, {"solver": Newton(max_iterations=1)}])
def test_what_was_kept_without_its_history_cuts_off_no_unrolled_gradient(settings):
    kept = KeepsItsWeight()
    steps = [nn.Tanh(), kept, nn.Tanh()]
    solve(steps, Z0, gradient=deeppcr.Unrolled(), **settings).states.sum().backward()
    assert kept.weight is None
    found, kept.raw.grad = kept.raw.grad, None
    solve(steps, Z0, solver=deeppcr.Loop()).states.sum().backward()
    torch.testing.assert_close(found, kept.raw.grad)


@pytest.mark.parametrize("steps", ["one", "list", "stacked"])
def test_a_solve_that_is_refused_leaves_batch_statistics_alone(steps):
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    step = {"one": norms[0], "list": [nn.Tanh(), norms[0], nn.Tanh()], "stacked": [nn.Tanh(), *norms]}[steps]
    with pytest.raises(StepError, match="changes the buffer 'num_batches_tracked' of a BatchNorm1d"):
        solve(step, Z0, **({"length": 5} if steps == "one" else {}))
    for _, norm in norms:
        assert norm.num_batches_tracked == 0
        assert not norm.running_mean.any()
        assert (norm.running_var == 1).all()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), normed()])
        self.a, self.b = self.parts


@pytest.mark.parametrize(
    "make",
    [
        lambda model, part: (lambda z: model.b(z)) if part else (lambda z: model.a(z)),
        lambda model, part: lambda z: model.parts[part](z),
        lambda model, part: partial(lambda part, z: model.parts[part](z), part),
        lambda model, part: (lambda z: model.parts[1](z)) if part else (lambda z: model.parts[0](z)),
    ],
    ids=["name", "closure", "partial", "code"],
)
def test_where_solves_repeat_a_step_that_calls_another_part_of_a_model_is_looked_at(make):
    model = Parts()
    Sequence(make(model, 0), Z0, length=5, traced=True).check_purity()
    with pytest.raises(StepError, match="changes the buffer"):
        Sequence(make(model, 1), Z0, length=5, traced=True)


@pytest.mark.parametrize("change", [lambda m: m[1].append(normed()), lambda m: m.__setitem__(0, normed())])
def test_where_solves_repeat_a_model_that_has_another_part_is_looked_at(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential())
    before = model[0]  # which lives on
    Sequence(model, Z0, length=5, traced=True).check_purity()
    change(model)
    with pytest.raises(StepError, match="changes the buffer"):
        Sequence(model, Z0, length=5, traced=True)
    del before


def test_where_solves_repeat_what_a_module_keeps_is_undone_without_another_look(monkeypatch):
    module = Seeing()
    for count in (1, 2):
        if count == 2:
            monkeypatch.setattr(deeppcr.sequence.purity, "_call", None)  # which cannot be called
        sequence = Sequence(module, Z0, length=5, traced=True)
        sequence.values(Z0.expand(5, -1, -1), range(5))
        sequence.check_purity()
        sequence.undo_side_effects()
        assert len(module.log) == count
        assert sequence.keepers == [module]


HIDDEN = normed()


class Experiment:
    def __init__(self):
        self.network = normed()

    def apply(self, z):
        return self.network(z)

    def step(self, way):
        return (lambda z: self.network(z)) if way == "attribute" else (lambda z: self.apply(z))


class Caller:
    def __init__(self):
        self.inner = [normed()]

    def apply(self, z):
        return self.first()(z)

    def first(self):
        return self.inner[0]

    def hidden(self, z):
        return HIDDEN(z)


PYTHON = ModuleType("python")
PYTHON.network = normed()


def _in_a_function_inside(z):
    def inner(z):
        return HIDDEN(z)

    return inner(z)


@pytest.mark.parametrize(
    "step",
    [
        _in_a_function_inside,
        lambda z: sum(HIDDEN(each) for each in (z,)),
        Experiment().step("attribute"),
        Experiment().step("method"),
        (lambda held: lambda z: held.apply(z))(Caller()),
        (lambda held: lambda z: held.hidden(z))(Caller()),
        lambda z: PYTHON.network(z),
    ],
    ids=[
        "function inside",
        "generator",
        "attribute of an object",
        "method of an object",
        "list that a method of a method names",
        "global variable that a method names",
        "Python's module",
    ],
)
def test_modules_are_found_in_functions_inside_and_in_objects(step):
    with pytest.raises(StepError, match="changes the buffer '_u'"):
        solve(step, Z0, length=20)


class Clamping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 0.8, 0.95, 1.2]))

    def forward(self, z):
        with torch.no_grad():
            self.weight.clamp_(max=0.9)
        return torch.tanh(z) * self.weight


def test_what_is_written_again_to_the_same_is_no_reason_to_refuse_but_has_no_derivative():
    module = Clamping()
    loop = solve(deepcopy(module), Z0, length=20, solver=deeppcr.Loop())
    assert relative_error(solve(module, Z0, length=20, solver=deeppcr.Jacobi()).states, loop.states) < 1e-5
    with pytest.raises(StepError, match=r"changes the parameter 'weight' of a Clamping in place.*before the solve"):
        solve(Clamping(), Z0, length=20)


def test_an_embedding_that_scales_its_rows_is_taken_once_they_are_scaled():
    table, xs = nn.Embedding(5, 4, max_norm=0.5), torch.arange(10)[:, None].expand(10, 3) % 5

    def step(z, x):
        return 0.5 * torch.tanh(z) + table(x)

    with pytest.raises(StepError, match=r"changes the parameter 'weight' of a Embedding in place.*solver=Loop"):
        solve(step, Z0, xs, solver=deeppcr.Jacobi())
    loop = solve(step, Z0, xs, solver=deeppcr.Loop())
    assert relative_error(solve(step, Z0, xs, solver=deeppcr.Jacobi()).states, loop.states) < 1e-5


class Momentum(nn.Module):
    """Moves on with the difference to the state that it saw before."""

    def __init__(self, keeps):
        super().__init__()
        self.linear, self.seen, self.keeps = nn.Linear(4, 4), deque(maxlen=1), keeps
        self.before = None

    def forward(self, z):
        before = self.seen[0] if self.seen else self.before if self.before is not None else z
        if self.keeps == "deque":
            self.seen.append(z)
        else:
            self.before = z
        return torch.tanh(self.linear(z)) + 0.3 * (z - before)


@pytest.mark.parametrize("keeps", ["deque", "attribute"])
@pytest.mark.parametrize("wrap", [lambda step: step, deeppcr.rowwise], ids=["vmap", "rowwise"])
@pytest.mark.parametrize("solver", [Newton(), deeppcr.Jacobi()], ids=["Newton", "Jacobi"])
def test_what_a_transform_says_of_a_tensor_that_was_kept_is_explained(keeps, wrap, solver):
    with pytest.raises(StepError, match=r"a Momentum keeps '(seen|before)'"):
        solve(wrap(Momentum(keeps)), Z0, length=20, solver=solver)


def test_a_tensor_that_is_no_buffer_is_not_called_one():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.count = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, z):
            self.count += 1
            return torch.tanh(self.linear(z))

    with pytest.raises(StepError, match="changes the tensor 'count' of a Counting in place"):
        solve(Counting(), Z0, length=20)


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
    with pytest.raises(StepError, match=r"a Masking keeps 'mask'.*let the loop set once: solver=Loop\(\)"):
        solve(layers, Z0)
    loop = solve(layers, Z0, solver=deeppcr.Loop())
    assert relative_error(solve(layers, Z0).states, loop.states) < 1e-5
