"""Images with labels: MNIST from its four files, checked against their md5, or scikit-learn's digits for quick runs."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .store import PaperError

#: Of the gzipped file, and of its content.
MD5 = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
_PIXELS = 28 * 28


@dataclass(frozen=True)
class Images:
    """Pixels with mean 0 and standard deviation 1 over the training set, and labels.

    Attributes:
        train, test: [N, pixels]
        train_labels, test_labels: [N]
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @staticmethod
    def normalised(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> Images:
        mean, std = train.mean(), train.std()
        return Images((train - mean) / std, train_labels, (test - mean) / std, test_labels)

    def first(self, train: int | None, test: int | None) -> Images:
        """The first images only."""
        return Images(self.train[:train], self.train_labels[:train], self.test[:test], self.test_labels[:test])

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Images:
        train, test = (each.to(device, dtype) for each in (self.train, self.test))
        return Images(train, self.train_labels.to(device), test, self.test_labels.to(device))


def mnist_folder(data_dir: Path | None) -> Path | None:
    """Where MNIST is: as given, or as ``DEEPPCR_DATA`` says; None where neither does."""
    given = os.environ.get("DEEPPCR_DATA")
    return data_dir if data_dir is not None else Path(given) if given else None


def mnist(data_dir: Path | None) -> Images:
    """MNIST from a folder with its four files (in it or in its ``mnist`` folder), or from the network without one."""
    return Images.normalised(*mnist_pixels(data_dir))


def mnist_pixels(data_dir: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with pixels from 0 to 1: images [N, 784] and labels [N] to train with, images and labels to test with."""
    folder = mnist_folder(data_dir)
    if folder is None:
        return _from_openml()
    if not folder.is_dir():
        raise PaperError(f"data folder {folder}: there is no such folder")
    if not any(_find(folder, name) for name in MD5) and (folder / "mnist").is_dir():
        folder = folder / "mnist"
    missing = [name for name in MD5 if _find(folder, name) is None]
    if missing:
        raise PaperError(f"data folder {folder}: lacks {', '.join(missing)} (each with or without .gz)")
    contents = [_content(folder, name) for name in MD5]
    train, test = (_pixels(contents[i][16:]) for i in (0, 2))
    train_labels, test_labels = (_bytes(contents[i][8:]).long() for i in (1, 3))
    return train, train_labels, test, test_labels


def digits() -> Images:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels; a fifth of them for testing. Nothing is downloaded."""
    return Images.normalised(*digits_pixels())


def digits_pixels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with pixels from 0 to 16, as `mnist_pixels` returns them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise PaperError(
            "--quick needs scikit-learn for its digits: give MNIST with --data-dir, or in a clone pip install -e '.[paper]' "
            "-c constraints.txt"
        ) from None
    found: Any = load_digits()
    pixels, labels = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order], labels[order]
    count = len(labels) * 4 // 5
    return pixels[:count], labels[:count], pixels[count:], labels[count:]


def _find(folder: Path, name: str) -> Path | None:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    return None


def _content(folder: Path, name: str) -> bytes:
    """A file's content, unpacked, after its md5 was compared."""
    path = _find(folder, name)
    assert path is not None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PaperError(f"{path}: cannot be read: {error.strerror or error}") from None
    packed = path.suffix == ".gz"
    expected, found = MD5[name][0 if packed else 1], hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found == expected:
        return gzip.decompress(content) if packed else content
    if packed:
        # Another compressor writes another file with the same content: that is fine.
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            content = b""
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == MD5[name][1]:
            return content
    raise PaperError(f"{path}: corrupt: expected md5 {expected}, found {found}; download it again")


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _pixels(content: bytes) -> Tensor:
    return _bytes(content).reshape(-1, _PIXELS).float() / 255


def _from_openml() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    advice = "give the folder of its four files with --data-dir, or in DEEPPCR_DATA"
    try:
        from sklearn.datasets import fetch_openml
    except ImportError:
        raise PaperError(f"MNIST: {advice} (or install scikit-learn to download it)") from None
    try:
        found: Any = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
    except Exception as error:  # of the network in all its forms; it is passed on in words
        raise PaperError(f"MNIST: cannot be downloaded ({type(error).__name__}: {error}); {advice}") from None
    pixels = torch.tensor(found.data, dtype=torch.float32) / 255
    labels = torch.tensor([int(each) for each in found.target])
    return pixels[:60_000], labels[:60_000], pixels[60_000:], labels[60_000:]
