"""Gradients through ``sample`` equal those through the loop."""

import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import DDIM, DDPM, GaussianPrior, Noise, Schedule, Window, sample
from deeppcr.gradient import Adjoint
from kernel_support import pairwise


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 16), nn.Linear(16, width)
        self.label = nn.Embedding(4, 16)

    def forward(self, z, t, classes=None):
        hidden = self.enter(z) + 0.01 * t[:, None]
        if classes is not None:
            hidden = hidden + self.label(classes)
        return 0.7 * z + 0.5 * self.leave(torch.tanh(hidden))


SOLVERS = {
    "window": {"jacobian": "prior"},
    "small window": {"solver": Window(size=11)},
    "newton": {"solver": deeppcr.Newton()},
    "newton with the prior": {"solver": deeppcr.Newton(), "jacobian": "prior"},
}


@pairwise(
    step=[DDPM(), DDIM(), DDPM(clip=1.0)],
    length=[1, 2, 50],
    width=[5, 40],  # dense adjoint, iterative adjoint
    name=SOLVERS.keys(),
)
def test_gradients_equal_those_of_the_loop(step, length, width, name, device):
    make = {"dtype": torch.float64, "device": device}
    net = Net(width).to(**make)
    noise = Noise.draw((3, width), length, generator=torch.Generator(device).manual_seed(0), dtype=torch.float64)
    noise = Noise(noise.initial.requires_grad_(), noise.steps.requires_grad_())
    settings = dict(SOLVERS[name])
    if settings.get("jacobian") == "prior":
        settings["jacobian"] = GaussianPrior.from_data(torch.randn(50, width, **make) * torch.rand(width, **make))
    conditional = {"classes": torch.tensor([0, 3, 1], device=device)} if width == 5 else {}

    def gradients(**settings):
        found = sample(
            net, Schedule.linear(60).take(length), noise, step=step, keep_states=True, **conditional, **settings
        )
        weights = torch.linspace(-1, 1, found.states.numel(), **make).view_as(found.states)
        loss = (found.final**2).sum() + (weights * found.states).sum()
        wanted = [noise.initial, noise.steps, *net.parameters()]
        return found, torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    loop, expected = gradients(solver=deeppcr.Loop())
    found, got = gradients(**settings)
    assert (found.final - loop.final).abs().max() <= 1e-8
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= 1e-8 * (1 + other.abs().max())


def test_without_gradients_nothing_is_attached(device):
    net = Net(5).to(device)
    noise = Noise.draw((2, 5), 20, device=device)
    with torch.no_grad():
        assert not sample(net, Schedule.linear(20), noise).final.requires_grad
    assert sample(net, Schedule.linear(20), noise).final.requires_grad
    net.requires_grad_(False)
    assert not sample(net, Schedule.linear(20), noise).final.requires_grad
    with torch.inference_mode():
        assert sample(net, Schedule.linear(20), noise).final.shape == (2, 5)


def test_gradients_reach_embeddings_that_are_given(device):
    embeddings = torch.randn(2, 6, device=device, dtype=torch.float64, requires_grad=True)
    mix = torch.randn(6, 3, device=device, dtype=torch.float64)
    denoiser = lambda z, t, classes: 0.5 * z + torch.tanh(classes @ mix)  # noqa: E731
    initial = torch.randn(2, 3, device=device, dtype=torch.float64)
    found = []
    for solver in (Window(), deeppcr.Loop()):
        final = sample(denoiser, Schedule.linear(30), initial, step=DDIM(), classes=embeddings, solver=solver).final
        found.append(torch.autograd.grad(final.square().sum(), embeddings)[0])
    assert torch.allclose(*found, rtol=1e-8, atol=1e-10)


def test_the_adjoint_of_a_wide_state_is_found_by_the_priors_sweeps(device, monkeypatch):
    """Without the prior's couplings 100 steps would take 100 sweeps, more than are made, and end step by step."""

    def refuse(*_):
        raise AssertionError("the sweeps did not converge")

    monkeypatch.setattr(Adjoint, "walk", refuse)
    net = Net(40).to(device, torch.float64)
    noise = Noise.draw((2, 40), 100, device=device, dtype=torch.float64)
    sample(net, Schedule.linear(100), noise).final.square().sum().backward()
    assert net.leave.weight.grad.isfinite().all()
