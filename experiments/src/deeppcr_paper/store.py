"""Result files: one JSON file a run, whole or not there.

While a run is under way its file is ``<name>.partial.json``, written anew after the cells; it gets its final name once
every cell is in it. The same command finds the partial file, on this or another machine of the same kind, and goes on from
there; where several machines have each done a part, their partial files become one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import torch

import deeppcr

from .timing import hardware, machine

#: Raised when the meaning of a field changes; files of another version are not read.
SCHEMA = 1
#: Files are written anew at most this often, in seconds; what is finished in between is kept in memory.
INTERVAL = 2.0
#: And so much less often than it takes: a file of some megabytes takes a second.
SHARE = 20.0
PARTIAL = ".partial.json"
#: What the state of a long cell is kept in ends so.
CHECKPOINT = ".checkpoint.partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PaperError(Exception):
    """What a user can do something about; the message is one line that says what."""


def read(path: Path) -> dict[str, Any]:
    """A result file, whole or partial, checked to be one that this version understands."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PaperError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PaperError(f"{path}: cannot be read: {error}") from None
    try:
        content = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise PaperError(f"{path}: not a whole JSON file ({error}); move it away and run again") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise PaperError(
            f"{path}: not a result file of `deeppcr-paper reproduce`: it has no schema version; move it away"
        )
    if content["schema"] != SCHEMA:
        raise PaperError(
            f"{path}: written in version {content['schema']} of the format, this deeppcr reads version {SCHEMA}; "
            "move it away and run again"
        )
    missing = [key for key in ("experiment", "settings", "device", "complete", "records") if key not in content]
    if missing:
        raise PaperError(f"{path}: the result file lacks {', '.join(missing)}")
    records = content["records"] if isinstance(content["records"], list) else []
    counts = Counter(record.get("key") for record in records if isinstance(record, dict))
    twice = [key for key, count in counts.items() if key is not None and count > 1]
    if twice:
        raise PaperError(f"{path}: damaged: it holds the cell {twice[0]} more than once; move it away")
    return content


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def write(path: Path, content: dict[str, Any]) -> None:
    """A result file, all or nothing."""
    # NaN is no JSON: as_json has given it a name.
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """All or nothing, as ``replacing`` has it."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` in one step, once its content has reached the disk; or not at all."""
    temporary = None
    try:
        make_folder(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


def check_folder(folder: Path) -> None:
    """Raise PaperError where a file stands in the way of this folder."""
    for each in (folder, *folder.parents):
        if os.path.exists(each) and not os.path.isdir(each):
            raise PaperError(f"{each}: is a file, expected a folder")


def make_folder(folder: Path) -> None:
    """The folder, with those above it; a message about it names it, and not what was to be written there."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _FULL:
            raise disk_error(folder, error) from error
        raise PaperError(f"{folder}: no folder can be made there: {error.strerror or error}") from error


def disk_error(path: Path, error: OSError) -> PaperError:
    """The message for a disk that does not take what is written."""
    if error.errno in _FULL:
        return PaperError(
            f"{path}: no space left on the disk; nothing was overwritten. Free some space and run the same command again"
        )
    return PaperError(f"{path}: cannot be written: {error.strerror or error}")


def as_json(value: Any) -> Any:
    """The value as it comes back from a file: tuples become lists, keys text, and what is not finite becomes its name."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def current_commit() -> str:
    """The commit of this checkout, marked where files differ from it; ``DEEPPCR_COMMIT`` where there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if os.environ.get("DEEPPCR_COMMIT"):
        return os.environ["DEEPPCR_COMMIT"]
    try:
        # Untracked files (results, mostly) do not change what was run.
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def session(device: torch.device) -> dict[str, Any]:
    """What one stretch of work ran on: hardware, versions, commit, and when it began."""
    about = machine(device)
    return {
        "hardware": {"device": about["hardware"], "cpu": hardware(torch.device("cpu"))},
        "machine": about,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "deeppcr": deeppcr.__version__},
        "commit": current_commit(),
        "start": now(),
        "end": None,
    }


def file_name(experiment: str, device_name: str, date: str, commit: str, *, quick: bool) -> str:
    """``<experiment>-<hardware>-<date>-<commit>[-quick]``, without what file systems dislike."""
    parts = [
        experiment,
        device_name.replace("(R)", "").replace("(TM)", ""),
        date,
        commit,
        *(["quick"] if quick else []),
    ]
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)


@dataclass
class Store:
    """The file of one run, open for more records.

    Attributes:
        path: of the partial file; ``finish`` gives it its final name
        content: what is in the file: the header's fields and ``records``, each with a ``key``
    """

    path: Path
    content: dict[str, Any]
    _saved: float = field(default=0.0, repr=False)
    _took: float = field(default=0.0, repr=False)

    @staticmethod
    def open(
        folder: Path, experiment: str, settings: dict[str, Any], device: torch.device, *, quick: bool = False
    ) -> Store:
        """Go on with the partial files of the same experiment, settings and hardware, or begin a new one.

        Times of two kinds of hardware do not belong in one file: another kind begins its own.
        """
        settings, here = as_json(settings), session(device)
        name = here["hardware"]["device"]
        mine = []
        for path in sorted(folder.glob(f"{experiment}-*{PARTIAL}")):
            content = read(path)
            if _is_of(content, experiment, settings, device, name):
                mine.append(Store(path, content))
        if mine:
            first, *others = mine
            for other in others:
                first.take_in(other)
            first.content["sessions"].append(here)
            first.warn_of_versions()
            return first
        content = {
            "schema": SCHEMA,
            "experiment": experiment,
            "quick": quick,
            "complete": False,
            "device": device.type,
            "hardware": here["hardware"],
            "versions": here["versions"],
            "commit": here["commit"],
            "start": here["start"],
            "end": None,
            "settings": settings,
            "sessions": [here],
            "summary": None,
            "records": [],
        }
        return Store(_free(folder, _stem(content), PARTIAL), content)

    def take_in(self, other: Store) -> None:
        """The records of another partial file of the same run, and its checkpoints; that file is then gone.

        Of two checkpoints of a cell the one that has come further is kept; of a cell that either has finished, none.
        """
        first, done = len(self.content["sessions"]), self.done
        self.content["sessions"] += other.content["sessions"]
        for record in other.records:
            if record["key"] not in done:
                self.content["records"].append({**record, "session": first + record["session"]})
        write(self.path, self.content)  # not ``save``: the last session is another's, and ended when it did
        mine, theirs = (each.path.name.removesuffix(PARTIAL) for each in (self, other))
        for path in other.path.parent.glob(f"{theirs}.*{CHECKPOINT}"):
            here = path.with_name(mine + path.name.removeprefix(theirs))
            if here.exists() and _step_of(here) >= _step_of(path):
                path.unlink()
            else:
                os.replace(path, here)
        for key in self.done:
            checkpoint_path(self.path, key).unlink(missing_ok=True)
        other.path.unlink()

    def warn_of_versions(self) -> None:
        """Times of two commits, or of two versions of PyTorch, need not belong together: the file says so, and so do we."""
        sessions = self.content["sessions"]
        busy = sorted(
            {record["session"] for record in self.records} | {len(sessions) - 1}
        )  # in which cells were measured
        found = dict.fromkeys(
            f"commit {each.get('commit')} on torch {each.get('versions', {}).get('torch')}"
            for each in (sessions[number] for number in busy)
        )
        if len(found) > 1:
            warnings.warn(f"{self.path.name}: cells of several versions in one file: {'; '.join(found)}", stacklevel=4)

    @property
    def done(self) -> set[str]:
        """The keys of the cells that are finished."""
        return {record["key"] for record in self.content["records"]}

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.content["records"]

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Keep the record of a cell, and write the file unless that was done a moment ago."""
        number = len(self.content["sessions"]) - 1
        device_name = self.content["sessions"][number]["hardware"]["device"]
        self.content["records"].append({"key": key, "hardware": device_name, "session": number, **as_json(record)})
        if time.monotonic() - self._saved >= max(INTERVAL, SHARE * self._took):
            self.save()

    def keep(self, keys: Sequence[str]) -> None:
        """Of the records those of these cells."""
        self.content["records"] = [record for record in self.records if record["key"] in keys]

    def save(self) -> None:
        self.content["sessions"][-1]["end"] = now()
        begun = time.monotonic()
        write(self.path, self.content)
        self._saved = time.monotonic()
        self._took = self._saved - begun

    def finish(self, summary: Any = None) -> Path:
        """Every cell is there: give the file its final name. An existing file is never replaced."""
        self.content["summary"] = as_json(summary)
        self.content["end"] = now()
        self.content["complete"] = True
        self.save()
        final = _free(self.path.parent, _stem(self.content), ".json")  # whatever a part was called on its way
        try:
            os.rename(self.path, final)
        except OSError as error:
            raise disk_error(final, error) from error
        self.path = final
        return final


def finished(
    folder: Path, experiment: str, settings: dict[str, Any], device: torch.device
) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole result of the same experiment, settings and hardware, and its content; None where there is none."""
    settings, name = as_json(settings), hardware(device)
    found = []
    for path in sorted(folder.glob(f"{experiment}-*.json")):
        if path.name.endswith(PARTIAL):
            continue
        content = read(path)
        if content["complete"] and _is_of(content, experiment, settings, device, name):
            found.append((path, content))
    return max(found, key=lambda pair: str(pair[1].get("end")), default=None)


def checkpoint_path(partial: Path, name: str) -> Path:
    """Of a cell, beside the partial file, and ending as it does not: it is never taken for results."""
    slug = re.sub(r"[^a-zA-Z0-9]+", "-", name)
    return partial.with_name(f"{partial.name.removesuffix(PARTIAL)}.{slug}{CHECKPOINT}")


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state of a long cell; one that cannot be read is as good as none."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # spoilt bytes make the unpickler raise anything, an IndexError for one
        return None


def _step_of(checkpoint: Path) -> int:
    """How far it has come."""
    found = read_checkpoint(checkpoint)
    return found.get("step", -1) if isinstance(found, dict) else -1


def _is_of(content: dict[str, Any], experiment: str, settings: Any, device: torch.device, name: str) -> bool:
    """Whether a file is of this run: the header has the hardware of all its records."""
    here = (experiment, settings, device.type, name)
    there = content.get("hardware") or {}
    return (content["experiment"], content["settings"], content["device"], there.get("device")) == here


def _stem(content: dict[str, Any]) -> str:
    about = (content["experiment"], content["hardware"]["device"], content["start"][:10], content["commit"])
    return file_name(*about, quick=content["quick"])


def _free(folder: Path, name: str, ending: str) -> Path:
    """A path that is not taken, whole or partial: a second run on the same day gets ``-2``."""
    number = 1
    while True:
        stem = name if number == 1 else f"{name}-{number}"
        others = [PARTIAL, ".json"] if ending == PARTIAL else [".json"]
        if not any((folder / f"{stem}{other}").exists() for other in others):
            return folder / f"{stem}{ending}"
        number += 1
