"""The README's table: a few loops of every kind, by the loops that a user has, by the loop in one kernel, and in parallel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..claims.networks import of_activation
from ..claims.results import IMAGES, Finished, best, command
from ..claims.trainings import with_defaults
from ..figures.style import seconds as in_words
from ..mlp_summary import seconds
from ..table import times

BEGIN = "<!-- the table begins: written by make paper -->"
END = "<!-- the table ends -->"
#: Columns: the loop in Python, the fastest loop without this library, and this library's two.
HEADS = {
    "python": "loop in Python",
    "other": "fastest without `deeppcr`",
    "kernel": "`deeppcr`: loop in one kernel",
    "parallel": "`deeppcr`: in parallel",
}
#: No more rows than a reader takes in at once.
MOST = 14
#: Loops of users, and whether with gradients: their names in ``benchmarks/loops.py``, and in words.
LOOPS = {
    ("gru", "forward"): "elementwise GRU",
    ("dense-gru-16", "forward and backward"): "GRU with gradients",
    ("kalman", "forward"): "Kalman filter, mean and covariance",
    ("pendulum", "forward"): "pendulum, Runge-Kutta",
    ("lorenz", "forward"): "Lorenz, chaotic",
}
_OTHERS = {"cuDNN": "cuDNN", "pararnn-torch": "pararnn-torch", "bare loop in a CUDA graph": "CUDA graph"}
#: Networks of the paper, (direction, depth, width); None stands for the greatest depth.
NETWORKS = (
    ("forward", None, 16),
    ("forward", None, 256),
    ("forward", None, 512),
    ("forward", 64, 16),
)
_GRAPH = "CUDA graph"
#: A layer of ``benchmarks/recurrent.py``, and a line of ``benchmarks/real_diffusion.py``: 3 x 32 x 32 numbers.
LAYER = {"kind": "GRU", "T": 32_768, "B": 1, "H": 16, "direction": "forward and backward"}
SAMPLER, STEPS, NUMBERS = ("DDPM 1000, one sample", "tf32"), 1_000, 3_072
#: The programs besides the paper's experiments whose files are read.
BENCHMARKS = ("loops", "recurrent", "real-diffusion")

Times = Mapping[str, float | None]
#: Of a benchmark, the name of its newest file on a GPU, and what is in it.
Measured = Mapping[str, tuple[str, Mapping[str, Any]]]


def put(page: str, results: Sequence[Finished], measured: Measured) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return before + "\n".join([BEGIN, "", *lines(results, measured), "", END]) + after


def newest(folder: Path) -> Measured:
    """Of each benchmark the newest run on a GPU, where there is one."""
    found = {}
    for name in BENCHMARKS:
        paths = folder.glob(f"{name}-nvidia-*.json")
        files = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        if files:
            found[name] = max(files, key=lambda each: each[1]["date"])
    return found


def lines(results: Sequence[Finished], measured: Measured) -> list[str]:
    needed = {"mlp-timing": _on_gpu, "resnet-training": _fast, "latent-diffusion": _on_gpu}
    found = {name: best(results, name, needs) for name, needs in needed.items()}
    used = [result for result in found.values() if result]
    missing = [f"`{command(name)}`" for name, result in found.items() if result is None]
    missing += [f"`python benchmarks/{name.replace('-', '_')}.py`" for name in BENCHMARKS if name not in measured]
    if missing:
        return [f"Not run yet: {', '.join(missing)}."]
    timed, trained, latents = used
    loops, layers, sampled = (measured[name][1] for name in BENCHMARKS)
    rows = [*_loops(loops), *_layer(layers), *_networks(timed), *_training(trained), *_samples(latents)]
    rows += [*_real(sampled), *_batch(latents)]
    if len(rows) > MOST:
        raise ValueError(f"the README's table has {len(rows)} rows: {MOST} at most")
    sources = [f"`{each.path.name}`" + (", smaller than the paper's runs" if each.smaller else "") for each in used]
    sources += [f"`{file}`" for file, _ in measured.values()]
    machines = [each.hardware for each in used] + [record["machine"]["hardware"] for _, record in measured.values()]
    return [
        f"| loop, steps × rows × width | {' | '.join(HEADS.values())} |",
        "|---" * (1 + len(HEADS)) + "|",
        *rows,
        "",
        f"- {' and '.join(dict.fromkeys(machines))}. Medians of whole calls in float32 (the UNet in TF32), of slow ones of only 1 to 4 calls. The fastest is **bold**.",
        "- In brackets: its time over the faster of the two `deeppcr` columns; below 1× `deeppcr` is slower. By default `deeppcr` takes the way that it finds faster; "
        "the last column is always the parallel one.",
        "- A dash: not measured; for Lorenz, no gain.",
        "- The first five rows are steps in `deeppcr.solve`; their loops in Python and in CUDA graphs are timed over 256 steps and scaled. MLPs are `deeppcr.nn.MLP` with "
        "PyTorch's initial weights.",
        f"- Every result was first compared with the loop's. Largest errors shown: {_error_of_networks(timed):.1e} (MLPs, against float64) and "
        f"{max(_error_of_samples(latents), *(line['error'] for line in _shown_lines(sampled)), 0.0):.1e} (samples, against the loop's).",
        f"- Files in `results/`, whose names have the machine, day and commit: {', '.join(sources)}.",
    ]


def _on_gpu(result: Finished) -> bool:
    return result.content["device"] == "cuda"


def _fast(result: Finished) -> bool:
    """Trainings in float64 show equality, not speed: the kernels are for float32."""
    return result.content["settings"].get("dtype") == "float32" and _on_gpu(result) and with_defaults(result)


def _loops(record: Mapping[str, Any]) -> list[str]:
    found = []
    for (loop, direction), name in LOOPS.items():
        cases = {
            case["method"]: case
            for case in record["cases"]
            if case["suite"] == "table"
            and case["passed"]
            and (case["parameters"]["loop"], case["parameters"]["direction"]) == (loop, direction)
        }
        if "solve" not in cases:
            continue
        taken = {method: median(case["seconds"]) for method, case in cases.items()}
        others = {taken[method]: words for method, words in _OTHERS.items() if method in taken}
        sizes = cases["solve"]["parameters"]
        each = {
            "python": taken.get("bare loop"),
            "other": min(others, default=None),
            "kernel": taken.get('Loop(by="kernel")'),
            "parallel": None if cases["solve"]["result"] == "LOOP" else taken["solve"],
        }
        found.append(
            _row(f"{name}, {_size(sizes['L'], sizes['B'], sizes['D'])}", each, others.get(each["other"] or 0.0))
        )
    return found


def _layer(record: Mapping[str, Any]) -> list[str]:
    taken = {
        case["method"]: median(case["seconds"])
        for case in record["cases"]
        if case["suite"] == "targets" and case["passed"] and LAYER.items() <= case["parameters"].items()
    }
    if not {"torch.nn", "auto"} <= taken.keys():
        return []
    size, captured = _size(LAYER["T"], LAYER["B"], LAYER["H"]), taken.get("torch.nn, captured", math.inf)
    other, name = min((taken["torch.nn"], "cuDNN"), (captured, "cuDNN in a CUDA graph"))
    return [_row(f"`nn.GRU` with gradients, {size}", {"other": other, "parallel": taken["auto"]}, name)]


def _real(record: Mapping[str, Any]) -> list[str]:
    return [
        _row(
            f"diffusion, a UNet of 36 million parameters, {_size(STEPS, 1, NUMBERS)}",
            {"other": line["loop"], "parallel": line["found"]},
        )
        for line in _shown_lines(record)
    ]


def _shown_lines(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is too far from the loop is not shown."""
    return [line for line in record["lines"] if (line["name"], line["precision"]) == SAMPLER and line.get("good")]


