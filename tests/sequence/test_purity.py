"""Modules that keep something from one call to the next are refused by name; what a first call sets for good is not."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import deeppcr
from deeppcr import Newton, StepError, check
from deeppcr.iteration import Outcome
from deeppcr.sequence import Sequence
from problems import relative_error
from tape import capture

solve = partial(deeppcr.solve, solver=Newton())  # what Newton meets; the loop where a test says so
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


def test_a_module_whose_result_depends_on_what_it_keeps_is_refused():
    module = Numbering()
    with pytest.raises(StepError, match="Numbering keeps 'calls' from one call to the next"):
        solve(module, Z0, length=20)
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


class Seeing(nn.Module):
    """Keeps what it last saw, or all of it in what it is given; nothing depends on it."""

    def __init__(self, recent=None):
        super().__init__()
        self.linear, self.seen, self.recent = nn.Linear(4, 4), None, recent

    def forward(self, z):
        if isinstance(self.recent, set):
            self.recent.add(z.detach())
        elif self.recent is not None:
            self.recent.append(z.detach())
        else:
            self.seen = z.detach()
        return torch.tanh(self.linear(z))


@pytest.mark.parametrize("several", [False, True], ids=["one step", "stacked"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Late, "calls"),
        (Remembering, "table"),
        (Seeing, "seen"),
        (lambda: Seeing(deque(maxlen=1)), "recent"),
        (lambda: Seeing([]), "recent"),
        (lambda: Seeing(set()), "recent"),
    ],
    ids=["counter", "many things", "attribute", "queue", "list", "set"],
)
def test_what_every_call_keeps_is_refused_used_or_not(make, name, several):
    step, settings = ([make() for _ in range(4)], {}) if several else (make(), {"length": 20})
    with pytest.raises(StepError, match=rf"keeps '{name}' from one call to the next.*Take that out.*solver=Loop\(\)"):
        solve(step, Z0, **settings)
    (finding,) = check(step, Z0, **settings)
    assert finding.kind == "side effect"
    assert f"keeps '{name}'" in finding.message
    assert solve(step, Z0, solver=deeppcr.Loop(), **settings).states.isfinite().all()


def test_what_every_call_changes_is_refused_before_the_solve():
    module = Late()
    with pytest.raises(StepError, match="Late keeps 'calls'"):
        solve(module, Z0, length=20)
    assert module.calls == 2


class Rebinding(nn.Module):
    """Sets a parameter or buffer anew at every call, instead of writing to it."""

    def __init__(self, name):
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.ones(4)), name
        self.register_buffer("scale", torch.ones(4))

    def forward(self, z):
        if self.name == "weight":
            self.weight = nn.Parameter(self.weight.detach().clone())
        else:
            self.scale = self.scale.clone()
        return torch.tanh(z) * self.weight * self.scale


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_parameters_and_buffers_that_every_call_replaces(name):
    with pytest.raises(StepError, match=f"a Rebinding keeps '{name}'"):
        solve(Rebinding(name), Z0, length=20)


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


def test_what_is_kept_only_with_gradients_is_refused():
    class Watching(Seeing):
        def forward(self, z):
            return super().forward(z) if torch.is_grad_enabled() else torch.tanh(self.linear(z))

    with torch.no_grad():
        assert solve(Watching(), Z0, length=5).result.name == "CONVERGED"
    with pytest.raises(StepError, match="a Watching keeps 'seen'"):
        solve(Watching(), Z0, length=5)


def test_numbers_and_shapes_that_every_call_sets_to_the_same_are_no_change():
    class Measuring(nn.Module):
        def forward(self, z):
            self.rows, self.share, self.shape = z.shape[0], 1 / z.shape[0], [*z.shape]
            return torch.tanh(z)

    assert solve(Measuring(), torch.ones(300, 4), length=5).result.name == "CONVERGED"
    network = deeppcr.nn.MLP(4, 4, 3, 4, mode="sequential")
    assert solve(lambda z: torch.tanh(network(z)), Z0, length=5).result.name == "CONVERGED"


class Later:
    """A step that from its third call on lets a module keep what it sees; and may fail then."""

    def __init__(self, error=None):
        self.module, self.calls, self.error = Seeing(), [], error

    def __call__(self, z):
        self.calls.append(1)
        after = self.module(z) if len(self.calls) > 2 else torch.tanh(self.module.linear(z))
        if self.error is not None and len(self.calls) > 3:
            raise self.error
        return after


@pytest.mark.filterwarnings("error:Newton stopped")  # which is not what is wrong
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"solver": deeppcr.Jacobi()},
        {"solver": Newton(max_iterations=1)},
        {"solver": Newton(max_iterations=1), "on_failure": "return"},
        {"gradient": deeppcr.Unrolled()},
        {"solver": Newton(stop=deeppcr.FixedIterations(3)), "gradient": deeppcr.Unrolled()},
    ],
    ids=["Newton", "Jacobi", "finished by loop", "returned", "unrolled", "fixed"],
)
@pytest.mark.parametrize("wrap", [lambda step: step, deeppcr.rowwise], ids=["vmap", "rowwise"])
def test_what_is_kept_after_the_first_step_is_found_after_the_solve(settings, wrap):
    with pytest.raises(StepError, match="a Seeing keeps 'seen'"):
        solve(wrap(Later()), Z0, length=30, **settings)


def test_rows_of_a_folded_call_that_differ_by_what_a_module_keeps():
    module, calls = Seeing(), []

    def step(z):
        calls.append(1)
        after = torch.tanh(module.linear(z)) + (0 if module.seen is None else 0.1)
        return after if len(calls) < 2 else after + 0 * module(z)

    with pytest.raises(StepError, match="a Seeing keeps 'seen'"):
        Sequence(deeppcr.rowwise(step), Z0, length=5)


@pytest.mark.parametrize(
    "error",
    [KeyError("of its own"), KeyboardInterrupt("of the caller"), torch.OutOfMemoryError("out of memory")],
    ids=["its own", "interrupt", "memory"],
)
def test_other_errors_than_of_transforms_are_left_as_they_are(error):
    with pytest.raises(type(error), match=str(error.args[0])):
        solve(Later(error), Z0, length=30)


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
    layers = [nn.Tanh(), *(SetByFirst() for _ in range(count))]
    with pytest.raises(StepError, match=r"changes the parameter 'shift' of a SetByFirst.*solver=Loop.*not put back"):
        solve(layers, Z0)
    layers = [nn.Tanh(), *(SetByFirst() for _ in range(count))]
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


def test_random_numbers_are_not_taken_for_a_state_that_is_kept():
    class Random(Caching):
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
    class Failing(Late):
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
    original = deeppcr.sequence.purity._Held
    monkeypatch.setattr(
        deeppcr.sequence.purity, "_Held", lambda modules: looked_at.extend(modules) or original(modules)
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
    original = deeppcr.sequence.purity._Held
    monkeypatch.setattr(
        deeppcr.sequence.purity, "_Held", lambda modules: looked_at.extend(modules) or original(modules)
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*deprecated.*")
def test_scripted_modules_are_not_looked_into():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)).eval()
    states = solve(torch.jit.trace(layer, Z0), Z0, length=10).states
    assert relative_error(states, solve(layer, Z0, length=10).states) < 1e-5


def test_the_loop_takes_modules_that_keep_what_they_like():
    layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(4))
    assert solve(layers, Z0, solver=deeppcr.Loop()).states.isfinite().all()
    assert [layer.num_batches_tracked.item() for layer in layers] == [1] * 4


def test_every_solve_looks_anew():
    module = normed().eval()
    assert solve(module, Z0, length=5).result.name == "CONVERGED"
    module[0].train()
    with pytest.raises(StepError, match="changes the buffer"):
        solve(module, Z0, length=5)


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_last_look_is_also_taken_where_a_recording_gives_the_result(monkeypatch, differentiated):
    step = Later()
    loop = solve(step, Z0, length=5, solver=deeppcr.Loop()).states.detach()
    step.calls.clear()

    class Found:
        def solve(self, solver, sequence, guess, plan):
            sequence.step(0, Z0), sequence.step(0, Z0)
            ones = torch.ones(3, dtype=torch.long)
            return Outcome(loop, [deeppcr.Result.CONVERGED] * 3, ones, 5 * ones, torch.zeros(1, 3)), torch.zeros(3)

    module = deeppcr.solve.__globals__
    monkeypatch.setitem(module, "captured_solves", Found())
    monkeypatch.setitem(module, "may_capture", lambda *_: True)
    with torch.set_grad_enabled(differentiated), pytest.raises(StepError, match="a Seeing keeps 'seen'"):
        solve(step, Z0, length=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [(Seeing, "a Seeing keeps 'seen'"), (lambda: nn.BatchNorm1d(4), "changes the buffer"), (Caching, None)],
    ids=["replaced", "written", "first call"],
)
def test_while_a_graph_is_captured_nothing_is_called_twice_and_changes_are_found(make, message):
    calls, module = [], make()

    def step(z):
        if _is_plain(z):
            calls.append(1)
        return module(z)

    expected = pytest.raises(StepError, match=message) if message else nullcontext()
    with torch.no_grad(), expected:
        capture(lambda: solve(step, Z0, length=5, solver=Newton(stop=deeppcr.FixedIterations(3)), on_failure="return"))
    assert len(calls) == 1


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
        solve(steps, torch.randn(3, 4))


@pytest.mark.parametrize("gradient", [deeppcr.Implicit(), deeppcr.Unrolled()])
def test_what_a_later_step_sets_for_good_is_taken_once_it_is_set(gradient):
    kept, linear, z0 = KeepsItsWeight(), nn.Linear(4, 4), torch.randn(3, 4)
    steps = [lambda z: linear(z)] + [lambda z, i=i: kept(z) * (1 + i / 10) for i in range(4)]
    with pytest.raises(StepError, match=r"keeps 'weight'.*set by a call before the solve"):
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


def _is_plain(tensor):
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@pytest.mark.parametrize("steps", ["one", "list", "stacked"])
def test_batch_statistics_in_train_mode(steps):
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    step = {"one": norms[0], "list": [nn.Tanh(), norms[0], nn.Tanh()], "stacked": [nn.Tanh(), *norms]}[steps]
    with pytest.raises(StepError, match="changes the buffer 'num_batches_tracked' of a BatchNorm1d"):
        solve(step, Z0, **({"length": 5} if steps == "one" else {}))


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


@pytest.mark.parametrize("solver", [Newton(), deeppcr.Jacobi()], ids=["Newton", "Jacobi"])
def test_what_is_written_again_to_the_same_is_refused_too(solver):
    with pytest.raises(StepError, match=r"changes the parameter 'weight' of a Clamping in place.*before the solve"):
        solve(Clamping(), Z0, length=20, solver=solver)


def test_an_embedding_that_scales_its_rows_is_taken_once_it_no_longer_does():
    table, xs = nn.Embedding(5, 4, max_norm=0.5), torch.arange(10)[:, None].expand(10, 3) % 5

    def step(z, x):
        return 0.5 * torch.tanh(z) + table(x)

    loop = solve(step, Z0, xs, solver=deeppcr.Loop())  # which has scaled all rows
    with pytest.raises(StepError, match=r"changes the parameter 'weight' of a Embedding in place.*before the solve"):
        solve(step, Z0, xs)
    table.max_norm = None
    assert relative_error(solve(step, Z0, xs).states, loop.states) < 1e-5


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
    with pytest.raises(StepError, match=r"a Masking keeps 'mask'.*let the loop set it once: solver=Loop\(\)"):
        solve(layers, Z0)
    loop = solve(layers, Z0, solver=deeppcr.Loop())
    assert relative_error(solve(layers, Z0).states, loop.states) < 1e-5


def test_a_solution_does_not_keep_what_modules_once_held():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.big = torch.zeros(1000)

        def forward(self, z):
            return torch.tanh(self.weight * z)

    module = Holding()
    solution = solve(module, torch.ones(2, 3), length=9)
    held = weakref.ref(module.big)
    module.big = None
    gc.collect()
    assert held() is None
    assert solution.states.requires_grad
