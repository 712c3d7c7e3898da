"""The README's table: what a pass takes by every loop, as printed and with the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..claims.diffusion import DATA
from ..claims.results import Finished, best
from ..figures.style import seconds as in_words
from ..mlp_summary import BASELINES, seconds
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
    timed = best(results, "mlp-timing", _on_gpu)
    trained = best(results, "resnet-training", _fast)
    sampled = [each for name in ("latent-diffusion", "pixel-diffusion") if (each := best(results, name, _on_gpu))]
    rows = [*(_networks(timed) if timed else []), *(_training(trained) if trained else [])]
    rows += [row for each in sampled for row in _samples(each)]
    if not rows:
        return ["Not run yet: `deeppcr-paper reproduce mlp-timing --device cuda`."]
    from_files = [
        each.source + (", smaller than the paper's runs" if each.smaller else "")
        for each in (timed, trained, *sampled)
        if each
    ]
    return [
        f"| time of a pass{' or a sample' if sampled else ''} | {' | '.join(HEADS.values())} |",
        "|---" * (1 + len(HEADS)) + "|",
        *rows,
        "",
        'In brackets: its time over that of `deeppcr` in parallel, so below 1 where that is slower; `mode="auto"`, the default, '
        "takes the fused sequential kernel, which is `deeppcr`'s too, where it is expected to be the faster. L layers of "
        f"width w, one row{' (in training 8)' if trained else ''}; whole calls, with their stopping tests. Of an MLP the shortest of "
        f"{_repeats(timed)}as the paper shows, else medians. Backward: the "
        "gradients of weights, biases and input, through autograd; `backward` among [the kernels' "
        "times](docs/performance.md#measured) is without those of the weights, and shorter."
        + (" Diffusion: L denoising steps, one sample." if sampled else ""),
        f"From {' and '.join(from_files)}.",
    ]


def _repeats(timed: Finished | None) -> str:
    counts = (
        [
            len(each["seconds"])
            for r in timed.records
            for way in ("forward", "backward")
            for each in r[way].values()
            if each.get("seconds")
        ]
        if timed
        else []
    )
    return f"{min(counts)} to {max(counts)} calls, " if counts else ""


def _on_gpu(result: Finished) -> bool:
    return result.content["device"] == "cuda"


def _fast(result: Finished) -> bool:
    """Trainings in float64 show equality, not speed: the kernels are for float32."""
    return result.content["settings"].get("dtype") == "float32" and _on_gpu(result)


def _networks(result: Finished) -> list[str]:
    mine = [record for record in result.records if record["activation"] == "relu"]
    deepest = max((record["L"] for record in mine), default=0)
    found = []
    for way in ("forward", "backward"):
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
            images = f"{entry.get('side')}×{entry.get('side')} pixels"
            size = f"latents of {DATA.get(entry['data'], entry['data'])}, w = {entry['w']}" if "w" in entry else images
            found.append(_row(f"Diffusion, {size}, L = {longest:,}", entry["seconds"]))
    return found


def _row(name: str, each: Mapping[str, float | None]) -> str:
    ours = each.get("auto")
    cells: Sequence[str] = [_cell(column, each.get(column), ours) for column in HEADS]
    return f"| {name} | {' | '.join(cells)} |"


def _cell(column: str, value: float | None, ours: float | None) -> str:
    if value is None:
        return "–"
    if column == "auto":
        return f"**{in_words(value)}**"
    return in_words(value) + (f" ({times(value / ours)})" if ours else "")
