"""What rounding leaves: a tolerance that it does not reach is not certified, and residuals are of what is returned."""

import contextlib
import copy
import math
import warnings

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, DDPM, GaussianPrior, Noise, Schedule, Steps, Window, sample
from deeppcr.diffusion.coupling import Coupling
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window.rounding import MARGIN, Rounding
from diffusion import digits
from diffusion.test_sample import noise_for
from kernel_support import thorough


@pytest.mark.parametrize(
    ("step", "length"),
    [(DDPM(), 200), (DDIM(), 50), (DDPM(clip=1.0), 50), *thorough((DDPM(), 50), (DDIM(), 200), (DDPM(clip=1.0), 200))],
    ids=str,
)
def test_what_is_certified_holds_and_the_rest_is_called_rounding(net, length, step, device):
    """Tolerances from far above rounding to far below it."""
    noise = noise_for(2, length, device=device)
    given = (net, digits.TRAINING.take(length), noise)
    results = []
    with torch.no_grad():
        loop = sample(*given, step=step, solver=deeppcr.Loop())
        for tolerance in (1e-3, 1e-4, 1e-5, 1e-6, 1e-9):
            with pytest.warns(deeppcr.ConvergenceWarning) if tolerance < 1e-8 else contextlib.nullcontext():
                found = sample(*given, step=step, jacobian=digits.prior(), solver=Window(tolerance=tolerance))
            for error, result in zip((found.final - loop.final).abs().flatten(1).amax(1), found.results, strict=True):
                assert result in (Result.CONVERGED, Result.PRECISION_FLOOR)
                assert error <= (tolerance if result is Result.CONVERGED else 2e-4)
            results.append(found.result)
    assert results[0] is Result.CONVERGED  # the default
    assert results[-1] is Result.PRECISION_FLOOR
    assert results == sorted(results, key=lambda result: result.severity)
    assert "Loosen the tolerance, or use float64" in found.message
    assert Result.FINISHED_BY_LOOP not in found.results


def test_double_precision_certifies_more(net, device):
    noise = noise_for(2, 50, torch.float64, device=device)
    try:
        with torch.no_grad():
            for tolerance, expected in ((1e-9, Result.CONVERGED), (1e-18, Result.PRECISION_FLOOR)):
                found = sample(
                    net.double(),
                    digits.TRAINING.take(50),
                    noise,
                    jacobian=digits.prior(),
                    solver=Window(tolerance=tolerance),
                )
                assert found.result is expected
    finally:
        net.float()


def test_a_network_in_half_precision_certifies_less():
    """Its outputs are rounded, however exact the states are: that much is the default tolerance, and less is not certified."""
    noise, schedule = Noise.draw((2, 4), 40, generator=torch.Generator().manual_seed(0)), Schedule.linear(40)

    def ideal(z, t):  # of data of unit variance
        return ((1 - schedule.alphas_bar.to(z)[t.long()]).sqrt().unsqueeze(-1) * z).to(dtype)

    for dtype, tolerance, expected in (
        (torch.float32, None, Result.CONVERGED),
        (torch.bfloat16, None, Result.CONVERGED),
        (torch.bfloat16, 1e-3, Result.PRECISION_FLOOR),
    ):
        window = Window(tolerance=tolerance)
        with torch.no_grad():
            found = sample(ideal, schedule, noise, solver=window)
            problem = Problem(ideal, DDPM().steps(schedule), noise)
        assert found.result is expected
        assert (1e-3 if dtype == torch.float32 or tolerance else 2e-3) <= window.tolerance_for(problem) <= 0.1


