"""A fingerprint sees what a function closes over, however it is held: made of another number, changed in place, equal but not the same."""

import ctypes
import functools
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from contextvars import ContextVar
from types import MappingProxyType, ModuleType, SimpleNamespace

import pytest
import torch

from deeppcr.sequence.fingerprint import fingerprint, structure_of
from sequence.holding import Processor, cases, closing_over


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self, scale, hidden=0):
        self.scale, self.__hidden = scale, hidden

    def __call__(self, z):
        return (self.scale + self.__hidden) * z


class Below(Slotted):
    __slots__ = ("more",)


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, z, t):
        return self.function(z)


def with_default(value):
    return lambda z, scale=value: z * scale


def with_keyword_default(value):
    def scaled(z, *, scale=value):
        return z * scale

    return scaled


def with_attribute(value):
    def scaled(z):
        return z * scaled.scale

    scaled.scale = value
    return scaled


def nested(value):
    def outer(z):
        def inner(z):
            return z * value

        return inner(z)

    return outer


def hooked(value, register):
    module = torch.nn.ReLU()
    getattr(module, register)(lambda module, *rest: value)
    return module


#: What a denoiser may close over: made of a number, on which its result depends.
HELD = {
    "a number": lambda n: n,
    "a closure": closing_over,
    "a closure in a list": lambda n: [torch.sin, closing_over(n)],
    "a closure in a closure": lambda n: closing_over(closing_over(n)),
    "a nested function": nested,
    "a default": with_default,
    "a keyword default": with_keyword_default,
    "a function's attribute": with_attribute,
    "a partial": lambda n: functools.partial(closing_over, n),
    "a partial of a partial": lambda n: functools.partial(torch.mul, other=functools.partial(closing_over, value=n)),
    "a bound method": lambda n: (lambda each: setattr(each, "scale", n) or each.__call__)(Processor()),
    "an object": lambda n: SimpleNamespace(scale=n),
    "an attribute of an attribute": lambda n: SimpleNamespace(inner=SimpleNamespace(scale=n)),
    "far inside": lambda n: SimpleNamespace(a=[{"b": SimpleNamespace(c=(closing_over(n),))}]),
    "a slot": Slotted,
    "a slot of a class above": lambda n: Below(n),
    "a slot with a private name": lambda n: Slotted(1, n),
    "a list": lambda n: [1, [n]],
    "a tuple": lambda n: (1, (n, 3)),
    "a deque": lambda n: deque([n]),
    "a set": lambda n: {1, n + 5},
    "a value of a dictionary": lambda n: {"a": {"b": n}},
    "a key of a dictionary": lambda n: {("a", n): 1},
    "the order of a dictionary": lambda n: OrderedDict([("a", 1), ("b", 1)][::n]),
    "a module's mode": lambda n: torch.nn.Sequential(torch.nn.Dropout()).train(n == 1),
    "a module's attribute": lambda n: torch.nn.Sequential(torch.nn.LeakyReLU(n)),
    "a module in a dictionary": lambda n: {"nets": [torch.nn.LeakyReLU(n)]},
    "a function that a module holds": lambda n: Calling(closing_over(n)),
    "an object that a module holds": lambda n: Calling(Slotted(n)),
    "a hook": lambda n: hooked(n, "register_forward_hook"),
    "a hook that comes before": lambda n: hooked(n, "register_forward_pre_hook"),
    "which one of two it is": lambda n: (lambda one, other: [one, other, one if n == 1 else other])([1], [2]),
    "how often it is the same": lambda n: [[1], [1]] if n == 1 else [[1]] * 2,
}


@pytest.mark.parametrize("make", cases(HELD))
def test_a_fingerprint_sees_what_is_closed_over_and_not_that_it_was_made_anew(make):
    held = make(1)

    def denoiser(z, t):
        return held

    before, kept = fingerprint(denoiser), held
    assert fingerprint(denoiser) == before
    held = make(-1)
    assert fingerprint(denoiser) != before
    held = kept
    assert fingerprint(denoiser) == before
    held = make(1)
    assert kept is not held or isinstance(kept, int)
    assert fingerprint(denoiser) == before
    assert hash(fingerprint(denoiser)) == hash(before)


def counting():
    count = 0

    def next_number():
        nonlocal count
        count += 1
        return count

    return next_number


def with_gain(tensor, gain=0.3):
    tensor.gain = gain
    return tensor


class OfThread(threading.local):
    pass


def of_this_thread(kind=threading.local):
    held = kind()
    held.scale = 1
    return held


class Scaling:
    scale = 1

    def scaled(self, z):
        return self.scale * z


SETTINGS = ModuleType("settings_of_somebody")
SETTINGS.scale = 1
SCALES, SCALING, VARIABLE = {"scale": 1}, Calling(1), ContextVar("scale")
BYTES, SCALED = bytearray(b"1"), Scaling()


def by_settings(z, settings=SETTINGS):
    return z * settings.scale


