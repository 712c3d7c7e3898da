"""Modules that keep something from one call to the next are refused by name."""

import random
from collections import deque

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Newton, StepError, check
from deeppcr.sequence import Sequence
from deeppcr.ways import plan
from problems import plain_loop
from sequence.keeping import Z0, Caching, KeepsItsWeight, Later, Seeing, SetByFirst, solve


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


def test_parameters_that_every_call_changes():
    class Drifting(SetByFirst):
        def forward(self, z):
            with torch.no_grad():
                self.shift.add_(0.1)
            return torch.tanh(self.linear(z + self.shift))

    module = Drifting()
    with pytest.raises(StepError, match="changes the parameter 'shift' of a Drifting in place"):
        solve(module, Z0, length=20)


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


def test_inputs_that_a_later_step_changes():
    xs = torch.ones(8, 3, 4)
    xs[5] = 2

    def step(z, x):
        return torch.tanh(z + (x.mul_(0.5) if x.sum() > 12 else x))

    with pytest.raises(StepError, match="changes xs in place"):
        solve(step, Z0, xs, solver=deeppcr.Jacobi())


def test_modules_of_a_list_do_not_use_what_the_first_one_keeps():
    steps = [KeepsItsWeight() for _ in range(6)]
    with torch.no_grad(), pytest.raises(StepError, match="KeepsItsWeight keeps 'weight'"):
        solve(steps, torch.randn(3, 4))


@pytest.mark.parametrize("steps", ["one", "list", "stacked"])
def test_batch_statistics_in_train_mode(steps):
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    step = {"one": norms[0], "list": [nn.Tanh(), norms[0], nn.Tanh()], "stacked": [nn.Tanh(), *norms]}[steps]
    with pytest.raises(StepError, match="changes the buffer 'num_batches_tracked' of a BatchNorm1d"):
        solve(step, Z0, **({"length": 5} if steps == "one" else {}))


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


class Velocity:
    velocity = 0

    def __call__(self, z, x):
        self.velocity = 0.9 * self.velocity + x
        return 0.5 * z + self.velocity

    def method(self, z, x):
        return self(z, x)


class VelocityInPlace:
    def __init__(self):
        self.velocity = torch.zeros(2, 3)

    def __call__(self, z, x):
        self.velocity.mul_(0.9).add_(x)
        return 0.5 * z + self.velocity


class Clock:
    time = 0

    def __call__(self, z, x):
        self.time += 1
        return 0.5 * z + x * self.time


def in_a_closure():
    velocity = 0

    def step(z, x):
        nonlocal velocity
        velocity = 0.9 * velocity + x
        return 0.5 * z + velocity

    return step


def in_a_list():
    seen = []

    def step(z, x):
        seen.append(z)
        return 0.5 * z + x + 0.1 * seen[max(0, len(seen) - 3)]

    return step


def counting_in_a_list():
    count = [0]

    def step(z, x):
        count[0] += 1
        return 0.5 * z + x + count[0] / 100

    return step


def largest_in_a_dict():
    seen = {"largest": 0.0}

    def step(z, x):
        seen["largest"] = max(seen["largest"], x[0, 0].item())
        return 0.5 * z + x - seen["largest"]

    return step


def by_a_generator(draw):
    def make():
        generator = torch.Generator().manual_seed(0) if draw else random.Random(0)

        def step(z, x):
            drawn = torch.rand((), generator=generator) if draw else generator.random()
            return 0.5 * z + x + drawn

        return step

    return make


def longer_after_a_while():
    calls = []

    def step(z, x):
        calls.append(1)
        return 0.5 * z + x + (len(calls) > 20)

    return step


def other_after_a_while():
    """What an iteration comes to, and what it is judged by, is the same function all the time, and not the loop's."""
    count = [0]

    def step(z, x):
        count[0] += 1
        return 0.5 * z + x + (count[0] > 40)

    return step


COUNTING = [Clock, counting_in_a_list, largest_in_a_dict, longer_after_a_while, other_after_a_while]
DRAWING = [by_a_generator(True), by_a_generator(False)]
OUTSIDE = [Velocity, lambda: Velocity().method, VelocityInPlace, in_a_closure, in_a_list]


@pytest.mark.parametrize("make", [*OUTSIDE, *COUNTING, *DRAWING])
def test_what_a_step_keeps_outside_of_modules_is_left_to_the_loop_by_default(make, monkeypatch):
    """From its second step on no step is taken twice, not even by a probe: that would go on from what the probe has left."""
    monkeypatch.setitem(plan._WORTH_NEWTON, "cpu", 0.0)
    monkeypatch.setitem(plan._OPERATION, "cpu", (1.0, 0.0, 0.0))
    z0, xs = torch.zeros(2, 3), torch.linspace(0, 1, 300).reshape(50, 2, 3)
    for _ in range(2):
        found = deeppcr.solve(make(), z0, xs)
        assert torch.equal(found.states, plain_loop(make(), z0, xs))
        assert "at every call" in found.plan.notes[0]


@pytest.mark.parametrize("solver", [None, Newton()], ids=["default", "Newton"])
def test_what_a_step_notes_and_does_not_read_is_its_own_affair(solver, monkeypatch):
    monkeypatch.setitem(plan._WORTH_NEWTON, "cpu", 0.0)
    monkeypatch.setitem(plan._OPERATION, "cpu", (1.0, 0.0, 0.0))
    calls, shapes, sizes = [], {}, set()

    def step(z, x):
        calls.append((1, z.sum()))
        sizes.add(object())
        if (key := object()) not in shapes:  # as a memo
            shapes[key] = 1
        return 0.5 * torch.tanh(z) + x

    found = deeppcr.solve(step, torch.zeros(2, 3), torch.linspace(0, 1, 300).reshape(50, 2, 3), solver=solver)
    assert found.result is deeppcr.Result.CONVERGED


@pytest.mark.parametrize("solver", [Newton(), deeppcr.Jacobi()], ids=["Newton", "Jacobi"])
@pytest.mark.parametrize(
    ("make", "message"),
    [*[(each, "keeps '(time|entries|calls)' from one call to the next") for each in COUNTING],
     *[(each, "draws random numbers") for each in DRAWING]],
)  # fmt: skip
def test_numbers_that_a_step_keeps_outside_of_modules_are_refused_by_name(make, message, solver):
    """Also where an iteration would converge, to something else than the loop."""
    z0, xs = torch.zeros(2, 3), torch.linspace(0, 1, 300).reshape(50, 2, 3)
    with pytest.raises(StepError, match=message):
        deeppcr.solve(make(), z0, xs, solver=solver)


def test_what_is_not_a_number_is_as_it_was():
    missing = float("nan")
    found = deeppcr.solve(lambda z: torch.nan_to_num(z + missing), Z0, length=20, solver=Newton())
    assert found.result is deeppcr.Result.CONVERGED


@pytest.mark.parametrize("make", OUTSIDE)
def test_a_tensor_that_a_step_keeps_outside_of_modules_is_named(make):
    """Not that a tensor escaped from a transform, of which its author knows nothing."""
    with pytest.raises(deeppcr.StepError, match=r"keeps '(velocity|seen)' from one call to the next"):
        deeppcr.solve(make(), torch.zeros(2, 3), torch.ones(50, 2, 3), solver=deeppcr.Newton())
