"""``mlp-memory``: peak memory of a forward pass, and the loop's over that of DeepPCR (fig. 14)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import style
from .drawing import Drawing
from .panels import describe, guide, legend, lines, panels, same_y

Record = dict[str, Any]


def mebibytes(record: Record, name: str) -> float | None:
    """At the peak, the network included; None where it was not measured."""
    peak = record["peaks"].get(name, {})
    return (record["network_bytes"] + peak["bytes"]) / 2**20 if "bytes" in peak else None


def ratio(record: Record, name: str) -> float | None:
    """The paper's: memory of the loop over that of the parallel pass."""
    mine, loop = mebibytes(record, name), mebibytes(record, "loop")
    return loop / mine if mine and loop else None


def draw(result: dict[str, Any]) -> list[Drawing]:
    records: list[Record] = result["records"]
    names = list(dict.fromkeys(name for record in records for name in record["peaks"]))
    others = [name for name in names if name != "loop"]
    if not any(mebibytes(record, name) for record in records for name in names):
        return []
    figure, places = panels(2 + len(others))
    colours = style.ordered(record["w"] for record in records)
    for axes, name in zip(places, ("loop", "printed"), strict=False):
        title = "loop" if name == "loop" else style.LABELS[name]
        describe(axes, f"{title}, memory", "depth L (layers)", "peak memory (MiB)", name)
        lines(axes, records, [mebibytes(record, name) for record in records], colours)
    for axes, name in zip(places[2:], others, strict=True):
        title = {"printed": "printed", "chunk auto": "automatic chunks"}.get(name, name.replace("chunk", "chunks of"))
        method = "printed" if name == "printed" else "auto"
        describe(axes, f"loop over {title}", "depth L (layers)", "memory ratio (×)", method)
        lines(axes, records, [ratio(record, name) for record in records], colours)
        guide(axes, 1)
    same_y(places[:2], log=True)
    same_y(places[2:], log=True)
    legend(figure, colours, "width w")
    return [Drawing("mlp-memory", "Peak memory of a forward pass", "fig. 14", caption(records, names), figure)]


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
        if mebibytes(record, name) is None
    ]
    for words, begins in (("Out of memory", "out of memory"), ("Not tried, after smaller ones took too long", "not")):
        holes = Counter(name for name, status in missing if status.startswith(begins))
        if holes:
            each = [f"{_name(name)} in {style.cells(count)}" for name, count in holes.items()]
            text += f" {words}: " + ", ".join(each) + "."
    return text


def _name(name: str) -> str:
    special = {"printed": "as printed", "loop": "the loop", "chunk auto": "chunks chosen by the library"}
    return special.get(name, name.replace("chunk", "chunks of"))
