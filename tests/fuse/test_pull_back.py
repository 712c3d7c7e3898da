"""Backward passes by kernels: cotangents of whatever a step reads, shared or not, changed or in part."""

import pytest
import torch

from deeppcr.fuse import back
from deeppcr.fuse.back import pull_back
from fuse.compared import compare, elementwise, narrow, normal
from fuse.loops import Fused, by_loop, check_any_chunk
from kernel_support import error

# Of the interpreter, where iterates stray, or nothing is divided by nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_cotangents_of_tensors_that_leaves_share(device):
    """Overlapping views of one input, of one row and of all: their cotangents add up."""

    def step(z, x):
        return torch.sin(z) * x[..., :3] + 0.2 * x[..., 1:] + x[..., 1:2]

    compare(step, normal(2, 3, device=device), normal(9, 2, 4, device=device), [], chunk=4)
    compare(step, normal(2, 3, device=device), normal(9, 4, device=device), [], chunk=4)


def test_cotangents_of_what_steps_share_are_summed_by_the_kernels(device):
    """Of several tensors, of parts of one, and of one that rows have each: compared, and then counted."""
    weights, pair = [normal(3, device=device) for _ in range(2)], normal(2, 3, device=device)
    step = lambda z: weights[0] * torch.sin(weights[1] * z) + pair[0] * torch.cos(pair[1] * z)  # noqa: E731
    fused = compare(step, normal(2, 3, device=device), None, [*weights, pair], chunk=4, length=9)
    run, found = fused.run(), fused.solve(4)
    with torch.profiler.profile() as profile:
        pull_back(run, found.states, torch.ones_like(found.states), 4)
    assert [event.count for event in profile.key_averages() if event.key == "aten::sum"] == []


def test_a_part_of_what_is_read_gets_zeros(device, poisoned_memory):
    """What no lane reads of an input has a gradient of 0, not of whatever memory held."""
    compare(
        lambda z, x: torch.sin(z) * x[..., 1:3],
        normal(2, 2, device=device),
        normal(9, 2, 5, device=device),
        [],
        chunk=4,
    )


@pytest.mark.thorough
def test_gradients_of_what_needs_none_are_not_asked_for(device):
    """Only z0, only a closure, or nothing at all."""
    step, z0, xs, closures = elementwise(1, device)
    for some in ([closures[0]], [xs]):
        for tensor in (z0, xs, *closures):
            tensor.requires_grad_(any(tensor is each for each in some))
        ours, theirs = Fused(step, z0, xs).states(4), by_loop(step, z0, xs)
        (a,), (b,) = (torch.autograd.grad((states**2).sum(), some) for states in (ours, theirs))
        assert error(a, b) < 1e-10


@pytest.mark.thorough
def test_a_backward_pass_takes_any_cotangent(device):
    """Of the last state only, expanded, and not contiguous."""
    step, z0, xs, _ = elementwise(1, device)
    z0.requires_grad_()
    fused = Fused(step, z0, xs)
    theirs = by_loop(step, z0, xs)
    for loss in (lambda s: s[-1].sum(), lambda s: (s.mT * 2).square().sum()):
        (a,), (b,) = (torch.autograd.grad(loss(states), z0, retain_graph=True) for states in (fused.states(4), theirs))
        assert error(a, b) < 1e-10


def test_changed_tensors_are_told_in_the_backward_pass(device):
    """As autograd does: what a backward pass needs must not be written to before it."""
    for which in (0, 1, 2):
        step, z0, xs, closures = elementwise(1, device)
        given = [z0, xs, *closures[:2]]
        for tensor in given:
            tensor.requires_grad_()
        states = Fused(step, z0, xs).states(4)
        with torch.no_grad():
            given[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            states.sum().backward()


@pytest.mark.thorough
def test_pulling_back_by_any_chunk_gives_the_same(device):
    step, z0, xs, _ = narrow(2, device)
    check_any_chunk(Fused(step, z0, xs), 1e-12)


def test_gradients_of_a_filter_whose_powers_grow_are_those_of_the_loop(device, monkeypatch):
    """Products of its blocks lose digits that steps keep: where chunks do not join, cotangents are corrected, or taken step by step."""
    roots = torch.tensor([0.99, 0.985, 0.98, 0.975], dtype=torch.float64)
    polynomial = torch.ones(1, dtype=torch.float64)
    for root in roots:
        polynomial = torch.nn.functional.pad(polynomial, (0, 1)) - root * torch.nn.functional.pad(polynomial, (1, 0))
    companion = torch.zeros(4, 4, dtype=torch.float64)
    companion[0], companion[1:, :3] = -polynomial[1:], torch.eye(3)
    companion = companion.to(device).requires_grad_()
    z0, xs = torch.zeros(1, 4, dtype=torch.float64, device=device), normal(48, 1, 4, device=device)
    inputs = (z0.requires_grad_(), xs.requires_grad_(), companion)
    fused = Fused(lambda z, x: z @ companion.mT + x, z0, xs)
    right = torch.autograd.grad(by_loop(fused.step, z0, xs)[-1].sum(), inputs)
    found = torch.autograd.grad(fused.states(12)[-1].sum(), inputs)
    for one, other in zip(found, right, strict=True):
        assert error(one, other) < 1e-10
    # Without the passes that see it, digits are missing: else this test shows nothing.
    monkeypatch.setattr(back, "_TOLERANCE", {torch.float64: 1e9})
    rough = torch.autograd.grad(fused.states(12)[-1].sum(), inputs)
    digits = [max(error(one, other) for one, other in zip(each, right, strict=True)) for each in (found, rough)]
    assert digits[1] > (1e-10 if device.type == "cpu" else 10 * digits[0])
