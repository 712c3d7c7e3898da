"""Every operation on tiles, its tangents and its cotangents, against PyTorch: with padding that holds zeros, and with padding that holds anything."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings

from deeppcr.fuse import tile_rules
from deeppcr.fuse.expressions import NotCovered
from fuse.on_tiles import LEAD, derivatives, names_in, run_on_tiles
from fuse.test_slices import WIDTH, computed, programs
from kernel_support import thorough

#: Functions of tensors, and the shapes of these: of which some dimensions are no power of two, some are one.
CASES = {
    "addmm": (torch.addmm, (5,), (3, 6), (6, 5)),
    "addmm scaled": (lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=-2), (3, 5), (3, 6), (6, 5)),
    "addmv": (torch.addmv, (3,), (3, 6), (6,)),
    "amax": (lambda a: torch.amax(a - 5, -1), (3, 5)),
    "amax of all": (lambda a: torch.amax(a - 5), (3, 5)),
    "amin": (lambda a: torch.amin(a + 5, (0, 2), keepdim=True), (3, 5, 6)),
    "as many": (lambda a, b: a * b, (5, 1), (1, 6)),
    "attention": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (3, 5), (3, 5), (3, 5)),
    "baddbmm": (torch.baddbmm, (2, 3, 5), (2, 3, 6), (2, 6, 5)),
    "bmm": (torch.bmm, (3, 5, 2), (3, 2, 3)),
    "bmm of one": (torch.bmm, (1, 5, 6), (1, 6, 3)),
    "bmm with ones": (lambda a: torch.bmm(torch.ones(3, 2, 5, dtype=a.dtype), a), (3, 5, 6)),
    "bool picked": (lambda a: torch.where(~(a > 0)[0], a[1], 2 * a[1]), (3, 5)),
    "cat": (lambda a, b: torch.cat([a, b, 2 * a], -1), (3, 5), (3, 1)),
    "cat of made zeros": (lambda a: torch.cat([torch.zeros(3, 2, dtype=a.dtype), a, torch.ones(3, 2, dtype=a.dtype)], -1), (3, 5)),
    "cat of rows": (lambda a, b: torch.cat([a, b], 0), (3, 5), (2, 5)),
    "chunk": (lambda a: torch.sub(*a.chunk(2, -1)), (3, 10)),
    "clamp": (lambda a: a.clamp(-0.3, 0.4), (3, 5)),
    "constant_pad_nd": (lambda a: F.pad(a, (1, 2, 0, 3), value=0.5), (3, 5)),
    "detach": (lambda a: a * a.detach(), (3, 5)),
    "div": (lambda a, b: a / (2 + b), (3, 5), (3, 1)),
    "dot": (torch.dot, (5,), (5,)),
    "expand": (lambda a: a.expand(3, 5) + a, (3, 1)),
    "expand a number": (lambda a: a.sum().expand(3, 5), (5,)),
    "flip": (lambda a: a.flip(0, 1), (3, 5)),
    "gated": (lambda a, b: torch.sigmoid(a) * torch.tanh(b) + (1 - torch.sigmoid(a)) * a, (5,), (5,)),
    "index": (lambda a: a[:, [4, 2, 0]], (3, 5)),
    "index around": (lambda a: a[[1, 2, 0]], (3, 5)),
    "index_put": (lambda a: a.index_put((torch.tensor([1, 2]),), torch.ones(2, 5, dtype=a.dtype)), (4, 5)),
    "index_select": (lambda a: torch.index_select(a, -1, torch.tensor([1, 3])), (3, 5)),
    "layer_norm": (lambda a, b: F.layer_norm(a, (5,), b, b), (3, 5), (5,)),
    "linear in parts": (lambda a, b: F.linear(torch.cat([a, a * a], -1), b), (1, 5), (3, 10)),
    "logsumexp": (lambda a: torch.logsumexp(a, -1), (3, 5)),
    "mean": (lambda a: a.mean(-1, keepdim=True), (3, 5)),
    "mean of all": (torch.mean, (3, 5)),
    "mm": (torch.mm, (3, 5), (5, 6)),
    "mm of one": (torch.mm, (3, 1), (1, 6)),
    "mm on units": (torch.mm, (1, 20), (20, 17)),
    "mm on units, from the left": (torch.mm, (17, 20), (20, 1)),
    "mm on units, of matrices": (torch.mm, (17, 20), (20, 33)),
    "mm with ones": (lambda a: a @ torch.ones(5, 3, dtype=a.dtype), (3, 5)),
    "mm of a number with ones": (lambda a: a[:, :1] @ torch.ones(1, 6, dtype=a.dtype), (1, 5)),
    "mm of zeros": (lambda a: a @ torch.zeros(5, 3, dtype=a.dtype) + a.sum(), (3, 5)),
    "mv": (torch.mv, (3, 5), (5,)),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=-1), (3, 5)),
    "norm of all": (lambda a: torch.linalg.vector_norm(a), (3, 5)),
    "permute": (lambda a: a.permute(2, 0, 1) * 2, (3, 5, 6)),
    "pattern": (lambda a: a * torch.arange(5) + torch.arange(3).unsqueeze(-1), (3, 5)),
    "repeated by ones": (lambda a: (a * torch.ones(3, 1, dtype=a.dtype)).sum(0) + (a + torch.zeros(3, 5, dtype=a.dtype)).sum(0), (1, 5)),
    "reshape": (lambda a: a.reshape(8, 2) * 2, (2, 8)),
    "roll": (lambda a: a.roll((1, -2), (0, 1)), (3, 5)),
    "roll of all": (lambda a: a.roll(2), (5,)),
    "roll nowhere": (lambda a: a.roll(0, -1) + a.roll(5, -1), (3, 5)),
    "select": (lambda a: a[1] * a[:, 2].sum() + a[..., -1, 0], (3, 5)),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, -1, 2), (3, 5), (3,)),
    "slice": (lambda a: a[:, 1:4] * a[:, :1], (3, 5)),
    "slice in steps": (lambda a: a[..., ::2] - a[..., 1::2].sum(), (3, 5)),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 1, 3), (3, 5), (3, 2)),
    "softmax": (lambda a: torch.softmax(a - 100, -1), (3, 5)),
    "split_with_sizes": (lambda a: torch.cat(a.split([1, 3, 2], 0)[::-1], 0), (6, 5)),
    "squeeze": (lambda a: a.squeeze(0) * a.unsqueeze(-1).sum((0, -1)), (1, 5)),
    "stack": (lambda a: torch.stack([a.sin(), a, a * a], -1), (5,)),
    "std": (lambda a: a.std(-1), (3, 5)),
    "sum": (lambda a: (a * a).sum(-1), (3, 5)),
    "sum of all": (lambda a: (a + 1).sum(), (3, 5)),
    "sum of comparisons": (lambda a: (a > 0).sum(-1) * a.sum(-1), (3, 5)),
    "sum of some": (lambda a: (a + 1).sum((0, 2)), (3, 5, 6)),
    "t": (lambda a: a.t() @ a, (3, 5)),
    "transpose": (lambda a: a.transpose(-1, 0) * 2, (3, 5, 6)),
    "unbind": (lambda a: a.unbind(-1)[1] * a.unbind(0)[2].sum(), (3, 5)),
    "var": (lambda a: a.var(-1, correction=0), (3, 5)),
    "var of all": (torch.var, (3, 5)),
    "var_mean": (lambda a: torch.mul(*torch.var_mean(a, 0, keepdim=True)), (3, 5)),
    "where": (lambda a, b: torch.where(a > 0, a * b, b), (3, 5), (3, 1)),
    "where, what is not chosen has no derivative": (lambda a: torch.where(a > 0, a.sqrt(), 0.1 * a), (3, 5)),
}  # fmt: skip
#: looked at in ``make test`` already: what was wrong once, and one of a kind
QUICK = {
    "addmm", "amax", "amin", "attention", "bmm with ones", "bool picked", "cat of made zeros", "constant_pad_nd", "expand a number", "flip",
    "gated", "index", "index_put", "layer_norm", "mm", "mm of a number with ones", "mm of zeros", "mm on units, from the left", "mm on units, of matrices", "norm",
    "pattern", "repeated by ones", "roll", "slice in steps", "slice_scatter", "var of all", "where, what is not chosen has no derivative",
}  # fmt: skip


def draw(*shapes):
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def same(ours, theirs, what):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            a.expand(b.shape), b, rtol=1e-10, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )


def stacked(function):
    """Of every tangent, [LEAD, ...] each."""
    found = [function(i) for i in range(LEAD)]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def check(function, *given):
    """Values, tangents, and cotangents, many and one."""
    values, push, pull = derivatives(function, *given)
    theirs = values(*given)
    theirs = list(theirs) if isinstance(theirs, list | tuple) else [theirs]
    tangents = draw(*((LEAD, *each.shape) for each in given))
    back = draw(*((LEAD, *each.shape) for each in theirs))
    pushed = stacked(lambda i: push(*given, *(each[i] for each in tangents)))
    pulled = stacked(lambda i: pull(*given, *(each[i] for each in back)))
    for padding in (0.0, float("nan")):
        same(run_on_tiles(values, given, padding=padding), theirs, "values")
        same(run_on_tiles(push, given, tangents, padding=padding), pushed, "tangents")
        same(run_on_tiles(pull, given, back, padding=padding), pulled, "cotangents")
        alone = run_on_tiles(pull, [*given, *(each[0] for each in back)], padding=padding)
        same(alone, [each[0] for each in pulled], "one cotangent")


@pytest.mark.parametrize("name", [*sorted(QUICK), *thorough(*sorted(CASES.keys() - QUICK))])
def test_operations(name):
    function, *shapes = CASES[name]
    check(function, *draw(*shapes))


@pytest.mark.thorough
def test_every_rule_is_met():
    """By one of the cases above: a rule that no graph asks for is to go."""
    met = set()
    for function, *shapes in CASES.values():
        met |= set().union(*map(names_in, derivatives(function, *draw(*shapes))))
    assert {name for name in tile_rules._RULES if name not in met} == set()


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@drawn(programs())
def test_random_programs(program):
    torch.manual_seed(0)
    with contextlib.suppress(NotCovered):
        check(lambda *given: computed(program, *given), *draw((1, WIDTH), (3, WIDTH), (10, 10)))
