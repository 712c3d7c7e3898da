"""A step whose rows depend on each other has no kernels, whatever its inputs happen to be; one that treats them alike has."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import deeppcr
from deeppcr import Newton
from deeppcr.fuse.expressions import NotCovered
from deeppcr.fuse.step import FusedStep
from deeppcr.sequence.fingerprint import structure_of
from deeppcr.sequence.layout import Layout
from fuse.loops import by_loop
from fuse.test_trace import CASES
from kernel_support import error, thorough

OF_ROWS = torch.randn(3, 2, dtype=torch.float64)
GATE, ALMOST_SHUT = torch.zeros((), dtype=torch.float64), torch.full((2,), 1e-18, dtype=torch.float64)


def fused(step, z0, x=None, batch_dims=None):
    layout = Layout.of(z0, batch_dims)
    return FusedStep.of(step, layout, z0, x, structure_of(step)[1])


#: Of states and inputs [3, 2] that are zeros.
COUPLED = {
    "a mean of inputs": lambda z, x: 0.5 * torch.sin(z) + x - x.mean(0),
    "a small part of it": lambda z, x: torch.cos(z) + x + 1e-6 * x.mean(0),
    "a product with it": lambda z, x: 0.5 * torch.sin(z) * (x + x.sum(0)),
    "statistics of a batch": lambda z, x: 0.5 * torch.sin(z) + F.batch_norm(x, None, None, training=True),
    "a softmax over rows": lambda z, x: torch.sin(z) * torch.softmax(x, 0),
    "rows of others": lambda z, x: torch.sin(z) * x.flip(0),
    "the largest": lambda z, x: z + x - torch.relu(x).amax(0),
    "a mean of a closure": lambda z, x: 0.5 * torch.sin(z * OF_ROWS.mean(0)) * OF_ROWS + x,
    "how many rows there are": lambda z, x: torch.sin(z + 1) / len(z) + x,
    "the number of a row": lambda z, x: torch.cos(z) * torch.arange(len(z)).unsqueeze(-1) + x,
    "states": lambda z, x: z - z.mean(0) + x,
    "states, behind a gate that is shut": lambda z, x: torch.tanh(0.5 * z + GATE * z.mean(0) + x),
    "states, behind one that is almost shut": lambda z, x: torch.tanh(0.5 * z + ALMOST_SHUT * z.mean(0)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_depend_on_each_other_are_refused(name):
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(NotCovered, match="rows"):
        fused(COUPLED[name], zeros, zeros)


def test_what_a_step_keeps_is_left_alone():
    """It is asked on numbers of its own, which are nobody's statistics; and the caller's random numbers are left alone."""
    module, zeros = nn.BatchNorm1d(2), torch.zeros(3, 2)
    before, random = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(NotCovered):
        fused(lambda z, x: 0.5 * torch.sin(z) + module(x), zeros, zeros)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", [*list(CASES)[::8], *thorough(*(name for at, name in enumerate(CASES) if at % 8))])
def test_steps_that_treat_rows_alike_are_not_refused(name):
    step, z0, xs, batch_dims = CASES[name]()
    x = None if xs is None else tree_map(lambda leaf: leaf[0], xs)
    found, reached = fused(step, z0, x, batch_dims), structure_of(step)[1]
    assert found.has_gradients_of(step, z0, x, reached)


@pytest.mark.parametrize(
    "step",
    [
        lambda z, x: torch.log(z) + 3 + x,  # of both signs it is not a number
        lambda z, x: torch.linalg.inv(torch.eye(2) * 1e-3 + z.unsqueeze(-1) * z.unsqueeze(-2)) @ x.unsqueeze(-1),
        lambda z, x: 1e6 * (torch.sin(z) - torch.sin(z + 1e-6 * x)),  # rounding is most of it
        lambda z, x: torch.exp(100 * z) * x,  # beyond the numbers
        lambda z, x: torch.linalg.cholesky(torch.eye(2) + z.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1),  # raises
    ],
)
def test_where_a_step_is_not_defined_or_loses_digits_nothing_is_learned(step):
    z0, x = torch.rand(3, 2) + 0.5, torch.rand(3, 2)
    shaped = lambda z, x: step(z, x).reshape(z.shape)  # noqa: E731
    assert fused(shaped, z0, x).has_gradients_of(shaped, z0, x, structure_of(shaped)[1])


@pytest.mark.usefixtures("kernels")
def test_gradients_that_rows_share_are_noticed(device):
    """The states are those of one row; gradients are not, and come from the step itself."""
    z0, xs = (torch.randn(*shape, dtype=torch.float64, device=device) for shape in ((2, 3), (9, 2, 3)))
    step = lambda z, x: 0.3 * torch.sin(z) + x - x.mean(0) + x.mean(0).detach()  # noqa: E731
    for _ in range(2):
        found = deeppcr.solve(step, z0, xs, solver=Newton(chunk=4))
    assert found.plan.evaluation.startswith("fused kernels")
    xs.requires_grad_()
    found, theirs = deeppcr.solve(step, z0, xs, solver=Newton(chunk=4)), by_loop(step, z0, xs)
    assert "not by kernels: the kernels give another result than the step itself" in found.plan.notes
    a, b = (torch.autograd.grad((states**2).sum(), xs)[0] for states in (found.states, theirs))
    assert error(a, b) < 1e-9
