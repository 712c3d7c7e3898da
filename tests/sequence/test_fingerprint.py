"""What CUDA graphs of a function depend on is in its fingerprint: wherever it hides."""

import functools
from collections import OrderedDict, deque
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from deeppcr.sequence.fingerprint import fingerprint


def test_a_fingerprint_sees_what_graphs_depend_on():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net.scale = 2.0
    offset = torch.ones(3)
    closed = lambda z, t: net(z) + offset  # noqa: E731
    partial = functools.partial(closed)
    for function in (net, closed, partial, net.forward):
        before = fingerprint(function)
        with torch.no_grad():
            net[0].weight.mul_(2)  # in place: a graph reads it where it lies
        assert fingerprint(function) == before
        net[1].weight = torch.nn.Parameter(net[1].weight.detach().clone())
        changed = fingerprint(function)
        assert changed != before
        net.scale += 1
        again = fingerprint(function)
        assert again != changed
        net.train(not net.training)
        assert fingerprint(function) != again
    assert fingerprint(net.forward) == fingerprint(net.forward)
    assert fingerprint(net.forward) != fingerprint(net.__call__)
    before = fingerprint(closed)
    offset = torch.zeros(3)
    assert fingerprint(closed) != before


def test_a_fingerprint_of_modules_of_all_kinds():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    parent = torch.nn.Module()
    parent.child, net.parent = net, parent  # a circle
    for made in (torch.compile(torch.nn.Linear(3, 3)), torch.jit.script(torch.nn.Linear(3, 3)), parent):
        first = fingerprint(made)
        assert first == fingerprint(made)
        made.training = False
        assert first != fingerprint(made)


def test_a_fingerprint_sees_into_dicts_objects_hooks_and_private_names():
    net = torch.nn.Linear(3, 3)
    net._scale, net.table, net.config = 1.0, {"scale": 1.0}, SimpleNamespace(scale=1.0)
    net.register_forward_hook(lambda module, args, found: found)

    def denoiser(z, t, *, shift=0.0):
        return net(z) + shift

    seen = {fingerprint(denoiser)}
    net._scale = 2.0
    seen.add(fingerprint(denoiser))
    net.table["scale"] = 2.0
    seen.add(fingerprint(denoiser))
    net.config.scale = 2.0
    seen.add(fingerprint(denoiser))
    net._forward_hooks.clear()
    net.register_forward_hook(lambda module, args, found: 2 * found)
    seen.add(fingerprint(denoiser))
    denoiser.__kwdefaults__["shift"] = 1.0
    seen.add(fingerprint(denoiser))
    assert len(seen) == 6
    for number in range(20):  # an object that is gone leaves its identity to the next
        net.config = SimpleNamespace(scale=number)
        seen.add(fingerprint(denoiser))
    assert len(seen) == 26


class Processor:
    """As attention's are: a plain object that a module calls."""

    def __init__(self):
        self.scale = 1.0

    def __call__(self, z):
        return self.scale * z


@pytest.mark.parametrize("kind", ["buffer", "not a number", "callable", "its method", "array", "set"])
def test_a_fingerprint_sees_numbers_that_kernels_are_given(kind):
    """Which a graph holds, wherever they come from; tensors of several numbers it reads when it is replayed."""
    net, processor = torch.nn.Linear(3, 3), Processor()
    net.table, net.names, net.call, net.several = np.ones(3), {1, 2}, processor, torch.ones(2)
    net.method, net.numpy = processor.__call__, np
    net.register_buffer("number", torch.tensor(0.5))
    if kind == "not a number":
        net.number.fill_(torch.nan)
    if kind == "its method":
        del net.call
    before = fingerprint(net)
    net.several.add_(1)
    assert fingerprint(net) == before
    assert hash(fingerprint(net)) == hash(before)
    if kind == "array":
        net.table[0] = 2
    elif kind == "set":
        net.names.add(3)
    elif kind in ("callable", "its method"):
        processor.scale = 2.0
    else:
        net.number.fill_(0.9)
    assert fingerprint(net) != before


def test_a_fingerprint_does_not_look_into_large_arrays():
    """It is taken at every call."""
    net = torch.nn.Linear(3, 3)
    net.table = np.ones(100_000)
    before = fingerprint(net)
    assert fingerprint(net) == before
    assert len(str(before)) < 10_000
    net.table = np.ones(100_000)
    assert fingerprint(net) != before


