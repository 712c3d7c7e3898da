"""Where an adjoint by the Jacobians of all steps at once does not hold: walked as the loop does, or refused with the cause."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

import deeppcr
from deeppcr import Implicit, Newton, Unrolled
from kernel_support import thorough
from problems import Generator, plain_loop

pytestmark = pytest.mark.filterwarnings("ignore:Newton stopped:deeppcr.ConvergenceWarning")
FULL = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def compare(step, z0, xs, tolerance, at_least=0.0, solver=Newton(), **settings):
    """The gradients of the last state in z0 and xs against the loop's, relative to the largest."""
    sources = [leaf.requires_grad_() for leaf in (*(z0 if isinstance(z0, tuple) else (z0,)), xs)]

    def gradients_of(states):
        last = torch.cat([leaf[-1].flatten() for leaf in (states if isinstance(states, tuple) else (states,))])
        return torch.autograd.grad(last, sources, torch.arange(1, len(last) + 1).to(last).cos())

    z = z0
    for x in xs:
        z = step(z, x)
    expected = gradients_of(tuple(leaf.unsqueeze(0) for leaf in z) if isinstance(z, tuple) else z.unsqueeze(0))
    found = gradients_of(deeppcr.solve(step, z0, xs, solver=solver, **settings).states)
    largest = max(at_least, *(float(each.abs().max()) for each in expected))
    for ours, loops in zip(found, expected, strict=True):
        assert (ours - loops).abs().max() <= tolerance * largest


@FULL
def test_a_norm_over_two_features(dtype, device):
    """Its result is 1 and -1 whatever comes: the derivative is rounding, and no two ways to find it agree in a digit."""
    for seed in range(2):
        make = Generator(seed, dtype, device)
        weight = make.normal(2, 2)
        step = lambda z, x: F.layer_norm(z @ weight + x, (2,))  # noqa: B023, E731
        compare(step, make.normal(3, 2), make.normal(30, 3, 2), 1e-3, at_least=1.0)


def test_features_that_are_almost_equal(device):
    """As in some of many rows: their norm loses most of its digits there, otherwise in forward mode than in reverse."""
    make = Generator(0, torch.float32, device)
    step = lambda z, x: 0.9 * z + 0.1 * F.layer_norm(0.3 * z + x, (2,))  # noqa: E731
    for gradient in (Implicit(), Unrolled()):
        compare(step, 0.1 * make.normal(1000, 2), make.normal(6, 1000, 2), 1e-2, gradient=gradient)


