"""The paper's claims on diffusion. No figure of ours is typed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from ..figures.diffusion import DATA
from ..figures.style import seconds as in_words
from ..table import of_cells, times
from .claim import Claim, Ours
from .collect import Finished
from .words import BASELINES, METHODS, error_size


def _sizes(entries: Sequence[dict[str, Any]]) -> str:
    """Of the states; a line does not end inside 4 × 4."""
    if "w" in entries[0]:
        return f"w = {', '.join(str(entry['w']) for entry in entries)}"
    sides = ", ".join(f"{entry['side']}\u00a0×\u00a0{entry['side']}" for entry in entries)
    return f"{sides} pixels{', classes given' if entries[0].get('conditional') == 'yes' else ''}"


def _alike(entries: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those that differ in size alone: they share a line."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault((entry["data"], entry.get("conditional")), []).append(entry)
    return list(found.values())


def _entries(result: Finished, grey: bool | None) -> list[dict[str, Any]]:
    """The cells with the most steps; of latent models those of images in grey, or in colour."""
    mine = [entry for entry in result.summary if grey is None or (entry["data"] in ("mnist", "digits")) == grey]
    most = max((entry["L"] for entry in mine), default=0)
    return [entry for entry in mine if entry["L"] == most]


def sampling_speedup(*, grey: bool | None) -> Callable[[Finished], list[Ours]]:
    """For every size: as printed over the paper's loop, the defaults over both."""

    def ours(result: Finished) -> list[Ours]:
        found = []
        for entries in _alike(_entries(result, grey)):
            for method, loop in (("printed", "loop"), ("auto", "loop"), ("auto", "graph")):
                mine = [entry for entry in entries if entry.get(method, {}).get(f"over_{loop}")]
                if mine:
                    what = f"{DATA.get(mine[0]['data'], mine[0]['data'])}, {_sizes(mine)}, L = {mine[0]['L']:,}"
                    both = f"{_times(mine, method)} instead of {_times(mine, loop)}, medians"
                    where = f"{METHODS[method]} over the {BASELINES[loop]}; {what}: {both}"
                    found.append(Ours(", ".join(times(entry[method][f"over_{loop}"]) for entry in mine), where))
        return found

    return ours


def _times(entries: Sequence[dict[str, Any]], column: str) -> str:
    seconds = [entry["seconds"][column] for entry in entries]
    least, most = in_words(min(seconds)), in_words(max(seconds))
    return least if least == most else f"{least} to {most}"


def sampling_iterations(result: Finished) -> list[Ours]:
    found = []
    for entries in _alike(_entries(result, None)):
        if mine := [entry for entry in entries if entry.get("printed")]:
            worst = error_size(max(entry["printed"]["error"] for entry in mine))
            data = DATA.get(mine[0]["data"], mine[0]["data"])
            where = f"{METHODS['printed']}; {data}, {_sizes(mine)}, L = {mine[0]['L']:,}; error at most {worst}"
            found.append(Ours(", ".join(f"{entry['printed']['iterations']:.1f}" for entry in mine), where))
    return found


def sampling_error(result: Finished) -> list[Ours]:
    found = []
    for method in ("printed", "auto"):
        mine = [entry for entry in result.summary if entry.get(method)]
        if mine:
            worst = max(mine, key=lambda entry: entry[method]["error"])
            where = f"{METHODS[method]}; the largest, at {_sizes([worst])}, L = {worst['L']:,}"
            if missed := of_cells(len(mine), len(result.summary)):
                where += f"; {missed}"
            found.append(Ours(error_size(worst[method]["error"]), where))
    return found


def signed(value: float) -> str:
    """
    >>> signed(-0.00042), signed(0.0)
    ('−4.2·10⁻⁴', '0')
    """
    return f"{'−' if value < 0 else '+' if value > 0 else ''}{error_size(abs(value))}"


def distance_difference(result: Finished) -> list[Ours]:
    found = []
    for entry in result.summary:
        distance = entry["frechet"]
        low, high = distance["difference_interval"]
        where = (
            f"{DATA.get(entry['data'], entry['data'])}, w = {entry['w']}, L = {entry['L']:,}; the largest; 95% of a "
            f"bootstrap from {signed(low)} to {signed(high)}; the distance itself is {distance['sequential']:.3f}"
        )
        found.append((abs(distance["difference"]), Ours(signed(distance["difference"]), where)))
    # The largest of all: a line for every cell would be too many.
    return [max(found, key=lambda pair: pair[0])[1]] if found else []


