"""A closer look at runs in which what was large once may hide that later states are not known."""

from __future__ import annotations

from ..tolerance import Tolerance
from .kinds import Kind
from .run import Found, Run
from .transients import hides_any

#: So many times what is faint is corrected to see whether it is a signal that lives on, or noise.
_CLOSER_LOOKS = 4


def hides(run: Run, found: Found, tolerance: Tolerance) -> bool:
    """Whether what was large once hides that later states, which live on, are not known: see ``Tolerance.hides``.

    What is left where a signal has died is noise: as in ``iteration``, it falls with every correction.
    """
    sizes, states, initial = found.suspected, found.states, run.initial
    assert sizes is not None
    for _ in range(_CLOSER_LOOKS):
        if not hides_any(sizes, initial, tolerance):
            return False
        if len(states) < found.length:
            return True  # and nobody can look closer
        # Of two passes the second one starts where the first one corrected it.
        looked = run.in_parallel(Kind(found.length, found.chunk), tolerance, states, most=2, closer=True)
        assert looked.suspected is not None
        if hides_any(sizes, initial, tolerance, looked.suspected):
            return True
        sizes, states = looked.suspected, looked.states
    return False