@pytest.mark.parametrize("slots", [1, 2])
def test_rounding_is_weighed_by_what_follows(slots):
    """Against the derivatives of the prior's own chain, one step after the other."""
    length, prior = 7, GaussianPrior(torch.tensor([0.3, 2.0, 1.0]))
    plain = DDIM().steps(Schedule.linear(length))
    keep, gain = torch.zeros(length, slots, slots), torch.zeros(length, slots)
    keep[:, 0, 0], gain[:, 0] = plain.keep[:, 0, 0], plain.gain[:, 0]
    if slots == 2:
        keep[:, 0, 1], gain[:, 1] = -0.5 * plain.gain[:, 0], 1
    steps = Steps(plain.timesteps, keep, gain, plain.signal, plain.spread)
    problem = Problem(lambda z, t: z, steps, torch.ones(1, 3, dtype=torch.float64))
    coupling = Coupling(prior, steps, 3, problem.device, problem.dtype)
    blocks = prior.couplings(steps).reshape(length, 3, slots, slots)
    expected = []
    for l in range(length):
        chain = torch.eye(slots, dtype=torch.float64).expand(3, slots, slots)
        for block in blocks[l + 1 :]:
            chain = block @ chain
        expected.append(chain[:, 0].norm(dim=-1).max())
    eps = torch.finfo(torch.float64).eps
    size = torch.rand(length, 2, dtype=torch.float64)
    rounding = Rounding(problem, coupling)
    assert torch.allclose(rounding.weights, eps * torch.stack(expected), rtol=1e-12)
    least = MARGIN * eps * (torch.stack(expected)[:, None] * size).square().sum(0).sqrt()
    found, own = rounding.least(size, torch.ones_like(size))
    assert torch.allclose(found, least, rtol=1e-12)
    assert torch.allclose(own, least / MARGIN, rtol=1e-12)


def test_residuals_are_of_the_states_that_are_returned(net, device):
    """Clipped with a network that has not learned it, the states of the loop itself grow to thousands, and come back."""
    noise = noise_for(1, 200, device=device)
    given, step = (net, digits.TRAINING, noise), DDIM(clip=0.9)
    with torch.no_grad():
        loop = sample(*given, step=step, solver=deeppcr.Loop(), keep_states=True)
        assert loop.states.abs().max() > 1e3
        with pytest.warns(deeppcr.ConvergenceWarning, match="one step at a time"):
            found = sample(*given, step=step, jacobian=digits.prior(), solver=Window(max_iterations=20))
    assert found.result is Result.FINISHED_BY_LOOP
    assert found.exact_steps < 60
    assert (found.final - loop.final).abs().max() <= 1e-3
    assert 0 < float(found.residual) < 1e-4 < math.inf


def test_a_prior_that_is_too_narrow_promises_no_more(device):
    """It would have errors wiped out that are not; then more would be certified than float32 can hold."""
    generator = torch.Generator().manual_seed(0)
    schedule, drawn = Schedule.linear(200), Noise.draw((64, 2), steps=200, generator=generator)
    noise = Noise(drawn.initial.to(device), drawn.steps.to(device))
    means = 4 * torch.randn(6, 2, generator=generator).to(device)

    def denoiser(z, t):  # the ideal one, of six Gaussians of variance 4
        a = schedule.alphas_bar.to(z)[t.long()].unsqueeze(-1)
        variance = 4 * a + 1 - a
        off = z.unsqueeze(1) - a.sqrt().unsqueeze(1) * means
        weights = torch.softmax(-off.square().sum(-1) / (2 * variance), 1)
        return (1 - a).sqrt() * (weights.unsqueeze(-1) * off).sum(1) / variance

    solver = Window(tolerance=5e-6, tf32=None)
    with torch.no_grad():
        loop = sample(denoiser, schedule, noise, solver=deeppcr.Loop())
        found = sample(denoiser, schedule, noise, jacobian=GaussianPrior(1e-3), solver=solver)
    wrong = ((found.final - loop.final).abs().amax(1) > 5e-6).tolist()
    assert any(wrong)  # rounding leaves more
    claimed = [result is Result.CONVERGED for result in found.results]
    assert not any(a and b for a, b in zip(wrong, claimed, strict=True))
    problem = Problem(denoiser, DDPM().steps(schedule), noise)
    narrow, unit = (
        Rounding(problem, Coupling(GaussianPrior(variance), problem.steps, 2, problem.device, problem.dtype)).weights
        for variance in (1e-3, 1.0)
    )
    assert torch.equal(narrow, unit)


def growing(z, t):
    """No denoiser: it blows samples up to 1e7, where float32 is exact to 1 at best."""
    return -z


