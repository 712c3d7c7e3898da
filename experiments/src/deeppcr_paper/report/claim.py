"""What a claim is, and one figure of ours that answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .collect import Finished


@dataclass(frozen=True)
class Ours:
    """One figure of ours: the value, and what it has to be read with."""

    value: str
    where: str


@dataclass(frozen=True)
class Claim:
    """One row: what is claimed, the paper's figure, how and where it stands there, and how ours is read off a result.

    Attributes:
        ours: a result of the experiment to our figures, in the order in which they are shown
    """

    what: str
    paper: str
    source: str
    experiment: str
    ours: Callable[[Finished], list[Ours]]
