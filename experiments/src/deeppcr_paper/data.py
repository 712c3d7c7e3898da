"""Images with labels: MNIST from its four files, checked against their md5, or scikit-learn's digits for quick runs."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .store import PaperError

if TYPE_CHECKING:
    from typing import Self

#: Of the unpacked files.
MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
#: Images and labels to train with, images and labels to test with.
Split = tuple[Tensor, Tensor, Tensor, Tensor]


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

    def first(self, train: int | None, test: int | None) -> Self:
        """The first images only."""
        return replace(
            self,
            train=self.train[:train],
            train_labels=self.train_labels[:train],
            test=self.test[:test],
            test_labels=self.test_labels[:test],
        )

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        labels = {name: getattr(self, name).to(device) for name in ("train_labels", "test_labels")}
        return replace(self, train=self.train.to(device, dtype), test=self.test.to(device, dtype), **labels)


def normalised(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> Images:
    mean, std = train.mean(), train.std()
    return Images((train - mean) / std, train_labels, (test - mean) / std, test_labels)


def data_folder(data_dir: Path | None) -> Path | None:
    """Where the data sets are: as given, or as ``DEEPPCR_DATA`` says; None where neither does."""
    given = os.environ.get("DEEPPCR_DATA")
    folder = data_dir if data_dir is not None else Path(given) if given else None
    if folder is not None and not folder.is_dir():
        raise PaperError(f"data folder {folder}: there is no such folder")
    return folder


def mnist(data_dir: Path | None) -> Images:
    """MNIST from a folder with its four files (in it or in its ``mnist`` folder), or from the network without one."""
    return normalised(*mnist_pixels(data_dir))


def mnist_pixels(data_dir: Path | None) -> Split:
    """The same with pixels from 0 to 1, [N, 784]."""
    folder = data_folder(data_dir)
    if folder is None:
        return _from_openml()
    if not any(find(folder, name, ".gz") for name in MD5) and (folder / "mnist").is_dir():
        folder = folder / "mnist"
    paths = {name: find(folder, name, ".gz") for name in MD5}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise PaperError(f"data folder {folder}: lacks {', '.join(missing)} (each with or without .gz)")
    contents = [unpacked(path, MD5[name]) for name, path in paths.items() if path is not None]
    train, test = (contents[i][16:].reshape(-1, 28 * 28).float() / 255 for i in (0, 2))
    train_labels, test_labels = (contents[i][8:].long() for i in (1, 3))
    return train, train_labels, test, test_labels


def digits() -> Images:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels; a fifth of them for testing. Nothing is downloaded."""
    return normalised(*digits_pixels())


def digits_pixels() -> Split:
    """The same with pixels from 0 to 16, as `mnist_pixels` returns them."""
    from sklearn.datasets import load_digits  # takes two seconds to import

    found: Any = load_digits()
    pixels, labels = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order], labels[order]
    count = len(labels) * 4 // 5
    return pixels[:count], labels[:count], pixels[count:], labels[count:]


def find(folder: Path, name: str, packed: str) -> Path | None:
    """The file of that name, with or without the ending of a packed one."""
    return next((path for path in (folder / f"{name}{packed}", folder / name) if path.is_file()), None)


def unpacked(path: Path, md5: str | None) -> Tensor:
    """The bytes of a file, after its md5 was compared where it is known. Packed ones may come from any compressor."""
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
    try:
        content = unpack(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise PaperError(f"{path}: corrupt: {error}; download it again") from None
    except OSError as error:
        raise PaperError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 is not None and found != md5:
        raise PaperError(f"{path}: corrupt: expected md5 {md5} of its content, found {found}; download it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _from_openml() -> Split:
    from sklearn.datasets import fetch_openml

    try:
        found: Any = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
    except Exception as error:  # of the network in all its forms; it is passed on in words
        advice = "give the folder of its four files with --data-dir, or in DEEPPCR_DATA"
        raise PaperError(f"MNIST: cannot be downloaded ({type(error).__name__}: {error}); {advice}") from None
    pixels = torch.tensor(found.data, dtype=torch.float32) / 255
    labels = torch.tensor([int(each) for each in found.target])
    return pixels[:60_000], labels[:60_000], pixels[60_000:], labels[60_000:]
