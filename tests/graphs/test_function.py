"""A function and its gradients, recorded: whose memory what comes out is, and when the graphs are free for another call."""

import threading
import weakref

import pytest
import torch

from again import Counts, record_here
from deeppcr.graphs import function
from deeppcr.graphs.function import FunctionRecording, Made


@pytest.fixture(autouse=True)
def recording(device, monkeypatch):
    record_here(device, monkeypatch)


def plain(tensors):
    x, weight = tensors
    y = torch.tanh(x @ weight)
    return y, (y * x).sum(0)


def noting(tensors):
    y, total = plain(tensors)
    return Made([y, total], [y.detach().amax(0)], torch.arange(3, dtype=torch.int32, device=y.device))


def given(device, *, grad=True):
    x = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=grad)
    return [x, torch.randn(3, 3, dtype=torch.float64, device=device, requires_grad=grad)]


@pytest.fixture
def recorded(device):
    return FunctionRecording(noting, given(device), function.SCRATCH[device.type](device))


def called(recorded, tensors):
    """What a call returns, as it is used; None where the graphs are taken."""
    replayed = recorded.call(tensors)
    return None if replayed is None else replayed.attached(tensors)


def assert_alike(found, right):
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("large", [function._LARGE, 80, 1])
def test_a_call_gives_values_notes_counts_and_gradients(recorded, device, large, monkeypatch):
    monkeypatch.setattr(function, "_LARGE", large)  # none of them, some, all
    for _ in range(3):
        tensors = given(device)
        replayed = recorded.call(tensors)
        found, right = replayed.attached(tensors), plain(tensors)
        assert_alike([*found, replayed.notes[0]], [*right, right[0].amax(0)])
        assert replayed.counts() == [0, 1, 2]
        seeds = [torch.randn_like(each) for each in right]
        assert_alike(torch.autograd.grad(found, tensors, seeds), torch.autograd.grad(right, tensors, seeds))
        del replayed, found
    assert Counts.recorded == 2
    assert Counts.replayed == 6


def test_what_is_changed_in_place_is_seen(recorded, device):
    """As an optimiser changes weights, between a pass and the next."""
    tensors = given(device)
    for _ in range(2):
        found, right = called(recorded, tensors), plain(tensors)
        assert_alike(found, right)
        sum(each.sum() for each in found).backward()
        with torch.no_grad():
            tensors[1] -= 0.1 * tensors[1].grad


def test_outputs_that_nobody_uses_have_no_gradient(recorded, device):
    """Also where the one before them had."""
    for used in ([0], [0, 1], [1], [0]):
        tensors = given(device)
        found, right = called(recorded, tensors), plain(tensors)
        found, right = ([each[at] for at in used] for each in (found, right))
        seeds = [torch.randn(1, dtype=each.dtype, device=device).expand_as(each) for each in right]
        assert_alike(torch.autograd.grad(found, tensors, seeds), torch.autograd.grad(right, tensors, seeds))


def test_two_calls_before_a_backward_pass(recorded, device):
    first, second = given(device), given(device)
    found = called(recorded, first)
    assert called(recorded, second) is None  # its ordinary way
    seeds = [torch.randn_like(each) for each in found]
    of_first = torch.autograd.grad(found, first, seeds)
    assert_alike(of_first, torch.autograd.grad(plain(first), first, seeds))
    again = called(recorded, second)  # though ``found`` lives on
    assert_alike(again, plain(second))
    assert_alike(found, plain(first))


def test_a_call_whose_counts_nobody_has_waited_for(device):
    """Another one would write over them."""
    recorded = FunctionRecording(noting, given(device, grad=False), function.SCRATCH[device.type](device))
    tensors = given(device, grad=False)
    replayed = recorded.call(tensors)
    assert recorded.call(given(device, grad=False)) is None
    found = replayed.attached(tensors)
    assert replayed.counts() == [0, 1, 2]
    del replayed
    assert called(recorded, given(device, grad=False)) is not None
    assert_alike(found, plain(tensors))


