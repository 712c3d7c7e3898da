"""``hardware``: the times of two machines side by side and their ratio (fig. 12)."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import Any

from . import style
from .drawing import Drawing
from .panels import describe, guide, legend, lines, panels, same_y

Record = dict[str, Any]


def time_on(record: Record, way: str, column: str, machine: int) -> float | None:
    return record[way].get(column, {}).get("seconds", (None, None))[machine]


def ratio(record: Record, way: str, column: str) -> float | None:
    """Second machine over first."""
    return record[way].get(column, {}).get("ratio")


def draw(result: dict[str, Any]) -> list[Drawing]:
    found = []
    for activation, mine in style.grouped(result["records"], "activation").items():
        for way in ("forward", "backward"):
            if any(ratio(record, way, column) for record in mine for column in record[way]):
                found.append(side_by_side(mine, activation, way))
    return found


def side_by_side(records: list[Record], activation: str, way: str) -> Drawing:
    """The paper's method on either machine; below, the ratio of the times for every column."""
    machines = records[0]["machines"]
    tried = {column for record in records for column in record[way]}
    columns = [column for column in (*style.PARALLEL, *style.SEQUENTIAL) if column in tried]
    shown = columns[0]
    figure, places = panels(2 + len(columns))
    colours = style.ordered(record["w"] for record in records)
    for machine, axes in enumerate(places[:2]):
        name = textwrap.shorten(machines[machine], 28, placeholder="…")
        describe(axes, name, "depth L (layers)", "time (s)", shown)
        lines(axes, records, [time_on(record, way, shown, machine) for record in records], colours)
    said = []
    for axes, column in zip(places[2:], columns, strict=True):
        ratios = [ratio(record, way, column) for record in records]
        describe(axes, f"ratio, {style.LABELS[column]}", "depth L (layers)", "second over first (×)", column)
        lines(axes, records, ratios, colours, otherwise="not timed on both")
        guide(axes, 1)
        if known := [value for value in ratios if value]:
            said.append(f"{style.LABELS[column]} {style.span(known, '.2f')} (median {median(known):.2f})")
    same_y(places[:2], log=True)
    same_y(places[2:], log=True)
    legend(figure, colours, "width w")
    title = f"Two machines, {way} pass, {style.activation(activation)}"
    text = f"{style.LABELS[shown]} on either machine, and time on {machines[1]} over time on {machines[0]}: "
    return Drawing(f"hardware-{activation}-{way}", title, "fig. 12", f"{text}{'; '.join(said)}.", figure)
