"""MNIST's files: found gzipped or not, checked, and named where they are wrong."""

import gzip
import hashlib

import pytest
import torch

from deeppcr_paper import data
from deeppcr_paper.store import PaperError


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def contents(monkeypatch):
    """A tiny MNIST: 6 images to train on, 4 to test, with md5 to match."""
    monkeypatch.delenv("DEEPPCR_DATA", raising=False)
    generator = torch.Generator().manual_seed(0)
    made = {}
    for part, count in (("train", 6), ("t10k", 4)):
        pixels = torch.randint(0, 256, (count * 784,), generator=generator, dtype=torch.uint8)
        made[f"{part}-images-idx3-ubyte"] = bytes(16) + bytes(pixels.tolist())
        made[f"{part}-labels-idx1-ubyte"] = bytes(8) + bytes(range(count))
    monkeypatch.setattr(data, "MD5", {name: md5(made[name]) for name in data.MD5})
    return made


def put(folder, contents, packed):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("packed", [True, False])
def test_reads_the_files(tmp_path, contents, packed):
    put(tmp_path, contents, packed)
    images = data.mnist(tmp_path)
    assert images.train.shape == (6, 784)
    assert images.test.shape == (4, 784)
    assert images.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.test_labels.dtype == torch.long
    assert images.train.mean().abs() < 1e-5
    assert images.train.std() == pytest.approx(1)
    raw = torch.tensor(list(contents["train-images-idx3-ubyte"][16:]), dtype=torch.float32).reshape(6, 784)
    assert torch.allclose(images.train, (raw - raw.mean()) / raw.std(), atol=1e-5)


def test_the_folder_may_be_the_one_above_or_come_from_the_environment(tmp_path, contents, monkeypatch):
    put(tmp_path / "mnist", contents, True)
    assert len(data.mnist(tmp_path).train) == 6
    monkeypatch.setenv("DEEPPCR_DATA", str(tmp_path))
    assert len(data.mnist(None).train) == 6


def test_packed_by_another_program(tmp_path, contents):
    put(tmp_path, contents, True)
    name = "train-images-idx3-ubyte"
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(contents[name], compresslevel=1, mtime=1))
    assert len(data.mnist(tmp_path).train) == 6


def test_a_folder_without_the_files(tmp_path, contents):
    with pytest.raises(PaperError, match="lacks train-images-idx3-ubyte, train-labels"):
        data.mnist(tmp_path)
    put(tmp_path, contents, True)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(PaperError, match="lacks t10k-labels-idx1-ubyte "):
        data.mnist(tmp_path)
    with pytest.raises(PaperError, match="no such folder"):
        data.mnist(tmp_path / "none")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_a_corrupt_file(tmp_path, contents, packed, cut):
    put(tmp_path, contents, packed)
    name = "train-labels-idx1-ubyte"
    path = tmp_path / (f"{name}.gz" if packed else name)
    wrong = path.read_bytes()[:-3] if cut else b"x" + path.read_bytes()[1:]
    path.write_bytes(wrong)
    with pytest.raises(PaperError, match=f"{path}: corrupt: .*; download it again") as caught:
        data.mnist(tmp_path)
    if not packed:
        assert f"expected md5 {data.MD5[name]} of its content, found {md5(wrong)}" in str(caught.value)


def test_a_file_with_other_content(tmp_path, contents):
    put(tmp_path, contents | {"t10k-labels-idx1-ubyte": b"other"}, True)
    with pytest.raises(PaperError, match=f"t10k-labels-idx1-ubyte.gz: corrupt: .* found {md5(b'other')}"):
        data.mnist(tmp_path)


def test_without_a_folder_or_a_network(monkeypatch):
    monkeypatch.delenv("DEEPPCR_DATA", raising=False)

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(PaperError, match=r"no network.*--data-dir"):
        data.mnist(None)


def test_digits():
    images = data.digits()
    assert images.train.shape == (1437, 64)
    assert sorted(set(images.test_labels.tolist())) == list(range(10))
    assert len(images.first(20, 10).test) == 10
