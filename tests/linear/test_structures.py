"""The conformance suite, for every structure there is."""

import pytest
import torch

from deeppcr import linear
from linear.conformance import BlocksConformance
from linear.reference import random_blocks


class TestDense(BlocksConformance):
    def make(self, length, batch, width):
        return random_blocks(linear.Dense, length, batch, width)

    def dense(self, blocks, width):
        return blocks.data


class TestDiagonal(BlocksConformance):
    def make(self, length, batch, width):
        return random_blocks(linear.Diagonal, length, batch, width)

    def dense(self, blocks, width):
        rows = [blocks.data[..., i, None] * unit for i, unit in enumerate(torch.eye(width).to(blocks.data))]
        return torch.stack(rows, -2)


class TestBlockDiagonal(BlocksConformance):
    def make(self, length, batch, width):
        return random_blocks(linear.BlockDiagonal, length, batch, width)

    def dense(self, blocks, width):
        size = blocks.data.shape[-1]
        small = blocks.data.unbind(-3)
        rows = [torch.nn.functional.pad(block, (k * size, width - (k + 1) * size)) for k, block in enumerate(small)]
        return torch.cat(rows, -2)


class TestScalar(BlocksConformance):
    def make(self, length, batch, width):
        return random_blocks(linear.Scalar, length, batch, width)

    def dense(self, blocks, width):
        rows = [blocks.data[..., None] * unit for unit in torch.eye(width).to(blocks.data)]
        return torch.stack(rows, -2)

    def test_to_dense_asks_for_a_width(self):
        with pytest.raises(ValueError, match="width: scalar blocks fit any width"):
            self.blocks(2).to_dense()

    def test_one_scalar_serves_every_width(self):
        blocks = self.blocks(5)
        for width in (1, 4):
            rhs = self.randn(5, width)
            torch.testing.assert_close(linear.solve(blocks, rhs)[1], blocks.data[1] * rhs[0] + rhs[1])


def test_blocks_itself_is_abstract():
    with pytest.raises(TypeError, match="Blocks is abstract: use Dense, Diagonal, BlockDiagonal or Scalar"):
        linear.Blocks(torch.zeros(2, 3, 3))