@FULL
@pytest.mark.parametrize("units", [1.0, 2.0**-40, 2.0**40])
def test_iterations_for_a_square_root(units, dtype, device):
    """At a root the derivative of Newton's iteration is zero, but for rounding."""
    for seed in range(3):
        make = Generator(seed, dtype, device)
        step = lambda z, x: 0.5 * (z + units * units * x / z)  # noqa: E731
        xs = make.normal(3).exp().expand(40, 2, 3).clone()
        compare(step, units * make.normal(2, 3).exp(), xs, 1e-4 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("angle", [0.05, 0.3])
def test_filters_that_are_far_from_normal(angle, device):
    """Products of their companion matrices lose digits that steps keep."""
    poly = torch.ones(1, dtype=torch.float64)
    for radius in (0.9, 0.95, 0.99, 0.99):
        pair = torch.tensor([radius**2, -2 * radius * math.cos(angle), 1.0], dtype=torch.float64)
        poly = F.conv1d(poly.view(1, 1, -1), pair.view(1, 1, -1), padding=2).flatten()
    matrix = torch.cat([-poly[1:].unsqueeze(0), torch.eye(8, dtype=torch.float64)[:-1]]).to(device)
    make = Generator(0, torch.float64, device)
    compare(lambda z, x: z @ matrix.mT + x, make.normal(2, 8), make.normal(300, 2, 8), 1e-8)


@pytest.mark.parametrize(
    "measured", [1, 2]
)  # of two, PyTorch's derivative of torch.linalg.solve is wrong under two vmaps
@FULL
def test_a_kalman_filter(measured, dtype, device):
    for seed in range(2):
        make = Generator(seed, dtype, device)
        a = 0.9 * torch.eye(3, dtype=dtype, device=device) + 0.05 * make.normal(3, 3)
        c, eye = make.normal(measured, 3), torch.eye(measured, dtype=dtype, device=device)

        def step(z, y):
            mean, cov = z
            mean, cov = mean @ a.mT, a @ cov @ a.mT + 0.01 * torch.eye(3).to(a)  # noqa: B023
            gain = torch.linalg.solve(c @ cov @ c.mT + 1e-3 * eye, c @ cov).mT  # noqa: B023
            return mean + (gain @ (y - mean @ c.mT).unsqueeze(-1)).squeeze(-1), cov - gain @ c @ cov  # noqa: B023

        z0 = (make.normal(3), torch.eye(3, dtype=dtype, device=device))
        compare(step, z0, make.normal(20, measured), 1e-2 if dtype is torch.float32 else 1e-8, batch_dims=0)


def test_autocast_inside_the_step(device):
    make = Generator(0, torch.float32, device)
    weight = make.normal(8, 8) / 3

    def step(z, x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return torch.tanh(z @ weight + x).float()

    compare(step, make.normal(2, 8), make.normal(50, 2, 8), 0.05, solver=Newton(atol=2e-2, rtol=2e-2))


def test_products_that_overflow_where_steps_do_not(device):
    """What nothing depends on grows by 1e30 a step: products of two steps overflow, and 0 times infinity is no number."""
    grows = torch.tensor([0.5, 1e30], device=device)
    z0 = torch.tensor([[1.0, 0.0]], device=device, requires_grad=True)
    solver = Newton(linear=deeppcr.PCR(), chunk=1)
    states = deeppcr.solve(lambda z: grows * torch.sin(z), z0, length=20, solver=solver).states
    (ours,) = torch.autograd.grad(states[..., 0].sum(), z0)
    (loops,) = torch.autograd.grad(plain_loop(lambda z: grows * torch.sin(z), z0, length=20)[..., 0].sum(), z0)
    assert torch.allclose(ours, loops)


# What is the step's fault is told, and nothing else is blamed; also where derivatives are little but rounding.


def plain(z, x):
    return torch.tanh(0.5 * z + x)


def rounded(z, x):
    return F.layer_norm(0.5 * z + x, (2,))


def refused(step, xs, device, solver=Newton(), **settings):
    z0 = torch.ones(3, 2, dtype=xs.dtype, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="the adjoint does not hold") as raised:
        deeppcr.solve(step, z0, xs, solver=solver, **settings).states.sin().sum().backward()
    return str(raised.value)


CAUSES = ("rows of the batch influence", "rebound since", "torch.no_grad()", "given Jacobian")


@FULL
@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("base", [plain, rounded])
def test_rows_that_influence_each_other_are_named(base, gradient, dtype, device):
    step = lambda z, x: base(z, x) + 0.01 * torch.sin(z.roll(1, 0))  # noqa: E731
    said = refused(step, Generator(0, dtype, device).normal(30, 3, 2), device, gradient=gradient)
    assert [cause for cause in CAUSES if cause in said] == ["rows of the batch influence"]


@FULL
@pytest.mark.parametrize("base", [plain, rounded])
def test_a_part_without_a_gradient_is_named_where_the_first_step_has_none(base, dtype, device):
    step = lambda z, x: partly(z, x, base)  # noqa: E731
    said = refused([base, *[step] * 29], Generator(0, dtype, device).normal(30, 3, 2), device)
    assert [cause for cause in CAUSES if cause in said] == ["torch.no_grad()", "given Jacobian"]


def partly(z, x, base=plain):
    with torch.no_grad():
        fixed = torch.sin(z)
    return base(z, x) + 0.3 * fixed


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("wrap", [lambda step: step, deeppcr.rowwise], ids=["vmap", "rowwise"])
@pytest.mark.parametrize("jacobian", [deeppcr.DenseJacobian(), deeppcr.DiagonalJacobian()], ids=["dense", "diagonal"])
def test_a_part_without_a_gradient_has_none_however_long_the_loop_is(jacobian, wrap, gradient, device):
    for length in (2, 30, 300):
        make = Generator(0, torch.float64, device)
        z0, xs = make.normal(3, 2), make.normal(length, 3, 2)
        compare(wrap(partly), z0, xs, 1e-10, solver=Newton(jacobian=jacobian), gradient=gradient)


@FULL
@pytest.mark.parametrize("base", [plain, rounded])
def test_what_was_rebound_is_named(base, dtype, device):
    xs, factor = Generator(0, dtype, device).normal(30, 3, 2), 0.3
    z0 = torch.ones(3, 2, dtype=dtype, device=device, requires_grad=True)
    states = deeppcr.solve(lambda z, x: base(z, x) + factor * z, z0, xs, solver=Newton()).states
    factor = 0.301
    with pytest.raises(RuntimeError, match=r"the adjoint does not hold.*rebound since") as raised:
        states.sin().sum().backward()
    assert "influence" not in str(raised.value)


def test_a_given_jacobian_that_is_wrong_is_named(device):
    off = lambda z, x: deeppcr.linear.Diagonal(0.49 / torch.cosh(0.5 * z + x) ** 2)  # noqa: E731
    solver = Newton(jacobian=deeppcr.GivenJacobian(off, exact=True), chunk=1)
    xs = Generator(0, torch.float64, device).normal(30, 3, 2)
    said = refused(plain, xs, device, solver=solver)
    assert [cause for cause in CAUSES if cause in said] == ["torch.no_grad()", "given Jacobian"]


@pytest.mark.parametrize("solver", [Newton(jacobian=deeppcr.HutchinsonJacobian(samples=4)), deeppcr.Jacobi(), Newton()])
def test_a_covariance_that_is_read_as_a_batch_of_rows(solver, device):
    """Whatever finds the states, derivatives through iterations rest on Jacobians that leave out how rows influence each other."""
    make = Generator(0, torch.float64, device)
    a, c, eye = 0.3 * make.normal(3, 3), make.normal(1, 3), torch.eye(3, dtype=torch.float64, device=device)

    def step(cov):
        cov = a @ cov @ a.mT + 0.02 * eye
        gain = cov @ c.mT / (c @ cov @ c.mT + 0.1)
        return cov - gain @ c @ cov

    z0 = (2 * eye).requires_grad_()
    with pytest.raises(RuntimeError, match="rows of the batch influence each other"):
        deeppcr.solve(step, z0, length=20, solver=solver, gradient=Unrolled())
    states = deeppcr.solve(step, z0, length=20, solver=solver, gradient=Unrolled(), batch_dims=0).states
    weights = make.normal(20, 3, 3)
    ours, loops = (torch.autograd.grad(each, z0, weights)[0] for each in (states, plain_loop(step, z0, length=20)))
    assert (ours - loops).abs().max() < 1e-8 * loops.abs().max()


# Where the gradient rests on digits that no tolerance vouches for.


def fading(dtype, device, units=1.0, gain=0.6, width=6):
    """A network without biases whose signal dies out; and what is left of its direction."""
    make = Generator(0, dtype, device)
    length = int((30 if dtype is torch.float32 else 60) / -math.log(gain))
    weights = gain * make.normal(length, width, width) / width**0.5
    step = lambda z, w: units * torch.tanh(z / units @ w)  # noqa: E731
    return step, (units * make.normal(1, width)).requires_grad_(), weights


def direction(states):
    last = states[-1] / states[-1].detach().abs().amax(-1, keepdim=True)  # whose square is a number
    return (last / last.norm(dim=-1, keepdim=True))[:, 0].sum()


def warned(said):
    return any("the gradient is not the loop's" in str(each.message) for each in said)


@pytest.mark.parametrize(
    ("units", "dtype"),
    [
        (1.0, torch.float64),
        *((units, torch.float32) for units in (2.0**-20, 1.0, 2.0**20)),
        *thorough((2.0**-20, torch.float64), (2.0**20, torch.float64)),
    ],
)
def test_a_signal_that_died_out_and_is_normalised_afterwards(units, dtype, device):
    """Its gradient is right, or the caller is told."""
    told = 0
    for gain, width in ((0.5, 2), (0.6, 6), (0.9, 16)):
        step, z0, weights = fading(dtype, device, units, gain, width)
        weights.requires_grad_()
        (loops,) = torch.autograd.grad(direction(plain_loop(step, z0, weights)), weights)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (ours,) = torch.autograd.grad(direction(deeppcr.solve(step, z0, weights, solver=Newton()).states), weights)
        off = (ours - loops).abs().max() / loops.abs().max()
        told += warned(said)
        assert warned(said) or off < 0.01, (gain, width)
    assert told or units != 1


@FULL
def test_a_signal_that_died_out_where_its_beginning_counts(dtype, device):
    """What is left of it at the end adds nothing to the loss, known or not."""
    step, z0, weights = fading(dtype, device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (ours,) = torch.autograd.grad(deeppcr.solve(step, z0, weights, solver=Newton()).states.square().sum(), z0)
    (loops,) = torch.autograd.grad(plain_loop(step, z0, weights).square().sum(), z0)
    assert torch.allclose(ours, loops, rtol=1e-4)
    assert not warned(said)


@FULL
@pytest.mark.parametrize("solver", [deeppcr.Loop(), Newton(stop=deeppcr.FixedIterations(3))])
def test_who_promises_nothing_says_nothing(solver, dtype, device):
    step, z0, weights = fading(dtype, device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        direction(deeppcr.solve(step, z0, weights, solver=solver).states).backward()
    assert not warned(said)
