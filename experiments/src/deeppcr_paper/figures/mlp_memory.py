"""``mlp-memory``: peak memory of a forward pass, and the loop's over that of DeepPCR (fig. 14)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from . import style
from .drawing import Drawing

Record = dict[str, Any]

MIB = 2**20


def total(record: Record, name: str) -> float | None:
    """Bytes at the peak, the network included; None where it was not measured."""
    peak = record["peaks"].get(name, {})
    return record["network_bytes"] + peak["bytes"] if "bytes" in peak else None


def ratio(record: Record, name: str) -> float | None:
    """The paper's: memory of the loop over that of the parallel pass."""
    mine, loop = total(record, name), total(record, "loop")
    return loop / mine if mine and loop else None


def draw(result: dict[str, Any]) -> list[Drawing]:
    records: list[Record] = result["records"]
    names = list(dict.fromkeys(name for record in records for name in record["peaks"]))
    others = [name for name in names if name != "loop"]
    if not any(total(record, name) for record in records for name in names):
        return []
    figure, grid = style.canvas(1 + math.ceil(len(others) / 2), extra=1.0)
    colours = style.ordered(record["w"] for record in records)
    depths = sorted({record["L"] for record in records})
    every = [value / MIB for record in records for name in ("loop", "printed") if (value := total(record, name))]
    for axes, name in zip(grid[0], ("loop", "printed"), strict=True):
        style.panel_title(axes, f"{'loop' if name == 'loop' else style.LABELS[name]}, memory", name)
        style.lines(axes, records, "L", "w", colours, lambda record, name=name: _mib(record, name))
        style.powers_of_two(axes, depths)
        style.decades(axes, every)
        axes.set_ylabel("peak memory (MiB)")
        axes.set_xlabel("depth L (layers)")
    places = [axes for row in grid[1:] for axes in row]
    ratios = [value for record in records for name in others if (value := ratio(record, name))]
    for axes, name in zip(places, others, strict=False):
        title = {"printed": "printed", "chunk auto": "automatic chunks"}.get(name, name.replace("chunk", "chunks of"))
        style.panel_title(axes, f"loop over {title}", "printed" if name == "printed" else "auto")
        style.lines(axes, records, "L", "w", colours, lambda record, name=name: ratio(record, name))
        style.guide(axes, [depths[0] / 2, depths[-1] * 2], [1, 1])
        style.powers_of_two(axes, depths)
        style.decades(axes, ratios, also=[1.0])
        axes.set_ylabel("memory ratio (×)")
        axes.set_xlabel("depth L (layers)")
    spare = places[len(others) :]
    style.legend(figure, colours, "width w", place=spare[0] if spare else None)
    return [
        Drawing(
            "mlp-memory",
            "Peak memory of a forward pass",
            "fig. 14",
            caption(records, names),
            figure,
        )
    ]


def _mib(record: Record, name: str) -> float | None:
    found = total(record, name)
    return found / MIB if found is not None else None


def caption(records: list[Record], names: list[str]) -> str:
    said = []
    for name in names:
        known = [value for record in records if name != "loop" and (value := ratio(record, name))]
        if known:
            said.append(f"{_name(name)}: {style.span(known, '.2f')}")
    text = f"Memory of the loop over that of DeepPCR, the network included in both. {'; '.join(said).capitalize()}."
    missing = [
        (name, record["peaks"].get(name, {}).get("status", ""))
        for record in records
        for name in names
        if total(record, name) is None
    ]
    for words, begins in (("Out of memory", "out of memory"), ("Not tried, after smaller ones took too long", "not")):
        holes = Counter(name for name, status in missing if status.startswith(begins))
        if holes:
            each = [f"{_name(name)} in {style.cells(count)}" for name, count in holes.items()]
            text += f" {words}: " + ", ".join(each) + "."
    return text


def _name(name: str) -> str:
    return {"printed": "as printed", "loop": "the loop"}.get(
        name, name.replace("chunk", "chunks of").replace("of auto", "chosen by the library")
    )
