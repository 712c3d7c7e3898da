from __future__ import annotations

import pytest

from distributed.team import Team


@pytest.fixture(scope="session")
def team(request):
    """Three ranks, or eight of them for thorough tests; started when the first test asks."""
    everything = request.config.getoption("--all") or request.config.getoption("--device") != "cpu"
    made = Team(8, (1, 2, 3, 4, 8)) if everything else Team(3, (1, 2, 3))
    yield made
    made.close()
