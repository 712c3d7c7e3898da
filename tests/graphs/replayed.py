"""What tests of recorded solves share."""

import torch
from torch.utils import _pytree as pytree

from problems import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
REPLAYED = "replayed as a CUDA graph"


def is_replayed(solution) -> bool:
    return REPLAYED in solution.plan.notes


def why_not(solution) -> str:
    return next((note for note in solution.plan.notes if note.startswith("not captured")), "")


def assert_same(found, expected):
    """Of a replayed solve and one by the general iteration."""
    assert is_replayed(found), found.plan
    assert not why_not(found)
    assert found.results == expected.results
    assert found.iterations.tolist() == expected.iterations.tolist()
    assert found.exact_steps.tolist() == expected.exact_steps.tolist()
    assert found.updates.shape == expected.updates.shape
    assert found.residual.shape == expected.residual.shape
    assert found.message == expected.message
    dtype = pytree.tree_leaves(found.states)[0].dtype
    assert relative_error(found.states, expected.states) < TOLERANCE[dtype]
    for name in ("evaluation", "derivative", "chunk"):
        assert getattr(found.plan, name) == getattr(expected.plan, name)


def twice(solve):
    """The second of two solves of a kind, which is recorded."""
    solve()
    solution = solve()
    assert is_replayed(solution), solution.plan
    return solution
