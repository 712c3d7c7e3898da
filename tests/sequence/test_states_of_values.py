"""What a step keeps from call to call in values of all kinds, and what a look at them costs."""

import array
import collections
import ctypes
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Loop, Newton, StepError
from deeppcr.sequence.changing import state_of
from deeppcr.sequence.fingerprint import structure_of
from deeppcr.sequence.purity import SideEffect, watch
from deeppcr.ways import plan
from sequence.holding import cases

LATE = 30
Z0, XS = torch.zeros(1, 1), torch.linspace(-1, 1, 60).reshape(60, 1, 1)


class Attribute:
    def __init__(self, value):
        self.value = value

    def tick(self):
        self.value += 1
        return int(self.value.max())


def in_place(held):
    def tick():
        held[0] += 1
        return int(held[0])

    return tick


def growing(held, add):
    def tick():
        add(held)
        return len(held)

    return tick


def length_of_a_dict():
    held = {}

    def tick():
        held[len(held)] = 1
        return len(held)

    return tick


def by_key(held):
    def tick():
        held["calls"] += 1
        return held["calls"]

    return tick


def texts():
    held = {"log": ""}

    def tick():
        held["log"] += "."
        return len(held["log"])

    return tick


def in_a_class(method):
    class Clock:
        time = 0

        @classmethod
        def tick(cls):
            cls.time += 1
            return cls.time

    def tick():
        Clock.time += 1
        return Clock.time

    return Clock.tick if method else tick


def in_the_class_of_a_module():
    class Counts(torch.nn.Module):
        time = 0

        def forward(self):
            Counts.time += 1
            return Counts.time

    return Counts()


