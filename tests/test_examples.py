"""The recipes of examples/: each gives what the plain loop, or the tool that people use now, gives."""

import math
import re
import sys
from types import ModuleType

import pytest
import torch

import deeppcr
from scripts import ROOT, scripts

NAMES = ("compressor", "gae", "iir", "kalman", "langevin", "lru", "ode", "unrolled")
#: Every way that a recipe may go where it leaves the choice to ``solve``.
SOLVERS = [pytest.param({}, id="chosen"), pytest.param({"solver": deeppcr.Newton()}, id="Newton")]
LENGTHS = (1, 2, 3, 65)

# What the loop had to finish was not solved in parallel.
pytestmark = pytest.mark.filterwarnings("error::deeppcr.ConvergenceWarning")


@pytest.fixture(scope="module")
def examples(device):
    """The modules, by name."""
    with scripts("examples") as load, pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("compare"), "DEVICE", device)
        yield {name: load(name) for name in NAMES}


def randn(device, *shape: int, **options):
    return torch.randn(*shape, dtype=torch.float64, device=device, **options)


def same(found, right, rtol=1e-8):
    torch.testing.assert_close(found, right, rtol=rtol, atol=rtol * float(right.detach().abs().max()))


def same_gradients(found, right, sources, rtol=1e-7):
    """Of a weighted sum of both, in all sources."""
    weights = torch.randn_like(right)
    pair = [torch.autograd.grad((each * weights).sum(), sources, retain_graph=True) for each in (found, right)]
    for one, other in zip(*pair, strict=True):
        assert other.abs().max() > 0
        same(one, other, rtol)