def _networks(result: Finished) -> list[str]:
    columns = {"python": "loop", "other": "graph", "kernel": "fused", "parallel": "auto"}
    return [
        _row(
            f"MLP {way}, {_size(record['L'], 1, record['w'])}",
            {column: seconds(record, way, name) for column, name in columns.items()},
        )
        for way, record in _shown(result)
    ]


def _shown(result: Finished) -> list[tuple[str, dict[str, Any]]]:
    """Of the paper's networks the directions and records that are shown."""
    mine = of_activation(result, "relu")
    deepest = max((record["L"] for record in mine), default=0)
    return [
        (way, record)
        for way, depth, width in NETWORKS
        for record in mine
        if (record["L"], record["w"]) == (depth or deepest, width) and record[way].get("auto", {}).get("seconds")
    ]


def _error_of_networks(result: Finished) -> float:
    return max((record[way]["auto"].get("error", 0.0) for way, record in _shown(result)), default=0.0)


def _training(result: Finished) -> list[str]:
    """The deepest network: a step in a CUDA graph."""
    entry, width = max(result.summary, key=lambda each: each["L"]), result.content["settings"]["width"]
    each = {"kernel": entry["sequential"]["replayed_seconds"], "parallel": entry["parallel"]["replayed_seconds"]}
    if entry["loop"] != "fused" or not all(each.values()):
        return []
    size = _size(entry["L"], result.content["settings"]["batch"], width)
    return [_row(f"ResNet, a training step in a CUDA graph, {size}", each)]


