"""``mlp-memory``: peak memory of a forward pass, layer by layer, in parallel, and in parallel by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from .experiment import Cell, Context, Experiment
from .memory import peak_bytes
from .mlp import LAYERS, Network
from .mlp_summary import foot
from .mlp_timing import solver
from .patience import note, too_long
from .room import OUT_OF_MEMORY, release, within_memory
from .settings import setting
from .table import shown, table
from .timing import clocked


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        chunks: of the chunked solves, beside the paper's method (chunk 1)
        patience: what takes more seconds than this is not tried at larger depths
    """

    depths: tuple[int, ...] = tuple(2**k for k in range(1, 15))
    widths: tuple[int, ...] = tuple(2**k for k in range(1, 11))
    chunks: tuple[int | str, ...] = setting((16, 64, "auto"), choices=["auto"])
    activation: str = setting("relu", choices=LAYERS)
    patience: float = 2.0
    seed: int = 0


FULL = Settings()
QUICK = Settings(depths=(16, 128, 1024, 4096), widths=(2, 8, 32))


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    for width, depth in product(settings.widths, settings.depths):
        yield {"L": depth, "w": width}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """Bytes of the network, and for every way to run it the peak beyond them."""
    depth, width, device = cell["L"], cell["w"], context.device
    names = ["loop", "printed", *(f"chunk {chunk}" for chunk in settings.chunks)]
    found: dict[str, Any] = {"network_bytes": 4 * (depth * (width**2 + width) + width)}
    network = within_memory(lambda: Network.make(depth, width, device, settings.seed, settings.activation), device)
    if network is None:
        return {**found, "peaks": dict.fromkeys(names, OUT_OF_MEMORY)}
    # Not as CUDA graphs, which keep copies of their inputs: what a solve itself takes.
    usual = solver(network, "auto", capture=False)
    solvers = [solver(network, "printed", capture=False), *(replace(usual, chunk=chunk) for chunk in settings.chunks)]
    runs: list[Callable[[], Any]] = [network.loop, *(partial(network.parallel, each) for each in solvers)]
    peaks = {name: _peak(name, run, network, cell, settings, context) for name, run in zip(names, runs, strict=True)}
    return {**found, "peaks": peaks}


def _peak(
    name: str, run: Callable[[], Any], network: Network, cell: Cell, settings: Settings, context: Context
) -> dict[str, Any]:
    place, device, seconds = ("mlp-memory", cell["w"], name), context.device, []
    if why := too_long(context, place, cell["L"], settings.patience):
        return {"status": f"not measured: it took {why}"}
    if device.type == "cuda":
        release(device)

    def clocked_run() -> None:
        _, took = clocked(run, device)
        seconds.append(took)

    peak = within_memory(lambda: peak_bytes(clocked_run, device, *network.tensors), device)
    if peak is None:
        return OUT_OF_MEMORY
    note(context, place, cell["L"], min(seconds))  # the first call sets up
    return {"status": "ok", "bytes": peak}


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The paper's ratio: memory of the loop over that of the parallel pass, the network included in both.

    Where either was not measured the ratio is None, and the status says why.
    """
    ratios: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        loop, network = record["peaks"]["loop"], record["network_bytes"]
        for name, peak in record["peaks"].items():
            if name == "loop":
                continue
            status = next((each["status"] for each in (loop, peak) if each["status"] != "ok"), "ok")
            ratio = (network + loop["bytes"]) / (network + peak["bytes"]) if status == "ok" else None
            ratios.setdefault(name, []).append({"L": record["L"], "w": record["w"], "ratio": ratio, "status": status})
    return ratios


def known_ratios(entries: list[dict[str, Any]]) -> list[float]:
    """Of the cells in which both were measured."""
    return [entry["ratio"] for entry in entries if entry["ratio"] is not None]


def lines(summary: dict[str, Any]) -> list[str]:
    rows = []
    for name, entries in summary.items():
        ratios = known_ratios(entries)
        rows.append(
            {
                "memory of the loop over that of": name,
                "least": shown(min(ratios, default=None), ".2f"),
                "most": shown(max(ratios, default=None), ".2f"),
                "cells": f"{len(ratios)} of {len(entries)}",
            }
        )
    return table(rows) + foot(summary)


EXPERIMENT = Experiment(
    name="mlp-memory",
    paper="fig. 14",
    what="peak memory of a forward pass: the loop against DeepPCR, chunked too",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
