"""Result files: one JSON file a run, whole or not there.

While a run is under way its file is ``<name>.partial.json``, written anew after the cells; it gets its final name once
every cell is in it. The same command finds the partial file, on this or another machine of the same kind, and goes on from
there; where several machines have each done a part, their partial files become one.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import deeppcr

from .timing import hardware, machine

#: Raised when the meaning of a field changes; files of another version are not read.
SCHEMA = 1
#: Files are written anew at most this often, in seconds, since one of some megabytes takes a second; what is finished in
#: between is kept in memory.
INTERVAL = 10.0
PARTIAL = ".partial.json"
#: What the state of a long cell is kept in ends so.
CHECKPOINT = ".checkpoint.partial"


class PaperError(Exception):
    """What a user can do something about; the message is one line that says what."""


def read(path: Path) -> dict[str, Any]:
    """A result file, whole or partial, checked to be one that this version understands."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise PaperError(f"{path}: there is no such file") from None
    except OSError as error:
        raise PaperError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise PaperError(f"{path}: not a whole JSON file ({error}); move it away and run again") from None
    if not isinstance(content, dict) or "schema" not in content:
        what = "not a result file of `deeppcr-paper reproduce`: it has no schema version"
        raise PaperError(f"{path}: {what}; move it away")
    if content["schema"] != SCHEMA:
        what = f"written in version {content['schema']} of the format, this deeppcr reads version {SCHEMA}"
        raise PaperError(f"{path}: {what}; move it away and run again")
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
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """All or nothing: the file is replaced in one step, once its new content has reached the disk."""
    make_folder(path.parent)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
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
        raise disk_error(folder, error, "no folder can be made there") from error


def disk_error(path: Path, error: OSError, what: str = "cannot be written") -> PaperError:
    """The message for a disk that does not take what is written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space left on the disk; nothing was overwritten. Free some space and run the same command again"
        return PaperError(f"{path}: {what}")
    return PaperError(f"{path}: {what}: {error.strerror or error}")


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
    return datetime.now(UTC).isoformat(timespec="seconds")


def current_commit() -> str:
    """The commit of this checkout, marked where files differ from it; ``DEEPPCR_COMMIT`` where there is no repository."""
    if os.environ.get("DEEPPCR_COMMIT"):
        return os.environ["DEEPPCR_COMMIT"]
    # Untracked files (results, mostly) do not change what was run.
    command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def session(device: torch.device) -> dict[str, Any]:
    """What one stretch of work ran on: hardware, versions, commit, and when it began."""
    about = machine(device)
    return {
        "hardware": {"device": about["hardware"], "cpu": hardware(torch.device("cpu"))},
        "machine": about,
        "versions": {"python": about["python"], "torch": about["torch"], "deeppcr": deeppcr.__version__},
        "commit": current_commit(),
        "start": now(),
        "end": None,
    }


def file_name(experiment: str, device_name: str, date: str, commit: str, *, quick: bool) -> str:
    """``<experiment>-<hardware>-<date>-<commit>[-quick]``, without what file systems dislike."""
    device_name = device_name.replace("(R)", "").replace("(TM)", "")
    parts = [experiment, device_name, date, commit, *(["quick"] if quick else [])]
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
    _saved: float = field(default=-math.inf, repr=False)

    @staticmethod
    def open(
        folder: Path, experiment: str, settings: dict[str, Any], device: torch.device, *, quick: bool = False
    ) -> Store:
        """Go on with the partial files of the same experiment, settings and hardware, or begin a new one.

        Times of two kinds of hardware do not belong in one file: another kind begins its own.
        """
        here = session(device)
        mine = _files_of(folder, experiment, settings, device, partial=True)
        if mine:
            first, *others = (Store(path, content) for path, content in mine)
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
            **{key: here[key] for key in ("hardware", "versions", "commit", "start", "end")},
            "settings": as_json(settings),
            "sessions": [here],
            "summary": None,
            "records": [],
        }
        return Store(_free(folder, _stem(content), PARTIAL), content)

    def take_in(self, other: Store) -> None:
        """The records of another partial file of the same run, and its checkpoints; that file is then gone."""
        first, done = len(self.content["sessions"]), self.done
        self.content["sessions"] += other.content["sessions"]
        for record in other.records:
            if record["key"] not in done:
                self.records.append({**record, "session": first + record["session"]})
        write(self.path, self.content)  # not ``save``: the last session is another's, and ended when it did
        for path in other.path.parent.glob(f"{_run_name(other.path)}.*{CHECKPOINT}"):
            here = self.path.with_name(_run_name(self.path) + path.name.removeprefix(_run_name(other.path)))
            os.replace(max(path, here, key=_step_of), here)  # the one that has come further
            path.unlink(missing_ok=True)
        for key in self.done:
            checkpoint_path(self.path, key).unlink(missing_ok=True)
        other.path.unlink()

    def warn_of_versions(self) -> None:
        """Times of two commits, or of two versions of PyTorch, need not belong together: the file says so, and so do we."""
        sessions = self.content["sessions"]
        measured = sorted({record["session"] for record in self.records} | {len(sessions) - 1})
        found = dict.fromkeys(
            f"commit {each.get('commit')} on torch {each.get('versions', {}).get('torch')}"
            for each in (sessions[number] for number in measured)
        )
        if len(found) > 1:
            warnings.warn(f"{self.path.name}: cells of several versions in one file: {'; '.join(found)}", stacklevel=4)

    @property
    def done(self) -> set[str]:
        """The keys of the cells that are finished."""
        return {record["key"] for record in self.records}

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.content["records"]

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Keep the record of a cell, and write the file unless that was done a moment ago."""
        number = len(self.content["sessions"]) - 1
        device_name = self.content["sessions"][number]["hardware"]["device"]
        self.records.append({"key": key, "hardware": device_name, "session": number, **as_json(record)})
        if time.monotonic() - self._saved >= INTERVAL:
            self.save()

    def save(self) -> None:
        self.content["sessions"][-1]["end"] = now()
        write(self.path, self.content)
        self._saved = time.monotonic()

    def finish(self, summary: Any = None) -> Path:
        """Every cell is there: give the file its final name. An existing file is never replaced."""
        self.content |= {"summary": as_json(summary), "end": now(), "complete": True}
        self.save()
        final = _free(self.path.parent, _stem(self.content), ".json")  # whatever a part was called on its way
        try:
            os.rename(self.path, final)
        except OSError as error:
            raise disk_error(final, error) from error
        self.path = final
        return final