class HoldsAnArray(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = np.zeros(1)

    def forward(self):
        self.calls += 1
        return int(self.calls[0])


KINDS = {
    "array of NumPy": (lambda: in_place(np.zeros(1)), "held"),
    "attribute of NumPy": (lambda: Attribute(np.zeros(3)).tick, "value"),
    "scalar of NumPy": (lambda: Attribute(np.int64(0)).tick, "value"),
    "large array of NumPy": (lambda: in_place(np.zeros(100_000)), "held"),
    "array": (lambda: in_place(array.array("l", [0])), "held"),
    "large list": (lambda: in_place([0] * 5000), "held"),
    "bytearray": (lambda: growing(bytearray(), lambda held: held.append(1)), "held"),
    "set": (lambda: growing(set(), lambda held: held.add(len(held))), "held"),
    "list of objects": (lambda: growing([], lambda held: held.append(object())), "held"),
    "dict that grows": (length_of_a_dict, "held"),
    "Counter": (lambda: by_key(collections.Counter()), "calls"),
    "text": (texts, "entries"),
    "class": (lambda: in_a_class(False), "Clock.time"),
    "class method": (lambda: in_a_class(True), "Clock.time"),
    "class of a module": (in_the_class_of_a_module, "time"),
    "array in a module": (HoldsAnArray, "calls"),
}


def by_default():
    def tick(calls=[0]):  # noqa: B006 - which is the point
        calls[0] += 1
        return calls[0]

    return tick


def by_the_length_of_a_default():
    def tick(other=None, calls=[]):  # noqa: B006
        calls.append(None)
        return len(calls)

    return tick


def by_a_default_of_a_module():
    class Counts(torch.nn.Module):
        def forward(self, calls=[0]):  # noqa: B006
            calls[0] += 1
            return calls[0]

    return Counts()


def by_an_argument_of_a_partial():
    def tick(calls):
        calls[0] += 1
        return calls[0]

    return partial(tick, [0])


class Noting:
    def __init__(self):
        self.seen = []

    def __call__(self):
        self.seen.append(None)
        return len(getattr(self, "seen"))  # noqa: B009


def by_a_bound_method():
    calls = []
    count = calls.__len__

    def tick():
        calls.append(None)
        return count()

    return tick


KINDS |= {
    "default": (by_default, "entries"),
    "length of a default": (by_the_length_of_a_default, "calls"),
    "default of a module": (by_a_default_of_a_module, "entries"),
    "argument of a partial": (by_an_argument_of_a_partial, "entries"),
    "asked for by its name": (Noting, "seen"),
    "asked for by a method": (by_a_bound_method, "calls"),
}


def late(tick):
    """A step whose inputs count for less when it was called often."""
    return lambda z, x: torch.tanh(0.7 * z) + (0.5 if tick() > LATE else 1.0) * x


@pytest.mark.parametrize(("make", "name"), cases(KINDS))
def test_a_state_of_any_kind_is_left_to_the_loop_or_refused_by_name(make, name, monkeypatch):
    monkeypatch.setitem(plan._WORTH_NEWTON, "cpu", 0.0)
    monkeypatch.setitem(plan._OPERATION, "cpu", (1.0, 0.0, 0.0))
    expected = deeppcr.solve(late(make()), Z0, XS, solver=Loop()).states
    found = deeppcr.solve(late(make()), Z0, XS)
    assert torch.equal(found.states, expected)
    assert "at every call" in found.plan.notes[0]
    with pytest.raises(StepError, match=rf"keeps '[^']*{name}'"):
        deeppcr.solve(late(make()), Z0, XS, solver=Newton())


def test_a_flag_that_stays_is_refused_by_name():
    """It was set by a probe, so that all that came after was the same function, and not the loop's."""
    flag = {"done": False}

    def step(z, x):
        if flag["done"]:
            return z
        if x.abs().max() > 0.95:
            flag["done"] = True
        return 0.9 * torch.tanh(z) + x

    with pytest.raises(StepError, match=r"a dict \('flag'\) keeps 'entries'"):
        deeppcr.solve(step, Z0, XS.flip(0)[2:], solver=Newton())


def test_a_container_is_called_by_its_name():
    settings = {"counts": [0]}

    def step(z):
        settings["counts"][0] += 1
        return z

    changed = watch(step)
    step(Z0)
    assert "a list (\"settings['counts']\")" in str(changed())


def test_what_is_only_looked_up_or_made_anew_is_no_state():
    memo, known = {}, Attribute(None)

    def step(z, x):
        known.value = (True, "as before", 3)
        key = len(known.value), object()
        if key not in memo:
            memo[key] = 0.5
        return memo[key] * torch.tanh(z) + x

    known.value = (True, "as before", 3)
    assert deeppcr.solve(step, Z0, XS, solver=Newton()).result is deeppcr.Result.CONVERGED


class Holds:
    def __init__(self, data):
        self.data, self.scale = data, 1.0

    def step(self, z):
        return self.scale * z

    def reads(self, z):
        return self.last() * z

    def last(self):
        return self.data[-1]


def test_data_that_no_code_names_is_not_walked_through():
    pairs = [(torch.zeros(2), i) for i in range(20_000)]
    step = Holds(pairs).step
    structure_of(step)
    begin = time.perf_counter()
    assert structure_of(step)[1] == []
    assert time.perf_counter() - begin < 0.03  # else 0.2


@pytest.mark.parametrize("wrap", [lambda held: held.reads, lambda held: partial(pick, (held.data, held))])
def test_data_that_is_named_or_reached_otherwise_is_looked_into(wrap):
    for data, other in (([0.0] * 500, -0.0), ([torch.zeros(2)] * 500, torch.zeros(3)), ([1] * 500, True)):
        step = wrap(Holds(data))
        before = structure_of(step)[0]
        assert structure_of(step)[0] == before
        data[-1] = other
        assert structure_of(step)[0] != before


def pick(held, z):
    return held[0][-1] * z


@pytest.mark.parametrize(
    "memory",
    [memoryview(bytearray(10**7)), memoryview(bytearray(10**7))[::2], (ctypes.c_int * 10**6)(), memoryview(bytearray(9))],
    ids=["view", "every second", "C", "short"],
)  # fmt: skip
def test_of_much_memory_the_ends_are_looked_at(memory):
    before = state_of(memory)
    assert sum(len(each) for each in before if isinstance(each, bytes)) < 10**5
    memory[len(memory) - 1] = 7
    assert state_of(memory) != before


def test_memory_that_was_released_has_no_state():
    memory = memoryview(bytearray(9))
    memory.release()
    assert state_of(memory) == []


def test_numpy_is_not_imported_for_a_look(monkeypatch):
    held = np.zeros(1)
    monkeypatch.delitem(sys.modules, "numpy")
    assert state_of(held) is None
    assert "numpy" not in sys.modules


TOLD, OFTEN = {"calls": 0}, list(range(5))


class Looks(nn.Module):
    """Whose arguments nobody changes; what its method names besides is no state of its own."""

    def forward(self, z, x, dims=(0, -1), scale={"by": [0.5]}):  # noqa: B006
        TOLD["calls"] += 1
        return scale["by"][0] * torch.tanh(z.flip(dims[-1])) + x + 0.01 * len(OFTEN)


class Recalls(nn.Module):
    """That names a module of its class, as in a notebook, where it is itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, z, x, dims=(0, 1)):
        return torch.tanh(RECALLED.linear(z)) + x


RECALLED = Recalls()


@pytest.mark.parametrize("module", [Looks(), RECALLED])
def test_arguments_that_nobody_changes_bring_nothing_in(module):
    solution = deeppcr.solve(module, torch.zeros(2, 3), torch.randn(40, 2, 3), solver=Newton())
    assert solution.result is deeppcr.Result.CONVERGED


class Helped(nn.Module):
    def tick(self, calls=[0]):  # noqa: B006
        calls[0] += 1
        return calls[0]

    def forward(self, z, x):
        return torch.tanh(0.7 * z) + (0.5 if self.tick() > 30 else 1.0) * x


class Named:
    def __init__(self):
        self.seen, self.name = [], "seen"

    def __call__(self, z, x):
        self.seen.append(None)
        return torch.tanh(0.7 * z) + (0.5 if len(getattr(self, self.name)) > 30 else 1.0) * x


@pytest.mark.parametrize("kind", [Helped, Named])
def test_states_in_arguments_of_a_method_or_asked_for_by_a_name_that_is_held(kind):
    with pytest.raises(SideEffect):
        deeppcr.solve(kind(), torch.zeros(2, 3), torch.randn(40, 2, 3), solver=Newton())
