"""``hardware``: the times of two machines side by side and their ratio (fig. 12)."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from . import style
from .drawing import Drawing

Record = dict[str, Any]


def time_on(record: Record, way: str, column: str, machine: int) -> float | None:
    return record[way].get(column, {}).get("seconds", (None, None))[machine]


def ratio(record: Record, way: str, column: str) -> float | None:
    """Second machine over first."""
    return record[way].get(column, {}).get("ratio")


def draw(result: dict[str, Any]) -> list[Drawing]:
    records: list[Record] = result["records"]
    found = []
    for activation in dict.fromkeys(record["activation"] for record in records):
        for way in ("forward", "backward"):
            mine = [record for record in records if record["activation"] == activation]
            if any(ratio(record, way, column) for record in mine for column in record[way]):
                found.append(side_by_side(mine, activation, way))
    return found


def side_by_side(records: list[Record], activation: str, way: str) -> Drawing:
    """The paper's method on either machine; below, the ratio of the times for every column."""
    first, second = records[0]["machines"]
    tried = {column for record in records for column in record[way]}
    columns = [column for column in (*style.PARALLEL, *style.SEQUENTIAL) if column in tried]
    shown = columns[0]
    figure, grid = style.canvas(1 + math.ceil(len(columns) / 2), extra=1.0)
    colours = style.ordered(record["w"] for record in records)
    depths = sorted({record["L"] for record in records})
    every = [time for record in records for machine in (0, 1) if (time := time_on(record, way, shown, machine))]
    for machine, (axes, name) in enumerate(zip(grid[0], (first, second), strict=True)):
        style.panel_title(axes, style.clip(name, 28), shown)
        style.lines(
            axes, records, "L", "w", colours, lambda record, machine=machine: time_on(record, way, shown, machine)
        )
        style.powers_of_two(axes, depths)
        style.decades(axes, every)
        axes.set_ylabel("time (s)")
        axes.set_xlabel("depth L (layers)")
        if not any(time_on(record, way, shown, machine) for record in records):
            style.remark(axes, "not timed")
    places = [axes for row in grid[1:] for axes in row]
    ratios = [value for record in records for column in columns if (value := ratio(record, way, column))]
    for axes, column in zip(places, columns, strict=False):
        style.panel_title(axes, f"ratio, {style.LABELS[column]}", column)
        style.lines(axes, records, "L", "w", colours, lambda record, column=column: ratio(record, way, column))
        style.guide(axes, [depths[0] / 2, depths[-1] * 2], [1, 1])
        style.powers_of_two(axes, depths)
        style.decades(axes, ratios, also=[1.0])
        axes.set_ylabel("second over first (×)")
        axes.set_xlabel("depth L (layers)")
        if not any(ratio(record, way, column) for record in records):
            style.remark(axes, "not timed on both")
    spare = places[len(columns) :]
    style.legend(figure, colours, "width w", place=spare[0] if spare else None)
    said = [
        f"{style.LABELS[column]} {style.span(each, '.2f')} (median {median(each):.2f})"
        for column in columns
        if (each := [value for record in records if (value := ratio(record, way, column))])
    ]
    return Drawing(
        f"hardware-{activation}-{way}",
        f"Two machines, {way} pass, {style.activation(activation)}",
        "fig. 12",
        f"{style.LABELS[shown]} on either machine, and time on {second} over time on {first}: {'; '.join(said)}.",
        figure,
    )
