"""``mlp-newton``: Newton iterations and error of the output over depths and widths (fig. 8 left)."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from . import style
from .drawing import Drawing
from .panels import describe, legend, lines, panels, same_y

Record = dict[str, Any]

GUESSES = {"repeat-initial": "the first layer's output, repeated", "random": "random numbers"}
#: Of a session that was killed nobody knows when.
_OPEN_END = "9999"


def iterations(record: Record) -> float | None:
    """The mean over the networks of a cell."""
    return fmean(record["iterations"]) if record["status"] == "ok" else None


def error(record: Record) -> float | None:
    """The largest over the networks of a cell; zero has no place on a log axis."""
    if record["status"] != "ok":
        return None
    worst = max((style.number(each) for each in record["error"]), default=math.nan)
    return worst if worst > 0 else None


def not_converged(record: Record) -> bool:
    return record["status"] == "ok" and any(name != "CONVERGED" for name in record["results"])


def shared_device(result: dict[str, Any]) -> bool:
    """Whether others were measured beside what ran out of memory or patience: alone it need not have."""
    spans = [(each["start"], each["end"] or _OPEN_END) for each in result.get("sessions", ())]
    failed = {record.get("session", 0) for record in result["records"] if record["status"] != "ok"}
    return any(
        spans[one][0] < end and start < spans[one][1]
        for one in failed
        if one < len(spans)
        for other, (start, end) in enumerate(spans)
        if other != one
    )


def draw(result: dict[str, Any]) -> list[Drawing]:
    return [
        by_guess(records, guess, shared_device(result))
        for guess, records in style.grouped(result["records"], "guess").items()
        if any(record["status"] == "ok" for record in records)
    ]


def by_guess(records: list[Record], guess: str, shared: bool) -> Drawing:
    """For each activation, iterations above and error below."""
    by_activation = style.grouped(records, "activation")
    count = len(by_activation)
    figure, places = panels(2 * count, columns=count)
    colours = style.ordered(record["w"] for record in records)
    for (activation, mine), above, below in zip(by_activation.items(), places, places[count:], strict=False):
        name = style.activation(activation)
        describe(above, f"{name}, iterations", "depth L (layers)", "iterations (mean)")
        lines(above, mine, map(iterations, mine), colours)
        missed = [record for record in mine if not_converged(record)]
        x, y = [record["L"] for record in missed], [fmean(record["iterations"]) for record in missed]
        above.plot(x, y, "x", markersize=7, color=style.INK, gid="not converged")
        describe(below, f"{name}, error of the output", "depth L (layers)", "error (2-norm)")
        lines(below, mine, map(error, mine), colours)
    same_y(places[:count], zero=True)
    same_y(places[count:], log=True)
    legend(figure, colours, "width w")
    title = f"Newton iterations from {GUESSES.get(guess, guess)}"
    return Drawing(f"mlp-newton-{guess}", title, "fig. 8 left", caption(records, shared), figure)


def caption(records: list[Record], shared: bool) -> str:
    known = [record for record in records if record["status"] == "ok"]
    said = []
    for activation, mine in style.grouped(known, "activation").items():
        most = max(max(record["iterations"]) for record in mine)
        errors = [value for record in mine if (value := error(record)) is not None]
        worst = f", error at most {style.plain(max(errors))}" if errors else ""
        missed = sum(map(not_converged, mine))
        crossed = f", not converged in {style.cells(missed)} (crosses)" if missed else ""
        said.append(f"{style.activation(activation)}: at most {most} iterations{worst}{crossed}")
    networks = style.span((len(record["iterations"]) for record in known), ".0f")
    text = f"Under the paper's test, mean of the {networks} networks of a cell. {'; '.join(said)}."
    exact = sum(all(style.number(each) == 0 for each in record["error"]) for record in known)
    full = sum(record["status"] == "out of memory" for record in records)
    slow = sum(record["status"].startswith("not measured") for record in records)
    text += f" The error is 0 in {style.cells(exact)}, which a log axis does not show." if exact else ""
    text += f" Out of memory in {style.cells(full)}." if full else ""
    text += f" Not tried in {style.cells(slow)}, after smaller ones took too long." if slow else ""
    text += " Several processes shared the device." if shared and (full or slow) else ""
    return text