@pytest.mark.parametrize("on_failure", ["loop", "return"])
def test_rounding_far_above_the_tolerance_is_warned_of(on_failure):
    noise, schedule = noise_for(2, 100), Schedule.linear(100)
    with torch.no_grad():
        loop = sample(growing, schedule, noise, solver=deeppcr.Loop())
        with pytest.warns(
            deeppcr.ConvergenceWarning, match=r"estimated as \de\+\d+, more than .* the loop rounds as much"
        ):
            found = sample(growing, schedule, noise, on_failure=on_failure)
        with pytest.raises(deeppcr.ConvergenceError, match="went as far as rounding lets it"):
            sample(growing, schedule, noise, on_failure="raise")
    assert found.result is Result.PRECISION_FLOOR  # and kept: the loop is no better
    assert Result.FINISHED_BY_LOOP not in found.results
    assert 0.1 < (found.final - loop.final).abs().max() < 1e-5 * loop.final.abs().max()


def test_rounding_a_little_above_the_tolerance_is_said_by_the_result_alone():
    """Here it leaves 20 times as much; and hundreds of times in half precision, of which no more is expected."""
    noise = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    runs = (
        (lambda z, t: 0.9 * z, Window(tolerance=1e-6)),
        (lambda z, t: (0.9 * z).bfloat16(), Window(tolerance=1e-4)),
    )
    for denoiser, solver in runs:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = sample(denoiser, Schedule.linear(40), noise, step=DDIM(), solver=solver, on_failure="raise")
        assert found.result is Result.PRECISION_FLOOR


def test_one_sample_far_off_is_enough():
    def denoiser(z, t, classes):
        return torch.where(classes[:, None] == 1, -z, 0.9 * z)

    noise = Noise.draw((2, 4), 100, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 1])
    with torch.no_grad(), pytest.warns(deeppcr.ConvergenceWarning, match="sample 1; 1 of 2 samples"):
        found = sample(denoiser, Schedule.linear(100), noise, classes=classes)
    assert found.results == (Result.CONVERGED, Result.PRECISION_FLOOR)


@pytest.mark.parametrize("on_failure", ["loop", "return", "raise"])
def test_what_cannot_be_estimated_is_not_called_rounding(on_failure):
    """By this Jacobian errors grow beyond all numbers; the steps finish one by one all the same."""
    noise, schedule = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), Schedule.linear(100)
    given = (lambda z, t: 0.9 * z, schedule, noise)

    def run():
        return sample(*given, step=DDIM(), jacobian=deeppcr.ScalarJacobian(100.0), on_failure=on_failure)

    with torch.no_grad():
        if on_failure == "raise":
            with pytest.raises(deeppcr.ConvergenceError, match=r"cannot be estimated: .* it is not to be trusted"):
                run()
            return
        with pytest.warns(deeppcr.ConvergenceWarning, match=r"cannot be estimated: .* 2 of 2 samples"):
            found = run()
        loop = sample(*given, step=DDIM(), solver=deeppcr.Loop())
    if on_failure == "loop":
        assert found.results == (Result.FINISHED_BY_LOOP,) * 2
        assert "computed one step at a time instead" in found.message
        assert torch.equal(found.final, loop.final)  # from the first step on
        assert (found.evaluations >= 100 + found.iterations).all()
    else:
        assert found.results == (Result.NOT_CONVERGED,) * 2
        assert found.exact_steps.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [DDIM(), DDPM()])
def test_a_network_of_half_precision_is_not_asked_for_more_than_it_knows(dtype, step, net, device):
    """Its rounding keeps states moving by more than any tolerance: steps leave with that, and do not wait to be exact."""
    half, schedule = copy.deepcopy(net).to(dtype), digits.TRAINING.take(100)
    noise = noise_for(3, 100, device=device)
    given = schedule, Noise(noise.initial.to(dtype), noise.steps.to(dtype))
    with torch.no_grad():
        exact = sample(net, schedule, Noise(*(each.float() for each in (given[1].initial, given[1].steps))), step=step,
                       solver=deeppcr.Loop()).final  # fmt: skip
        loop = sample(half, *given, step=step, solver=deeppcr.Loop()).final
        # The size is that which a CPU takes by itself: a GPU would take all steps at once, and evaluate more rows.
        found = sample(half, *given, step=step, jacobian=digits.prior(), solver=Window(size=22, tolerance=1e-4))
    assert found.result is Result.PRECISION_FLOOR
    assert found.evaluations.max() < 8 * 100
    assert found.iterations.max() < 50
    assert (found.final.float() - exact).abs().max() <= 1.3 * (loop.float() - exact).abs().max()


