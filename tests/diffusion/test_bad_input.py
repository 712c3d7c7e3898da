"""What cannot be sampled is refused with one clear message."""

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import deeppcr
from deeppcr.diffusion import DDIM, GaussianPrior, MeanStart, Noise, Schedule, Window, sample

SCHEDULE = Schedule.linear(20)
GLOBALS = {}
LABELS = {"classes": torch.zeros(2, dtype=torch.long), "guidance": 2.0}


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
        (Noise(torch.full((2, 3), float("nan")), torch.randn(20, 2, 3)), "not finite"),
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
        ({"guidance": torch.tensor([1.0, 2.0])}, TypeError, r"guidance: expected a finite number .* got tensor"),
        ({"guidance": torch.tensor(1.0)}, TypeError, "guidance: expected a finite number"),
        ({"guidance": float("nan")}, TypeError, "guidance: expected a finite number .* got nan"),
        (LABELS | {"unconditional": "none"}, ValueError, r"unconditional: expected .* \[\(2,\)\], got \['str'\]"),
        (LABELS | {"unconditional": torch.zeros(3)}, ValueError, r"unconditional: expected .* got \[\(3,\)\]"),
        (LABELS | {"unconditional": [torch.zeros(2)] * 2}, ValueError, "unconditional: expected"),
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
        (lambda: GaussianPrior(-1.0), r"variance: .* got -1\.0"),
        (lambda: GaussianPrior(torch.tensor([1.0, float("nan")])), "variance: .* got nan"),
        (lambda: GaussianPrior(torch.ones(2, 2)), r"variance: .* got shape \(2, 2\)"),
        (lambda: GaussianPrior(torch.ones(3), torch.eye(4)), "basis"),
        (lambda: GaussianPrior.from_data(torch.ones(1, 3)), "at least 2"),
        (lambda: GaussianPrior.from_data(torch.full((5, 3), float("nan"))), "data: expected finite"),
        (lambda: GaussianPrior.from_covariance(torch.ones(3, 4)), "covariance"),
        (lambda: GaussianPrior.from_covariance(torch.full((3, 3), float("inf"))), "covariance: expected finite"),
    ],
)
def test_priors_are_checked(wrong, match):
    with pytest.raises(ValueError, match=match):
        wrong()


def test_the_mean_of_whole_numbers_is_none_of_them():
    assert GaussianPrior.from_data(torch.tensor([[0, 1], [1, 1]])).mean.tolist() == [0.5, 1.0]


def test_priors_of_no_numbers():
    for wrong, match in ((lambda: GaussianPrior("wide"), "variance"), (lambda: GaussianPrior(1.0, [[1.0]]), "basis")):
        with pytest.raises(TypeError, match=f"{match}: expected a"):
            wrong()


@pytest.mark.parametrize("shape", [5, (), (5,), (2, -1), (2, 2.5)])
def test_noise_of_no_shape(shape):
    with pytest.raises(TypeError, match=r"shape: expected \[B, \*shape\], at least two whole numbers from 1, got"):
        Noise.draw(shape)
    with pytest.raises(TypeError, match="steps: expected a whole number"):
        Noise.draw((2, 3), steps=2.5)
    assert Noise.draw(torch.zeros(2, 3).shape).samples == 2


def test_only_the_plain_loop():
    with pytest.raises(ValueError, match=r"solver: sample has no Loop\(by='kernel'\)"):
        run(solver=deeppcr.Loop(by="kernel"))


SOLVERS = [Window(), deeppcr.Newton(), deeppcr.Loop()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(1, 1, 3, padding=1)], ids=lambda s: type(s).__name__)
def test_noise_of_another_dtype_than_the_network(layer, solver):
    for function, match in (
        (lambda z, t: layer(z), r"noise: is torch\.float64, but the denoiser's parameters are torch\.float32"),
        (lambda z, t: next(GLOBALS["layer"])(z), r"noise: is torch\.float64, which the denoiser does not take"),
    ):
        GLOBALS["layer"] = itertools.repeat(layer)
        with pytest.raises(TypeError, match=match):
            sample(function, SCHEDULE, torch.randn(2, 1, 4, dtype=torch.float64), step=DDIM(), solver=solver)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_other_faults_of_the_network_come_as_they_are(solver):
    def wrong(z, t):
        return torch.ones(3, 4) @ z.mT

    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        run(wrong, solver=solver)


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=lambda s: type(s).__name__)
def test_transforms_that_it_does_not_take(solver):
    noise = torch.randn(2, 3)

    def final(noise, net=plain):
        return sample(net, SCHEDULE, noise, step=DDIM(), solver=solver).final.sum()

    for transform, given in (
        (torch.func.grad, noise),
        (torch.func.jacfwd, noise),
        (torch.func.vmap, torch.stack([noise, noise])),
    ):
        with pytest.raises(RuntimeError, match=r"sample: cannot run inside a torch.func transform .*deeppcr.Loop"):
            transform(final)(given)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="sample: has no forward-mode derivative"):
            final(forward_ad.make_dual(noise, noise))
        scale = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            final(noise, lambda z, t: scale * z)
    leaf = noise.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"second derivatives .* use solver=deeppcr.Loop"):
        torch.autograd.grad(final(leaf), leaf, create_graph=True)


