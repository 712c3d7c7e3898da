"""The README's table: what a pass takes by every loop, as printed and with the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..claims.networks import of_activation
from ..claims.results import IMAGES, Finished, best, command
from ..figures.style import seconds as in_words
from ..mlp_summary import BASELINES, seconds
from ..mlp_timing import DIRECTIONS
from ..table import times

BEGIN = "<!-- the table begins: written by make paper -->"
END = "<!-- the table ends -->"
HEADS = {
    "loop": "eager loop",
    "graph": "loop in a CUDA graph",
    "fused": "fused sequential kernel",
    "printed": "the paper's method as printed",
    "auto": "`deeppcr` in parallel",
}
WIDTHS = (4, 16, 64, 256)
#: A depth at which loops are short.
SHORT = 64


def put(page: str, results: Sequence[Finished]) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return before + "\n".join([BEGIN, "", *lines(results), "", END]) + after


def lines(results: Sequence[Finished]) -> list[str]:
    needed = {"mlp-timing": _on_gpu, "resnet-training": _fast, "latent-diffusion": _on_gpu, "pixel-diffusion": _on_gpu}
    found = {name: best(results, name, needs) for name, needs in needed.items()}
    used = [result for result in found.values() if result]
    if len(used) < len(needed):
        missing = [f"`{command(name)}`" for name, result in found.items() if result is None]
        return [f"Not run yet: {', '.join(missing)}."]
    timed, trained, *sampled = used
    sources = [each.source + (", smaller than the paper's runs" if each.smaller else "") for each in used]
    return [
        f"| time of a pass or a sample | {' | '.join(HEADS.values())} |",
        "|---" * (1 + len(HEADS)) + "|",
        *_networks(timed),
        *_training(trained),
        *(row for each in sampled for row in _samples(each)),
        "",
        'In brackets: its time over that of `deeppcr` in parallel, so below 1 where that is slower; `mode="auto"`, the default, '
        "takes the fused sequential kernel, which is `deeppcr`'s too, where it is expected to be the faster. L layers of "
        "width w, one row (in training 8); whole calls, with their stopping tests. Of an MLP the shortest of "
        f"{_repeats(timed)} calls, as the paper shows, else medians. Backward: the "
        "gradients of weights, biases and input, through autograd; `backward` among [the kernels' "
        "times](docs/performance.md#measured) is without those of the weights, and shorter. "
        "Diffusion: L denoising steps, one sample.",
        f"From {' and '.join(sources)}.",
    ]


def _repeats(timed: Finished) -> str:
    entries = [entry for record in timed.records for way in DIRECTIONS for entry in record[way].values()]
    counts = [len(entry["seconds"]) for entry in entries if entry.get("seconds")]
    return f"{min(counts)} to {max(counts)}"


def _on_gpu(result: Finished) -> bool:
    return result.content["device"] == "cuda"


def _fast(result: Finished) -> bool:
    """Trainings in float64 show equality, not speed: the kernels are for float32."""
    return result.content["settings"].get("dtype") == "float32" and _on_gpu(result)


def _networks(result: Finished) -> list[str]:
    mine = of_activation(result, "relu")
    deepest = max((record["L"] for record in mine), default=0)
    found = []
    for way in DIRECTIONS:
        for depth, widths in ((deepest, WIDTHS), (SHORT, (16,))):
            for record in mine:
                if record["L"] == depth and record["w"] in widths:
                    name = f"MLP {way}, L = {depth:,}, w = {record['w']}"
                    found.append(_row(name, {column: seconds(record, way, column) for column in HEADS}))
    return found


def _training(result: Finished) -> list[str]:
    found, width = [], result.content["settings"]["width"]
    for entry in sorted(result.summary, key=lambda each: each["L"]):
        each: dict[str, Any] = {
            "loop": entry["eager_forward_seconds"],
            entry["loop"] if entry["loop"] in BASELINES else "graph": entry["sequential"]["forward_seconds"],
            "printed": entry["printed_forward_seconds"],
            "auto": entry["parallel"]["forward_seconds"],
        }
        found.append(_row(f"ResNet forward in training, L = {entry['L']:,}, w = {width}", each))
    for entry in sorted(result.summary, key=lambda each: each["L"]):
        modes = {"fused": "sequential", "auto": "parallel"}
        each = {column: entry[mode]["replayed_seconds"] for column, mode in modes.items()}
        if entry["loop"] == "fused" and all(each.values()):
            found.append(_row(f"ResNet training step in a CUDA graph, L = {entry['L']:,}, w = {width}", each))
    return found


def _samples(result: Finished) -> list[str]:
    """Of every model without classes the longest sequence."""
    longest = max((entry["L"] for entry in result.summary), default=0)
    found = []
    for entry in result.summary:
        if entry["L"] == longest and entry.get("conditional", "no") == "no":
            if "w" in entry:
                size = f"latents of {IMAGES[entry['data']]}, w = {entry['w']}"
            else:
                size = f"{entry['side']}×{entry['side']} pixels"
            found.append(_row(f"Diffusion, {size}, L = {longest:,}", entry["seconds"]))
    return found


def _row(name: str, each: Mapping[str, float | None]) -> str:
    cells = [_cell(column, each.get(column), each.get("auto")) for column in HEADS]
    return f"| {name} | {' | '.join(cells)} |"


def _cell(column: str, value: float | None, ours: float | None) -> str:
    if value is None:
        return "–"
    if column == "auto":
        return f"**{in_words(value)}**"
    return in_words(value) + (f" ({times(value / ours)})" if ours else "")
