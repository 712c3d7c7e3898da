"""Images for the diffusion models: CIFAR-10's batches, folders of images, margins and pooling; what is wrong is named."""

import hashlib
import lzma

import pytest
import torch
from PIL import Image

from deeppcr_paper import pictures
from deeppcr_paper.store import PaperError


@pytest.fixture
def batch(monkeypatch):
    """A batch of ten images, with the md5 and the length to match."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (10, 3073), generator=generator, dtype=torch.uint8)
    rows[:, 0] = torch.arange(10)
    content = bytes(rows.flatten().tolist())
    monkeypatch.setattr(pictures, "CIFAR_MD5", {"data_batch_1": hashlib.md5(content).hexdigest()})
    monkeypatch.setattr(pictures, "_CIFAR_BYTES", len(content))
    return content


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_with_and_without_a_test_batch(tmp_path, batch, packed):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / f"data_batch_1.bin{'.xz' * packed}").write_bytes(lzma.compress(batch) if packed else batch)
    found = pictures.pictures("cifar10", tmp_path)
    assert found.train.shape == (9, 3, 32, 32)
    assert found.test_labels.tolist() == [9]  # every tenth is held out
    first = torch.tensor(list(batch[1:3073]), dtype=torch.float32).reshape(3, 32, 32) / 127.5 - 1
    assert torch.equal(found.train[0], first)
    (folder / "data_batch_3.bin").write_bytes(batch)
    (folder / "test_batch.bin").write_bytes(batch)
    found = pictures.pictures("cifar10", tmp_path)
    assert (len(found.train), len(found.test)) == (20, 10)
    assert found.first(5, 3).train.shape == (5, 3, 32, 32)


def test_cifar_that_is_corrupt(tmp_path, batch):
    with pytest.raises(PaperError, match="lacks CIFAR-10's data_batch_1"):
        pictures.cifar10(tmp_path)
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(batch[:-1] + b"?")
    with pytest.raises(PaperError, match=f"{path}: corrupt: expected md5"):
        pictures.cifar10(tmp_path)
    path.unlink()
    (tmp_path / "data_batch_1.bin.xz").write_bytes(lzma.compress(batch)[:-20])
    with pytest.raises(PaperError, match=r"data_batch_1.bin.xz: corrupt"):
        pictures.cifar10(tmp_path)
    (tmp_path / "data_batch_1.bin.xz").unlink()
    (tmp_path / "data_batch_2.bin").write_bytes(batch[:-1])
    with pytest.raises(PaperError, match="expected 30,730 bytes, found 30,729"):
        pictures.cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\x0b" + batch[1:])
    with pytest.raises(PaperError, match="a label of 11"):
        pictures.cifar10(tmp_path)


def test_a_folder_of_images(tmp_path):
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number in range(10):
        portrait = Image.new("RGB", (64, 96), (255, 0, 0))  # red above and below the square in the middle
        portrait.paste((0, 0, 10 * number), (0, 16, 64, 80))
        portrait.save(folder / f"{number:06}.png")
    found = pictures.pictures("celeba", tmp_path)
    assert found.train.shape == (9, 3, 32, 32)
    assert found.classes is None
    assert torch.allclose(found.train[4, 2], torch.tensor(40 / 127.5 - 1))
    assert (found.train[:, 0] == -1).all()  # nothing red is left
    (folder / "000003.png").write_bytes((folder / "000003.png").read_bytes()[:60])
    with pytest.raises(PaperError, match=r"000003.png: not an image that can be read"):
        pictures.pictures("celeba", tmp_path)


def test_folders_without_images(tmp_path):
    with pytest.raises(PaperError, match="expected a folder with images"):
        pictures.celeba(tmp_path)
    with pytest.raises(PaperError, match="no such folder"):
        pictures.pictures("celeba", tmp_path / "none")


def test_a_folder_must_be_given(monkeypatch):
    monkeypatch.delenv("DEEPPCR_DATA", raising=False)
    with pytest.raises(PaperError, match="--data-dir"):
        pictures.pictures("cifar10", None)


def test_margins_and_pooling(monkeypatch):
    train, labels = torch.rand(3, 784), torch.arange(3)
    monkeypatch.setattr(pictures, "mnist_pixels", lambda data_dir: (train, labels, train[:1], labels[:1]))
    found = pictures.pictures("mnist", None)
    assert found.train.shape == (3, 1, 32, 32)
    assert torch.equal(found.train[:, :, 2:-2, 2:-2].flatten(1), 2 * train - 1)
    assert (found.train[:, :, :2] == -1).all()
    pooled = found.pooled(4)
    assert torch.allclose(pooled.train[1, 0, 2, 3], found.train[1, 0, 16:24, 24:].mean())
    assert pooled.test.shape == (1, 1, 4, 4)
    with pytest.raises(PaperError, match="divisors of 32"):
        found.pooled(5)


def test_digits():
    found = pictures.pictures("digits", None)
    assert found.train.shape[1:] == (1, 8, 8)
    assert (found.train.min(), found.train.max()) == (-1, 1)
