"""The loop that ``scan`` is held against, with nothing of the library's in it."""

import torch
from torch.utils import _pytree as pytree

from deeppcr import Loop, Newton

SOLVERS = [None, Newton(), Loop()]


def plain_scan(combine, init, xs, *, dim=0, reverse=False):
    """The loop, with nothing of the library's in it."""
    leaves, spec = pytree.tree_flatten(xs)
    leaves = [leaf.movedim(dim, 0) for leaf in leaves]
    length, carry = len(leaves[0]), init
    outputs = [None] * length
    for step in reversed(range(length)) if reverse else range(length):
        carry, outputs[step] = combine(carry, pytree.tree_unflatten([leaf[step] for leaf in leaves], spec))
    return carry, pytree.tree_map(lambda *each: torch.stack(each, dim if dim <= each[0].ndim else 0), *outputs)


def assert_same(found, expected, **tolerance):
    found, expected = (pytree.tree_flatten(each) for each in (found, expected))
    assert found[1] == expected[1]
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)
