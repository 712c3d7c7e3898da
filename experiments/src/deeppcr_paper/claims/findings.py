"""What the runs found, whatever it is: one paragraph each, computed from the results, or that it was not run yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..figures.ablations import GUESSES
from ..figures.mlp_width import limit_in_words
from ..figures.style import plain
from ..mlp_memory import known_ratios
from ..mlp_summary import seconds, threshold
from ..table import of_cells, times
from . import diffusion, trainings
from .check import NO, YES
from .networks import FLAT, BreakEven, mean_iterations_by_depth, of_activation
from .results import IMAGES, Finished, best
from .words import HOW, activation_name, listed


@dataclass(frozen=True)
class Finding:
    """One of the questions that the runs were made to answer.

    Attributes:
        question: its heading
        experiment: what answers it
        answer: a result to a paragraph, or to one for each line of a list; None where it does not tell
    """

    question: str
    experiment: str
    answer: Callable[[Finished], str | list[str] | None]


@dataclass(frozen=True)
class Found:
    """A question with its answer: by a result, or by none where it was not run yet."""

    finding: Finding
    result: Finished | None = None
    answer: str | list[str] = ""


def answered(finding: Finding, results: Sequence[Finished]) -> Found:
    result = best(results, finding.experiment)
    if result is None:
        return Found(finding)
    with result.blamed():
        answer = finding.answer(result)
    return Found(finding) if answer is None else Found(finding, result, answer)


def accuracy(result: Finished) -> str | None:
    if trainings.cut_short(result):
        return None
    entry = trainings.deepest(result)
    ends = {mode: trainings.end_accuracies(entry, mode) for mode in ("sequential", "parallel")}
    if not all(ends.values()):
        return f"At depth {entry['L']:,} a training diverged."
    one, other = (fmean(each) for each in ends.values())
    answer = "Yes" if max(abs(one - 94), abs(other - 94)) <= 1 else "More" if min(one, other) > 94 else "No"
    return (
        f"{answer}: at depth {entry['L']:,} the mean of {len(ends['parallel'])} seeds is {one:.1f}% layer by layer and "
        f"{other:.1f}% in parallel."
    )


def guesses(result: Finished) -> str | None:
    depth = max(entry["L"] for entry in result.summary)
    said = []
    for guess in dict.fromkeys(entry["guess"] for entry in result.summary):
        runs = trainings.ends(result, depth, guess)
        suffice = trainings.enough(runs)
        tried = max((count for count in runs if count), default=0)
        said.append(f"{suffice[0] if suffice else f'more than {tried}'} from {GUESSES.get(guess, guess)}")
    answer = "Yes" if all(check.holds == YES for check in trainings.guesses(result)) else "Not quite"
    return f"{answer}: at depth {depth:,}, to train as well as with the paper's test, it takes {listed(said)}."


def iterations(result: Finished) -> str:
    said = []
    for name in dict.fromkeys(record["activation"] for record in result.records):
        every = of_activation(result, name)
        known = [record for record in every if record.get("iterations")]
        counts = [count for record in known for count in record["iterations"]]
        if not counts:
            said.append(f"{activation_name(name)} not measured")
            continue
        left = of_cells(len(known), len(every))
        means = mean_iterations_by_depth(every)
        ends = (
            f"{means[min(means)]:.1f} on average at L = {min(means):,}, {means[max(means)]:.1f} at L = {max(means):,}"
        )
        good = max(counts) <= 6 and max(means.values()) - min(means.values()) <= FLAT
        text = f"{activation_name(name)} {'yes' if good else 'no'}, at most {max(counts)}"
        said.append(f"{text} ({ends}{left and f'; {left}'})")
    return f"Under the paper's test: {'; '.join(said)}."


def gains(result: Finished) -> str:
    """``mlp-gain``: from where on the number of iterations depends on the depth."""
    said = []
    for entry in result.summary:
        text = f"{activation_name(entry['activation'])} at most {entry['most_iterations_at_default']} as PyTorch makes them"
        if worst := entry["worst"]:
            depths = {int(depth): mean for depth, mean in worst["mean_iterations_by_depth"].items()}
            low, high = min(depths), max(depths)
            text += f", and {depths[low]:.0f} at L = {low:,} but {depths[high]:.0f} at L = {high:,} when scaled by "
            text += f"{worst['gain']:g}"
        said.append(text)
    return f"Under the paper's test {'; '.join(said)}. What decides is how far a network carries errors: most is taken where it is about to amplify them, or does."


def break_even_depths(result: Finished) -> list[str]:
    said = []
    for activation in dict.fromkeys(record["activation"] for record in result.records):
        mine = of_activation(result, activation)
        for way in ("forward", "backward"):
            each = [
                f"{words} {BreakEven.of(mine, way, method, over)}"
                for method, over, words in (
                    ("printed", "loop", "as printed over the eager loop"),
                    ("auto", "loop", "with the defaults over the eager loop"),
                    ("auto", "fused", "over the fused loop"),
                )
            ]
            said.append(f"{activation_name(activation)}, {way}: {'; '.join(each)}.")
    return said


def size_limit(result: Finished) -> str:
    mine = of_activation(result, "relu")
    limits = [threshold(mine, "forward", name) for name in ("printed", "auto")]
    printed, auto = (limit["w2L"] for limit in limits)
    if not printed:
        return "Nowhere on this grid does the method as printed take twice as long as at the least width."
    moved = (
        f"w²L ≈ {plain(auto)} with the defaults, {times(auto / printed)} as far" if auto else "not with the defaults"
    )
    if limits[1]["widths"]:
        moved = f"with the defaults there is no such size, and the width varies less: {limit_in_words(limits[1])}"
    beyond = [
        one / other
        for record in mine
        if record["w"] ** 2 * record["L"] >= printed
        and (one := seconds(record, "forward", "printed"))
        and (other := seconds(record, "forward", "auto"))
    ]
    faster = (
        f" Beyond the first size the defaults are {times(min(beyond))} to {times(max(beyond))} as fast as printed (median "
        f"{times(median(beyond))})."
        if beyond
        else ""
    )
    return (
        f"A forward pass takes twice as long as at the least width from w²L ≈ {plain(printed)} on as printed (median "
        f"over depths); {moved}.{faster}"
    )


def memory(result: Finished) -> str | None:
    said = []
    for name in ("printed", "chunk auto"):
        entries = result.summary.get(name, [])
        if ratios := known_ratios(entries):
            left = of_cells(len(ratios), len(entries))
            how = "as printed" if name == "printed" else f"with {name}"
            said.append(f"{median(ratios):.2f} {how}{left and f' ({left})'}")
    if not said:
        return None
    return f"Memory of the loop over that of the parallel pass, the network included, median: {', '.join(said)}."


def loop_wins(result: Finished) -> str:
    """Cells in which some loop that does not go through Python is faster than the defaults."""
    said = []
    for way in ("forward", "backward"):
        lost, timed = [], []
        for record in result.records:
            loops = [t for name in ("graph", "fused") if (t := seconds(record, way, name))]
            mine = seconds(record, way, "auto")
            if mine and loops:
                timed.append(record)
                if min(loops) < mine:
                    lost.append(record)
        if not timed:
            continue
        text = f"{way}: in {len(lost)} of {len(timed)} cells"
        if lost:
            depths = {width: max(r["L"] for r in lost if r["w"] == width) for width in sorted({r["w"] for r in lost})}
            won = {r["w"] for r in timed if r not in lost}
            low, high = min(depths.values()), max(depths.values())
            text += f", up to L = {low:,}" + (f" to {high:,} by width" if high > low else "")
            wide = [width for width in depths if width not in won]
            text += f"; at w = {listed([str(width) for width in wide])} at every depth that was timed" if wide else ""
        said.append(text)
    return f"The fused kernel or the CUDA graph is faster than the parallel defaults, {'; '.join(said)}."


def distances(result: Finished) -> str:
    found = []
    for data in dict.fromkeys(entry["data"] for entry in result.summary):
        check = diffusion.distance([entry for entry in result.summary if entry["data"] == data])
        found.append(f"{IMAGES.get(data, data)}: {check.holds}, they differ {check.ours}")
    return f"Wasserstein-2 distances to the latents of the test set, sequential and parallel. {'; '.join(found)}."


def classes(result: Finished) -> str:
    found = {check.what.removeprefix("conditional models "): check for check in diffusion.classes(result)}
    said = []
    for words in HOW.values():
        gain, few = found.get(f"gain more, {words}"), found.get(f"take no more iterations, {words}")
        if gain and few:
            answer = {YES: "yes, ", NO: "not always, "}.get(gain.holds, "")
            said.append(f"{words} {answer}{gain.ours}; they take no more iterations {few.ours}")
    return ". ".join(each[0].upper() + each[1:] for each in said) + "." if said else "Not timed."


FINDINGS = (
    Finding("Does a ResNet of 1024 layers reach 94% ± 1 in both modes?", "resnet-training", accuracy),
    Finding("Do 3 Newton iterations suffice with the warm start, and not from elsewhere?", "resnet-guess", guesses),
    Finding("Do MLPs take at most 6 iterations, whatever L?", "mlp-newton", iterations),
    Finding("And with larger weights?", "mlp-gain", gains),
    Finding("From which depth on does it pay?", "mlp-timing", break_even_depths),
    Finding(
        "Where does the paper's method leave the logarithmic regime, and how far do chunks move that?",
        "mlp-timing",
        size_limit,
    ),
    Finding("How much memory?", "mlp-memory", memory),
    Finding("Where does the sequential kernel still win?", "mlp-timing", loop_wins),
    Finding("Are the samples as good (Fréchet distances)?", "latent-diffusion", distances),
    Finding("Do conditional models gain more?", "pixel-diffusion", classes),
)
