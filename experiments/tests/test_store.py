"""Result files: whole or not there, never overwritten, and gone on with."""

import errno
import json
import math
import os
import re
import warnings
from dataclasses import dataclass

import pytest
import torch

from deeppcr_paper import store as store_module
from deeppcr_paper.experiment import Context, Experiment
from deeppcr_paper.store import (
    PARTIAL,
    SCHEMA,
    PaperError,
    Store,
    as_json,
    checkpoint_path,
    file_name,
    read,
    read_checkpoint,
    write,
)

CPU = torch.device("cpu")


def opened(folder, settings=None, **options) -> Store:
    return Store.open(folder, "mlp-timing", settings or {"depths": (2, 4)}, CPU, **options)


@pytest.fixture
def always_saved(monkeypatch):
    monkeypatch.setattr(store_module, "INTERVAL", 0.0)


def test_a_file_is_not_written_again_within_a_moment(tmp_path, monkeypatch):
    clock, write_file, written = [100.0], store_module.write, []

    def noted(path, content):
        written.append(len(content["records"]))
        write_file(path, content)

    monkeypatch.setattr(store_module, "write", noted)
    monkeypatch.setattr(store_module.time, "monotonic", lambda: clock[0])
    store = opened(tmp_path)
    for number in range(25):
        clock[0] += 1.0
        store.add(str(number), {})
    assert written == [1, 11, 21]


def test_a_run_is_partial_until_it_is_finished(tmp_path, always_saved):
    store = opened(tmp_path, quick=True)
    store.add("a", {"seconds": [1.0, 2.0]})
    assert [path.name for path in tmp_path.iterdir()] == [store.path.name]
    assert store.path.name.endswith(f"-quick{PARTIAL}")
    assert read(store.path)["complete"] is False
    final = store.finish({"best": 2})
    assert [path.name for path in tmp_path.iterdir()] == [final.name]
    content = read(final)
    assert final.name.startswith("mlp-timing-")
    assert content["complete"] is True
    assert content["schema"] == SCHEMA
    assert content["settings"] == {"depths": [2, 4]}
    assert content["summary"] == {"best": 2}
    assert {"device", "cpu"} <= content["hardware"].keys()
    assert {"python", "torch", "deeppcr"} <= content["versions"].keys()
    assert content["start"] <= content["end"]
    assert content["records"][0]["seconds"] == [1.0, 2.0]
    assert content["records"][0]["hardware"] == content["hardware"]["device"]


def test_the_same_command_goes_on_and_another_does_not(tmp_path, always_saved):
    opened(tmp_path).add("a", {})
    assert opened(tmp_path).done == {"a"}
    assert len(opened(tmp_path).content["sessions"]) == 2
    assert opened(tmp_path, {"depths": (2, 8)}).done == set()
    assert Store.open(tmp_path, "mlp-memory", {"depths": (2, 4)}, CPU).done == set()


def on_another(patched, device_name, cpu="Some CPU"):
    """As if it ran elsewhere."""
    patched.setattr(store_module, "hardware", lambda device: device_name)
    here = {**store_module.machine(CPU), "hardware": device_name, "cpu": cpu}
    patched.setattr(store_module, "machine", lambda device: here)


def test_another_machine_of_the_same_kind_goes_on(tmp_path, always_saved, monkeypatch):
    on_another(monkeypatch, "Some GPU", "one")
    opened(tmp_path / "one").add("a", {})
    (tmp_path / "one").rename(tmp_path / "carried")
    on_another(monkeypatch, "Some GPU", "other")
    store = opened(tmp_path / "carried")
    store.add("b", {})
    assert [record["session"] for record in store.records] == [0, 1]
    assert [each["machine"]["cpu"] for each in store.content["sessions"]] == ["one", "other"]


def test_another_kind_of_machine_begins_its_own_file(tmp_path, always_saved, monkeypatch):
    opened(tmp_path).add("a", {})
    on_another(monkeypatch, "Another CPU")
    store = opened(tmp_path)
    assert store.done == set()
    store.add("b", {})
    assert {record["hardware"] for record in store.records} == {"Another CPU"} == {store.content["hardware"]["device"]}
    assert len(list(tmp_path.iterdir())) == 2
    assert store_module.finished(tmp_path, "mlp-timing", {"depths": (2, 4)}, CPU) is None
    final = store.finish()
    assert store_module.finished(tmp_path, "mlp-timing", {"depths": (2, 4)}, CPU) == final
    assert store_module.finished(tmp_path, "mlp-timing", {"depths": (2, 8)}, CPU) is None
    monkeypatch.undo()
    assert store_module.finished(tmp_path, "mlp-timing", {"depths": (2, 4)}, CPU) is None


