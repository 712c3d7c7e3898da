"""What a step keeps outside of modules: refused by name by Newton's method, and left to the loop by default."""

import random
import random as shared_random
import sys
import threading
from contextvars import ContextVar
from random import random as draw
from types import MappingProxyType

import numpy as np
import pytest
import torch
from numpy import random as numbers

import deeppcr
from deeppcr import Newton, StepError
from deeppcr.sequence.changing import state_of
from deeppcr.ways import plan
from problems import plain_loop
from sequence.keeping import Z0


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


def by_a_shared_generator(seed, draw):
    """Of the whole process; what is drawn matters hardly ever."""

    def make():
        seed(0)
        return lambda z, x: 0.5 * z + x + (draw() < 1e-9)

    return make


def by_names_of_its_own():
    """Nothing here is called random."""
    return lambda z, x: 0.5 * z + x + (draw() < 0) + (numbers.exponential() < 0)  # noqa: NPY002


class DrawsByNamesOfItsOwn(torch.nn.Module):
    def forward(self, z, x):
        return 0.5 * z + x + (numbers.exponential() < 0)  # noqa: NPY002


class DrawsSeldom(torch.nn.Module):
    def __init__(self):
        super().__init__()
        random.seed(0)

    def forward(self, z, x):
        return 0.5 * z + x + (shared_random.gauss(0, 1) > 9)


def longer_after_a_while():
    calls = []

    def step(z, x):
        calls.append(1)
        return 0.5 * z + x + (len(calls) > 20)

    return step


def are_many(_, entries):
    return len(entries) > 20


def longer_by_keyword():
    """Read beside another variable, which is one instruction from Python 3.13 on."""

    def step(z, x, *, calls=[]):  # noqa: B006 - of this step
        calls.append(1)
        return 0.5 * z + x + are_many(x, calls)

    return step


def other_after_a_while():
    """What an iteration comes to, and what it is judged by, is the same function all the time, and not the loop's."""
    count = [0]

    def step(z, x):
        count[0] += 1
        return 0.5 * z + x + (count[0] > 40)

    return step


def in_a_variable_of_a_context():
    count = ContextVar("count")
    count.set(0.0)

    def step(z, x):
        count.set(count.get() + 1)
        return 0.5 * z + x * count.get()

    return step


def at_something(holder):
    """An attribute: of a tensor, or of what each thread has for itself."""

    def make():
        held = holder()
        held.count = 0.0

        def step(z, x):
            held.count += 1
            return 0.5 * z + x * held.count

        return step

    return make


ELSEWHERE = [in_a_variable_of_a_context, at_something(threading.local), at_something(lambda: torch.zeros(3))]
COUNTING = [
    Clock, counting_in_a_list, largest_in_a_dict, longer_after_a_while, longer_by_keyword, other_after_a_while,
]  # fmt: skip
DRAWING = [
    by_a_generator(True), by_a_generator(False), by_a_shared_generator(random.seed, lambda: random.random()),
    by_a_shared_generator(random.seed, random.random), by_a_shared_generator(np.random.seed, lambda: np.random.rand()),  # noqa: NPY002
    by_a_shared_generator(np.random.seed, np.random.rand), DrawsSeldom, by_names_of_its_own, DrawsByNamesOfItsOwn,
]  # fmt: skip
OUTSIDE = [Velocity, lambda: Velocity().method, VelocityInPlace, in_a_closure, in_a_list]


@pytest.mark.parametrize("make", [*OUTSIDE, *COUNTING, *ELSEWHERE, *DRAWING])
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


class Scaled(torch.nn.Module):
    """With names of distributions."""

    gamma, beta = 0.5, 0.1

    def sample(self, z, x):
        return self.gamma * z + x

    def forward(self, z, x):
        return self.sample(z, x) + self.beta


@pytest.mark.parametrize("make", [Scaled, lambda: Scaled().sample, lambda: lambda z, x, inner=Scaled(): inner(z, x)])
def test_what_others_draw_meanwhile_is_not_taken_for_the_steps(make):
    """Other threads, say; here the guess."""

    def guess(*_):
        random.random()
        return torch.full((50, 2, 3), numbers.rand())  # noqa: NPY002

    z0, xs = torch.zeros(2, 3), torch.linspace(0, 1, 300).reshape(50, 2, 3)
    assert deeppcr.solve(make(), z0, xs, solver=Newton(), guess=guess).result is deeppcr.Result.CONVERGED


def test_numbers_that_are_drawn_in_pairs_are_a_state():
    generator = np.random.RandomState(0)
    before = [state_of(generator), generator.randn()][0]
    between = [state_of(generator), generator.randn()][0]
    assert before != between != state_of(generator)
    assert state_of(generator) == state_of(generator)


WEIGHTS = {"a": torch.full((3,), 0.5), "b": torch.full((3,), 0.25)}


@pytest.mark.parametrize("view", [WEIGHTS.values(), WEIGHTS.items(), WEIGHTS.keys(), MappingProxyType(WEIGHTS)])
def test_what_stands_for_a_dictionary_is_the_same_at_every_look(view):
    """Though what it holds is put into a list of its own each time."""

    def step(z, x):
        weights = (
            dict(view)
            if isinstance(view, (type(WEIGHTS.items()), MappingProxyType))
            else dict(zip("ab", view, strict=True))
        )
        return (weights["a"] if isinstance(weights["a"], torch.Tensor) else 0.5) * z + x

    found = deeppcr.solve(step, torch.zeros(2, 3), torch.ones(50, 2, 3), solver=Newton())
    assert found.result is deeppcr.Result.CONVERGED


def test_what_a_step_keeps_behind_the_values_of_a_dictionary_is_seen():
    """Also where other lists are looked at twice, because something is noted there."""
    held, notes = {"velocity": torch.zeros(2, 3)}, []

    def make(values):
        def step(z, x):
            notes.append(1)
            (velocity,) = values
            velocity.mul_(0.9).add_(x)
            return 0.5 * z + velocity

        return step

    with pytest.raises(StepError, match="from one call to the next"):
        deeppcr.solve(make(held.values()), torch.zeros(2, 3), torch.ones(50, 2, 3), solver=Newton())


def test_what_is_not_a_number_is_as_it_was():
    missing = float("nan")
    found = deeppcr.solve(lambda z: torch.nan_to_num(z + missing), Z0, length=20, solver=Newton())
    assert found.result is deeppcr.Result.CONVERGED


@pytest.mark.parametrize("make", OUTSIDE)
def test_a_tensor_that_a_step_keeps_outside_of_modules_is_named(make):
    """Not that a tensor escaped from a transform, of which its author knows nothing."""
    with pytest.raises(deeppcr.StepError, match=r"keeps '(velocity|seen)' from one call to the next"):
        deeppcr.solve(make(), torch.zeros(2, 3), torch.ones(50, 2, 3), solver=deeppcr.Newton())


def test_a_library_that_is_imported_during_the_solve_has_drawn_nothing(monkeypatch):
    """PyTorch imports some when it first differentiates, numpy.random with them."""
    monkeypatch.delitem(sys.modules, "numpy.random")

    def random(z):  # which is what a step says that draws numbers
        return torch.cos(z)

    step = {"random": random}

    def drawn(z):
        if torch._C._functorch.maybe_current_level() is not None:
            monkeypatch.setitem(sys.modules, "numpy.random", np.random)
        return step["random"](z)

    assert deeppcr.solve(drawn, Z0, length=20, solver=Newton()).result is deeppcr.Result.CONVERGED
