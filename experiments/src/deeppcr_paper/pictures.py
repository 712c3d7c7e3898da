"""Images as the diffusion models see them: [N, channels, side, side], from -1 (black) to 1.

MNIST, CIFAR-10 in its binary version, a folder of images such as CelebA, or scikit-learn's digits for quick runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from .data import Images, data_folder, digits_pixels, find, mnist_pixels, unpacked
from .store import PaperError

#: What a diffusion model can be trained on.
SOURCES = ("mnist", "cifar10", "celeba", "digits")
SIDE = 32
#: Of the unpacked file; of the other batches the length and the labels are checked.
CIFAR_MD5 = {"data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25"}
_CIFAR_TRAIN, _CIFAR_TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
_CIFAR_IMAGE = 3 * SIDE * SIDE
_CIFAR_BYTES = 10_000 * (1 + _CIFAR_IMAGE)
#: Where a data set comes without images to test with, every so manyth is held out.
HELD_OUT = 10


@dataclass(frozen=True)
class Pictures(Images):
    """Images to train and to test with.

    Attributes:
        train, test: [N, channels, side, side], from -1 to 1
        train_labels, test_labels: [N]; all 0 where ``classes`` is None
        classes: how many, where the images have labels
    """

    classes: int | None

    @property
    def channels(self) -> int:
        return self.train.shape[1]

    @property
    def side(self) -> int:
        return self.train.shape[-1]

    def pooled(self, side: int) -> Pictures:
        """Averages of squares of pixels: fewer, larger ones."""
        if self.side % side:
            raise PaperError(f"sides: expected divisors of {self.side}, the side of the images; got {side}")
        train, test = (functional.avg_pool2d(each, self.side // side) for each in (self.train, self.test))
        return replace(self, train=train, test=test)


def pictures(source: str, data_dir: Path | None) -> Pictures:
    """The images of that name: at 32 x 32, digits at 8 x 8."""
    if source == "mnist":
        return mnist(data_dir)
    if source == "digits":
        return digits()
    folder = data_folder(data_dir)
    if folder is None:
        raise PaperError(f"{source}: give the folder that holds it with --data-dir, or in DEEPPCR_DATA")
    return cifar10(folder) if source == "cifar10" else celeba(folder)


def mnist(data_dir: Path | None) -> Pictures:
    """MNIST with a black margin: 28 pixels become 32."""
    train, train_labels, test, test_labels = mnist_pixels(data_dir)

    def padded(pixels: Tensor) -> Tensor:
        return functional.pad(2 * pixels.reshape(-1, 1, 28, 28) - 1, (2, 2, 2, 2), value=-1.0)

    return Pictures(padded(train), train_labels, padded(test), test_labels, 10)


def digits() -> Pictures:
    train, train_labels, test, test_labels = digits_pixels()
    train, test = (pixels.reshape(-1, 1, 8, 8) / 8 - 1 for pixels in (train, test))
    return Pictures(train, train_labels, test, test_labels, 10)


def cifar10(folder: Path) -> Pictures:
    """CIFAR-10 from its binary batches, as many as there are; every tenth image is for testing where test_batch is missing."""
    if not any(_batch_path(folder, name) for name in _CIFAR_TRAIN) and (folder / "cifar-10-batches-bin").is_dir():
        folder = folder / "cifar-10-batches-bin"
    batches = [_cifar_batch(path, name) for name in _CIFAR_TRAIN if (path := _batch_path(folder, name))]
    if not batches:
        raise PaperError(f"data folder {folder}: lacks CIFAR-10's data_batch_1.bin ... data_batch_5.bin (or .bin.xz)")
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if test := _batch_path(folder, _CIFAR_TEST):
        return Pictures(images, labels, *_cifar_batch(test, _CIFAR_TEST), 10)
    return _hold_out(images, labels, 10)


def celeba(folder: Path) -> Pictures:
    """A folder of images, CelebA's aligned ones for one: the square in the middle, at 32 x 32 pixels.

    Every tenth is for testing; there are no classes.
    """
    folder = folder / "celeba" if (folder / "celeba").is_dir() else folder
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if len(paths) < HELD_OUT:
        raise PaperError(f"{folder}: expected a folder with images (.jpg, .png), found {len(paths)}")
    images = torch.stack([read_image(path) for path in paths])
    return _hold_out(images.float() / 127.5 - 1, torch.zeros(len(paths), dtype=torch.long), None)


def read_image(path: Path) -> Tensor:
    """The square in the middle at 32 x 32 pixels, [3, 32, 32] bytes."""
    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BOX)
    except Exception as error:  # Pillow raises anything on spoilt bytes
        raise PaperError(f"{path}: not an image that can be read ({error}); remove it or get it anew") from None
    return torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).reshape(SIDE, SIDE, 3).permute(2, 0, 1)


def _hold_out(images: Tensor, labels: Tensor, classes: int | None) -> Pictures:
    test = torch.arange(len(images)) % HELD_OUT == HELD_OUT - 1
    return Pictures(images[~test], labels[~test], images[test], labels[test], classes)


def _batch_path(folder: Path, name: str) -> Path | None:
    return find(folder, f"{name}.bin", ".xz")


def _cifar_batch(path: Path, name: str) -> tuple[Tensor, Tensor]:
    content = unpacked(path, CIFAR_MD5.get(name))
    if len(content) != _CIFAR_BYTES:
        raise PaperError(f"{path}: corrupt: expected {_CIFAR_BYTES:,} bytes, found {len(content):,}; download it again")
    rows = content.reshape(-1, 1 + _CIFAR_IMAGE)
    labels = rows[:, 0].long()
    if int(labels.max()) > 9:
        raise PaperError(f"{path}: corrupt: a label of {int(labels.max())}, expected 0 to 9; download it again")
    return rows[:, 1:].reshape(-1, 3, SIDE, SIDE).float() / 127.5 - 1, labels