def test_parts_of_several_machines_become_one(tmp_path, always_saved):
    for number, keys in enumerate(("ab", "bc")):
        part = opened(tmp_path / str(number))
        for key in keys:
            part.add(key, {"from": number})
        checkpoint = f"{part.path.name.removesuffix(PARTIAL)}.{number}{store_module.CHECKPOINT}"
        part.path.with_name(checkpoint).write_text("")
    together = tmp_path / "together"
    together.mkdir()
    for number in range(2):  # two of one day and commit have one name
        for path in (tmp_path / str(number)).iterdir():
            path.rename(together / path.name.replace("mlp-timing-", f"mlp-timing-{number}-"))
    store = opened(together)
    assert [(each["key"], each["from"], each["session"]) for each in store.records] == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("c", 1, 1),
    ]
    assert len(store.content["sessions"]) == 3
    stem = store.path.name.removesuffix(PARTIAL)
    expected = [f"{stem}{PARTIAL}", *(f"{stem}.{number}{store_module.CHECKPOINT}" for number in range(2))]
    assert sorted(path.name for path in together.iterdir()) == sorted(expected)
    assert store.finish().name.removesuffix(".json") == part.path.name.removesuffix(PARTIAL)  # not mlp-timing-0-...


def parts(folder, *contents):
    """Partial files of one run, one for each dictionary: ``keys`` that are finished, ``steps`` of checkpoints by key."""
    folder.mkdir()
    for number, content in enumerate(contents):
        part = opened(folder / str(number))
        for key in content.get("keys", ""):
            part.add(key, {})
        part.save()
        path = part.path.replace(folder / f"mlp-timing-{number}{PARTIAL}")
        (folder / str(number)).rmdir()
        for key, step in content.get("steps", {}).items():
            torch.save({"step": step}, checkpoint_path(path, key))
        written = read(path)
        written["sessions"][0] |= content.get("session", {})
        write(path, written)


def test_of_two_checkpoints_the_one_that_has_come_further_is_kept(tmp_path, always_saved):
    parts(tmp_path / "a", {"steps": {"x": 5000, "y": 100}}, {"steps": {"x": 100, "y": 5000, "z": 7}})
    checkpoint_path(tmp_path / "a" / f"mlp-timing-0{PARTIAL}", "w").write_bytes(b"spoilt")
    torch.save({"step": 1}, checkpoint_path(tmp_path / "a" / f"mlp-timing-1{PARTIAL}", "w"))
    store = opened(tmp_path / "a")
    found = {key: read_checkpoint(checkpoint_path(store.path, key)) for key in "wxyz"}
    assert found == {"w": {"step": 1}, "x": {"step": 5000}, "y": {"step": 5000}, "z": {"step": 7}}
    assert len(list((tmp_path / "a").iterdir())) == 5


def test_checkpoints_of_finished_cells_are_gone(tmp_path, always_saved):
    parts(tmp_path / "a", {"keys": "x", "steps": {"y": 1}}, {"keys": "y", "steps": {"x": 1}})
    store = opened(tmp_path / "a")
    assert store.done == {"x", "y"}
    assert list((tmp_path / "a").iterdir()) == [store.path]


def test_a_session_ends_when_it_did(tmp_path, always_saved):
    ends = [f"2001-01-0{day}T00:00:00+00:00" for day in (1, 2)]
    parts(tmp_path / "a", *({"session": {"end": end}} for end in ends))
    store = opened(tmp_path / "a")
    assert [each["end"] for each in read(store.path)["sessions"]] == ends
    store.save()
    assert [each["end"] for each in read(store.path)["sessions"]][:2] == ends


def test_several_versions_in_one_file_are_named(tmp_path, always_saved):
    versions = {"python": "3.12.0", "torch": "0.1", "deeppcr": "0.1.0"}
    other = {"session": {"commit": "abc1234", "versions": versions}}
    parts(tmp_path / "a", {"keys": "x"}, {"keys": "y", **other})
    with pytest.warns(
        UserWarning, match=rf"torch {re.escape(torch.__version__)}.*commit abc1234 on torch 0.1"
    ) as caught:
        opened(tmp_path / "a")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts(tmp_path / "b", {"keys": "x"}, {"keys": "y"}, other)  # the last has measured nothing
        opened(tmp_path / "b")


