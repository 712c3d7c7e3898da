"""When misses at the joints of chunks are taken for what a larger number beside them rounds to, and when they are not."""

import pytest
import torch

from deeppcr.fuse.compiled import module_of
from deeppcr.fuse.joints import joints_source, map_size

pytest.importorskip("triton")

# Of the interpreter, where nothing is divided by nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CHUNKS, GROUPS, RTOL = 16, 4, 1e-5
#: What every lane misses, in tolerances of its signal, at one joint or at all; and whether that may be the rounding of the number beside it.
MISSES = {
    "near, at one joint": (5.0, slice(5, 6), True),
    "by more than rounding is taken for": (20.0, slice(5, 6), False),
    "near, which adds up to a correction that is not": (5.0, slice(0, None), False),
}


def test_what_a_large_number_rounds_to_is_the_cause_of_small_misses_only(device):
    """A number of a million moves a signal of one, whose corrections no longer shrink."""
    rows = len(MISSES)
    starts = torch.ones(CHUNKS, 2, rows, device=device)
    starts[:, 0] = 1e6
    ends, sizes = starts.clone(), starts.clone()
    for row, (tolerances, joints, _) in enumerate(MISSES.values()):
        ends[:-1][joints, 1, row] += tolerances * RTOL
    products = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device).reshape(1, 4, 1).repeat(CHUNKS, 1, rows)
    maps = torch.full((GROUPS * map_size(2) * rows,), torch.nan, device=device)
    passes, limit = 1, 4
    corrections = torch.full((limit, rows), 4.0, device=device)
    unsettled, taken = (torch.zeros(size, dtype=torch.int32, device=device) for size in (limit + 2, rows))
    residual = torch.zeros(rows, device=device)
    module_of(joints_source(2, torch.float32)).join[(1,)](
        starts, ends, products, sizes, maps, corrections, unsettled, taken, residual,
        rows, CHUNKS, GROUPS, CHUNKS // GROUPS, passes, limit, 0.0, RTOL, 32.0, 0, 0, 0, GROUPS, 4,
    )  # fmt: skip
    rounding = torch.tensor([is_rounding for *_, is_rounding in MISSES.values()])
    assert torch.equal(taken.cpu() < 0, rounding), corrections[passes]
    assert unsettled[limit] == 1
    assert ((corrections[passes] == 0).cpu() == rounding).all()
    assert (corrections[passes].cpu()[~rounding] > 1).all()
