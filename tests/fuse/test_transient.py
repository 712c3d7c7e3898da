"""What was large once does not hide what comes after it from the kernels either."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Newton, Result
from deeppcr.fuse import closer, transients
from deeppcr.tolerance import Tolerance
from kernel_support import thorough
from problems import plain_loop

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def elementwise(z, x):
    return 0.05 * z + torch.sin(1.3 * torch.tanh(z)) * 0.7 + x


def mixing(z, x):
    """Every number of the state depends on others: three in a lane, twelve on a tile."""
    return 0.05 * z + torch.tanh(z.roll(1, -1)) * 0.7 + x


def solve(step, z0, xs, **options):
    solver = Newton(chunk=4)
    deeppcr.solve(step, torch.zeros_like(z0), xs, solver=solver)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = deeppcr.solve(step, z0, xs, solver=solver, **options)
    assert found.plan.evaluation.startswith("fused kernels")
    return found


STEPS = {"lanes": (elementwise, 2), "narrow": (mixing, 3), "tiles": (mixing, 12)}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("lanes", 1e7), ("lanes", 1e10), ("narrow", 1e10), ("tiles", 1e7)),
        *thorough(("narrow", 1e7), ("tiles", 1e10)),
    ],
)
def test_a_large_start(kind, size, device):
    step, width = STEPS[kind]
    xs = torch.randn(48, 1, width, generator=torch.Generator().manual_seed(0)).to(device)
    z0 = torch.zeros(1, width, device=device)
    z0[0, 0] = size
    found = solve(step, z0, xs)
    assert found.result is Result.CONVERGED
    assert (found.states - plain_loop(step, z0, xs)).abs()[12:].max() <= 1e-3
    assert "digits of every state were asked for" in str(found.plan)
    assert "died out" not in found.message


def test_of_states_that_are_not_written(device):
    xs = torch.randn(48, 1, 2, generator=torch.Generator().manual_seed(0)).to(device)
    z0 = torch.full((1, 2), 1e7, device=device)
    deeppcr.solve(elementwise, z0, xs, solver=Newton(chunk=4))
    for _ in range(4):
        found = solve(elementwise, z0, xs, keep="last")
        assert (found.final - plain_loop(elementwise, z0, xs)[-1]).abs().max() <= 1e-3


@pytest.mark.parametrize("width", [3, 12])
def test_a_signal_that_dies_out_takes_no_more_passes(width, device):
    weight = 0.5 * torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0].to(device)
    step = lambda z, x: torch.tanh(z @ weight) + x  # noqa: E731
    xs = torch.zeros(64, 1, width, device=device)
    found = solve(step, torch.ones(1, width, device=device), xs)
    assert found.result is Result.CONVERGED
    assert "digits of every state" not in str(found.plan)
    assert "died out" in found.message


def test_where_it_was_suspected_before_the_kernels_look_themselves(device, monkeypatch):
    """And nobody else does, as long as they find nothing. Where something is hidden, it is found as in the first solve."""
    looks = []
    hides = closer.hides
    monkeypatch.setattr(closer, "hides", lambda *given: looks.append(given) or hides(*given))
    xs = torch.zeros(64, 1, 2, device=device)
    step, solver = lambda z, x: 0.8 * torch.tanh(z) + x, Newton(chunk=4)
    solved = [deeppcr.solve(step, torch.ones(1, 2, device=device), xs, solver=solver) for _ in range(5)]
    assert [found.result for found in solved[1:]] == [Result.CONVERGED] * 4
    assert len(looks) == 1
    xs[2:] = torch.randn(62, 1, 2, generator=torch.Generator().manual_seed(0)).to(device)
    large = torch.full((1, 2), 1e9, device=device)
    found = deeppcr.solve(step, large, xs, solver=solver)
    assert len(looks) == 2
    assert "digits of every state were asked for" in str(found.plan)
    assert (found.states - plain_loop(step, large, xs)).abs()[12:].max() <= 1e-3


def series(chunks, numbers, dtype):
    """Sizes of chunks [N, 1, D], and of the initial state: each stays what it is for some time, and then is another one of many."""
    source = torch.Generator().manual_seed(chunks)
    level = torch.floor(12 * torch.rand(chunks + 1, numbers, generator=source))
    often = 2.5 / (chunks + 1) ** 0.5 * torch.rand(numbers, generator=source)
    changes = torch.rand(chunks + 1, numbers, generator=source) < often
    for n in range(1, chunks + 1):
        level[n] = torch.where(changes[n], level[n], level[n - 1])
    sizes = 10 ** -level.to(dtype)
    sizes[:, 0] = 0.0
    return sizes[1:].unsqueeze(1), sizes[0].unsqueeze(0)


@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [
        (1, torch.float32),
        (2, torch.float32),
        (3, torch.float64),
        (9, torch.float32),
        (20, torch.float64),
        *thorough((40, torch.float32), (79, torch.float64), (200, torch.float32)),
    ],
)
def test_a_kernel_says_what_tolerance_says(chunks, dtype, device):
    sizes, initial = (each.to(device) for each in series(chunks, 20, dtype))
    tolerance, seen = Tolerance(0.0, 1e-5), set()
    nearer = torch.where(torch.arange(20, device=device) % 2 == 0, 1e-3 * sizes, sizes)

    def compare(at, closer):
        part = [None if each is None else each[..., at].contiguous() for each in (sizes, initial, closer)]
        expected = bool(tolerance.hides(part[0], part[1], tolerance.allowed(part[0], part[1]), part[2]).any())
        assert transients.hides_any(part[0], part[1], tolerance, part[2]) == expected
        seen.add(expected)

    for number in range(20):
        compare(slice(number, number + 1), None)
    for number in range(0, 20, 4):
        compare(slice(number, number + 2), nearer)
    assert chunks < 9 or len(seen) == 2


def test_more_chunks_than_a_program_looks_at(device, monkeypatch):
    monkeypatch.setattr(transients, "_MOST_CHUNKS", 50)
    sizes, initial = (each.to(device) for each in series(64, 20, torch.float32))
    assert transients.hides_any(sizes, initial, Tolerance(0.0, 1e-5))
    assert not transients.hides_any(sizes[..., :1], initial[..., :1], Tolerance(0.0, 1e-5))