def batch_speedup(result: Finished) -> list[Ours]:
    entries = _entries(result, None)
    ratios = [entry["batch"]["over_fastest_loop"] for entry in entries]
    if not ratios:
        return []
    where = (
        f"{METHODS['auto']} over the fastest loop, {entries[0]['batch']['samples']} samples at a time, "
        f"L = {entries[0]['L']:,}; mean, from {times(min(ratios))} to {times(max(ratios))} by size"
    )
    return [Ours(times(fmean(ratios)), where)]


def small_error_after(result: Finished) -> list[Ours]:
    found = []
    for space in ("latent", "pixel"):
        mine = [entry for entry in result.summary if entry["space"] == space]
        for method in ("printed", "auto"):
            counts = [entry[method]["iterations"] for entry in mine]
            known = [count for count in counts if count is not None]
            missed = (
                f"; not reached in {len(counts) - len(known)} of {len(counts)} cells"
                if len(known) < len(counts)
                else ""
            )
            if counts:
                value = f"at most {max(known)}" if known else "not reached"
                few = _fewer_samples(result, space, method)
                found.append(Ours(value, f"{METHODS[method]}, {space} space{missed if known else ''}{few}"))
    return found


def _fewer_samples(result: Finished, space: str, method: str) -> str:
    """The largest error of a cell is that of fewer samples where these took too long."""
    counts = [len(record["errors"][method]) for record in result.records if record["space"] == space]
    wanted = result.content["settings"]["samples"]
    few = sum(count < wanted for count in counts)
    return f"; fewer than {wanted} samples in {few} of {len(counts)} cells" if few else ""


def class_mean_gain(result: Finished) -> list[Ours]:
    """Iterations from the mean of the class over those from the mean of all, of the same networks."""
    found = []
    entries = {
        (entry["side"], entry["L"], entry["guess"]): entry for entry in result.summary if entry["conditional"] == "yes"
    }
    for method in ("printed", "auto"):
        ratios = [
            entries[side, length, "mean"][method]["iterations"] / entry[method]["iterations"]
            for (side, length, guess), entry in entries.items()
            if guess == "class-mean"
            and method in entries.get((side, length, "mean"), {})
            and entry.get(method, {}).get("iterations")
        ]
        if ratios:
            where = f"{METHODS[method]}; iterations from the training mean over those from the class mean, mean of {len(ratios)} cells"
            found.append(Ours(times(fmean(ratios)), where))
    return found


CLAIMS = (
    Claim(
        "One sample of latent diffusion on MNIST",
        "11.2×, 11.0×, 8.8×, 6.1×",
        "w = 16, 32, 64, 128 at L = 1024, over the eager loop; 1.3 s to 0.12 s; §4.3, fig. 6, app. E",
        "latent-diffusion",
        sampling_speedup(grey=True),
    ),
    Claim(
        "One sample of latent diffusion on images in colour",
        "8× and 9×",
        "CIFAR-10 and CelebA, w = 128 and 256; §4.3, fig. 7",
        "latent-diffusion",
        sampling_speedup(grey=False),
    ),
    Claim(
        "Newton iterations of a latent sample",
        "13.4, 14.1, 17.4, 18.5",
        "w = 16, 32, 64, 128 at L = 1024; app. E",
        "latent-diffusion",
        sampling_iterations,
    ),
    Claim("Error of a latent sample", "at most 0.0061", "L∞; app. E", "latent-diffusion", sampling_error),
    Claim(
        "Distance to the test set, in parallel minus by the loop",
        "consistently close to 0",
        "Wasserstein-2 of latents; §4.3, fig. 6",
        "latent-diffusion",
        distance_difference,
    ),
    Claim(
        "Many latent samples at a time",
        "not measured",
        "one sample at a time throughout",
        "latent-diffusion",
        batch_speedup,
    ),
    Claim(
        "One image of pixel diffusion",
        "14.3×, 16.0×, 2.5×",
        "4 × 4, 8 × 8, 16 × 16 at L = 1024, over the eager loop; app. E",
        "pixel-diffusion",
        sampling_speedup(grey=None),
    ),
    Claim(
        "Newton iterations of an image",
        "12.3, 11.1, 27.3",
        "4 × 4, 8 × 8, 16 × 16 at L = 1024; app. E",
        "pixel-diffusion",
        sampling_iterations,
    ),
    Claim("Error of an image", "at most 0.026", "L∞; app. E", "pixel-diffusion", sampling_error),
    Claim(
        "Iterations until the error of a sample is below 0.1",
        "fewer than 15",
        "but for the largest models; app. F.1",
        "diffusion-iterations",
        small_error_after,
    ),
    Claim(
        "Starting from the mean of the class",
        "a larger speed-up",
        "of conditional models; app. F.2",
        "diffusion-guess",
        class_mean_gain,
    ),
)
