"""500 random problems with default settings (25 of them in `make test`, which has others in `test_fuzz`): no silent wrong answer, no stable problem falls back."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import Result
from problems import Generator, plain_loop

COUNT, BATCHES = 500, 20
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def random_step(make, width, gain):
    """A step of one of several kinds; ``gain`` scales how strongly it couples to the state before."""
    weight = gain * make.normal(width, width) / width**0.5
    kind = int(make.uniform(1) * 6)
    if kind == 0:
        return lambda z, x: torch.tanh(z @ weight) + x
    if kind == 1:
        return lambda z, x: torch.relu(z) @ weight + 0.3 * x
    if kind == 2:
        return lambda z, x: torch.sin(z @ weight + x)
    if kind == 3:
        gate = make.normal(width, width) / width**0.5
        return lambda z, x: (g := torch.sigmoid(z @ gate + x)) * torch.tanh(z @ weight) + (1 - g) * (0.5 * gain) * z
    if kind == 4:
        return lambda z, x: 0.5 * gain * z + 0.5 * torch.nn.functional.softplus(-z) @ (weight / 2) + x
    return lambda z, x: gain * (0.7 * torch.cos(z) + 0.2 * z.roll(1, -1)) + 0.1 * x


def contraction(step, states, z0, xs) -> float:
    """The mean logarithmic growth of a small perturbation along the true trajectory, per step."""
    previous = torch.cat([z0.unsqueeze(0), states[:-1]]).double()
    # [L, B, D, D]: of every step and row at once, as one by one they take as long as the solve.
    jacobians = torch.vmap(torch.vmap(torch.func.jacfwd(step), (0, None)))(previous, xs.double())
    direction, total = torch.ones_like(z0).double().unsqueeze(-1), 0.0
    for jacobian in jacobians:
        direction = jacobian @ direction
        size = direction.norm(dim=-2, keepdim=True).clamp(min=1e-300)
        total += float(size.log().max())
        direction = direction / size
    return total / len(previous)


@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, BATCHES))])
def test_random_problems(batch, device):
    stable = 0
    for seed in range(batch * COUNT // BATCHES, (batch + 1) * COUNT // BATCHES):
        setup = Generator(seed)
        dtype = torch.float32 if setup.uniform(1) < 0.5 else torch.float64
        width = [1, 2, 3, 5, 8, 17, 33][int(setup.uniform(1) * 7)]
        length = [1, 2, 7, 33, 64, 150, 300][int(setup.uniform(1) * 7)]
        rows = 1 + int(setup.uniform(1) * 3)
        gain = [0.3, 0.7, 1.0, 1.5, 3.0][int(setup.uniform(1) * 5)]
        double = random_step(Generator(seed + 10_000, torch.float64, device), width, gain)
        make = Generator(seed + 20_000, dtype, device)
        step = random_step(Generator(seed + 10_000, dtype, device), width, gain)
        z0, xs = make.normal(rows, width), make.normal(length, width)

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
            solution = deeppcr.solve(step, z0, xs, solver=deeppcr.Newton())
            loop = plain_loop(step, z0, xs)
            states = solution.states
            if solution.result is Result.NON_FINITE:
                assert not loop.isfinite().all(), f"seed {seed}: {solution}"
                continue
            previous = torch.cat([z0.unsqueeze(0), states[:-1]])
            off = (torch.vmap(step)(previous, xs) - states).abs().amax(-1)
            assert (off <= 2 * TOLERANCE[dtype] * (1 + states.abs().amax(-1))).all(), f"seed {seed}: {solution}"

            growth = contraction(double, loop, z0, xs)
            if growth < -0.1:
                stable += 1
                assert solution.result is Result.CONVERGED, f"seed {seed}: {solution} {solution.plan}"
                error = (states - loop).abs().amax(-1) / (1 + loop.abs().amax(-1))
                assert error.max() <= 10 * TOLERANCE[dtype], f"seed {seed}: {float(error.max())} {solution}"
    assert stable > 0.2 * COUNT / BATCHES  # or the half of this test that looks at stable ones tests nothing
