"""Units do not matter: a loop rewritten with every component in a unit of its own gives the same digits."""

import math
import warnings

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result
from deeppcr.tolerance import Tolerance
from kernel_support import pairwise
from problems import plain_loop

LENGTH = 200


def duffing(z, x):
    """A damped, driven oscillator."""
    position, speed = z[..., 0], z[..., 1]
    return torch.stack([position + 0.05 * speed, speed + 0.05 * (x - 0.8 * speed - position - position**3)], -1)


def network(z, x):
    """Units that mix, beside one that drifts by itself."""
    hidden = z[..., :4]
    return torch.cat([torch.tanh(0.8 * hidden.roll(1, -1) - 0.3 * hidden + x), 0.99 * z[..., 4:] + 0.1], -1)


def kalman(z, x):
    """Mean and covariance of a filter, coupled and of very different sizes."""
    mean, variance = z[..., 0], z[..., 1]
    gain = variance / (variance + 0.3)
    return torch.stack([0.9 * mean + gain * (x - 0.9 * mean), 0.81 * (1 - gain) * variance + 0.1 + 0.01 * mean**2], -1)


STEPS = {"duffing": (duffing, 2), "network": (network, 5), "kalman": (kalman, 2)}


def in_units(step, units):
    return lambda z, x: step(z / units, x) * units


