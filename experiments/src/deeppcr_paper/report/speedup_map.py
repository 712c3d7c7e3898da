"""The data of the map: every time of ``mlp-timing``, as the page's script reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..claims.results import Finished
from ..claims.words import BASELINES, METHODS, finite, timed_columns
from ..mlp_summary import repeats_of, seconds
from ..mlp_timing import DIRECTIONS

EXPERIMENT = "mlp-timing"
_KEPT = ("error", "iterations", "chunk")


def map_data(results: Sequence[Finished]) -> list[dict[str, Any]]:
    """One map for every machine; none where nothing was timed."""
    found = []
    for result in results:
        if result.name == EXPERIMENT:
            with result.blamed():
                found.append(_map(result))
    return found


def _map(result: Finished) -> dict[str, Any]:
    records = result.records
    cells: dict[str, Any] = {}
    for record in records:
        for way in DIRECTIONS:
            key = f"{record['activation']} {way} {record['L']} {record['w']}"
            cells[key] = {name: _entry(record, way, name) for name in record[way]}
    return {
        "label": result.hardware + (" (quick run)" if result.quick else " (committed)" if result.committed else ""),
        "activations": list(dict.fromkeys(record["activation"] for record in records)),
        "directions": list(DIRECTIONS),
        "depths": sorted({record["L"] for record in records}),
        "widths": sorted({record["w"] for record in records}),
        "baselines": timed_columns(records, BASELINES),
        "methods": timed_columns(records, METHODS),
        "cells": cells,
    }


def _entry(record: dict[str, Any], way: str, name: str) -> dict[str, Any]:
    entry, shortest = record[way][name], seconds(record, way, name)
    found: dict[str, Any] = {"status": entry["status"]}
    if shortest is not None:
        found["seconds"] = float(f"{shortest:.4g}")  # a map of 840 cells is embedded in the page
        found["repeats"] = len(repeats_of(entry))
    found |= {key: entry[key] for key in _KEPT if key in entry}
    if finite(found.get("error")):
        found["error"] = float(f"{found['error']:.2g}")
    return found
