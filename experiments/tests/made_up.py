"""Result files that nobody measured, in the form and at the size of full runs: to test what is drawn from results."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

from deeppcr_paper import (
    compare_hardware,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    resnet_training,
)
from deeppcr_paper.store import SCHEMA, as_json

COLUMNS = ("loop", "graph", "fused", "printed", "auto")


def result(experiment: str, settings: Any, records: list[dict[str, Any]], device: str = "cuda") -> dict[str, Any]:
    return as_json(
        {
            "schema": SCHEMA,
            "experiment": experiment,
            "quick": False,
            "complete": True,
            "device": device,
            "hardware": {"device": "Made-up GPU", "cpu": "Made-up CPU"},
            "settings": asdict(settings),
            "summary": None,
            "records": records,
        }
    )


def seconds(column: str, depth: int, width: int, way: str) -> float:
    work = 1 + depth * width**2 / 2**21
    rounds = math.log2(2 * depth)
    least = {
        "loop": 8e-6 * depth * (1 + width / 2000),
        "graph": 1.6e-6 * depth * (1 + width / 1000),
        "fused": 8e-7 * depth * (1 + (width / 64) ** 2),
        "printed": 4e-4 * rounds * work,
        "auto": 3e-4 * rounds * (1 + work / 20),
    }[column]
    return least * (2 if way == "backward" and column == "loop" else 0.5 if way == "backward" else 1)


def mlp_timing_result(
    settings: mlp_timing.Settings = mlp_timing.FULL, columns: tuple[str, ...] = COLUMNS
) -> dict[str, Any]:
    """The largest networks do not fit; the graph fails at the greatest depths."""
    records = []
    for activation in settings.activations:
        for width in settings.widths:
            for depth in settings.depths:
                record: dict[str, Any] = {"activation": activation, "L": depth, "w": width, "hardware": "Made-up GPU"}
                for way in ("forward", "backward"):
                    record[way] = {}
                    for column in columns:
                        time = seconds(column, depth, width, way)
                        entry: dict[str, Any] = {"status": "ok", "seconds": [1.1 * time, time]}
                        if depth * width**2 > 2**32 and column == "printed":
                            entry = {"status": "out of memory"}
                        if depth * width**2 > 2**33:
                            entry = {"status": "out of memory"}
                        if column == "graph" and depth == 2**14:
                            entry = {"status": "failed: RuntimeError: capture"}
                        record[way][column] = entry
                records.append(record)
    return result("mlp-timing", settings, records)


def mlp_memory_result(settings: mlp_memory.Settings = mlp_memory.FULL) -> dict[str, Any]:
    names = ["loop", "printed", *(f"chunk {chunk}" for chunk in settings.chunks)]
    records = []
    for width in settings.widths:
        for depth in settings.depths:
            network = 4 * (depth * (width**2 + width) + width)
            peaks: dict[str, Any] = {}
            for name in names:
                part = {"loop": 4 * depth * width / network, "printed": 3.0}.get(name, 1 / 4 + width / 4000)
                peaks[name] = {"status": "ok", "bytes": int(part * network) + 2**14}
            if depth * width**2 > 2**32:
                peaks["printed"] = {"status": "out of memory"}
            records.append({"L": depth, "w": width, "network_bytes": network, "peaks": peaks})
    return result("mlp-memory", settings, records)


def mlp_newton_result(settings: mlp_newton.Settings = mlp_newton.FULL) -> dict[str, Any]:
    records = []
    for activation in settings.activations:
        for guess in settings.guesses:
            for width in settings.widths:
                for depth in settings.depths:
                    record = {"activation": activation, "guess": guess, "L": depth, "w": width}
                    count = 3 + (activation == "relu") * math.log2(1 + depth) / 5 + (guess == "random") + width / 1000
                    error = 1e-7 * math.sqrt(width) * (1 + math.log2(depth)) if depth > 2 else 0.0
                    record |= {
                        "status": "ok",
                        "iterations": [int(count), int(count) + 1, int(count)],
                        "error": [error, 2 * error, error / 2],
                        "error_float64": [error] * 3,
                        "results": ["CONVERGED"] * 3,
                    }
                    if depth * width**2 > 2**33:
                        record = {
                            **{k: record[k] for k in ("activation", "guess", "L", "w")},
                            "status": "out of memory",
                        }
                    elif depth * width**2 > 2**32:
                        record["results"][0] = "ITERATIONS_DONE"
                    records.append(record)
    return result("mlp-newton", settings, records)


def mlp_gain_result(settings: mlp_gain.Settings = mlp_gain.FULL) -> dict[str, Any]:
    """Chaotic from gain 2.5 on, where the defaults leave it to the loop; the deepest overflow at the largest gain."""
    records = []
    for activation in settings.activations:
        for depth in settings.depths:
            for gain in settings.gains:
                exponent = math.log(gain / 2.5) if gain > 0.6 or activation != "relu" else None
                chaotic, overflow = gain > 2.5, gain > 3.9 and depth > 1000
                count = int(depth * 0.5 * (1 - 2 / gain)) if chaotic else 4
                good = "NON_FINITE" if overflow else "CONVERGED"
                record = {"activation": activation, "gain": gain, "L": depth, "w": settings.width}
                record |= {
                    "exponents": [exponent] * settings.samples,
                    "paper": {"iterations": [count] * settings.samples, "results": [good] * settings.samples},
                    "default": {
                        "iterations": [3] * settings.samples,
                        "results": ["FINISHED_BY_LOOP" if chaotic else good] * settings.samples,
                        "chunk": 16,
                    },
                }
                records.append(record)
    return result("mlp-gain", settings, records)


def hardware_result(
    settings: mlp_timing.Settings = mlp_timing.FULL, columns: tuple[str, ...] = COLUMNS
) -> dict[str, Any]:
    records = []
    for record in mlp_timing_result(settings, columns)["records"]:
        found = {key: record[key] for key in ("activation", "L", "w")}
        found["machines"] = ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
        for way in ("forward", "backward"):
            found[way] = {}
            for column, entry in record[way].items():
                first = min(entry["seconds"]) if "seconds" in entry else None
                ratio = 0.9 / (1 + record["w"] / 1000)
                second = first * ratio if first else None
                found[way][column] = {"seconds": [first, second], "ratio": second / first if first else None}
        records.append(found)
    return result("hardware", compare_hardware.Settings(files=("one.json", "other.json")), records)


def run(points: int, window: int, epochs: int, noise: random.Random, *, parallel: bool, count: float = 4.0) -> dict:
    """A training: ``points`` windows of steps."""
    curves: dict[str, list[float]] = {"step": [window * (number + 1) for number in range(points)]}
    for number in range(points):
        passed = number / points
        loss = 0.2 + 2.1 * math.exp(-5 * passed) + noise.gauss(0, 0.06)
        values = {
            "loss": (loss, 0.25),
            "accuracy": (1 - loss / 3, 0.1),
            "forward_seconds": ((0.004 if parallel else 0.02) * (1 + 0.02 * noise.random()), 1e-4),
            "step_seconds": (0.05, 1e-3),
        }
        if parallel:
            values |= {"iterations": (count + 0.2 * noise.random(), 0.4), "not_converged": (0.0, 0.0)}
        for name, (mean, deviation) in values.items():
            curves.setdefault(name, []).append(mean)
            curves.setdefault(f"{name}_std", []).append(deviation)
    accuracy = [0.94 - 0.3 * 0.5**epoch + noise.gauss(0, 0.002) for epoch in range(epochs)]
    return {"curves": curves, "test_accuracy": accuracy, "diverged": None}


def untimed(curves: dict[str, list[float]]) -> None:
    """As of a training whose passes were not timed."""
    for name in [name for name in curves if "seconds" in name]:
        del curves[name]


def resnet_training_result(settings: Any = resnet_training.FULL, points: int = 600) -> dict[str, Any]:
    records: list[dict[str, Any]] = []
    for depth in settings.depths:
        records.append({"L": depth, "timing": "eager", "forward_seconds": [depth * 1.1e-4] * 20})
        for seed in range(settings.seeds):
            noise = random.Random(1000 * depth + seed)
            runs = {
                mode: run(
                    points, settings.window, settings.epochs, noise, parallel=mode == "parallel", count=3 + depth / 512
                )
                for mode in ("sequential", "parallel")
            }
            for mode, scale in (("sequential", 5e-6), ("parallel", 1e-6)):
                each = runs[mode]["curves"]["forward_seconds"]
                runs[mode]["curves"]["forward_seconds"] = [value * scale * depth / 0.004 for value in each]
                if seed >= settings.timed_seeds:
                    untimed(runs[mode]["curves"])
            distance = [1e-7 * depth * (number + 1) ** 0.7 for number in range(points)]
            apart = [1e-5 * (number % 7) + 1e-6 * seed for number in range(points)]
            found = {"runs": runs, "parameter_distance": distance, "loss_distance": apart}
            records.append({"L": depth, "seed": seed, **found})
    return result("resnet-training", settings, records)


def ablation_result(name: str, settings: Any, points: int = 150) -> dict[str, Any]:
    """One iteration is too few: that training diverges half-way."""
    records = []
    for depth in settings.depths:
        for guess in settings.guesses:
            for count in settings.iterations:
                noise = random.Random(f"{depth}{guess}{count}")
                mean = {"batch-mean": 3.4, "random": 7.1, "zeros": 6.2}[guess]
                found = run(points, settings.window, settings.epochs, noise, parallel=True, count=count or mean)
                curves = found["curves"]
                taken = (count or mean) * depth * 1e-6
                curves["forward_seconds"] = [taken * value / 0.004 for value in curves["forward_seconds"]]
                if count == 1:
                    found = {
                        "curves": {key: each[: points // 2] for key, each in curves.items()},
                        "test_accuracy": [],
                        "diverged": settings.window * (points // 2) + 7,
                    }
                    found["curves"]["loss"] = [
                        value * 1.1 ** max(0, number - points // 2 + 30)
                        for number, value in enumerate(found["curves"]["loss"])
                    ]
                records.append(
                    {"L": depth, "guess": guess, "iterations": count, "seed": 0, "runs": {"parallel": found}}
                )
    return result(name, settings, records)
