"""What kernels note comes to the host: at once where it is there already, and by a copy that runs beside the host."""

import pytest
import torch

from deeppcr.fuse import bound
from deeppcr.fuse.bound import Notes

LIMIT = 3


def noted(rows, device, floored):
    """Notes of which every number is known."""
    notes = Notes(LIMIT, rows, device)
    notes.memory.copy_(torch.arange(notes.memory.numel(), device=device))
    notes.unsettled.copy_(torch.tensor([7, 0, 5, floored, 1, 2], dtype=torch.int32, device=device))
    notes.taken.copy_(torch.arange(rows, dtype=torch.int32, device=device) - 1)
    return notes


@pytest.mark.parametrize("floored", [0, 4])
@pytest.mark.parametrize("rows", [2, 2000], ids=["few", "more than are copied"])
def test_what_is_noted_is_read(rows, floored, device):
    notes = noted(rows, device, floored)
    for _ in range(2):
        if device.type == "cuda":
            notes.send()
        assert notes.counts() == [7, 0, 5, floored, 1, 2]
    assert torch.equal(notes.on_host().memory.view(torch.int32), notes.memory.cpu().view(torch.int32))
    assert notes.rough(rows) == [True] + [False] * (rows - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_who_waits_at_the_same_time_has_memory_of_their_own(device):
    """And what was not waited for is over before somebody else has its memory."""
    torch.cuda.synchronize()
    bound._landings.clear()
    for floored in range(20):
        dropped, first, second = (noted(2, device, each) for each in (90, floored, 50))
        torch.cuda._sleep(10**6)
        dropped.send()
        del dropped
        first.send()
        second.send()
        assert second.counts()[LIMIT] == 50
        assert first.counts()[LIMIT] == floored
    assert [len(free) for free in bound._landings.values()] == [2]
    with torch.inference_mode():
        bound._landings.clear()
        first = noted(2, device, 8)
        first.send()
        assert first.counts()[LIMIT] == 8
    first = noted(2, device, 9)
    first.send()
    assert first.counts()[LIMIT] == 9
