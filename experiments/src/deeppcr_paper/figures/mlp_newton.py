"""``mlp-newton``: Newton iterations and error of the output over depths and widths (fig. 8 left)."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from . import style
from .drawing import Drawing

Record = dict[str, Any]

GUESSES = {"repeat-initial": "the first layer's output, repeated", "random": "random numbers"}


def iterations(record: Record) -> float | None:
    """The mean over the networks of a cell."""
    return fmean(record["iterations"]) if record["status"] == "ok" else None


def error(record: Record) -> float | None:
    """The largest over the networks of a cell; zero has no place on a log axis."""
    if record["status"] != "ok":
        return None
    worst = max((style.number(each) for each in record["error"]), default=math.nan)
    return worst if worst > 0 else None


def draw(result: dict[str, Any]) -> list[Drawing]:
    records: list[Record] = result["records"]
    found = []
    for guess in dict.fromkeys(record["guess"] for record in records):
        mine = [record for record in records if record["guess"] == guess]
        if any(record["status"] == "ok" for record in mine):
            found.append(by_guess(mine, guess, shared_device(result)))
    return found


#: Of a session that was killed nobody knows when.
_OPEN_END = "9999"


def shared_device(result: dict[str, Any]) -> bool:
    """Whether others were measured beside what ran out of memory or patience: alone it need not have."""
    sessions = result.get("sessions", ())
    spans = [(each["start"], each["end"] or _OPEN_END) for each in sessions]
    failed = {record.get("session", 0) for record in result["records"] if record["status"] != "ok"}
    return any(
        spans[one][0] < end and start < spans[one][1]
        for one in failed
        if one < len(spans)
        for other, (start, end) in enumerate(spans)
        if other != one
    )


def by_guess(records: list[Record], guess: str, shared: bool = False) -> Drawing:
    """For each activation, iterations above and error below."""
    activations = list(dict.fromkeys(record["activation"] for record in records))
    figure, grid = style.canvas(2, len(activations), extra=0.9)
    colours = style.ordered(record["w"] for record in records)
    depths = sorted({record["L"] for record in records})
    counts = [value for record in records if (value := iterations(record)) is not None]
    errors = [value for record in records if (value := error(record)) is not None]
    for column, activation in enumerate(activations):
        mine = [record for record in records if record["activation"] == activation]
        name = style.activation(activation)
        above, below = grid[0][column], grid[1][column]
        style.panel_title(above, f"{name}, iterations")
        style.lines(above, mine, "L", "w", colours, iterations)
        missed = [record for record in mine if _not_converged(record)]
        above.plot(
            [record["L"] for record in missed],
            [style.number(iterations(record)) for record in missed],
            linestyle="none",
            marker="x",
            markersize=7,
            color=style.INK,
            gid="not converged",
        )
        style.free(above, counts, also=[0.0])
        above.set_ylabel("iterations (mean)")
        style.panel_title(below, f"{name}, error of the output")
        style.lines(below, mine, "L", "w", colours, error)
        style.decades(below, errors)
        below.set_ylabel("error (2-norm)")
        for axes in (above, below):
            style.powers_of_two(axes, depths)
            axes.set_xlabel("depth L (layers)")
    style.legend(figure, colours, "width w")
    return Drawing(
        f"mlp-newton-{guess}",
        f"Newton iterations from {GUESSES.get(guess, guess)}",
        "fig. 8 left",
        caption(records, activations, shared),
        figure,
    )


def _not_converged(record: Record) -> bool:
    return record["status"] == "ok" and any(name != "CONVERGED" for name in record["results"])


def caption(records: list[Record], activations: list[str], shared: bool = False) -> str:
    said = []
    for activation in activations:
        mine = [record for record in records if record["activation"] == activation and record["status"] == "ok"]
        if not mine:
            continue
        most = max(max(record["iterations"]) for record in mine)
        errors = [value for record in mine if (value := error(record)) is not None]
        worst = f", error at most {style.plain(max(errors))}" if errors else ""
        missed = sum(map(_not_converged, mine))
        crossed = f", not converged in {style.cells(missed)} (crosses)" if missed else ""
        said.append(f"{style.activation(activation)}: at most {most} iterations{worst}{crossed}")
    known = [record for record in records if record["status"] == "ok"]
    exact = sum(all(style.number(each) == 0 for each in record["error"]) for record in known)
    none = f" The error is 0 in {style.cells(exact)}, which a log axis does not show." if exact else ""
    full = sum(record["status"] == "out of memory" for record in records)
    slow = sum(record["status"].startswith("not measured") for record in records)
    gone = f" Out of memory in {style.cells(full)}." if full else ""
    gone += f" Not tried in {style.cells(slow)}, after smaller ones took too long." if slow else ""
    gone += " Several processes shared the device." if gone and shared else ""
    networks = style.span((len(record["iterations"]) for record in known), ".0f") if known else "no"
    return f"Under the paper's test, mean of the {networks} networks of a cell. " + "; ".join(said) + "." + none + gone
