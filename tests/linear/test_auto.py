"""Auto chooses a solver and says why."""

from types import SimpleNamespace

import pytest
import torch

from deeppcr import linear
from deeppcr.linear import auto, fused
from linear.conformance import assert_compiles
from linear.reference import random_blocks


def couplings(structure, steps, width=3, device="cpu"):
    """Those between ``steps`` unknowns; only their shape and device are looked at."""
    return random_blocks(structure, steps - 1, (), width, device=device)


def couplings_for(rows, structure, steps, width):
    return random_blocks(structure, steps - 1, (rows,), width)


@pytest.mark.parametrize(
    ("structure", "steps", "width", "device", "expected"),
    [
        (linear.Dense, 2, 3, "cpu", linear.ForwardSubstitution()),
        (linear.Scalar, 9, 3, "cpu", linear.PCR()),
        (linear.Diagonal, 9, 300, "cpu", linear.PCR()),
        (linear.Dense, 64, 4, "cpu", linear.PCR()),
        (linear.Dense, 16, 64, "cpu", linear.ForwardSubstitution()),
        (linear.Dense, 500, 16, "cpu", linear.Hierarchical(chunk=4)),
        (linear.Dense, 1000, 32, "meta", linear.PCR()),
        (linear.BlockDiagonal, 1000, 34, "meta", linear.PCR()),
        (linear.Dense, 16384, 64, "meta", linear.Hierarchical(chunk=4)),
        (linear.Diagonal, 10000, 300, "cpu", linear.Hierarchical(chunk=8)),
    ],
)
def test_choice_and_reason(structure, steps, width, device, expected):
    solver, reason = linear.Auto().choose(couplings(structure, steps, width, device))
    assert solver == expected
    assert reason.startswith("expected: ")
    assert str(expected) not in reason  # but the others
    assert len([each for each in ("ForwardSubstitution", "PCR", "Hierarchical") if each in reason]) == 2


def test_rows_share_the_machine():
    """Products of blocks are w times the work of the loop, for each row: a full CPU has no time for them."""
    few = linear.Auto().choose(couplings_for(1, linear.Dense, 64, 16))[0]
    many = linear.Auto().choose(couplings_for(64, linear.Dense, 64, 16))[0]
    assert (few, many) == (linear.PCR(), linear.ForwardSubstitution())
    shared = couplings(linear.Dense, 64, 16)  # blocks that all rows have in common are multiplied once
    assert linear.Auto().choose(shared, torch.zeros(64, 2, 16, dtype=torch.float64))[0] == few


@pytest.mark.parametrize(("shared_memory", "widest"), [(99 * 1024, 128), (163 * 1024, 256), (227 * 1024, 256)])
def test_the_widest_kernels_need_a_device_with_room(shared_memory, widest, monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fused, "has_room", fused.has_room.__wrapped__)  # without its memory

    def refusal(width):
        data = SimpleNamespace(
            is_cuda=True, dtype=torch.float32, shape=(9, width, width), device=torch.device("cuda", 0)
        )
        return linear.Fused().refusal(linear.Dense(data))

    monkeypatch.setattr(fused, "has_triton", lambda: True)
    assert refusal(widest) is None
    assert refusal(widest + 1) == f"there are kernels for widths up to {widest}, the blocks have {widest + 1}"


class TestCounts:
    """The model against a count of what the solvers do."""

    prices = auto.Prices(1.0, 1.0, 1.0, 0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))

    @pytest.mark.parametrize("length", [2, 3, 9, 64, 100])
    def test_rounds(self, length, monkeypatch):
        applied = []
        apply = linear.Diagonal.apply
        monkeypatch.setattr(linear.Diagonal, "apply", lambda self, x: applied.append(len(self)) or apply(self, x))
        blocks, rhs = random_blocks(linear.Diagonal, length - 1), torch.zeros(length, 3, dtype=torch.float64)

        def count(solver):
            applied.clear()
            solver.solve_coupled(blocks, rhs)
            return len(applied), sum(applied)

        work = auto.Prices(0.0, 0.0, 0.0, 0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
        assert count(linear.ForwardSubstitution()) == (
            auto.forward_seconds(length, 0.0, self.prices),
            auto.forward_seconds(length, 1.0, work),
        )
        assert count(linear.PCR()) == (
            auto.pcr_seconds(length, 0.0, self.prices),
            auto.pcr_seconds(length, 1.0, work),
        )
        for chunk in (2, 4, 16):
            operations, applications = count(linear.Hierarchical(chunk=chunk))
            levels = (auto.hierarchical_seconds(length, chunk, 0.0, 0.0, self.prices) - operations) / 2
            assert levels in range(length.bit_length())
            # Chunks are counted as if all were full.
            counted = auto.hierarchical_seconds(length, chunk, 0.0, 1.0, work)
            assert applications <= counted <= applications + 2 * chunk * length.bit_length()

    def test_more_takes_longer(self):
        for cpu in (True, False):
            prices = auto._CPU if cpu else auto._GPU
            for seconds in (
                lambda length, prices=prices: auto.pcr_seconds(length, 1e-7, prices),
                lambda length, prices=prices: auto.forward_seconds(length, 1e-7, prices),
            ):
                times = [seconds(length) for length in range(2, 300)]
                assert times == sorted(times)


@pytest.mark.parametrize("steps", [5, 40, 100])
def test_auto_does_what_it_chose(steps, device):
    blocks = random_blocks(linear.Dense, steps, device=device)
    rhs = torch.randn(steps, 3, dtype=torch.float64, device=device)
    chosen, _ = linear.Auto().choose(blocks[1:])
    expected = linear.solve(blocks, rhs, solver=chosen)
    torch.testing.assert_close(linear.solve(blocks, rhs), expected, rtol=0, atol=0)


def test_auto_compiles(device):
    data = random_blocks(linear.Dense, 12, device=device).data
    rhs = torch.randn(12, 3, dtype=torch.float64, device=device)
    assert_compiles(lambda data, rhs: linear.solve(linear.Dense(data), rhs), (data, rhs))
