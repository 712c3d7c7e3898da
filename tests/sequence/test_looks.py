"""Which modules are looked at for what they keep, wherever a step holds them, and when."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import deeppcr
from deeppcr import Newton, StepError
from deeppcr.newton.iteration import Outcome
from deeppcr.sequence import Sequence
from deeppcr.ways import given
from problems import relative_error
from sequence.keeping import Z0, Caching, Later, Seeing, solve
from tape import capture


def normed():
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh())


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
    step.calls = count(1)

    class Found:
        def solve(self, solver, sequence, guess, plan):
            sequence.step(0, Z0), sequence.step(0, Z0)
            ones = torch.ones(3, dtype=torch.long)
            return Outcome(loop, [deeppcr.Result.CONVERGED] * 3, ones, 5 * ones, torch.zeros(1, 3)), torch.zeros(3)

    monkeypatch.setattr(given, "captured_solves", Found())
    monkeypatch.setattr(given, "may_capture", lambda *_: True)
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


def _is_plain(tensor):
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


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
