"""What cannot be sampled is refused with one clear message."""

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import DDIM, GaussianPrior, MeanStart, Noise, Schedule, Window, sample

SCHEDULE = Schedule.linear(20)
GLOBALS = {}


def plain(z, t):
    return torch.sin(z)


def run(denoiser=plain, noise=None, **settings):
    noise = Noise.draw((2, 3), 20) if noise is None else noise
    return sample(denoiser, settings.pop("schedule", SCHEDULE), noise, **settings)


@pytest.mark.parametrize("solver", [Window(), deeppcr.Loop(), deeppcr.Newton()], ids=lambda s: type(s).__name__)
def test_a_denoiser_that_returns_something_else(solver):
    with pytest.raises(ValueError, match=r"must return the shape of its input, \(\d+, 3\), returned \(\d+, 2\)"):
        run(lambda z, t: z[:, :2], solver=solver)
    with pytest.raises(TypeError, match="must return a tensor like its input, returned tuple"):
        run(lambda z, t: (z, t), solver=solver)


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), inner)

    def forward(self, z, t):
        return self.inner(z)


@pytest.mark.parametrize(
    ("inner", "match"),
    [
        (lambda: nn.Dropout(0.1), r"Dropout 'inner\.1' is random"),
        (lambda: nn.BatchNorm1d(3), r"BatchNorm1d 'inner\.1' normalises by its rows"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: lambda z, t: net(z, t), lambda net: net.forward])
def test_a_network_in_train_mode_is_found_and_named(inner, match, wrap):
    net = Block(inner())
    with pytest.raises(ValueError, match=match):
        run(wrap(net))
    run(wrap(net.eval()))


def test_dropout_that_drops_nothing_is_no_reason():
    run(Block(nn.Dropout(0.0)))


@pytest.mark.parametrize(
    ("noise", "match"),
    [
        (Noise(torch.randn(2, 3)), "adds noise at every step"),
        (Noise(torch.randn(2, 3), torch.randn(19, 2, 3)), r"\(20, 2, 3\) here, got \(19, 2, 3\)"),
        (Noise(torch.randn(2, 3), torch.randn(20, 2, 4)), r"got \(20, 2, 4\)"),
        (Noise(torch.randn(2, 3), torch.randn(20, 2, 3).double()), "float64"),
        (Noise(torch.randn(3)), r"\[B, \*shape\]"),
        (Noise(torch.zeros(2, 3, dtype=torch.long)), "floating"),
        (Noise(torch.full((2, 3), float("nan"))), "not finite"),
        (Noise(torch.zeros(0, 3)), "empty"),
    ],
)
def test_noise_that_does_not_fit(noise, match):
    with pytest.raises(ValueError, match=match):
        run(noise=noise)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"schedule": 20}, TypeError, "schedule"),
        ({"step": "ddpm"}, TypeError, "step"),
        ({"prediction": "score"}, ValueError, "prediction"),
        ({"solver": "window"}, TypeError, "solver"),
        ({"on_failure": "ignore"}, ValueError, "on_failure"),
        ({"start": "mean"}, TypeError, "start"),
        ({"start": torch.zeros(19, 2, 3)}, ValueError, r"\(20, 2, 3\), got \(19, 2, 3\)"),
        ({"start": MeanStart(torch.zeros(4))}, ValueError, "MeanStart"),
        ({"classes": torch.zeros(3, dtype=torch.long)}, ValueError, "B = 2"),
        ({"guidance": 2.0}, ValueError, "needs classes"),
        ({"jacobian": GaussianPrior(torch.ones(4))}, ValueError, "prior is of 4 numbers"),
        ({"jacobian": GaussianPrior(mean=torch.ones(4))}, ValueError, "prior's mean"),
        ({"noise": [1.0]}, TypeError, "noise"),
    ],
)
def test_arguments_are_named(settings, error, match):
    with pytest.raises(error, match=match):
        run(**settings)


def test_a_denoiser_must_be_callable():
    with pytest.raises(TypeError, match="denoiser: expected a callable"):
        run(3)


def test_samples_without_states_are_no_start():
    initial = torch.randn(2, 3)
    first = sample(plain, SCHEDULE, initial, step=DDIM())
    with pytest.raises(ValueError, match="keep_states=True"):
        sample(plain, SCHEDULE, initial, step=DDIM(), start=first)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: GaussianPrior(-1.0), "variance"),
        (lambda: GaussianPrior(torch.ones(3), torch.eye(4)), "basis"),
        (lambda: GaussianPrior.from_data(torch.ones(1, 3)), "at least 2"),
        (lambda: GaussianPrior.from_covariance(torch.ones(3, 4)), "covariance"),
    ],
)
def test_priors_are_checked(wrong, match):
    with pytest.raises(ValueError, match=match):
        wrong()


HIDDEN = {
    "dropout": (lambda: nn.Dropout(0.05), "another result each time"),
    "batch norm": (lambda: nn.BatchNorm1d(6), "rows must not influence each other"),
    "attention over the batch": (lambda: Mixed(lambda z: torch.softmax(z @ z.mT, -1) @ z), "rows must not influence"),
    "the mean of the rows": (lambda: Mixed(lambda z: z.mean(0, keepdim=True)), "rows must not influence each other"),
    "one NaN for all": (lambda: Mixed(lambda z: z.amax() - z.amax()), "rows must not influence each other"),
}


class Mixed(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, z):
        return z + 0.05 * self.mix(z)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_network_that_is_random_or_mixes_rows_is_found_out(name, samples):
    """Also where it hides from the look for modules in train mode, behind a global name, and converges as if nothing were."""
    make, match = HIDDEN[name]
    net = GLOBALS["net"] = make()
    calls = []

    def denoiser(z, t):
        calls.append(len(z))
        z = z + torch.where((t == 35)[:, None], float("inf"), 0.0) if name == "one NaN for all" else z
        return GLOBALS["net"](0.9 * z)

    schedule, noise = Schedule.linear(40), torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with pytest.raises(ValueError, match=match):
            sample(denoiser, schedule, noise, step=DDIM())
        assert len(calls) <= 3  # at once
        if name in ("dropout", "batch norm"):
            net.eval()
            assert sample(denoiser, schedule, noise, step=DDIM()).result is deeppcr.Result.CONVERGED


def test_a_network_that_takes_no_few_rows():
    def denoiser(z, t):
        if len(z) < 8:
            raise RuntimeError("too few")
        return torch.sin(z)

    with torch.no_grad(), pytest.raises(ValueError, match="it took 40 and not 4 of them: too few"):
        run(denoiser)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_that_depends_on_the_number_of_rows_is_no_coupling(dtype):
    """As matrix products have it, and much worse."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3).to(dtype)
    rough = 8 * torch.finfo(dtype).eps

    def denoiser(z, t):
        return 0.1 * net(z.to(dtype)).float() * (1 + rough * (len(z) % 3))

    with torch.no_grad():
        run(denoiser, solver=Window(tolerance=0.1))
