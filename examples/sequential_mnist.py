"""Sequential MNIST: a GRU of width 32 sees a digit pixel by pixel, 784 of them, and then says which one it was.

    python examples/sequential_mnist.py [--data-dir DIR] [--epochs N] [--minutes M] [--help]

It is trained by ``torch.nn`` and after ``deeppcr.nn.convert(model, mode="parallel")``, from the same seeds; see ``training.py``.
The exit code is 1 where a finished training of either side knows fewer than 90% of the test set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from deeppcr_paper.data import Images, mnist
from training import SIDES, Task, options, train

WIDTH, DIGITS = 32, 10
#: Of the test set, both sides are to know so much.
GOAL = 0.9


class Reader(nn.Module):
    """From pixels [T, B, 1] to the logits of digits [B, 10], by the state after the last pixel."""

    def __init__(self, steps: int):
        super().__init__()
        self.gru, self.head = nn.GRU(1, WIDTH), nn.Linear(WIDTH, DIGITS)
        remember(self.gru, steps)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.gru(pixels)[0][-1])


@torch.no_grad()
def remember(gru: nn.GRU, steps: int) -> None:
    """Have units remember for 1 to ``steps`` steps at the start, by the bias of the update gate (Tallec and Ollivier, 2018).

    As PyTorch draws them all forget within two or three steps, and no gradient reaches the first pixels. Spans are uniform in their
    logarithm, so that there are units for a stroke, for a row of pixels and for the whole picture.
    """
    spans = steps ** torch.rand(gru.hidden_size)
    update = slice(gru.hidden_size, 2 * gru.hidden_size)  # PyTorch's order: reset, update, new
    gru.bias_ih_l0[update] = spans.log()
    gru.bias_hh_l0[update] = 0


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """[B]: 1 where the digit is known; their mean is the accuracy."""
    return (logits.argmax(-1) == labels).to(logits.dtype)


def task_of(images: Images, side: int) -> Task:
    """Digits of ``side`` x ``side`` pixels, row by row."""

    def smaller(pixels: Tensor) -> Tensor:
        return avg_pool2d(pixels.unflatten(-1, (28, 28)), 28 // side).flatten(1)

    train, test = smaller(images.train), smaller(images.test)
    return Task(
        model=lambda: Reader(side * side),
        loss=cross_entropy,
        measure="accuracy",
        score=is_right,
        train=(train, images.train_labels),
        test=(test, images.test_labels),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("Sequential MNIST by a GRU.", "sequential_mnist", epochs=10, batch=128, rate=1e-2)
    parser.add_argument("--data-dir", type=Path, help="folder with the four files of MNIST; else that in DEEPPCR_DATA")
    parser.add_argument("--side", type=int, choices=(28, 14, 7), default=28, help="pixels of a row; fewer: averages")
    parser.add_argument("--images", type=int, help="only the first so many, of both sets")
    given = parser.parse_args(arguments)
    images = mnist(given.data_dir).first(given.images, given.images)
    record = train(task_of(images, given.side), given)
    if record["done"] < record["steps"]:
        return 0
    short = [name for name in SIDES if record["scores"][-1][name] < GOAL]
    if short:
        print(f"below {GOAL:.0%}: {', '.join(short)}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
