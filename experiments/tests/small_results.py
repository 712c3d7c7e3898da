"""Experiments small enough for tests, and result files made by a formula where the numbers themselves are under test."""

import json
import math
from dataclasses import asdict, replace

from deeppcr_paper import mlp_timing, store
from deeppcr_paper.denoisers import PRESETS

#: Training of a few steps: the networks run, and know next to nothing.
PRESETS["tiny"] = replace(
    PRESETS["quick"],
    autoencoder_batch=64,
    autoencoder_epochs=0.02,
    latent_batch=64,
    latent_epochs=0.16,
    latent_rate=5e-3,
    pixel_batch=64,
    pixel_epochs=0.08,
    hidden=32,
)
#: Smaller still than quick: enough to see that they run and what they write.
TINY = {
    "mlp-timing": {
        "depths": (2, 64),
        "widths": (2, 4),
        "other_widths": (2, 4),
        "activations": ("relu", "tanh"),
        "budget": 0.01,
        "most": 3,
    },
    "mlp-printed": {
        "depths": (2, 64),
        "widths": (2, 4),
        "other_widths": (2, 4),
        "activations": ("relu", "tanh"),
        "budget": 0.01,
        "most": 3,
    },
    "mlp-memory": {"depths": (64, 256), "widths": (4,)},
    "mlp-newton": {"depths": (8, 64), "widths": (4,)},
    "mlp-gain": {"depths": (8, 16), "gains": (1.0, 4.0), "activations": ("relu", "tanh")},
    "hardware": {},
    "resnet-training": {"depths": (8, 16), "train": 80, "test": 40, "window": 4, "eager_steps": 3, "epochs": 1},
    "resnet-iterations": {"depths": (16,), "train": 64, "test": 40, "window": 4, "iterations": (0, 3), "epochs": 1},
    "resnet-guess": {"depths": (16,), "train": 64, "test": 40, "window": 4, "iterations": (0, 3), "epochs": 1},
    "latent-diffusion": {
        "widths": (4,),
        "steps": (32, 48),
        "training": "tiny",
        "loop_runs": 2,
        "runs": 3,
        "budget": 0.1,
        "batch": 8,
        "images": 2,
        "samples": 16,
        "draws": 10,
    },
    "pixel-diffusion": {
        "sides": (4,),
        "steps": (32,),
        "training": "tiny",
        "runs": 3,
        "budget": 0.1,
        "batch": 4,
        "images": 2,
    },
    "diffusion-iterations": {"widths": (4,), "sides": (4,), "steps": (32,), "iterations": 5, "training": "tiny"},
    "diffusion-guess": {"sides": (4,), "conditional": ("yes",), "steps": (32,), "runs": 2, "training": "tiny"},
}


def timing_content(*, quick=False, like=None, hardware="NVIDIA Imaginary", end="2026-01-02T00:00:00+00:00", scale=1.0):
    """A result of mlp-timing on a GPU that is not there: times by a formula, with a corner that ran out of memory.

    Args:
        like: settings, where they are not those of a quick or a full run
        scale: of the eager loop's times
    """
    settings = store.as_json(asdict(like or (mlp_timing.QUICK if quick else mlp_timing.FULL)))
    records = [
        record(activation, depth, width, hardware, scale)
        for activation in settings["activations"]
        for width in settings["widths"]
        for depth in settings["depths"]
    ]
    versions = {"python": "3.12.0", "torch": "2.13.0", "deeppcr": "0.1.0"}
    where = {
        "hardware": {"device": hardware, "cpu": "Imaginary CPU"},
        "versions": versions,
        "commit": "abc1234",
        "start": "2026-01-01T00:00:00+00:00",
        "end": end,
    }
    machine = {"hardware": hardware, "device": "cuda", "cpu_count": 8, "threads": 8, "cuda": "13.0"}
    return {
        "schema": store.SCHEMA,
        "experiment": "mlp-timing",
        "quick": quick,
        "complete": True,
        "device": "cuda",
        **where,
        "settings": settings,
        "sessions": [{**where, "machine": machine}],
        "summary": None,
        "records": records,
    }


def record(activation, depth, width, hardware, scale):
    found = {"key": f"activation={activation} L={depth} w={width}", "hardware": hardware, "session": 0}
    found |= {"activation": activation, "L": depth, "w": width}
    iterations = {"relu": 5, "tanh": 4, "sigmoid": 3}[activation]
    work = depth * width**2
    for way, passes in (("forward", iterations), ("backward", 1)):
        times = {
            "loop": 3e-5 * depth * scale,
            "graph": 5e-6 * depth,
            "printed": passes * (2e-4 * math.log2(depth) + 3e-9 * work * width**0.5),
            "auto": passes * (5e-5 * math.log2(depth) + 4e-10 * work * width**0.5),
        }
        found[way] = {}
        for name, seconds in times.items():
            entry = {"status": "ok", "error": 1.2e-7}
            if name in ("printed", "auto"):
                entry |= {"iterations": iterations, "chunk": 1 if name == "printed" else 64, "linear": "PCR()"}
            if name == "printed" and work > 2**30:
                entry = {"status": "out of memory"}
            else:
                entry["seconds"] = [1.1 * seconds, seconds]
            found[way][name] = entry
    return found


def write(folder, content, name=None):
    """The content as a finished result file."""
    quick = "-quick" if content["quick"] else ""
    path = folder / (name or f"{content['experiment']}-{content['device']}-{content['end'][:10]}{quick}.json")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path