class Twice(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Methods:
    def one(self, z):
        return z

    def other(self, z):
        return 2 * z


CHANGES = {
    "a hook that comes before": lambda net: net.register_forward_pre_hook(lambda module, args: None),
    "a name in a dictionary": lambda net: net.table.update(b=net.table.pop("a")),
    "another method of the same object": lambda net: setattr(net, "call", net.methods.other),
    "how a parameter lies": lambda net: set_data(net, net.weight.detach().mT),
    "the shape of a parameter": lambda net: set_data(net, net.weight.detach()[:2]),
    "the dtype of a parameter": lambda net: set_data(net, net.weight.detach().view(torch.int32)),
}


def set_data(net, tensor):
    net.weight = torch.nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_sees_what_lies_at_the_same_address(change):
    net = torch.nn.Linear(3, 3)
    net.table, net.methods = {"a": 1}, Methods()
    net.call = net.methods.one
    place, before = net.weight.data_ptr(), fingerprint(net)
    assert fingerprint(net) == before
    CHANGES[change](net)
    assert net.weight.data_ptr() == place
    assert fingerprint(net) != before


class Loud(Processor):
    def __call__(self, z):
        return 2 * super().__call__(z)


def test_a_fingerprint_sees_the_class_of_what_is_called():
    outer, plain = torch.nn.Sequential(torch.nn.Linear(3, 3)), Processor()
    before = fingerprint(outer), fingerprint(plain)
    outer[0].__class__, plain.__class__ = Twice, Loud
    assert fingerprint(outer) != before[0]
    assert fingerprint(plain) != before[1]


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


def closing_over(value):
    return lambda z: z * value


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


def cases(table):
    rows = {name: case if isinstance(case, tuple) else (case,) for name, case in table.items()}
    return [pytest.param(*row, id=name) for name, row in rows.items()]


@pytest.mark.parametrize("make", cases(HELD))
def test_a_fingerprint_sees_what_is_closed_over(make):
    held = make(1)

    def denoiser(z, t):
        return held

    before, kept = fingerprint(denoiser), held
    assert fingerprint(denoiser) == before
    held = make(-1)
    assert fingerprint(denoiser) != before
    held = kept
    assert fingerprint(denoiser) == before


@pytest.mark.parametrize("make", cases(HELD))
def test_a_fingerprint_is_the_same_where_what_is_closed_over_is_made_anew(make):
    held = make(1)

    def denoiser(z, t):
        return held

    before, kept = fingerprint(denoiser), held
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


SCALE, NETWORK, SETTINGS = 1, torch.nn.Linear(3, 3), ModuleType("settings")
SETTINGS.SCALE, SETTINGS.inner = 1, ModuleType("settings.inner")
SETTINGS.inner.SCALE = 1


def scaled(z):
    return z * SCALE


class Scaling:
    def __init__(self):
        self.number = 1

    def __call__(self, z, t):
        return self.by_scale(z) * self.number

    def by_scale(self, z):
        return z * SCALE


class ScalingModule(torch.nn.Module):
    by_scale = Scaling.by_scale

    def forward(self, z, t):
        return self.by_scale(z)


class Indirect(torch.nn.Module):
    @property
    def doubled(self):
        return 2 * self.once()

    @staticmethod
    def once():
        return SCALE

    def forward(self, z, t):
        return z * self.doubled


def in_a_function_inside(z, t):
    return sum(z * SCALE for _ in range(1))


GLOBALS = {
    "its own": lambda z, t: z * SCALE,
    "of a function inside": in_a_function_inside,
    "of a function that it calls": lambda z, t: scaled(z),
    "of a method": Scaling().by_scale,
    "of a method that is called": lambda z, t, held=Scaling(): held.by_scale(z),
    "of an object that is called": Scaling(),
    "of a module": torch.nn.Sequential(ScalingModule()),
    "of a module behind properties": Indirect(),
    "of a partial": functools.partial(lambda one, z, t: scaled(z), 1),
}


@pytest.mark.parametrize("denoiser", cases(GLOBALS))
def test_a_fingerprint_sees_global_variables(denoiser, monkeypatch):
    before = fingerprint(denoiser)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 2)
        assert fingerprint(denoiser) != before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "NETWORK", 2)  # which none of them names
        assert fingerprint(denoiser) == before


def test_a_fingerprint_sees_networks_and_settings_that_are_global(monkeypatch):
    def denoiser(z, t):
        return NETWORK(z) * SETTINGS.SCALE + SETTINGS.inner.SCALE

    seen = [fingerprint(denoiser)]
    for where, name, value in ((SETTINGS, "SCALE", 2), (SETTINGS.inner, "SCALE", 3), (NETWORK, "training", False)):
        monkeypatch.setattr(where, name, value)
        seen.append(fingerprint(denoiser))
    monkeypatch.setitem(globals(), "NETWORK", torch.nn.Linear(3, 3))
    seen.append(fingerprint(denoiser))
    assert len(set(seen)) == 5
    monkeypatch.setattr(SETTINGS, "OTHER", 2, raising=False)
    assert fingerprint(denoiser) == seen[-1]


@pytest.mark.parametrize("make", [ScalingModule, Scaling])
def test_a_fingerprint_sees_another_program_of_a_class(make, monkeypatch):
    denoiser = make()
    before = fingerprint(denoiser)
    monkeypatch.setattr(make, "by_scale", lambda self, z: z)
    assert fingerprint(denoiser) != before


def test_a_fingerprint_of_tensors_that_lie_nowhere():
    held = torch.eye(3).to_sparse()
    lazy = torch.nn.LazyLinear(3)
    denoiser = lambda z, t: lazy(held @ z)  # noqa: E731
    before = fingerprint(denoiser)
    assert fingerprint(denoiser) == before
    held.mul_(2)
    assert fingerprint(denoiser) != before


def test_a_fingerprint_sees_hooks_of_all_modules():
    net = torch.nn.Linear(3, 3)
    before = fingerprint(net)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, found: 2 * found)
    assert fingerprint(net) != before
    handle.remove()
    assert fingerprint(net) == before


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
    "make", [lambda: torch.nn.Linear(3, 3), lambda: torch.compile(torch.nn.Linear(3, 3), backend="eager")]
)
def test_a_fingerprint_stays_when_the_function_is_called(make):
    net = make()

    def denoiser(z, t):
        return scaled(functools.partial(net)(z))

    before = fingerprint(denoiser), fingerprint(net)
    for rows in (1, 2, 3):
        denoiser(torch.ones(rows, 3), None)
        assert (fingerprint(denoiser), fingerprint(net)) == before
