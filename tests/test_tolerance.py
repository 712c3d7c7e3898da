"""What a step bears out of states that were found otherwise."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deeppcr.tolerance import Tolerance, bears_out

TOLERANCE = Tolerance(0.0, 1e-10)


def trajectory(length):
    """Of z * z: states [L, 2, 1], of which the second row soon is infinite, and what the step gives from those before them."""
    z0 = torch.tensor([[0.9], [2.0]], dtype=torch.float64)
    states = torch.stack([z0 ** (2.0 ** (l + 1)) for l in range(length)])
    return z0, states


def held(z0, states):
    values = torch.cat([z0.unsqueeze(0), states[:-1]]).square()
    return bears_out(values, states, z0, TOLERANCE).tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 63, 65])
def test_a_row_may_stop_being_finite_where_its_step_says_so(length):
    z0, states = trajectory(length)
    assert held(z0, states) == [True, True]
    states[12:, 1] = math.nan  # behind that, nothing is asked
    assert held(z0, states) == [True, True]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.5])
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_stops_being_finite_too_early_is_not_excused(wrong, row):
    z0, states = trajectory(20)
    states[3:, row] = wrong
    assert held(z0, states) == [row != 0, row != 1]


def test_nor_is_one_that_stays_finite_where_its_step_does_not():
    z0, states = trajectory(20)
    first = int((~torch.isfinite(states[:, 1, 0])).nonzero()[0])
    states[first:, 1] = 0.0
    assert held(z0, states) == [True, False]


def test_whether_something_is_hidden_can_be_asked_while_operations_are_recorded(device):
    """Without a look of the host."""
    states = torch.exp(-0.5 * torch.arange(80.0, device=device)).view(-1, 1, 1).expand(-1, 3, 2).clone()
    states[10, 1] = 1e7
    states[11:, 1] = 1.0
    initial = torch.ones(3, 2, device=device)
    tolerance = Tolerance(0.0, 1e-5)
    errors = tolerance.allowed(states, initial)
    with Watch() as watch:
        hidden = tolerance.hides(states, initial, errors)
    assert not watch.looked
    assert hidden.tolist() == [False, True, False]


class Watch(TorchDispatchMode):
    """Sees whether the host asks for a value."""

    looked = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.looked = self.looked or func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
