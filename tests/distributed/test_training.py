"""Steps spread over ranks compose with DDP and FSDP2, over rows and steps at once: parameters become those of one process."""

from __future__ import annotations

import pytest
import torch

from distributed import more_cases
from distributed.team import Team


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_training(size):
    team, expected = (
        Team(size, (size,)),
        more_cases.trained(None, "alone"),
    )  # a mesh of rows and steps takes all ranks of a world
    try:
        for how in ("ddp", "fsdp"):
            for each in team.results(size, "distributed.more_cases", "trained", how=how):
                torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-10)
    finally:
        team.close()
