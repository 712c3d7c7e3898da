"""Which records of diffusion models stand in one figure, and how their sizes are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """What stands in one figure: the records of one data set, or of networks with or without classes.

    Attributes:
        slug, label: in names and in titles
        size: the key of the state's size, "w" or "side"
        paper: which of the paper's results these are
    """

    slug: str
    label: str
    size: str
    paper: str
    records: list[dict[str, Any]]

    @property
    def lengths(self) -> list[int]:
        return sorted({record["L"] for record in self.records})

    @property
    def sizes(self) -> list[int]:
        return sorted({record[self.size] for record in self.records})

    @property
    def axis(self) -> str:
        return "width w of a latent (numbers)" if self.size == "w" else "side of an image (pixels)"

    def name(self, size: int) -> str:
        return f"w = {size}" if self.size == "w" else f"{size} × {size}"

    def with_most_steps(self) -> list[dict[str, Any]]:
        """By size."""
        mine = [record for record in self.records if record["L"] == self.lengths[-1]]
        return sorted(mine, key=lambda record: record[self.size])
