"""Finished results: what is in a file, how it was made, and which of several is taken."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..catalogue import EXPERIMENTS
from ..experiment import Experiment
from ..mlp_summary import say_turns
from ..store import PARTIAL, PaperError, read

#: What the trainings call their images, in words.
IMAGES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "celeba": "CelebA", "digits": "scikit-learn's digits"}
#: Images come from a folder of the user's.
_WITH_IMAGES = ("resnet-", "latent-", "pixel-", "diffusion-")
#: Settings that say how often something is timed, and leave its size alone.
_REPEATS = frozenset({"budget", "fewest", "most", "patience", "eager_steps", "runs", "loop_runs", "timed_seeds"})
_FIRST = "deeppcr-paper reproduce mlp-timing --quick"
#: Whether a result has what is asked for.
Needs = Callable[["Finished"], bool]


@dataclass(frozen=True)
class Finished:
    """One finished result file.

    Attributes:
        path: of the file
        content: what is in it
        committed: whether it comes with the repository, and stands in for one that was not made here
    """

    path: Path
    content: dict[str, Any]
    committed: bool = False

    @property
    def name(self) -> str:
        return self.content["experiment"]

    @property
    def experiment(self) -> Experiment | None:
        """What it is the result of; None for what this version no longer has."""
        return next((each for each in EXPERIMENTS if each.name == self.name), None)

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.content["records"]

    @property
    def quick(self) -> bool:
        return bool(self.content.get("quick"))

    @property
    def hardware(self) -> str:
        """Where it was measured; all of them where a run was gone on with on another machine."""
        names = [plain(record["hardware"]) for record in self.records if record.get("hardware")]
        return " and ".join(dict.fromkeys(names)) or "unknown hardware"

    @property
    def date(self) -> str:
        return str(self.content.get("end") or self.content.get("start") or "")

    @property
    def summary(self) -> Any:
        """Made anew from the records, by this version."""
        return self.experiment.summarise(self.records) if self.experiment else None

    @property
    def changes(self) -> dict[str, str]:
        """Settings that are other than this version's for such a run, as they are given on the command line."""
        return self.experiment.changes(self.content["settings"], quick=self.quick) if self.experiment else {}

    @property
    def changed(self) -> list[str]:
        """The names of those settings, also of the results that this one compares."""
        return [*self.changes, *self.content["settings"].get("changed", [])]

    @property
    def command(self) -> str:
        """The command that measures this again."""
        settings, words = self.content["settings"], ["deeppcr-paper", "reproduce", self.name]
        words += settings.get("files", [])
        if self.quick:
            words.append("--quick")
        if not settings.get("files"):  # two files are compared, wherever
            words += ["--device", self.content["device"]]
        if settings.get("seed"):
            words += ["--seed", str(settings["seed"])]
        for name, value in self.changes.items():
            words += ["--set", f"{name}={value}"]
        return shlex.join(words)

    @property
    def smaller(self) -> str:
        """What is other than at the paper's sizes, as it is given on the command line; empty where nothing is."""
        return _given(self.changes) if set(self.changes) - _REPEATS else ""

    @property
    def fewer(self) -> str:
        """Of a result of full size: how its timings were cut short; empty where they were not."""
        return "" if self.smaller else _given(self.changes)

    @property
    def variant(self) -> str:
        """By which method networks were trained: results by both stand side by side."""
        return str(self.content["settings"].get("solver", ""))

    @property
    def short(self) -> str:
        """The file, whose name has the machine, the day and the commit; and how its timings were cut short."""
        return f"`{self.path.name}`" + (f"; `{self.fewer}`" if self.fewer else "")

    @property
    def rank(self) -> tuple[Any, ...]:
        """Of two results the greater is taken: no quick one, one from a GPU, as large as the paper's, timed, newer."""
        timed = self.content["settings"].get("timed_seeds") != 0
        return not self.quick, self.content["device"] == "cuda", not self.smaller, timed, self.date, self.path.name

    @property
    def largest(self) -> int:
        """The most steps of a loop in it."""
        return max((record["L"] for record in self.records if isinstance(record.get("L"), int)), default=0)

    @property
    def remark(self) -> str:
        """What has to be said of its sizes and its data; nothing where they are the paper's."""
        words = [
            f"quick run: small sizes, at most L = {self.largest:,}" if self.quick else "",
            f"committed result at full size, {self.date[:10]}" if self.committed else "",
            f"on {self.images}" if "digits" in self._data else "",
            f"changed settings: {', '.join(self.changed)}" if self.changed else "",
        ]
        return "; ".join(filter(None, words))

    @property
    def images(self) -> str:
        """What was learnt, in a training; empty for other experiments."""
        return " and ".join(IMAGES.get(data, data) for data in self._data)

    @property
    def _data(self) -> list[str]:
        """One data set, or a list of them; other experiments have none."""
        data = self.content["settings"].get("data", [])
        return list(map(str, data if isinstance(data, list) else [data]))

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What goes wrong while its records are read is the file's fault, and says so in one line."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"
            raise PaperError(
                f"{self.path}: damaged, or of another version: its records cannot be read ({why}); move it away"
            ) from error

    @property
    def conditions(self) -> list[str]:
        """What a figure has to be read with: hardware, versions, when, from which commit."""
        sessions = self.content.get("sessions") or [self.content]
        found = []
        for session in sessions:
            machine, versions = session.get("machine", {}), session.get("versions", {})
            hardware = plain(session.get("hardware", {}).get("device", "unknown hardware"))
            if machine.get("device") == "cpu":
                threads = machine.get("threads")
                hardware += f" ({threads} thread{'s' * (threads != 1)} of {machine.get('cpu_count')} cores)"
            elif machine.get("cuda"):
                hardware += f" (CUDA {machine['cuda']})"
            software = ", ".join(
                f"{name} {versions[name]}" for name in ("torch", "deeppcr", "python") if name in versions
            )
            start = str(session.get("start") or "")[:10]
            found.append("; ".join(filter(None, [hardware, software, start, f"commit {session.get('commit')}"])))
        return list(dict.fromkeys(found))