@dataclass(frozen=True)
class Seeded:
    seed: int = 0


def made_of(*values, summarise=len):
    """An experiment of such cells, which measures nothing."""
    return Experiment(
        name="x-y",
        paper="",
        what="",
        full=Seeded(),
        quick=Seeded(),
        cells=lambda settings, context: [{"a": value} for value in values],
        measure=lambda cell, settings, context: {},
        summarise=summarise,
    )


def test_records_that_cannot_be_summed_up_are_named_in_one_line(tmp_path):
    experiment = made_of(1, 2, summarise=lambda records: sum(record["a"] for record in records))
    path, _ = experiment.run(Context(CPU), tmp_path, only=["a=1"])
    path.write_text(path.read_text().replace('"a": 1', '"a": "one"'))
    with pytest.raises(PaperError, match=r"partial.json: damaged: its records cannot be summed up \(TypeError"):
        experiment.run(Context(CPU), tmp_path)
    assert {record["key"] for record in read(path)["records"]} == {"a=1", "a=2"}, "what was measured is kept"


def test_cells_that_are_no_longer_measured_are_left_out(tmp_path):
    made_of(1, 2, 3).run(Context(CPU), tmp_path, only=["a=1,3"])
    with pytest.warns(UserWarning, match="does not measure are left out: a=1$"):
        path, summary = made_of(3, 2).run(Context(CPU), tmp_path)
    assert summary == 2
    assert [record["key"] for record in read(path)["records"]] == ["a=3", "a=2"]


def test_a_second_run_overwrites_nothing(tmp_path, monkeypatch):
    """Of the same day and commit, which are in its name."""
    monkeypatch.setattr(store_module, "now", lambda: "2026-01-02T00:00:00+00:00")
    monkeypatch.setattr(store_module, "current_commit", lambda: "abc")
    first = opened(tmp_path).finish()
    before = first.read_bytes()
    second = opened(tmp_path).finish()
    assert second != first
    assert second.name == f"{first.stem}-2.json"
    assert first.read_bytes() == before


def test_killed_between_the_last_write_and_the_new_name(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.add("a", {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    again = opened(tmp_path)
    assert again.done == {"a"}
    assert again.finish().exists()
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "records": [', "not a whole JSON file"),
        ("", "not a whole JSON file"),
        ("[]", "no schema"),
        ('{"experiment": "mlp-timing"}', "no schema"),
        ('{"schema": 0, "records": []}', f"version 0 of the format, this deeppcr reads version {SCHEMA}"),
        (f'{{"schema": {SCHEMA}}}', "lacks experiment"),
        (
            f'{{"schema": {SCHEMA}, "experiment": "x", "settings": {{}}, "device": "cpu", "complete": true, '
            '"records": [{"key": "a"}, {"key": "a"}]}',
            "holds the cell a more than once",
        ),
    ],
)
def test_files_that_are_not_results(tmp_path, text, message):
    path = tmp_path / f"mlp-timing-x{PARTIAL}"
    path.write_text(text)
    for attempt in (lambda: read(path), lambda: opened(tmp_path)):
        with pytest.raises(PaperError, match=message) as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_text() == text


def test_no_such_file(tmp_path):
    with pytest.raises(PaperError, match="no such file"):
        read(tmp_path / "none.json")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PaperError, match="no space left on the disk; nothing was overwritten"):
        write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PaperError, match="file: is a file, expected a folder"):
        write(tmp_path / "file" / "a.json", {})


def test_interrupted_while_writing(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, {"a": 1})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_what_is_not_finite_is_still_json(tmp_path):
    write(tmp_path / "a.json", as_json({"loss": [math.nan, math.inf, 1.0]}))
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": ["nan", "inf", 1.0]}


def test_names():
    name = file_name("mlp-timing", "Intel(R) Xeon(R) CPU @ 2.20GHz", "2026-01-02", "abc123-dirty", quick=True)
    assert name == "mlp-timing-intel-xeon-cpu-2-20ghz-2026-01-02-abc123-dirty-quick"