def run(name, units, dtype=torch.float32, **options):
    step, width = STEPS[name]
    xs = torch.cos(0.1 * torch.arange(LENGTH, dtype=dtype))
    z0 = torch.linspace(0.5, 1.5, width, dtype=dtype).repeat(2, 1) * torch.tensor([[1.0], [-0.3]], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", deeppcr.ConvergenceWarning)
        found = deeppcr.solve(in_units(step, units), z0 * units, xs, solver=Newton(**options))
    assert found.result is Result.CONVERGED
    return found.states / units, found.iterations


@pairwise(
    name=STEPS.keys(),
    options={"default": {}, "chunk of one": {"chunk": 1}, "local": {"scale": "local"}},
    dtype=[torch.float32, torch.float64],
)
def test_the_loop_in_other_units_gives_the_same_digits(name, options, dtype):
    powers = torch.randint(-40, 41, (STEPS[name][1],), generator=torch.Generator().manual_seed(len(options)))
    ours, iterations = run(name, 2.0 ** powers.to(dtype), dtype, **options)
    usual, as_usual = run(name, torch.ones(len(powers), dtype=dtype), dtype, **options)
    assert torch.equal(ours, usual)  # powers of two round nothing
    assert torch.equal(iterations, as_usual)


@pytest.mark.parametrize("size", [1e-12, 1e-5, 1.0, 1e8])
def test_small_and_large_units(size):
    """An absolute tolerance would take anything for the answer where states are small."""
    step, _ = STEPS["duffing"]
    xs = torch.cos(0.1 * torch.arange(2000))
    z0 = size * torch.tensor([1.0, 0.0])
    found = deeppcr.solve(in_units(step, size), z0, xs, solver=Newton())
    loop = plain_loop(in_units(step, size), z0.double(), xs.double())
    assert found.result is Result.CONVERGED
    assert (found.states - loop).abs().max() <= 1e-4 * size


@pytest.mark.parametrize("companion", [1e4, 1e7])
def test_a_large_component_does_not_hide_small_ones(companion):
    def step(z, x):
        return torch.cat([0.999 * z[..., :1] + companion * 1e-3 * x, network(z[..., 1:], x)], -1)

    xs, z0 = torch.cos(0.1 * torch.arange(500)), torch.cat([torch.tensor([companion]), torch.linspace(0.5, 1.5, 5)])
    found = deeppcr.solve(step, z0, xs, solver=Newton())
    loop = plain_loop(step, z0, xs)
    assert found.result is Result.CONVERGED
    assert ((found.states - loop).abs().amax(0) <= 1e-4 * loop.abs().amax(0)).all()


@pytest.mark.parametrize("seed", [3])
def test_what_is_exact_is_so_in_every_component(seed):
    """Of approximate Jacobians nobody knows what a step rounds: not as much as the largest number beside a small one."""
    generator, units = torch.Generator().manual_seed(seed), 2.0 ** torch.tensor([-10, 10, 18, -12])
    xs, z0 = torch.randn(100, 4, generator=generator), torch.randn(2, 4, generator=generator) * units
    circle = lambda z, x: z + 0.2 - 1.5 / (2 * math.pi) * torch.sin(2 * math.pi * z) + 0.01 * x  # noqa: E731
    step, solver = in_units(circle, units), Newton(jacobian=deeppcr.HutchinsonJacobian())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        found = deeppcr.solve(step, z0, xs, solver=solver, on_failure="return")
    previous = torch.cat([z0.unsqueeze(0), found.states[:-1]])
    off = (step(previous, xs.unsqueeze(1)) - found.states).abs() / units
    exact = torch.arange(100).view(-1, 1, 1) < found.exact_steps.unsqueeze(-1)
    assert off[exact.expand_as(off)].max() <= 1e-5


def test_a_clock_in_the_state():
    """Seconds since 1970 beside angles, float64."""

    def step(z, x):
        time, angle, speed = z.unbind(-1)
        speed = 0.98 * speed - 0.01 * torch.sin(angle) + 0.01 * torch.sin(1e-3 * time)
        return torch.stack([time + 10.0, angle + speed, speed], -1)

    xs, z0 = torch.zeros(300, dtype=torch.float64), torch.tensor([1.7e9, 0.3, 0.0], dtype=torch.float64)
    found = deeppcr.solve(step, z0, xs, solver=Newton())
    loop = plain_loop(step, z0, xs)
    assert found.result is Result.CONVERGED
    assert ((found.states - loop).abs().amax(0) <= 1e-8 * loop.abs().amax(0))[1:].all()


class TestDyingOut:
    """A network without biases: every layer shrinks the signal, and what is left is normalised afterwards."""

    @staticmethod
    def problem(gain=0.6, length=128):
        generator = torch.Generator().manual_seed(0)
        weights = gain * torch.randn(length, 16, 16, generator=generator) / 4
        z0 = torch.randn(1, 16, generator=generator)
        step = lambda z, w: torch.tanh(z @ w.mT)  # noqa: E731
        return step, z0, weights, plain_loop(step, z0.double(), weights.double())

    def test_the_message_says_from_where_on_digits_are_not_known(self):
        step, z0, weights, loop = self.problem()
        found = deeppcr.solve(step, z0, weights, solver=Newton())
        assert found.result is Result.CONVERGED
        known = int(found.known_steps)
        assert 5 < known < 60
        assert f"after step {known} states are so far below" in found.message
        assert 'Newton(scale="local")' in found.message
        sizes = loop.abs().amax((1, 2)) / loop.abs().max()
        assert (sizes[known:] < 1e-2).all()

    def test_local_digits(self):
        step, z0, weights, loop = self.problem()
        found = deeppcr.solve(step, z0, weights, solver=Newton(scale="local"))
        assert found.result is Result.CONVERGED
        assert int(found.known_steps) == len(weights)
        assert "died out" not in found.message
        sizes = loop.abs().amax(-1, keepdim=True)
        assert ((found.states - loop).abs() <= 1e-3 * sizes).all()

    def test_nothing_is_said_of_a_signal_that_stays(self):
        step, z0, weights, _ = self.problem(gain=1.5)
        with pytest.warns(deeppcr.ConvergenceWarning):
            found = deeppcr.solve(step, z0, weights, solver=Newton())
        assert int(found.known_steps) == len(weights)
        assert "died out" not in found.message

    def test_check_finds_it(self):
        step, z0, weights, _ = self.problem()
        found = deeppcr.check(step, z0, weights)
        assert [finding.kind for finding in found] == ["fading"]
        assert "from step " in found[0].message
        step, z0, weights, _ = self.problem(gain=1.5)
        assert deeppcr.check(step, z0, weights) == []

    def test_who_promises_no_tolerance_says_nothing(self):
        step, z0, weights, _ = self.problem()
        for solver in (deeppcr.Loop(), Newton(stop=deeppcr.FixedIterations(5))):
            found = deeppcr.solve(step, z0, weights, solver=solver)
            assert "died out" not in found.message
            assert torch.equal(found.known_steps, found.exact_steps)


class TestTolerance:
    def test_the_scale_is_the_largest_of_a_component_of_a_row_up_to_a_step(self):
        states = torch.tensor([[[1.0, -20.0]], [[-3.0, 5.0]], [[2.0, 30.0]]])
        scale = Tolerance(0.0, 1e-5).scale(states, torch.tensor([[2.0, 0.0]]))
        assert scale.tolist() == [[[2.0, 20.0]], [[3.0, 20.0]], [[3.0, 30.0]]]

    def test_a_local_scale_is_that_around_a_step(self):
        states = torch.tensor([8.0, 4.0, 2.0, -1.0]).reshape(4, 1, 1)
        scale = Tolerance(0.0, 1e-5, local=True).scale(states, torch.tensor([[16.0]]))
        assert scale.flatten().tolist() == [16.0, 8.0, 4.0, 2.0]

    def test_a_single_step(self):
        for local in (False, True):
            scale = Tolerance(0.0, 1e-5, local).scale(torch.full((1, 1, 1), 3.0), torch.ones(1, 1))
            assert scale.flatten().tolist() == [3.0]