def test_every_example_is_listed():
    """But for the trainings, which recurrent.md tells of; those over ranks stand in a folder of their own."""
    trainings = {"training", "sequential_mnist", "amplifier"}
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"compare"} - trainings
    assert files == set(NAMES)
    ranks = {path.stem for path in (ROOT / "examples" / "distributed").glob("*.py")} - {"start"}
    listed = set(re.findall(r"^\| \[(\w+)\.py\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE))
    assert listed == files | ranks
    assert set(re.findall(r"examples/(\w+)\.py", (ROOT / "docs" / "recipes.md").read_text())) == files


@pytest.mark.parametrize("options", SOLVERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_ode(examples, device, length, options):
    ode: ModuleType = examples["ode"]
    y0 = randn(device, 2, 2, requires_grad=True)
    damping = torch.tensor(0.5, dtype=torch.float64, device=device, requires_grad=True)
    t = torch.linspace(0, 0.05 * length, length + 1, dtype=torch.float64, device=device)
    func = ode.pendulum(damping, 0.3)
    found, right = ode.odeint(func, y0, t, **options), ode.odeint_by_loop(func, y0, t)
    same(found, right)
    same_gradients(found, right, (y0, damping))


def test_ode_is_of_fourth_order(examples, device):
    """Against exp, with nothing shared: half of the step, a sixteenth of the error."""
    ode, errors = examples["ode"], []
    for steps in (8, 16):
        t = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=device)
        found = ode.odeint(lambda t, y: (2 * t - 1) * y, torch.ones(1, dtype=torch.float64, device=device), t)
        errors.append(float((found[:, 0] - torch.exp(t * t - t)).abs().max()))
    assert 12 < errors[0] / errors[1] < 20


def test_ode_as_by_torchdiffeq(examples, device):
    torchdiffeq = pytest.importorskip("torchdiffeq")
    ode, y0 = examples["ode"], randn(device, 2, 2)
    t, func = torch.linspace(0, 5, 65, dtype=torch.float64, device=device), ode.pendulum(0.5, 0.3)
    same(ode.odeint(func, y0, t, solver=deeppcr.Newton()), torchdiffeq.odeint(func, y0, t, method="rk4"))


@pytest.mark.parametrize("options", SOLVERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_kalman(examples, device, length, options):
    kalman = examples["kalman"]
    model, y = kalman.tracker(torch.float64), randn(device, length, 3, 1)
    seen = torch.arange(length, device=device) % 5 != 1
    hidden = torch.where(seen[:, None, None], y, torch.nan)  # what is not there must not be looked at
    for found, right in zip(
        kalman.smooth(model, hidden, seen, **options), kalman.smooth_by_loop(model, y, seen), strict=True
    ):
        same(found, right)


def test_kalman_is_the_posterior(examples, device):
    """Against the joint Gaussian of all states and observations, with nothing shared."""
    kalman, L = examples["kalman"], 5
    model, y = kalman.tracker(torch.float64), randn(device, 5, 1, 1)
    A, C, Q, R, _, P = model
    moves = torch.eye(2 * L, dtype=torch.float64, device=device)
    for l in range(1, L):
        moves[2 * l : 2 * l + 2, 2 * l - 2 : 2 * l] = -A
    noise = torch.block_diag(A @ P @ A.mT + Q, *[Q] * (L - 1))
    precision = moves.mT @ torch.linalg.inv(noise) @ moves
    reads = torch.block_diag(*[C] * L)
    covariance = torch.linalg.inv(precision + reads.mT @ reads / R)
    _, mean, found = kalman.smooth(model, y, torch.ones(L, dtype=torch.bool, device=device), solver=deeppcr.Newton())
    same(mean.flatten(), covariance @ (reads.mT @ y.flatten() / R.squeeze()))
    same(found, torch.stack([covariance[2 * l : 2 * l + 2, 2 * l : 2 * l + 2] for l in range(L)]))


@pytest.mark.parametrize("orders", [(3, 3), (1, 2), (4, 1), (2, 5)], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_iir(examples, device, length, orders):
    iir = examples["iir"]
    b, a = (randn(device, count) / 4 for count in orders)
    a[0] = 2.0  # which all is divided by
    b, a, x = b.requires_grad_(), a.requires_grad_(), randn(device, length, 2, requires_grad=True)
    found, right = iir.lfilter(b, a, x), iir.lfilter_by_loop(b, a, x)
    same(found, right)
    if length >= max(orders):
        same_gradients(found, right, (b, a, x))


def test_iir_as_by_scipy(examples, device):
    signal = pytest.importorskip("scipy.signal")
    iir, x = examples["iir"], randn(device, 1000, 3)
    b, a = (each.to(device) for each in iir.resonator(0.3, 0.99))
    right = signal.lfilter(*(each.cpu().numpy() for each in (b, a, x)), axis=0)
    same(iir.lfilter(b, a, x).cpu(), torch.from_numpy(right))


@pytest.mark.parametrize("options", SOLVERS)
@pytest.mark.parametrize("length", [*LENGTHS, 300])
def test_compressor(examples, device, length, options):
    compressor, x = examples["compressor"], randn(device, length, 2)
    times = [torch.tensor(ms, dtype=torch.float64, device=device, requires_grad=True) for ms in (0.5, 3.0)]
    xs = compressor.settings(compressor.target_gain(x, threshold=-20.0, ratio=4.0), *times, rate=8_000)
    found, right = compressor.smooth(xs, **options), compressor.smooth_by_loop(xs)
    same(found, right)
    if length >= 65:
        falls = (right[1:] < right[:-1]).double().mean()
        assert 0.05 < falls < 0.95  # it attacks and releases
        same_gradients(found, right, times)


def test_compressor_keeps_ratio_and_time(examples, device):
    """A steady tone ends where the curve has it: 12 dB above the threshold, at 4 to 1, become 3; 1 - 1/e of that after 1 ms."""
    compressor, x = examples["compressor"], torch.full((400, 1), 10 ** (-8 / 20), dtype=torch.float64, device=device)
    xs = compressor.settings(compressor.target_gain(x, -20.0, 4.0), 1.0, 5.0, rate=8_000)
    gain = compressor.smooth(xs)
    assert abs(20 * torch.log10(compressor.compress(x, gain)[-1]).item() - (-20 + 3)) < 1e-3
    assert gain[7].item() == pytest.approx(-9 * (1 - math.exp(-1)))


@pytest.mark.parametrize("length", [*LENGTHS, 63])
def test_gae(examples, device, length):
    gae = examples["gae"]
    rewards, values, next_values, terminated, done = gae.rollout(length, 5, torch.float64)
    terminated, done = (each | (torch.rand(each.shape, device=device) < 0.2) for each in (terminated, done))
    given = rewards, values, torch.where(terminated, torch.nan, next_values), terminated, done | terminated
    same(gae.gae(*given, gamma=0.9, lam=0.8), gae.gae_by_loop(*given, gamma=0.9, lam=0.8))


@pytest.mark.parametrize("length", LENGTHS)
def test_lambda_returns(examples, device, length):
    gae = examples["gae"]
    rewards, _, next_values, _, _ = (
        each.requires_grad_(each.is_floating_point()) for each in gae.rollout(length, 5, torch.float64)
    )
    terminated = torch.rand(length, 5, device=device) < 0.2
    found = gae.lambda_returns(rewards, next_values, terminated, 0.9, 0.8)
    right = gae.lambda_returns_by_loop(rewards, next_values, terminated, 0.9, 0.8)
    same(found, right)
    same_gradients(found, right, (rewards, next_values))


@pytest.mark.parametrize("options", SOLVERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_langevin(examples, device, length, options):
    langevin, z0 = examples["langevin"], randn(device, 2, 3, requires_grad=True)
    width = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)
    step, noise = langevin.langevin_step(lambda z: langevin.ridge(z / width), 0.05), randn(device, length, 2, 3)
    found, right = langevin.chain(step, z0, noise, **options), langevin.chain_by_loop(step, z0, noise)
    same(found, right)
    same_gradients(found, right, (z0, width))


@pytest.mark.parametrize("options", SOLVERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_mala(examples, device, length, options):
    langevin, z0 = examples["langevin"], randn(device, 2, 3)
    xs = randn(device, length, 2, 3), torch.rand(length, 2, dtype=torch.float64, device=device).log()
    step = langevin.mala_step(langevin.ridge, 0.5)
    right = langevin.chain_by_loop(step, z0, xs)
    same(langevin.chain(step, z0, xs, **options), right)
    if length == 65:
        moved = (right[1:] != right[:-1]).any(-1).double().mean()
        assert 0.1 < moved < 0.95  # proposals are taken, and refused


def test_mala_leaves_its_target_alone(examples, device):
    """Chains that begin in the target stay in it, at a rate at which Langevin's own would not: variance 1."""
    langevin, z0 = examples["langevin"], randn(device, 4000, 1)
    xs = randn(device, 5, 4000, 1), torch.rand(5, 4000, dtype=torch.float64, device=device).log()

    def normal(z):
        return -0.5 * z.square().sum(-1)

    adjusted = langevin.chain_by_loop(langevin.mala_step(normal, 0.9), z0, xs)[-1]
    unadjusted = langevin.chain_by_loop(langevin.langevin_step(normal, 0.9), z0, xs[0])[-1]
    assert abs(adjusted.var() - 1) < 0.1
    assert unadjusted.var() > 1.5


@pytest.mark.parametrize("options", SOLVERS)
def test_unrolled(examples, device, options):
    unrolled = examples["unrolled"]
    batches, (features, labels) = unrolled.data(65, 8, 3, torch.float64), unrolled.data(1, 20, 3, torch.float64)
    rate, momentum = (torch.tensor(each, dtype=torch.float64, device=device) for each in (0.3, 0.5))

    def loss(train, rate, momentum, **options):
        return unrolled.loss_of(train(rate, momentum, batches, **options), features[0], labels[0])

    def gradient(train, **options):
        return unrolled.meta_gradient(
            lambda *both: train(*both, batches, **options), (features[0], labels[0]), rate, momentum
        )

    found, right = gradient(unrolled.trained, **options), gradient(unrolled.trained_by_loop)
    same(found, right, rtol=1e-7)
    differences = []
    for direction in ((1e-5, 0.0), (0.0, 1e-5)):
        up, down = (
            loss(unrolled.trained_by_loop, rate + sign * direction[0], momentum + sign * direction[1])
            for sign in (1, -1)
        )
        differences.append((up - down) / 2e-5)
    same(found, torch.stack(differences), rtol=1e-6)


def test_unrolled_is_what_the_optimiser_does(examples, device):
    unrolled = examples["unrolled"]
    features, labels = unrolled.data(17, 8, 3, torch.float64)
    weights = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
    optimiser = torch.optim.SGD([weights], lr=0.3, momentum=0.5)
    for batch in zip(features, labels, strict=True):
        optimiser.zero_grad()
        unrolled.loss_of(weights, *batch).backward()
        optimiser.step()
    rate, momentum = (torch.tensor(each, dtype=torch.float64, device=device) for each in (0.3, 0.5))
    same(unrolled.trained(rate, momentum, (features, labels), solver=deeppcr.Newton()), weights.detach())


def test_lru_keeps_the_size_of_its_input(examples, device):
    """States of an input of size 1, added up for long, have size 1 however slowly they decay."""
    layer = examples["lru"].LRU(1, 4).to(device)
    with torch.no_grad():
        layer.B.fill_(1)
        eigenvalues, driven = layer.parts(torch.ones(1, 1, 1, device=device))
    assert eigenvalues.abs().amax() < 1
    same(driven[0, 0].abs().square() / (1 - eigenvalues.abs().square()), torch.ones(4, device=device), rtol=1e-3)


@pytest.mark.parametrize("length", LENGTHS)
def test_lru(examples, device, length):
    layer, u = examples["lru"].LRU(3, 5).to(device), randn(device, length, 2, 3, requires_grad=True)
    for parameter in layer.parameters():  # ``double`` would make complex numbers real
        parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
    found, right = layer(u), layer.by_loop(u)
    same(found, right)
    if length > 1:
        same_gradients(found, right, (u, *layer.parameters()))


def test_an_example_prints_one_line_and_refuses_what_differs(examples, capsys):
    compare = sys.modules["compare"].compare
    examples["gae"].main()
    line = r"GAE, 2,048 steps: relative error [\d.e-]+; in parallel [\d.]+ ms, one by one [\d.]+ ms on \w+\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"differs by 2\.5e-01"):
        compare("nothing", lambda: torch.tensor([1.0, 2.5]), lambda: torch.tensor([1.0, 2.0]), allowed=1e-3)
    with pytest.raises(SystemExit, match="differs by nan"):
        compare("nothing", lambda: torch.tensor([torch.nan, 2.0]), lambda: torch.tensor([1.0, 2.0]), allowed=1e-3)
