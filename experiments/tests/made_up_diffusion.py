"""Results of the diffusion experiments that nobody measured, in the form and at the size of full runs."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from deeppcr_paper import diffusion_guess, diffusion_iterations, latent_diffusion, pixel_diffusion
from deeppcr_paper.sampling import pack
from made_up import result

TRAINING = {"denoiser": {"steps": 20, "seconds": 1.0, "curves": {"step": [10, 20], "noise": [0.4, 0.3]}}}


def timing(length: int, width: int, settings: Any, noise: random.Random, *, device: str = "cuda") -> dict[str, Any]:
    """A cell: the eager loop takes 1.2 ms a step, the graph 0.17; the widest with the most steps do not fit, as printed."""

    def spread(seconds: float, runs: int) -> list[float]:
        return [seconds * (1 + 0.1 * noise.random()) for _ in range(runs)]

    def solved(runs: int, iterations: float, error: float) -> dict[str, Any]:
        counts = [round(iterations + noise.random()) for _ in range(runs)]
        return {
            "iterations": counts,
            "evaluations": [round(0.6 * count * length) for count in counts],
            "results": ["CONVERGED"] * runs,
            "error": [error * (1 + noise.random()) for _ in range(runs)],
        }

    steps = math.log2(length)
    newton = length * width * 2e-5
    found: dict[str, Any] = {
        "loop": {"status": "ok", "seconds": spread(1.2e-3 * length, settings.loop_runs)},
        "network_seconds": 2e-4,
        "auto": {
            "status": "ok",
            "seconds": spread(2e-3 * steps * (1 + width / 200), settings.runs),
            "first_seconds": [0.1] * 4,
            **solved(settings.runs, 6 + steps + width / 32, 3e-4),
        },
        "printed": {
            "status": "ok",
            "seconds": spread(newton, 5),
            "phases": {"jacobian": 0.7 * newton, "linear": 0.2 * newton, "total": newton},
            **solved(5, 2 + steps / 2, 1e-6),
        },
        "newton": {"status": "ok", "seconds": spread(0.8 * newton, 5), **solved(5, 1 + steps / 2, 1e-6)},
        "batch": {"samples": settings.batch, "seconds": {"loop": [2.0], "graph": [1.0] * 3, "auto": [1.25] * 3}},
    }
    if device == "cuda":
        found["graph"] = {"status": "ok", "seconds": spread(1.7e-4 * length, settings.runs)}
    else:
        del found["batch"]["seconds"]["graph"]
    if length * width > 2**17:
        found["printed"] = {"status": "out of memory"}
        del found["newton"]
    return found


def pictures(channels: int, side: int, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(side)
    images = 2 * torch.rand(count, channels, side, side, generator=generator) - 1
    return {"sequential": pack(images), "parallel": pack((images + 0.02).clamp(-1, 1))}


def latent_result(settings: Any = latent_diffusion.FULL, device: str = "cuda") -> dict[str, Any]:
    records: list[dict[str, Any]] = []
    for data, width in latent_diffusion.models_of(settings):
        noise = random.Random(f"{data}{width}")
        images = {"train": 60_000, "test": 10_000}
        records.append({"data": data, "w": width, "part": "training", "training": TRAINING, "images": images})
        for length in settings.steps:
            distance = 0.5 + width / 100 + 0.1 * noise.random()
            apart = 1e-4 * noise.gauss(0, 1)
            frechet = {
                "samples": settings.samples,
                "sequential": distance,
                "parallel": distance + apart,
                "difference": apart,
                "sequential_interval": [distance - 0.05, distance + 0.06],
                "parallel_interval": [distance + apart - 0.05, distance + apart + 0.06],
                "difference_interval": [apart - 2e-4, apart + 2e-4],
            }
            channels, side = (3 if data in latent_diffusion.COLOUR else 1), (8 if data == "digits" else 32)
            records.append(
                {
                    "data": data,
                    "w": width,
                    "L": length,
                    **timing(length, width, settings, noise, device=device),
                    "frechet": frechet,
                    "pictures": pictures(channels, side, settings.images),
                }
            )
    return result("latent-diffusion", settings, records, device)


def pixel_result(settings: Any = pixel_diffusion.FULL) -> dict[str, Any]:
    records: list[dict[str, Any]] = []
    for side in settings.sides:
        for conditional in settings.conditional:
            noise = random.Random(f"{side}{conditional}")
            cell = {"data": settings.data, "side": side, "conditional": conditional}
            records.append(
                {**cell, "part": "training", "training": TRAINING, "images": {"train": 60_000, "test": 10_000}}
            )
            for length in settings.steps:
                found = timing(length, side**2, settings, noise)
                records.append({**cell, "L": length, **found, "pictures": pictures(1, side, settings.images)})
    return result("pixel-diffusion", settings, records)


def iterations_result(settings: Any = diffusion_iterations.FULL) -> dict[str, Any]:
    """Newton's error falls ever faster down to a floor, the prior's by a factor; the largest images stall above 0.1."""
    records = []
    for space in settings.spaces:
        for size in settings.widths if space == "latent" else settings.sides:
            for length in settings.steps:
                start = 2 + size / 64
                newton = [max(start * math.exp(-0.02 * k**2), 2e-7) for k in range(settings.iterations + 1)]
                prior = [max(start * math.exp(-0.5 * k), 1e-4) for k in range(settings.iterations + 1)]
                if space == "pixel" and size == max(settings.sides):
                    newton = [max(error, 0.3) for error in newton]
                errors = {"printed": [newton] * settings.samples, "auto": [prior] * settings.samples}
                records.append(
                    {"space": space, "w" if space == "latent" else "side": size, "L": length, "errors": errors}
                )
    return result("diffusion-iterations", settings, records)


def guess_result(settings: Any = diffusion_guess.FULL) -> dict[str, Any]:
    records = []
    shared = pixel_diffusion.FULL
    for side in settings.sides:
        for conditional in settings.conditional:
            for length in settings.steps:
                for number, guess in enumerate(settings.guesses):
                    if guess == "class-mean" and conditional == "no":
                        continue
                    noise = random.Random(f"{side}{conditional}{guess}")
                    found = timing(length, side**2, shared, noise)
                    mine = {method: {**found[method]} for method in ("loop", "auto", "printed")}
                    if side not in settings.printed_sides:
                        del mine["printed"]
                    mine["auto"]["iterations"] = [each + number for each in mine["auto"]["iterations"]]
                    cell = {"side": side, "conditional": conditional, "L": length, "guess": guess}
                    records.append({**cell, **mine})
    return result("diffusion-guess", settings, records)
