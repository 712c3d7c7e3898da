"""The command: one clear line for whatever is wrong."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from command_support import fails_clearly, files, patch_measure
from deeppcr_paper import cli, lock, store


def test_unknown_names(run, tmp_path):
    fails_clearly(run("mlp-timings", "--quick"), "'mlp-timings'", "mlp-timing, mlp-printed, mlp-memory")
    fails_clearly(run(), "which experiment?", "mlp-timing")
    fails_clearly(run("mlp-timing", "a.json"), "takes no files")
    assert files(tmp_path / "results") == []


@pytest.mark.parametrize("name", ["cuda:99", "mps", "tpu!"])
def test_a_device_that_is_not_there(run, tmp_path, name):
    fails_clearly(run("mlp-timing", "--quick", on=name), f"--device {name}")
    assert files(tmp_path / "results") == []


def test_no_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails_clearly(run("mlp-timing", "--quick", on="cuda"), "--device cuda", "no CUDA device")


def test_the_largest_seed(run, tmp_path):
    assert run("mlp-newton", "--quick", "--seed", 2**63 - 1).exit_code == 0
    assert run("resnet-iterations", "--quick", "--seed", 2**63 - 1).exit_code == 0
    result = run("mlp-newton", "--quick", "--seed", 2**63)
    assert result.exit_code == cli.BAD
    assert "Traceback" not in result.output
    assert "--seed" in result.output


@pytest.mark.parametrize("name", ["mlp-newton", "all"])
def test_out_is_no_folder(run, tmp_path, name):
    """The folder is named, and not what was to be written there."""
    taken = tmp_path / "taken"
    taken.write_text("")
    fails_clearly(run(name, "--quick", out=taken), f"deeppcr-paper: {taken}: is a file, expected a folder")
    fails_clearly(run(name, "--quick", out=taken / "below"), f"deeppcr-paper: {taken}: is a file, expected a folder")
    fails_clearly(run(name, "--quick", "--models", taken), f"deeppcr-paper: {taken}: is a file, expected a folder")
    assert files(tmp_path / "results") == []


@pytest.mark.parametrize("name", ["mlp-newton", "all"])
def test_out_cannot_be_made(run, tmp_path, name, monkeypatch, light):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = tmp_path / "results"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        found = run(name, "--quick")
    fails_clearly(found, f"deeppcr-paper: {folder}: no folder can be made there: Permission denied")


def test_out_takes_no_files(run, tmp_path, monkeypatch, light):

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)
    fails_clearly(
        run("mlp-newton", "--quick"), f"deeppcr-paper: {tmp_path / 'results'}: cannot be written: Permission denied"
    )


def test_bad_data(run, tmp_path):
    folder = tmp_path / "data"
    fails_clearly(run("resnet-training", "--data-dir", folder), str(folder), "no such folder")
    folder.mkdir()
    fails_clearly(run("resnet-training", "--quick", "--data-dir", folder), str(folder), "lacks train-images")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(b"not an image")
    fails_clearly(run("resnet-training", "--data-dir", folder), "train-images-idx3-ubyte.gz: corrupt")
    assert files(tmp_path / "results") == []


def test_trained_networks_are_shared_and_checked(run, tmp_path):
    few = ["--quick", "--set", "steps=8"]
    assert run("diffusion-iterations", *few, "--set", "spaces=pixel", "--set", "iterations=1").exit_code == 0
    (model,) = (tmp_path / "results" / "models").iterdir()
    before = model.stat().st_mtime_ns
    once = ["--set", "guesses=mean", "--set", "runs=1", "--set", "loop_runs=1"]
    assert run("diffusion-guess", *few, "--set", "conditional=no", *once).exit_code == 0
    assert [each.stat().st_mtime_ns for each in model.parent.iterdir()] == [before]
    model.write_bytes(model.read_bytes()[:-7])
    again = ("diffusion-iterations", *few, "--set", "spaces=pixel", "--set", "iterations=2")
    fails_clearly(run(*again), str(model), "cut short")
    assert run(*again, "--models", tmp_path / "elsewhere").exit_code == 0
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_bad_images(run, tmp_path):
    """A folder with an image that cannot be read is named before anything is trained."""
    folder = tmp_path / "data" / "celeba"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(b"not an image")
    result = run("latent-diffusion", "--quick", "--set", "data=celeba", "--data-dir", folder.parent)
    fails_clearly(result, str(folder / "0.jpg"), "not an image")
    fails_clearly(run("latent-diffusion", "--quick", "--set", "data=cifar10", "--data-dir", folder), "lacks CIFAR-10")
    fails_clearly(run("pixel-diffusion", "--quick", "--set", "sides=5"), "got 5")
    assert files(tmp_path / "results") == []


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_start(run, tmp_path, monkeypatch, light):
    monkeypatch.setattr(os, "fsync", full_disk)
    fails_clearly(run("mlp-newton", "--quick"), "no space left on the disk")
    assert files(tmp_path / "results") == []


def test_a_full_disk_on_the_way(run, tmp_path, monkeypatch, light):
    with monkeypatch.context() as patched:

        def filling(measure):
            def wrapped(cell, settings, context):
                if cell["L"] == 64:
                    patched.setattr(os, "fsync", full_disk)
                return measure(cell, settings, context)

            return wrapped

        patch_measure(patched, "mlp-newton", filling)
        fails_clearly(run("mlp-newton", "--quick"), "no space left on the disk")
    (found,) = files(tmp_path / "results")
    assert len(store.read(tmp_path / "results" / found)["records"]) == 2  # what was there before is still there
    assert run("mlp-newton", "--quick").exit_code == 0


@pytest.mark.parametrize("text", ['{"schema": 0, "records": []}', '{"schema": 1, "rec'])
def test_results_of_an_older_version_or_cut_off(run, tmp_path, text):
    folder = tmp_path / "results"
    folder.mkdir()
    old = folder / f"mlp-newton-old{store.PARTIAL}"
    old.write_text(text)
    fails_clearly(run("mlp-newton", "--quick"), str(old), "move it away")
    assert files(folder) == [old.name]
    assert old.read_text() == text
    fails_clearly(run("hardware", old, old), str(old))


def test_hardware_compares_two_files(run, tmp_path):
    folder = tmp_path / "results"
    one, other = two_machines(run, tmp_path)
    result = run("hardware", one, other)
    assert result.exit_code == 0, result.output
    (found,) = [name for name in files(folder) if name.startswith("hardware")]
    content = store.read(folder / found)
    for record in content["records"]:
        entry = record["forward"]["loop"]
        assert entry["ratio"] == pytest.approx(entry["seconds"][1] / entry["seconds"][0])
    assert "forward loop" in content["summary"]["ratios"]
    # It is no more than what it was made from: a quick run, of one depth.
    assert content["quick"]
    assert found.endswith("-quick.json")
    assert "depths" in content["settings"]["changed"]


def two_machines(run, tmp_path):
    """The result of this machine, with another setting, and the same times by another name."""
    assert run("mlp-timing", "--quick", "--set", "depths=64", out=tmp_path / "here").exit_code == 0
    (one,) = (tmp_path / "here").iterdir()
    content = store.read(one)
    content["records"] = [{**record, "hardware": "Another"} for record in content["records"]]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    return one, other


def test_hardware_wants_two_machines(run, tmp_path):
    one, _ = two_machines(run, tmp_path)
    fails_clearly(run("hardware", one, one), str(one), "given twice")
    copy = tmp_path / "copy.json"
    copy.write_bytes(one.read_bytes())
    fails_clearly(run("hardware", one, copy), str(one), str(copy), "both measured on ")
    assert files(tmp_path / "results") == []


def test_hardware_with_the_wrong_files(run, tmp_path, light):
    fails_clearly(run("hardware"), "two result files")
    fails_clearly(run("hardware", "a.json", "b.json"), "a.json: there is no such file")
    assert run("mlp-newton", "--quick").exit_code == 0
    (found,) = files(tmp_path / "results")
    path = tmp_path / "results" / found
    fails_clearly(run("hardware", path, path), "results of mlp-newton, expected those of mlp-timing")
    run("mlp-timing", "--quick", "--time-limit", 1e-9)
    (found,) = [name for name in files(tmp_path / "results") if name.startswith("mlp-timing")]
    path = tmp_path / "results" / found
    fails_clearly(run("hardware", path, path), "not finished")