def finished(folder: Path, experiment: str, settings: dict[str, Any], device: torch.device) -> Path | None:
    """The newest whole result of the same experiment, settings and hardware; None where there is none."""
    found = _files_of(folder, experiment, settings, device, partial=False)
    whole = [(str(content.get("end")), path) for path, content in found if content["complete"]]
    return max(whole)[1] if whole else None


def _files_of(
    folder: Path, experiment: str, settings: dict[str, Any], device: torch.device, *, partial: bool
) -> list[tuple[Path, dict[str, Any]]]:
    """The partial or the whole files of a run and their contents; the header has the hardware of all records."""
    wanted = (experiment, as_json(settings), device.type, hardware(device))
    paths = (path for path in sorted(folder.glob(f"{experiment}-*.json")) if path.name.endswith(PARTIAL) == partial)
    found = []
    for path, content in ((path, read(path)) for path in paths):
        there = (content.get("hardware") or {}).get("device")
        if (content["experiment"], content["settings"], content["device"], there) == wanted:
            found.append((path, content))
    return found


def checkpoint_path(partial: Path, name: str) -> Path:
    """Of a cell, beside the partial file, and ending as it does not: it is never taken for results."""
    slug = re.sub(r"[^a-zA-Z0-9]+", "-", name)
    return partial.with_name(f"{_run_name(partial)}.{slug}{CHECKPOINT}")


def _run_name(partial: Path) -> str:
    return partial.name.removesuffix(PARTIAL)


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state of a long cell; one that cannot be read is as good as none."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # spoilt bytes make the unpickler raise anything, an IndexError for one
        return None


def _step_of(checkpoint: Path) -> int:
    """How far it has come."""
    found = read_checkpoint(checkpoint)
    return found.get("step", -1) if isinstance(found, dict) else -1


def _stem(content: dict[str, Any]) -> str:
    about = (content["experiment"], content["hardware"]["device"], content["start"][:10], content["commit"])
    return file_name(*about, quick=content["quick"])


def _free(folder: Path, name: str, ending: str) -> Path:
    """A path that is not taken, whole or partial: a second run on the same day gets ``-2``."""
    stems = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    taken = {".json", ending}
    return next(
        folder / f"{stem}{ending}" for stem in stems if not any((folder / f"{stem}{each}").exists() for each in taken)
    )
