"""What CUDA graphs of a function depend on is in its fingerprint: wherever it hides."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deeppcr.sequence.fingerprint import fingerprint
from sequence.holding import Processor


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