def _samples(result: Finished) -> list[str]:
    """The longest sequence of the widest model without classes."""
    entry = _widest(result)
    columns = {"python": "loop", "other": "graph", "parallel": "auto"}
    return [_row(_sampled(entry, 1), {column: entry["seconds"][name] for column, name in columns.items()})]


def _batch(result: Finished) -> list[str]:
    """The same for many samples at once."""
    entry = _widest(result)
    for record in result.records:
        batch = record.get("batch")
        if batch and all(record.get(name) == entry.get(name) for name in ("data", "w", "L")):
            columns = {"python": "loop", "other": "graph", "parallel": "auto"}
            each = {column: _median({"seconds": batch["seconds"].get(name)}) for column, name in columns.items()}
            return [_row(_sampled(entry, batch["samples"]), each)]
    return []


def _widest(result: Finished) -> Mapping[str, Any]:
    plain = [entry for entry in result.summary if entry.get("conditional", "no") == "no"]
    return max(plain, key=lambda entry: (entry["L"], entry.get("w") or entry.get("side")))


def _error_of_samples(result: Finished) -> float:
    return _widest(result)["auto"]["error"]


def _sampled(entry: Mapping[str, Any], samples: int) -> str:
    if "w" in entry:
        return f"diffusion, latents of {IMAGES[entry['data']]}, {_size(entry['L'], samples, entry['w'])}"
    return f"diffusion, images, {_size(entry['L'], samples, entry['side'] ** 2)}"


def _size(steps: int, rows: int, width: int) -> str:
    return f"{steps:,} × {rows:,} × {width:,}"


def _median(entry: Mapping[str, Any] | None) -> float | None:
    return median(entry["seconds"]) if entry and entry.get("seconds") else None


def _row(name: str, each: Times, other: str | None = _GRAPH) -> str:
    """Args:
    other: what the fastest loop without this library is
    """
    measured = [value for value in each.values() if value is not None]
    ours = min(value for column, value in each.items() if value is not None and column in ("kernel", "parallel"))
    cells = []
    for column in HEADS:
        value = each.get(column)
        if value is None:
            cells.append("–")
            continue
        cell = f"**{in_words(value)}**" if value == min(measured) else in_words(value)
        if column == "other":
            cell += f" {other}"
        cells.append(cell + (f" ({times(value / ours)})" if column in ("python", "other") else ""))
    return f"| {name} | {' | '.join(cells)} |"
