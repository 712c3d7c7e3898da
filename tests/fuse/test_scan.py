"""A scan by kernels: counters ride along, and outputs and gradients are those of the loop."""

import pytest
import torch

import deeppcr
from deeppcr import Loop, Newton
from kernel_support import error

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("solver", [Newton(chunk=4), Loop(by="kernel")], ids=str)
def test_a_scan_by_kernels(solver, device):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    weight, start, xs = normal(3), normal(3), normal(7, 3)

    def combine(carry, x):
        h, count = carry
        after = 0.5 * torch.sin(h * weight) + x / (1 + count)
        return (after, count + 1), h * after

    init = (start, torch.tensor(0, device=device))
    found = None
    for _ in range(2):  # kernels come with the second solve of a kind
        found = deeppcr.scan(combine, init, xs, solver=solver, return_solution=True)
    (final, count), ys, solution = found
    assert solution.plan.evaluation.startswith("fused kernels"), solution.plan
    carry, outputs = init, []
    for x in xs:
        carry, y = combine(carry, x)
        outputs.append(y)
    assert count.item() == 7
    assert error(final, carry[0]) < 1e-9
    assert error(ys, torch.stack(outputs)) < 1e-9
    gradients = (
        torch.autograd.grad(state.sum() + y.cos().sum(), (weight, start, xs))
        for state, y in ((final, ys), (carry[0], torch.stack(outputs)))
    )
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs) < 1e-9
