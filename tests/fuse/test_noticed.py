"""Kernels that compute something else than the step does are noticed."""

import math

import pytest
import torch
import triton

import deeppcr
from deeppcr import Loop, Newton, Result
from deeppcr.fuse import back, run
from deeppcr.fuse.step import FusedStep
from deeppcr.sequence.layout import Layout
from fuse.loops import Fused, by_loop
from fuse.solving import NEWTON, by_kernels, normal, solve
from kernel_support import error, thorough

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def spoil(monkeypatch, kernels, factor=1.01):
    """Break emitted source: 0.3 becomes something else."""
    numbers = kernels.numbers

    def spoiled(self, device):
        return numbers(self, device) * factor

    monkeypatch.setattr(kernels, "numbers", spoiled)


@pytest.mark.parametrize("factor", [1.01, math.nan, math.inf])
def test_kernels_that_compute_something_else_are_noticed_at_once(factor, device, monkeypatch):
    """Also where it is no number: the step itself makes none of these states infinite."""
    from deeppcr.fuse.compiled import Kernels

    step, z0 = lambda z: 0.3 * torch.sin(z) + 0.7, normal(2, 3, device=device)
    spoil(monkeypatch, Kernels, factor)
    found = solve(step, z0, length=9)
    assert not by_kernels(found)
    assert any("another result than the step itself" in note for note in found.plan.notes)
    assert found.result is Result.CONVERGED
    assert error(found.states, by_loop(step, z0, length=9)) < 1e-9
    with pytest.raises(ValueError, match="another result than the step itself"):
        solve(step, z0, length=9, solver=Loop(by="kernel"))


def test_kernels_that_go_wrong_later_are_noticed(device, monkeypatch):
    """By the second solve with kernels, the fourth, the eighth ..."""
    from deeppcr.fuse.compiled import Kernels

    step, z0 = lambda z: 0.3 * torch.sin(z) + 0.7, normal(2, 3, device=device)
    assert by_kernels(solve(step, z0, length=9))
    spoil(monkeypatch, Kernels)
    found = solve(step, z0, length=9)
    assert not by_kernels(found)
    assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


