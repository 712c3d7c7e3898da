"""Result files: whole or not there, never overwritten, and gone on with."""

import errno
import json
import math
import os

import pytest
import torch

from deeppcr.paper import store as store_module
from deeppcr.paper.store import PARTIAL, SCHEMA, PaperError, Store, as_json, file_name, read, write

CPU = torch.device("cpu")


def opened(folder, settings=None, **options) -> Store:
    return Store.open(folder, "mlp-timing", settings or {"depths": (2, 4)}, CPU, **options)


@pytest.fixture
def always_saved(monkeypatch):
    monkeypatch.setattr(store_module, "INTERVAL", 0.0)
    monkeypatch.setattr(store_module, "SHARE", 0.0)


def test_a_file_that_takes_long_to_write_is_written_less_often(tmp_path, monkeypatch):
    clock, write_file, written = [100.0], store_module.write, []

    def slowly(path, content):
        clock[0] += 1.0
        written.append(len(content["records"]))
        write_file(path, content)

    monkeypatch.setattr(store_module, "write", slowly)
    monkeypatch.setattr(store_module.time, "monotonic", lambda: clock[0])
    store = opened(tmp_path)
    for number in range(50):
        clock[0] += 1.0
        store.add(str(number), {})
    assert written == [1, 21, 41]


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
    patched.setattr(store_module, "machine", lambda device: {"hardware": device_name, "cpu": cpu})


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
    assert store_module.finished(tmp_path, "mlp-timing", {"depths": (2, 4)}, CPU)[0] == final
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


def test_a_second_run_overwrites_nothing(tmp_path):
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
    with pytest.raises(PaperError, match="cannot be written"):
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