#: What is changed in place: what is held, and by what its result becomes another.
IN_PLACE = {
    "behind a cache": (functools.lru_cache(counting()), lambda held: held.__wrapped__()),
    "a slot": (Slotted(1), lambda held: setattr(held, "scale", 2)),
    "a deque": (deque([1]), lambda held: held.append(2)),
    "a closure": (counting(), lambda held: held()),
    "a closure that a module holds": (Calling(counting()), lambda held: held.function()),
    "a slot that a module holds": (Calling(Slotted(1)), lambda held: setattr(held.function, "scale", 2)),
    "a program": (
        closing_over(1),
        lambda held: setattr(held, "__code__", (lambda: lambda z: held).__code__.co_consts[1]),
    ),
    "an attribute of a tensor": (with_gain(torch.zeros(2)), lambda held: setattr(held, "gain", 0.6)),
    "an attribute of a parameter": (
        Calling(torch.nn.Parameter(with_gain(torch.zeros(2)))),
        lambda held: setattr(held.function, "gain", 0.6),
    ),
    "a module of Python's, as a default": (by_settings, lambda held: setattr(SETTINGS, "scale", 2)),
    "a module of Python's, in a partial": (
        functools.partial(by_settings, settings=SETTINGS),
        lambda held: setattr(SETTINGS, "scale", 3),
    ),
    "an array": (array("d", [1.0]), lambda held: held.append(2.0)),
    "bytes": (bytearray(b"1"), lambda held: held.append(2)),
    "behind a proxy": (MappingProxyType(SCALES), lambda held: SCALES.update(scale=2)),
    "behind a weak reference": (weakref.ref(SCALING), lambda held: setattr(SCALING, "function", 2)),
    "behind a weak method": (weakref.WeakMethod(SCALED.scaled), lambda held: setattr(SCALED, "scale", 2)),
    "the values of a dictionary": (SCALES.values(), lambda held: SCALES.update(scale=3)),
    "a list that is an attribute of a tensor": (with_gain(torch.zeros(2), [0.3]), lambda held: held.gain.append(0.6)),
    "a number of C's": (ctypes.c_double(1), lambda held: setattr(held, "value", 2)),
    "an array of C's": ((ctypes.c_int * 2)(1, 2), lambda held: held.__setitem__(1, 3)),
    "the middle of many bytes": (bytearray(20_000), lambda held: held.__setitem__(10_000, 2)),
    "the middle of many numbers": (array("d", [1.0] * 20_000), lambda held: held.__setitem__(10_000, 2)),
    "a view of memory": (memoryview(BYTES), lambda held: held.__setitem__(0, 2)),
    "a variable of a thread, of a class": (of_this_thread(OfThread), lambda held: setattr(held, "scale", 2)),
    "a variable of a context": (VARIABLE, lambda held: held.set(2)),
    "a variable of a thread": (of_this_thread(), lambda held: setattr(held, "scale", 2)),
    "far inside": ([{"a": SimpleNamespace(b=SimpleNamespace(c=[1]))}], lambda held: held[0]["a"].b.c.append(2)),
}


@pytest.mark.parametrize(("held", "change"), cases(IN_PLACE))
def test_a_fingerprint_sees_what_changes_in_place(held, change):
    denoiser = lambda z, t: held  # noqa: E731
    before = fingerprint(denoiser)
    change(held)
    assert fingerprint(denoiser) != before


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,))])
def test_a_fingerprint_tells_equal_values_apart(one, other):
    held = one
    denoiser = lambda z, t: held  # noqa: E731
    before = fingerprint(denoiser)
    held = other
    assert fingerprint(denoiser) != before


def test_a_fingerprint_takes_nan_for_nan():
    held = float("nan")
    denoiser = lambda z, t: held  # noqa: E731
    before = fingerprint(denoiser)
    held = float("nan") + 1
    assert fingerprint(denoiser) == before


class Marker:
    pass


def far_away(value):
    for _ in range(20):
        value = closing_over(value)
    return value


@pytest.mark.parametrize("make", [lambda: far_away(1), lambda: {closing_over(1)}], ids=["far away", "in a set"])
def test_a_fingerprint_tells_apart_by_identity_where_it_does_not_look(make):
    held = make()
    denoiser = lambda z, t: held  # noqa: E731
    before, kept = fingerprint(denoiser), held
    assert fingerprint(denoiser) == before
    held = make()
    assert fingerprint(denoiser) != before
    held = kept
    assert fingerprint(denoiser) == before


def test_a_fingerprint_sees_what_objects_in_a_set_hold():
    entry = type("Entry", (), {})()
    entry.value, held = 1, {entry}
    denoiser = lambda z, t: held  # noqa: E731
    before = fingerprint(denoiser)
    entry.value = 2
    assert fingerprint(denoiser) != before


def test_a_fingerprint_tells_objects_apart_that_hold_nothing():
    held = Marker()
    denoiser = lambda z, t: held  # noqa: E731
    before, kept = fingerprint(denoiser), held
    held = Marker()
    assert fingerprint(denoiser) != before
    held = kept
    assert fingerprint(denoiser) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [(array("i", [-1]), array("I", [2**32 - 1])), (memoryview(b"\xff"), memoryview(b"\xff").cast("b"))],
)
def test_the_same_bytes_may_be_other_numbers(one, other):
    assert bytes(one) == bytes(other)
    first, same, changed = (structure_of(lambda z, held=held: held[0] * z)[0] for held in (one, one, other))
    assert first == same != changed