#: What may be wrong with the first row of states [40, 3, 2] in chunks of 8, at which step, and up to which.
WRONG = {
    "not a number": (20, 40, math.nan),
    "infinite for one step": (30, 31, math.inf),
    "a wrong start": (16, 24, 0.1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_few_steps_tell_wrong_starts_and_what_is_not_finite_by_mistake(what, device):
    step, z0 = torch.square, normal(3, 2, device=device).clamp(-0.9, 0.9)
    z0[2] = 2.0  # which the step itself makes infinite
    fused_step, states = FusedStep.of(step, Layout.of(z0, None), z0, None, []), by_loop(step, z0, length=40)

    def is_borne_out():
        return fused_step.is_borne_out(step, z0, None, states, Newton().tolerance(states.dtype), 8)

    assert all(is_borne_out() for _ in range(5))
    first, last, value = WRONG[what]
    states[first:last, 0] += value
    assert not any(is_borne_out() for _ in range(5))


def test_a_step_that_knows_how_many_rows_there_are_is_not_trusted_to_kernels(device):
    """Of one row nothing tells that it is one of several."""
    z0 = normal(3, 2, device=device)
    for step in (
        lambda z: torch.sin(z) * (1 + torch.arange(len(z), device=z.device)).unsqueeze(-1) / 4,
        lambda z: torch.sin(z) / len(z),
    ):
        found = solve(step, z0, length=9)
        assert not by_kernels(found)
        assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


@pytest.mark.parametrize("width", [1, *thorough(9)])
def test_a_wrong_start_is_not_excused_by_what_it_leads_to(width, device):
    """The first correction leads to where the step jumps to 1e12: the size of that is no measure of the start."""
    length, chunk, jump, mix = 64, 8, 5, 0.0 if width == 1 else 0.1
    weight = mix * torch.ones(width, width, device=device) / width
    x = 0.1 * torch.ones(length, 1, width, device=device)
    bend, jumps = torch.zeros(2, length, 1, 1, device=device)
    bend[(jump - 1) * chunk : jump * chunk], jumps[jump * chunk] = 0.05, 1e12

    def step_around(center):
        def step(z, given):
            x, bend, jumps = given
            low = z.clamp(max=3.0)
            return (
                (0.9 - mix) * low
                + low @ weight
                + x
                + bend * low * low
                + jumps * torch.exp(-(((z - center) / 1e-3) ** 2))
            )

        return step

    def one_chunk(z):
        for l in range((jump - 1) * chunk, jump * chunk):
            z = step_around(50.0)(z, (x[l], bend[l], jumps[l]))
        return z

    z0, xs = torch.full((1, width), 0.2, device=device), (x, bend, jumps)
    right = by_loop(step_around(50.0), z0, xs)[(jump - 1) * chunk - 1]
    value, change = torch.func.jvp(one_chunk, (z0,), (right - z0,))
    step = step_around(float((value + change)[0, 0]))
    found = Fused(step, z0, xs).solve(chunk)
    assert error(found.states.view(length, 1, width), by_loop(step, z0, xs)) < 1e-4


@pytest.mark.parametrize("name", ["roll", "sweep"])
def test_kernels_that_do_not_fit_the_device(name, device, monkeypatch):
    """A step is solved otherwise, and the next time nobody tries; of gradients that is known before they are asked for."""
    weight = torch.full((2,), 0.5, device=device, requires_grad=True)
    step, z0, xs = (
        lambda z, x: torch.tanh(weight * z) + x,
        torch.zeros(2, device=device),
        torch.ones(20, 2, device=device),
    )
    module = run if name == "roll" else back

    def launch_too_much(kernel, *_, **__):
        raise triton.OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(module, "launch", launch_too_much)
    deeppcr.solve(step, z0, xs, solver=NEWTON)
    for _ in range(2):
        solution = deeppcr.solve(step, z0, xs, solver=NEWTON)
        assert any("fit the device" in note for note in solution.plan.notes)
    (found,) = torch.autograd.grad(solution.states.sum(), weight)
    (expected,) = torch.autograd.grad(deeppcr.solve(step, z0, xs, solver=deeppcr.Loop()).states.sum(), weight)
    torch.testing.assert_close(found, expected)


def test_kernels_of_gradients_are_tried_for_all_that_they_are_compiled_for(device, monkeypatch):
    """Inputs that lie otherwise (here: not at a multiple of 16 bytes) have others, which may not fit where the first ones did."""
    weight = torch.full((2,), 0.5, device=device, requires_grad=True)
    step, z0 = lambda z, x: torch.tanh(weight * z) + x, torch.zeros(2, device=device)
    whole = torch.ones(42, device=device)
    assert by_kernels(solve(step, z0, whole[:40].view(20, 2)))

    def launch_too_much(kernel, *_, **__):
        raise triton.OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(back, "launch", launch_too_much)
    assert by_kernels(deeppcr.solve(step, z0, whole[:40].view(20, 2), solver=NEWTON))  # they are known to fit
    found = deeppcr.solve(step, z0, whole[1:41].view(20, 2), solver=NEWTON)
    assert any("fit the device" in note for note in found.plan.notes)
    found.states.sum().backward()


def grid(z, x):
    return torch.round((z + x) * 2.0**38) / 2.0**38


@pytest.mark.parametrize(
    ("step", "width", "dtype", "drift"),
    [
        (lambda z, x: z.detach() + x, 1, torch.float64, 4e-12),
        (grid, 1, torch.float64, 2.0**-38),
        (lambda z, x: 0.5 * z + 0.5 * z.detach() + x, 1, torch.float64, 4e-12),
        (lambda z, x: z.detach() + x + 0 * z.sum(), 10, torch.float32, 9e-7),
    ],
)
def test_a_drift_that_derivatives_know_nothing_of(step, width, dtype, drift, device):
    """A correction of every chunk is within the tolerance, and the same again in every pass: their sum is not."""
    z0, xs = (
        torch.ones(1, width, dtype=dtype, device=device),
        torch.full((16, 1, width), drift, dtype=dtype, device=device),
    )
    loop = Fused(step, z0, xs)
    found = loop.run().in_parallel(run.Kind(16, 2), NEWTON.tolerance(dtype))
    assert found.passes == 4  # as many as are worth it
    assert found.left == found.notes.taken.numel()