def plain(name: str) -> str:
    """The name of a processor without its marks of registration."""
    return name.replace("(R)", "").replace("(TM)", "")


def _given(changes: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def command(experiment: str) -> str:
    """What runs it at full size."""
    if experiment == "hardware":
        return "deeppcr-paper reproduce hardware FILE1 FILE2   # two results of mlp-timing"
    return f"deeppcr-paper reproduce {experiment} --device cuda" + folder_of_images(experiment)


def folder_of_images(experiment: str) -> str:
    return " --data-dir DIR" if experiment.startswith(_WITH_IMAGES) else ""


def best(results: Sequence[Finished], experiment: str, needs: Needs = lambda result: True) -> Finished | None:
    """The one to take of an experiment's at full size, or nearly: never a quick one."""
    mine = [each for each in results if each.name == experiment and not each.quick and needs(each)]
    return max(mine, key=lambda each: each.rank, default=None)


def second(results: Sequence[Finished], experiment: str, needs: Needs = lambda result: True) -> Finished | None:
    """The same of another machine than that of the best."""
    first = best(results, experiment, needs)
    return first and best(results, experiment, lambda result: needs(result) and result.hardware != first.hardware)


def collect(folders: Sequence[Path], fallback: Sequence[Path] = ()) -> list[Finished]:
    """Of each experiment on each machine the result to take, in the order of the catalogue; quick ones where there are no others.

    Args:
        fallback: folders whose full results are taken for experiments of which there is none in the others
    """
    found = [result for folder in folders for result in finished(folder)]
    if not found:
        named = ", ".join(map(str, folders))
        begun = sorted(path.name for folder in folders for path in folder.glob(f"*{PARTIAL}"))
        todo = f"{begun[0]} is unfinished: its command, once more, goes on with it" if begun else f"run {_FIRST} first"
        raise PaperError(f"{named}: no finished results of `deeppcr-paper reproduce` there; {todo}")
    kept = {
        (result.name, result.hardware, result.variant): result for result in sorted(found, key=lambda each: each.rank)
    }
    full = {result.name for result in found if not result.quick}
    shown = [result for result in kept.values() if not (result.quick and result.name in full)]
    others = [each for folder in fallback for each in finished(folder) if not each.quick and each.name not in full]
    stand_in = {
        (each.name, each.hardware, each.variant): replace(each, committed=True)
        for each in sorted(others, key=lambda each: each.rank)
    }
    names = [each.name for each in EXPERIMENTS]

    def place(result: Finished) -> tuple[Any, ...]:
        known = names.index(result.name) if result.name in names else len(names)
        return known, result.name, result.committed, result.content["device"] == "cpu", result.hardware

    return sorted([*shown, *stand_in.values()], key=place)


def finished(folder: Path) -> list[Finished]:
    """Every finished result of `deeppcr-paper reproduce` in a folder; other files, and unfinished ones, are passed over."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "there is no such folder"
        raise PaperError(f"{folder}: {what}; --results says where the results are, {_FIRST} makes some")
    found = []
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        raise PaperError(f"{folder}: cannot be read: {error.strerror or error}") from None
    for path in paths:
        if path.name.endswith(PARTIAL) or not _is_ours(path):
            continue
        content = read(path)
        if content["complete"]:
            _check(path, content)
            say_turns(content)
            found.append(Finished(path, content))
    return found


def _is_ours(path: Path) -> bool:
    """Other programs keep their results in the same folder.

    What is no JSON at all, or has the name of an experiment and not its content, is left for `read` to complain of.
    """
    if any(path.name.startswith(f"{each.name}-") for each in EXPERIMENTS):
        return True
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and "schema" in content


def _check(path: Path, content: dict[str, Any]) -> None:
    records = content["records"]
    whole = (
        isinstance(content["experiment"], str)
        and isinstance(content["device"], str)
        and isinstance(content["settings"], dict)
        and isinstance(records, list)
        and all(isinstance(record, dict) for record in records)
    )
    if not whole:
        raise PaperError(f"{path}: damaged: not as `deeppcr-paper reproduce` writes it; move it away")
    if not records:
        raise PaperError(f"{path}: has no records; move it away")
