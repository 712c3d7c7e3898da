"""``mlp-memory``: peak memory of a forward pass, layer by layer, in parallel, and in parallel by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import deeppcr

from .experiment import Cell, Context, Experiment, is_out_of_memory
from .memory import peak_bytes
from .mlp import LAYERS, Network
from .mlp_summary import foot
from .mlp_timing import check_room, release, solver
from .patience import note, too_long
from .settings import setting
from .table import table
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
    for width in settings.widths:
        for depth in settings.depths:
            yield {"L": depth, "w": width}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """Bytes of the network, and for every way to run it the peak beyond them."""
    depth, width, device = cell["L"], cell["w"], context.device
    network_bytes = 4 * (depth * (width**2 + width) + width)
    names = ["loop", "printed", *(f"chunk {chunk}" for chunk in settings.chunks)]
    try:
        check_room(depth, width, device)
        network = Network.make(depth, width, device, settings.seed, settings.activation)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"network_bytes": network_bytes, "peaks": {name: {"status": "out of memory"} for name in names}}
    runs: dict[str, Callable[[], Any]] = {"loop": network.loop}
    # Not as a CUDA graph, which keeps copies of its inputs: what a solve itself takes.
    runs["printed"] = lambda: network.parallel(solver(network, "printed", capture=False))
    for chunk in settings.chunks:
        newton = deeppcr.Newton(chunk=chunk, jacobian=network.jacobian, capture=False)  # pyright: ignore[reportArgumentType]
        runs[f"chunk {chunk}"] = lambda newton=newton: network.parallel(newton)
    peaks: dict[str, Any] = {}
    for name, run in runs.items():
        why = too_long(context, ("mlp-memory", width, name), depth, settings.patience)
        if why:
            peaks[name] = {"status": f"not measured: it took {why}"}
            continue
        if device.type == "cuda":
            release(device)
        try:
            seconds: list[float] = []

            def clocked_run(run: Callable[[], Any] = run, seconds: list[float] = seconds) -> Any:
                found, took = clocked(run, device)
                seconds.append(took)
                return found

            peaks[name] = {"status": "ok", "bytes": peak_bytes(clocked_run, device, *network.tensors)}
            note(context, ("mlp-memory", width, name), depth, min(seconds))  # the first call sets up
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            peaks[name] = {"status": "out of memory"}
    return {"network_bytes": network_bytes, "peaks": peaks}


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
                "least": f"{min(ratios):.2f}" if ratios else None,
                "most": f"{max(ratios):.2f}" if ratios else None,
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
