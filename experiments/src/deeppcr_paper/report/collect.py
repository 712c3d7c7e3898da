"""Which results a report shows: of each experiment on each machine the newest, and quick ones where there are no others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..catalogue import EXPERIMENTS
from ..experiment import Experiment
from ..store import PARTIAL, PaperError, read

QUICK = "quick run, small sizes: shows that it works"
#: What the trainings call their images, in words.
IMAGES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "celeba": "CelebA", "digits": "scikit-learn's digits"}
#: Those that the paper does not have.
_OTHER = ("digits",)
_FIRST = "deeppcr-paper reproduce mlp-timing --quick"


@dataclass(frozen=True)
class Finished:
    """One finished result file.

    Attributes:
        path: of the file
        content: what is in it
    """

    path: Path
    content: dict[str, Any]

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
    def remark(self) -> str:
        """What has to be said of its sizes; nothing where they are the paper's."""
        other = f"on {self.images}" if any(data in _OTHER for data in self._data) else ""
        return "; ".join(filter(None, [QUICK if self.quick else "", other, self.changed_in_words]))

    @property
    def images(self) -> str:
        """What was learnt, in a training; empty for other experiments."""
        return " and ".join(IMAGES.get(data, data) for data in self._data)

    @property
    def _data(self) -> list[str]:
        """One data set, or a list of them; other experiments have none."""
        data = self.content["settings"].get("data", [])
        return list(map(str, data if isinstance(data, list) else [data]))

    @property
    def changed_in_words(self) -> str:
        return f"changed settings: {', '.join(self.changed)}" if self.changed else ""

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


def collect(folders: Sequence[Path]) -> list[Finished]:
    """What a report is made from, in the order of the catalogue.

    Files that are no results of ``deeppcr-paper reproduce``, neither by name nor by content, and unfinished ones are passed over.
    """
    found = [result for folder in folders for result in finished(folder)]
    if not found:
        named = ", ".join(map(str, folders))
        begun = sorted(path.name for folder in folders for path in folder.glob(f"*{PARTIAL}"))
        todo = f"{begun[0]} is unfinished: its command, once more, goes on with it" if begun else f"run {_FIRST} first"
        raise PaperError(f"{named}: no finished results of `deeppcr-paper reproduce` there; {todo}")
    names = [each.name for each in EXPERIMENTS]
    newest: dict[tuple[str, str], Finished] = {}
    # The last one stays: a full one, of those one whose settings nobody changed, of those the newest.
    for result in sorted(found, key=lambda each: (not each.quick, not each.changed, each.date, each.path.name)):
        newest[result.name, result.hardware] = result
    full = {result.name for result in newest.values() if not result.quick}
    kept = [result for result in newest.values() if not (result.quick and result.name in full)]

    def place(result: Finished) -> tuple[Any, ...]:
        known = names.index(result.name) if result.name in names else len(names)
        return known, result.name, result.content["device"] == "cpu", result.hardware

    return sorted(kept, key=place)


def finished(folder: Path) -> list[Finished]:
    """Every finished result of `deeppcr-paper reproduce` in a folder."""
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
