"""A step may hide the derivative of some of its numbers (``round``, ``detach``): what then adds up unseen is found, and left to the loop."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result
from deeppcr.graphs import record
from problems import plain_loop
from tape import Tape

GRID = {torch.float32: 2.0**-15, torch.float64: 2.0**-34}
SMALL = {torch.float32: 1e-5, torch.float64: 1e-10}


def rounded_clock(z, x):
    grid = GRID[x.dtype]
    return 0.99 * z[0] + x, torch.round((z[1] + grid) / grid) * grid


def rounded_clock_beside_tanh(z, x):
    return torch.tanh(0.9 * z[0] + x), rounded_clock(z, x)[1]


def clock_drives_filter(z, x):
    return 0.9 * z[0] + torch.sin(5 * z[1]), rounded_clock(z, x)[1]


def floored_counter(z, x):
    grid = GRID[x.dtype]
    return torch.tanh(z[0] + x), torch.floor(z[1] / grid + 1.5) * grid


def detached(z, x):
    return torch.tanh(0.9 * z[0] + x), z[1].detach() + 0.1 * SMALL[x.dtype] * 100


def half_detached(z, x):
    """Half of the influence is in the derivative."""
    return torch.tanh(0.9 * z[0] + x), 0.5 * z[1] + 0.5 * z[1].detach() + 0.1 * SMALL[x.dtype] * 100


def slow_statistics(z, x):
    level = z[1].detach() + 10 * SMALL[x.dtype] * z[0].detach().square()
    return torch.tanh(0.5 * z[0] + x), level


def dithered(z, x):
    """The increment is a sign, whose derivative is none; and the level itself is detached."""
    return 0.9 * z[0] + x, z[1].detach() + 10 * SMALL[x.dtype] * torch.sign(z[0] + 1)


def swapped_registers(z, x):
    """Each number of the second tensor takes the other's place: what one hides shows in the other."""
    first, second = z[1].unbind(-1)
    return 0.9 * z[0] + x, torch.stack([second.detach() + 5 * SMALL[x.dtype], first], -1)


def some_columns(z, x):
    column = torch.arange(z[1].shape[-1], device=x.device) == 1
    return 0.9 * z[0] + x, torch.where(column, z[1].detach(), z[1]) + SMALL[x.dtype]


#: Steps that hide derivatives which matter, with the width of their second tensor.
HIDING = {
    each.__name__: (each, width)
    for each, width in [
        (rounded_clock, 1),
        (rounded_clock_beside_tanh, 1),
        (clock_drives_filter, 1),
        (floored_counter, 1),
        (detached, 1),
        (half_detached, 1),
        (slow_statistics, 1),
        (dithered, 1),
        (swapped_registers, 2),
        (some_columns, 3),
    ]
}


def problem(width, dtype, device, rows=2, length=1500):
    made = torch.Generator("cpu").manual_seed(0)
    xs = torch.randn(length, rows, 1, generator=made, dtype=dtype).to(device)
    z0 = torch.zeros(rows, 1, dtype=dtype, device=device), torch.full((rows, width), 100.0, dtype=dtype, device=device)
    return z0, xs


def is_right(states, expected, dtype):
    return all(
        ((one - other).abs() <= 10 * SMALL[dtype] * other.abs().amax()).all()
        for one, other in zip(states, expected, strict=True)
    )


def solved(*loop, **settings):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return deeppcr.solve(*loop, **settings), told


@pytest.mark.parametrize("solver", [Newton(), Newton(chunk=1), Newton(scale="local")], ids=["auto", "chunk 1", "local"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", HIDING)
def test_what_adds_up_unseen_is_left_to_the_loop_and_told(name, dtype, solver, device):
    step, width = HIDING[name]
    z0, xs = problem(width, dtype, device)
    found, told = solved(step, z0, xs, solver=solver)
    assert is_right(found.states, plain_loop(step, z0, xs), dtype)
    assert found.result is Result.FINISHED_BY_LOOP
    assert any(issubclass(each.category, deeppcr.ConvergenceWarning) for each in told)