def test_a_backward_pass_comes_twice(recorded, device):
    tensors = given(device)
    found, right = called(recorded, tensors), plain(tensors)
    for seed in (1.0, 2.0):
        seeds = [torch.full_like(each, seed) for each in right]
        of_found = torch.autograd.grad(found, tensors, seeds, retain_graph=True)
        assert_alike(of_found, torch.autograd.grad(right, tensors, seeds, retain_graph=True))
        assert called(recorded, given(device)) is None
    torch.autograd.grad(found, tensors, seeds)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(found, tensors, seeds)
    assert called(recorded, given(device)) is not None


def test_what_is_dropped_without_a_backward_pass_frees_the_graphs(recorded, device):
    tensors = given(device)
    found = called(recorded, tensors)
    loss = found[0].sum()
    del found
    assert called(recorded, tensors) is None
    del loss
    assert called(recorded, tensors) is not None


def test_second_derivatives_are_refused(recorded, device):
    tensors = given(device)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(called(recorded, tensors)[0].sum(), tensors, create_graph=True)


@pytest.mark.parametrize("which", [0, 1])
def test_who_changes_what_a_backward_pass_needs_is_told(which, recorded, device):
    tensors = given(device)
    found = called(recorded, tensors)
    with torch.no_grad():
        tensors[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found[0].sum().backward()


def test_outputs_are_the_callers(recorded, device):
    """A later call does not write to them; and to write to them changes no gradient."""
    tensors = given(device)
    found, right = called(recorded, tensors), plain(tensors)
    found[0].detach().fill_(7)
    seeds = [torch.randn_like(each) for each in right]
    assert_alike(torch.autograd.grad(found, tensors, seeds), torch.autograd.grad(right, tensors, seeds))
    called(recorded, given(device))
    assert (found[0] == 7).all()
    torch.testing.assert_close(found[1], right[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_graphs_are_always_free(mode, device):
    with mode():
        recorded = FunctionRecording(noting, given(device, grad=False), function.SCRATCH[device.type](device))
        tensors = [given(device, grad=False) for _ in range(3)]
        found = [called(recorded, each) for each in tensors]
        for one, each in zip(found, tensors, strict=True):
            assert_alike(one, plain(each))
    assert Counts.recorded == 1
    assert all(leaf.is_inference() == (mode is torch.inference_mode) for one in found for leaf in one)


def test_another_thread_does_not_wait(recorded, device, monkeypatch):
    """It has its call done another way."""
    inside, done, found = threading.Event(), threading.Event(), []
    go = recorded._go

    def slowly():
        inside.set()
        assert done.wait(10)
        go()

    monkeypatch.setattr(recorded, "_go", slowly)
    thread = threading.Thread(target=lambda: found.append(recorded.call(given(device))))
    thread.start()
    assert inside.wait(10)
    assert recorded.call(given(device)) is None
    done.set()
    thread.join()
    assert found[0] is not None


def test_only_gradients_that_are_wanted(device):
    """Integers, too, are given to a function."""
    x, weight = given(device)
    at = torch.tensor([2, 0], device=device)

    def taking(tensors):
        x, weight, at = tensors
        return Made([(x @ weight)[at]], [], at.int())

    tensors = [x.detach(), weight, at]
    recorded = FunctionRecording(taking, tensors, function.SCRATCH[device.type](device))
    (found,) = called(recorded, tensors)
    torch.testing.assert_close(found, (x @ weight)[at])
    found.sum().backward()
    torch.testing.assert_close(weight.grad, torch.autograd.grad((x @ weight)[at].sum(), weight)[0])
    assert x.grad is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_hold_neither_the_function_nor_what_was_given():
    class Maker:
        def __call__(self, tensors):
            return noting(tensors)

    device, maker = torch.device("cuda"), Maker()
    tensors = given(device)
    recorded = FunctionRecording(maker, tensors, function.SCRATCH["cuda"](device))
    assert recorded.bytes > 0
    held = [weakref.ref(each) for each in (maker, *tensors)]
    del maker, tensors
    assert [each() for each in held] == [None] * 3
    tensors = given(device)
    assert_alike(called(recorded, tensors), plain(tensors))
