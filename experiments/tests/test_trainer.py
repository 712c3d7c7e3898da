"""Training that was killed goes on to the same bits; files are whole or not there; and safetensors is safetensors."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from deeppcr_paper import tensor_files, trainer
from deeppcr_paper.experiment import Context, OutOfTime, Watcher
from deeppcr_paper.store import PaperError
from deeppcr_paper.trainer import Trainer, adamw

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "bytes": torch.arange(5, dtype=torch.uint8),  # the next one does not begin at a multiple of its size
    "half": torch.randn(3).bfloat16(),
    "whole": torch.tensor([[-1], [2**40]]),
    "turned": torch.arange(6.0).reshape(2, 3).mT,
    "truth": torch.tensor([True, False]),
}


def small(seed=0, steps=40, **about) -> Trainer:
    """A network with dropout, batch norm and two optimisers: all that has a state."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    other = nn.Linear(4, 1)
    optimisers = {"network": adamw(network, 1e-2), "other": adamw(other, 1e-2)}
    generator = torch.Generator().manual_seed(seed)

    def step():
        x = torch.randn(16, 4, generator=generator)
        losses = [(module(x) - x.sum(1, keepdim=True)).square().mean() for module in (network, other)]
        for optimiser, loss in zip(optimisers.values(), losses, strict=True):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return torch.stack(losses).detach()

    modules: dict[str, nn.Module] = {"network": network, "other": other}
    return Trainer({"seed": seed, **about}, modules, optimisers, generator, ("one", "two"), step, steps)


def parameters(each: Trainer) -> list[torch.Tensor]:
    return [tensor for module in each.modules.values() for tensor in module.state_dict().values()]


class PowerCut(BaseException):
    """Nobody catches it."""


class Cut(Watcher):
    """Ends the training half way."""

    def part(self, fraction):
        if fraction > 0.5:
            self.end_it()

    def end_it(self):
        raise PowerCut


class Kill(Cut):
    """And the process with it."""

    def end_it(self):
        os.kill(os.getpid(), signal.SIGKILL)


def killed(path: Path) -> None:
    torch.set_num_threads(1)  # as in conftest.py: the order of a sum depends on it
    trainer.CHECKPOINT = 0.0
    small().run(Context(CPU, watcher=Kill()), path)


def test_after_a_power_cut_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    path = tmp_path / "network.safetensors"
    monkeypatch.setattr(trainer, "CHECKPOINT", 0.0)
    with pytest.raises(PowerCut):
        small().run(Context(CPU, watcher=Cut()), path)
    goes_on_to_the_same_bits(path)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_after_a_kill_training_goes_on_to_the_same_bits(tmp_path):
    path = tmp_path / "network.safetensors"
    code = f"from pathlib import Path; import test_trainer; test_trainer.killed(Path({str(path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    goes_on_to_the_same_bits(path)


def goes_on_to_the_same_bits(path):
    assert not path.exists()
    assert path.with_suffix(".training.safetensors").exists()
    steps = []
    resumed, whole = small(), small()
    inner = resumed.step
    resumed.step = lambda: steps.append(1) or inner()
    record = resumed.run(Context(CPU), path)
    assert 0 < len(steps) < 40
    expected = whole.run(Context(CPU), None)
    for one, other in zip(parameters(resumed), parameters(whole), strict=True):
        assert torch.equal(one, other)
    assert record["curves"] == expected["curves"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_finished_network_is_loaded(tmp_path):
    path = tmp_path / "network.safetensors"
    first, second = small(), small()
    record = first.run(Context(CPU), path)
    second.step = lambda: pytest.fail("trained again")
    assert second.run(Context(CPU), path) == record
    for one, other in zip(parameters(first), parameters(second), strict=True):
        assert torch.equal(one, other)


def test_out_of_time_keeps_the_state(tmp_path):
    path = tmp_path / "network.safetensors"
    with pytest.raises(OutOfTime):
        small().run(Context(CPU, deadline=0.0), path)
    assert path.with_suffix(".training.safetensors").exists()
    resumed = small()
    resumed.run(Context(CPU), path)
    assert resumed.curves["step"] == list(range(1, 41))


def test_files_of_other_settings_and_of_others(tmp_path):
    path = tmp_path / "network.safetensors"
    small().run(Context(CPU), path)
    with pytest.raises(PaperError, match=r"of other settings \(width\)"):
        small(width=3).run(Context(CPU), path)
    tensors, about = tensor_files.load(path)
    tensor_files.save(path, tensors)
    with pytest.raises(PaperError, match="not written by deeppcr"):
        small().run(Context(CPU), path)
    del tensors["other.bias"]
    tensor_files.save(path, tensors, about)
    with pytest.raises(PaperError, match="not the tensors of this network"):
        small().run(Context(CPU), path)


def test_a_training_that_diverges():
    diverging = small()
    diverging.step = lambda: torch.tensor([1.0, float("nan")])
    with pytest.raises(PaperError, match="training diverged: the two loss"):
        diverging.run(Context(CPU), None)


def test_tensors_come_back(tmp_path):
    path = tmp_path / "tensors.safetensors"
    tensor_files.save(path, TENSORS, {"about": "a text with ümläuts"})
    found, about = tensor_files.load(path)
    assert about == {"about": "a text with ümläuts"}
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_file_from_before_the_package_wrote_them(tmp_path):
    """Tensors in the order in which they came, wherever that put them."""
    entries, numbers = {}, b""
    for name, kind in (("bytes", "U8"), ("whole", "I64"), ("a", "F32")):
        content = TENSORS[name].contiguous().numpy().tobytes()
        offsets = [len(numbers), len(numbers) + len(content)]
        entries[name] = {"dtype": kind, "shape": list(TENSORS[name].shape), "data_offsets": offsets}
        numbers += content
    header = json.dumps({"__metadata__": {"about": "text"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)
    found, about = tensor_files.load(path)
    assert about == {"about": "text"}
    assert all(torch.equal(found[name], TENSORS[name]) for name in entries)


@pytest.mark.parametrize("cut", [0, 5, 40, 300, -1])
def test_a_file_that_was_cut_short(tmp_path, cut):
    path = tmp_path / "tensors.safetensors"
    tensor_files.save(path, TENSORS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(PaperError, match=f"{path}: cut short"):
        tensor_files.load(path)


def test_a_file_that_is_something_else(tmp_path):
    path = tmp_path / "tensors.safetensors"
    for content in (b"\x02\0\0\0\0\0\0\0[]", b"{}" * 40, b'\x09\0\0\0\0\0\0\0{"a": 1 }', bytes(8)):
        path.write_bytes(content)
        with pytest.raises(PaperError, match="no safetensors file"):
            tensor_files.load(path)
    with pytest.raises(PaperError, match="no such file"):
        tensor_files.load(tmp_path / "none")


def test_a_failed_write_leaves_the_good_file(tmp_path, monkeypatch):
    path = tmp_path / "tensors.safetensors"
    tensor_files.save(path, TENSORS)
    good = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PaperError, match="no space left on the disk"):
        tensor_files.save(path, {"b": torch.zeros(3)})
    assert path.read_bytes() == good
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
