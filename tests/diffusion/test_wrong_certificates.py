"""A random search for samples that a window calls converged and the loop does not give: denoisers, samplers, lengths, sizes, tolerances."""

import random

import pytest
import torch

from deeppcr import Loop, Result
from deeppcr.diffusion import DDIM, DDPM, GaussianPrior, GaussianStart, Noise, Schedule, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window.prepared import Prepared
from deeppcr.diffusion.window.sliding import SlidingIteration
from deeppcr.solution import Plan

ACTIVATIONS = {
    "smooth": torch.tanh,
    "kinked": torch.relu,
    "clipped": lambda v: v.clamp(-0.3, 0.3),
    "wavy": lambda v: torch.sin(3 * v),
}


class Slid(Prepared):
    kind = SlidingIteration


def denoiser(draw, width, seed):
    """A network of one hidden layer beside a share of its input, guided away from another one in every other draw."""
    make, inner = torch.Generator().manual_seed(seed), 32
    gain, act = 10 ** draw.uniform(-1, 0.7), ACTIVATIONS[draw.choice(sorted(ACTIVATIONS))]
    into = gain * torch.randn(2, width, inner, generator=make) / width**0.5
    out, shift = torch.randn(2, inner, width, generator=make) / inner**0.5, torch.randn(inner, generator=make)
    guidance = draw.choice([0.0, 2.0])

    def network(z, t):
        late = 1 + t.to(z).reshape(-1, 1) / 1000
        one, other = (0.7 * z + 0.5 * act(z @ into[each] + shift * late) @ out[each] for each in (0, 1))
        return one + guidance * (one - other)

    return network


def trial(seed):
    """How far converged samples are off, in tolerances, by the window that slides and by the one that does not; and their results."""
    draw = random.Random(seed)
    width, length = draw.choice([2, 5, 16]), draw.choice([5, 20, 50, 100])
    network = denoiser(draw, width, seed)
    step = draw.choice([DDPM(), DDIM(), DDPM(clip=1.0), DDIM(eta=0.5)])
    window = Window(size=draw.choice([1, 3, 8, 20]), tolerance=draw.choice([1e-2, 1e-3, 1e-4]))
    schedule = Schedule.linear(1000).take(length)
    noise = Noise.draw((3, width), steps=length, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        loop = sample(network, schedule, noise, step=step, solver=Loop()).final
        found = []
        for kind in (Slid, Prepared):
            problem = Problem(network, step.steps(schedule), noise)
            outcome = kind(window, problem, GaussianPrior()).run(window, problem, GaussianStart(), Plan())
            off = (problem.unflatten(outcome.states[..., 0])[-1] - loop).abs().amax(-1) / window.tolerance
            found += [(float(each), result) for each, result in zip(off, outcome.results, strict=True)]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_what_converged_is_what_the_loop_gives(seed):
    assert all(off <= 1 for off, result in trial(seed) if result is Result.CONVERGED)
