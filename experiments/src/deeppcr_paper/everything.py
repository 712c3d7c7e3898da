"""``deeppcr-paper reproduce all``: one experiment after the other, as far as the time allows; the same command goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from .experiment import Context, Experiment, OutOfTime
from .side_by_side import AllTimed, measure_side_by_side
from .store import PARTIAL, PaperError, make_folder

#: What an interruption leaves should say the most: first the paper's main figures, last what extends it. Experiments that
#: train the same networks follow each other. ``hardware`` measures nothing itself.
ORDER = (
    *(
        "mlp-timing",
        "resnet-training",
        "latent-diffusion",
        "diffusion-iterations",
        "pixel-diffusion",
        "diffusion-guess",
    ),
    *("mlp-newton", "mlp-memory", "resnet-iterations", "resnet-guess", "mlp-gain"),
)


def run_all(
    experiments: Sequence[Experiment],
    context: Callable[[], Context],
    out: Path,
    *,
    quick: bool,
    seed: int,
    jobs: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Run them all; those that are finished in ``out`` are not run again, and one that fails does not stop the others.

    Args:
        context: makes where each takes place; all with the same deadline
        jobs: only what is not timed, so many cells at a time

    Yields:
        for each its name and how it ended: "finished", "timed", "out of time" or "failed", with more words after a colon
    """
    measure_all = partial(measure_side_by_side, jobs=jobs) if jobs else None
    make_folder(out)  # where there can be none, no experiment need find out for itself
    for experiment in sorted(
        (each for each in experiments if each.name in ORDER), key=lambda each: ORDER.index(each.name)
    ):
        here = context()
        try:
            if there := experiment.finished(here, out, quick=quick, seed=seed):
                yield experiment.name, f"finished: {there}, from before"
                continue
            here.check_time()
            path, _ = experiment.run(here, out, quick=quick, seed=seed, measure_all=measure_all)
            part = (
                f"finished what is not timed, {here.watcher.finished} cells"
                if path.name.endswith(PARTIAL)
                else "finished"
            )
            yield experiment.name, f"{part}: {path}"
        except OutOfTime:
            watcher = here.watcher
            yield (
                experiment.name,
                "out of time" + (f": {watcher.finished} of {watcher.cells} cells" if watcher.cells else ""),
            )
        except AllTimed:
            yield experiment.name, "timed: left to the same command without --jobs"
        except PaperError as error:
            yield experiment.name, f"failed: {error}"
        except Exception as error:  # a bug or a broken device: the others may still run
            traceback.print_exc()
            yield experiment.name, f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
