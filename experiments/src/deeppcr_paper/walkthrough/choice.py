"""Which result files the walk-through is made from, and what has to be said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..report.collect import Finished, finished

Needs = Callable[[Finished], bool]
#: Images come from a folder of the user's.
_WITH_IMAGES = ("resnet-", "latent-", "pixel-", "diffusion-")
#: Settings that say how often something is timed, and leave its size alone.
_REPEATS = frozenset({"budget", "fewest", "most", "patience", "eager_steps", "runs", "loop_runs", "timed_seeds"})


@dataclass(frozen=True)
class Results:
    """Everything that a folder holds, and one of each experiment to take."""

    every: Sequence[Finished]

    @staticmethod
    def of(folder: Path) -> Results:
        return Results(finished(folder))

    def best(self, experiment: str, needs: Needs = lambda result: True) -> Finished | None:
        """One from a GPU, of those one as large as the paper's, of those one that was timed, of those the newest. Never a quick one."""
        mine = [each for each in self.every if each.name == experiment and not each.quick and needs(each)]
        return max(
            mine,
            key=lambda each: (
                each.content["device"] == "cuda",
                not smaller(each),
                timed(each),
                each.date,
                each.path.name,
            ),
            default=None,
        )

    def second(self, experiment: str, needs: Needs = lambda result: True) -> Finished | None:
        """The same of another machine than that of the best."""
        first = self.best(experiment, needs)
        return first and self.best(experiment, lambda result: needs(result) and result.hardware != first.hardware)


def source(result: Finished) -> str:
    """The file, the machine, the day and the commit."""
    sessions = result.content.get("sessions") or [result.content]
    commits = dict.fromkeys(str(session.get("commit")) for session in sessions)
    return f"`results/{result.path.name}` ({result.hardware}, {result.date[:10]}, commit {', '.join(commits)})"


def smaller(result: Finished) -> str:
    """What is other than at the paper's sizes, as it is given on the command line; empty where nothing is."""
    other = [name for name in result.changes if name not in _REPEATS]
    return ", ".join(f"{name}={value}" for name, value in result.changes.items()) if other else ""


def timed(result: Finished) -> bool:
    """Whether any of its trainings was; all else is."""
    return result.content["settings"].get("timed_seeds") != 0


def fewer(result: Finished) -> str:
    """Of a result of full size: how its timings were cut short; empty where they were not."""
    return "" if smaller(result) else ", ".join(f"{name}={value}" for name, value in result.changes.items())


def command(experiment: str) -> str:
    """What runs it at full size."""
    if experiment == "hardware":
        return "deeppcr-paper reproduce hardware FILE1 FILE2   # two results of mlp-timing"
    return f"deeppcr-paper reproduce {experiment} --device cuda" + _data(experiment)


def again(result: Finished) -> str:
    """What made this very result."""
    return result.command + _data(result.name)


def _data(experiment: str) -> str:
    return " --data-dir DIR" if experiment.startswith(_WITH_IMAGES) else ""