def test_the_loop_takes_all_derivatives_but_no_vmap():
    noise = torch.randn(2, 3, dtype=torch.float64)

    def final(noise):
        return sample(plain, SCHEDULE, noise, step=DDIM(), solver=deeppcr.Loop()).final.sum()

    with pytest.raises(RuntimeError, match=r"sample: cannot run inside a torch\.func transform"):
        torch.func.vmap(final)(torch.stack([noise, noise]))
    leaf = noise.clone().requires_grad_()
    expected = torch.autograd.grad(final(leaf), leaf)[0]
    for transform in (torch.func.grad, torch.func.jacfwd):
        assert torch.allclose(transform(final)(noise), expected)
    assert torch.autograd.gradgradcheck(final, leaf)


HIDDEN = {
    "dropout": (lambda: nn.Dropout(0.05), "another result each time"),
    "batch norm": (lambda: nn.BatchNorm1d(6), "rows must not influence each other"),
    "attention over the batch": (lambda: Mixed(lambda z: torch.softmax(z @ z.mT, -1) @ z), "rows must not influence"),
    "the mean of the rows": (lambda: Mixed(lambda z: z.mean(0, keepdim=True)), "rows must not influence each other"),
    "the row before": (lambda: Mixed(lambda z: z.roll(1, 0) * (torch.arange(len(z)) > 0)[:, None]), "rows must not"),
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
    """Also where it hides from the look for modules in train mode, in an iterator, and converges as if nothing were."""
    make, match = HIDDEN[name]
    net = make()
    GLOBALS["net"] = itertools.repeat(net)
    calls = []

    def denoiser(z, t):
        calls.append(len(z))
        z = z + torch.where((t == 35)[:, None], float("inf"), 0.0) if name == "one NaN for all" else z
        return next(GLOBALS["net"])(0.9 * z)

    schedule, noise = Schedule.linear(40), torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with pytest.raises(ValueError, match=match):
            sample(denoiser, schedule, noise, step=DDIM())
        assert len(calls) <= 4  # at once
        if name in ("dropout", "batch norm"):
            net.eval()
            assert sample(denoiser, schedule, noise, step=DDIM()).result is deeppcr.Result.CONVERGED


NET = nn.Dropout()


def test_a_global_network_in_train_mode_is_named():
    with pytest.raises(ValueError, match="denoiser: is in train mode, where its Dropout is random"):
        run(lambda z, t: NET(z))


def test_a_network_that_takes_no_few_rows():
    def denoiser(z, t):
        if len(z) < 10:
            raise RuntimeError("too few")
        return torch.sin(z)

    with torch.no_grad(), pytest.raises(ValueError, match="it took 40 and not 9 of them: too few"):
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


def test_a_start_that_is_not_finite():
    schedule, start = Schedule.linear(20), torch.zeros(20, 2, 6)
    start[3, 1, 2] = float("nan")
    with pytest.raises(ValueError, match="start: holds values that are not finite"):
        sample(lambda z, t: torch.sin(z), schedule, torch.randn(2, 6), step=DDIM(), start=start)


def test_noise_that_is_not_finite_is_not_the_denoisers_fault():
    """Also where the run ends before it, or the denoiser does not take it; noise that is not used may be anything."""
    noise = Noise.draw((2, 6), steps=20)
    noise.steps[17, 1, 2] = float("nan")

    def wary(z, t):
        assert torch.isfinite(z).all()
        return torch.sin(z)

    for denoiser, most in ((torch.sin, 2), (wary, 200)):
        solver = Window(max_iterations=most, size=20)
        with pytest.raises(ValueError, match="noise: steps holds"):
            sample(lambda z, t, f=denoiser: f(z, t) if f is wary else f(z), Schedule.linear(20), noise, solver=solver)
    for solver in (Window(), deeppcr.Loop()):
        assert torch.isfinite(
            sample(lambda z, t: 0.5 * z, Schedule.linear(20), noise, step=DDIM(), solver=solver).final
        ).all()


def test_noise_of_the_steps_that_is_not_finite():
    noise = Noise.draw((2, 6), steps=20)
    noise.steps[7, 1, 2] = float("nan")
    with pytest.raises(ValueError, match="noise: steps holds values that are not finite"):
        sample(lambda z, t: torch.sin(z), Schedule.linear(20), noise)