def test_half_precision_inside_of_a_network_is_seen_like_that_around_it(net):
    """It takes and returns float32: told by these, it was asked for more than it knows, and took as many iterations as steps."""
    switch = {"on": True}

    def inside(z, t):
        with torch.autocast("cpu", torch.bfloat16, enabled=switch["on"]):
            return net(z, t).float()

    net, schedule, noise = net.cpu(), digits.TRAINING.take(100), noise_for(3, 100)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            around = sample(net, schedule, noise, jacobian=digits.prior(), solver=Window(tolerance=1e-4))
        for _ in range(2):  # it is remembered
            found = sample(inside, schedule, noise, jacobian=digits.prior(), solver=Window(tolerance=1e-4))
            assert torch.equal(found.final, around.final)
            assert found.iterations.tolist() == around.iterations.tolist()
            assert found.result is around.result is Result.PRECISION_FLOOR
            assert "rounding of a network that computes in bfloat16" in str(found.plan)
        switch["on"] = False
        assert sample(inside, schedule, noise, jacobian=digits.prior()).result is Result.CONVERGED


def test_what_a_network_computes_in_is_asked_anew_where_it_may_have_changed():
    net = nn.Linear(6, 6).eval()
    net.low = True

    def plainly(z, t):
        return net(z)

    def cast(z, t):
        with torch.autocast("cpu", torch.bfloat16, enabled=net.low):
            return net(z).float()

    def through(function):
        return lambda z, t: function(z, t)

    def coarsest(denoiser):
        problem = Problem(denoiser, DDIM().steps(Schedule.linear(20), "epsilon"), torch.randn(2, 6))
        problem.check_times()
        calls.clear()
        again = Problem(denoiser, DDIM().steps(Schedule.linear(20), "epsilon"), torch.randn(2, 6))
        found = again.coarsest
        assert not calls  # it is remembered
        return found

    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        with torch.autocast("cpu", torch.float16):
            assert coarsest(through(plainly)) == torch.float16
        assert coarsest(through(cast)) == torch.bfloat16
        assert coarsest(through(plainly)) == torch.float32
        net.low = False
        assert coarsest(through(cast)) == torch.float32


@pytest.mark.parametrize(
    ("half", "compute"),
    [
        (True, lambda z, w: (z.half() @ w.half()).float()),
        (True, lambda z, w: nn.functional.conv1d(z[:, None].half(), w[:1, None, :3].half(), padding=1)[:, 0].float()),
        (
            True,
            lambda z, w: nn.functional.scaled_dot_product_attention(*[z[:, None, None].half()] * 3)[:, 0, 0].float(),
        ),
        (False, lambda z, w: nn.functional.embedding(torch.zeros(len(z), dtype=torch.long), w.half()).float() * z),
        (False, lambda z, w: torch.cat([w.half()[:1], w.half()[:1]])[:1].float() * z),
        (False, lambda z, w: (z @ w) / 2),
    ],
    ids=["matrices", "convolution", "attention", "table", "storage", "float32"],
)
def test_products_tell_what_a_network_computes_in(half, compute):
    weights = torch.eye(6) / 2
    problem = Problem(lambda z, t: compute(z, weights), DDIM().steps(Schedule.linear(20), "epsilon"), torch.randn(2, 6))
    assert problem.coarsest == (torch.float16 if half else torch.float32)
    assert problem.rows_seen == 0


def test_autocast_around_is_of_the_network_alone():
    """States and their updates keep their precision: in a prior's basis, too."""
    states, matrix = torch.randn(4, 3, 6, 1), torch.linalg.qr(torch.randn(6, 6)).Q
    steps = DDIM().steps(Schedule.linear(4), "epsilon")
    coupling = Coupling(GaussianPrior(torch.rand(6), matrix), steps, 6, states.device, states.dtype)
    expected = coupling.spread(states)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(coupling.spread(states), expected)


def test_what_a_network_returns_is_remembered_where_it_is_not_called_again(device):
    """As in runs that are replayed."""
    noise, calls = Noise.draw((2, 3), 20, device=device), []

    def denoiser(z, t):
        calls.append(len(z))
        return (0.5 * z).bfloat16()

    first, second = (Problem(denoiser, DDPM().steps(Schedule.linear(20)), noise) for _ in range(2))
    first.check_times()
    calls.clear()
    assert second.coarsest is torch.bfloat16
    assert not calls
