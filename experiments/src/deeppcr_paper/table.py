"""A summary in aligned columns, as the experiments show it at their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

#: Where there is nothing to say.
NOTHING = "–"


def times(ratio: float) -> str:
    """A speed-up, to two digits: the same on the screen and on the page.

    >>> times(51.8), times(3.14159), times(0.0421)
    ('52×', '3.1×', '0.042×')
    """
    return f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.2g}×"


def shown(value: float | None, form: str | Callable[[float], str]) -> str | None:
    """A number as Python formats it, or as a function such as `times` writes it; None where there is none.

    >>> shown(2.25, ".1f"), shown(2.25, times), shown(None, ".1f")
    ('2.2', '2.2×', None)
    """
    if value is None:
        return None
    return format(value, form) if isinstance(form, str) else form(value)


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """A line of headings and one for each row; what begins like a number stands on the right of its column.

    Args:
        rows: texts by heading, each with the headings of the first; None where there is nothing to say

    >>> table([{"depth": 64, "method": "loop"}, {"depth": 1024, "method": None}])
    ['depth  method', '   64  loop', ' 1024  –']
    """
    if not rows:
        return []
    columns = []
    for heading in rows[0]:
        cells = [NOTHING if row[heading] is None else str(row[heading]) for row in rows]
        width = max(map(len, [heading, *cells]))
        right = all(cell[:1].isdigit() or cell[:1] in "-+–" for cell in cells) and any(c != NOTHING for c in cells)
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in (heading, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def of_cells(known: int, every: int) -> str:
    """How many cells a number was read off, where some were left out; empty where all count.

    >>> of_cells(3, 4), of_cells(4, 4)
    ('3 of 4 cells', '')
    """
    return f"{known:,} of {every:,} cells" if known < every else ""
