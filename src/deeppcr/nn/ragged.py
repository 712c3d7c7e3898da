"""Sequences of different lengths: packed, one after the other, or one row after the other with marks where they begin.

Shapes: T steps of the longest, N sequences, S steps in all of them together, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Padding:
    """The steps of a ``PackedSequence`` in a tensor [T, N, ...], its sequences in the order of their lengths.

    Attributes:
        lengths: [N], on the CPU
        places: [S], of the packed steps among those of the flattened tensor
    """

    steps: int
    lengths: Tensor
    places: Tensor

    @staticmethod
    def of(packed: PackedSequence) -> Padding:
        sizes = packed.batch_sizes
        if not is_sorted(packed):
            raise ValueError(
                f"input: of a PackedSequence of {len(packed.data)} steps, expected batch_sizes that never grow and have this sum, got {sizes.tolist()[:8]}"
            )
        rows = int(sizes[0])
        inside = torch.arange(rows) < sizes.unsqueeze(1)
        places = inside.flatten().nonzero().flatten().to(packed.data.device, non_blocking=True)
        return Padding(len(sizes), inside.sum(0), places)

    def pad(self, data: Tensor) -> Tensor:
        """[S, F] to [T, N, F]"""
        rows = len(self.lengths)
        flat = data.new_zeros(self.steps * rows, data.shape[-1]).index_copy(0, self.places, data)
        return flat.unflatten(0, (-1, rows))

    def pack(self, padded: Tensor) -> Tensor:
        """[T, N, F] to [S, F]"""
        return padded.flatten(0, 1).index_select(0, self.places)


def is_sorted(packed: PackedSequence) -> bool:
    """Whether it is what PyTorch makes: at no step are there more sequences than before, and all steps are there."""
    sizes = packed.batch_sizes
    if not len(sizes) or int(sizes[-1]) < 1 or int(sizes.sum()) != len(packed.data):
        return False
    return not bool((sizes.diff() > 0).any())


def reversed_in_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """[T, N, F] with every sequence backwards, the padding behind it where it was. Twice is as before."""
    if lengths is None:
        return x.flip(0)
    at, lengths = torch.arange(len(x), device=x.device).unsqueeze(1), lengths.to(x.device, non_blocking=True)
    places = torch.where(at < lengths, lengths - 1 - at, at)
    return x.gather(0, places.unsqueeze(-1).expand_as(x))


@dataclass(frozen=True)
class Documents:
    """Sequences one after the other in a tensor [S, F].

    Attributes:
        sizes: [T], on the CPU: how many have a step of this number
        order: [S], the steps as a ``PackedSequence`` has them
        ranks, by_rank: [N], of each its place among all by length, and the other way round
    """

    sizes: Tensor
    order: Tensor
    ranks: Tensor
    by_rank: Tensor

    @staticmethod
    def of(input: Any, cu_seqlens: Any) -> Documents:
        """
        Args:
            input: [S, F]
            cu_seqlens: [N + 1], where they begin, and S
        """
        if not isinstance(input, Tensor) or input.ndim != 2:
            came = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(
                f"input: with cu_seqlens, expected all steps one after the other, [S, features], got {came}"
            )
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            came = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens: expected a tensor of integers, got {came}")
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens: expected where the N sequences begin, and S: [N + 1], got {list(cu_seqlens.shape)}"
            )
        bounds = cu_seqlens.to("cpu", torch.int64)
        lengths = bounds.diff()
        if bounds[0] != 0 or bounds[-1] != len(input) or int(lengths.min()) < 1:
            raise ValueError(
                f"cu_seqlens: expected numbers that grow from 0 to S = {len(input)}, got {bounds.tolist() if len(bounds) <= 8 else bounds}"
            )
        return Documents.between(bounds, input.device)

    @staticmethod
    def between(bounds: Tensor, device: torch.device) -> Documents:
        """``bounds``: [N + 1] on the CPU"""
        lengths = bounds.diff()
        by_rank = lengths.argsort(descending=True, stable=True)
        ranks = torch.empty_like(by_rank)
        ranks[by_rank] = torch.arange(len(ranks))
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        at = torch.arange(len(number)) - bounds[number]
        order = (at * len(lengths) + ranks[number]).argsort()
        return Documents(at.bincount(), *(each.to(device) for each in (order, ranks, by_rank)))

    def packed(self, input: Tensor) -> PackedSequence:
        return PackedSequence(input[self.order], self.sizes, self.by_rank, self.ranks)

    def in_sequence(self, packed: PackedSequence) -> Tensor:
        """[S, F], one after the other again."""
        return torch.empty_like(packed.data).index_copy(0, self.order, packed.data)


@dataclass(frozen=True)
class Episodes:
    """Rows that begin anew here and there, each piece of a row as a sequence of its own.

    Attributes:
        documents: the pieces, row after row
        first, last: [B], of each row the numbers of its first and its last piece
        fresh: [B], whether the first piece begins anew, too
        pieces: how many there are
    """

    documents: Documents
    first: Tensor
    last: Tensor
    fresh: Tensor
    pieces: int

    @staticmethod
    def of(reset: Tensor) -> Episodes:
        """``reset``: [T, B]"""
        begins = reset.detach().T.cpu().clone()  # [B, T]
        fresh = begins[:, 0].clone()
        begins[:, 0] = True
        bounds = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()])])
        last = begins.sum(1).cumsum(0) - 1
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        device = reset.device
        documents = Documents.between(bounds, device)
        return Episodes(documents, first.to(device), last.to(device), fresh.to(device), len(bounds) - 1)

    def starts(self, hx: Tensor, directions: int) -> Tensor:
        """Of every piece, [layers * directions, N, H]: those of the rows [layers * directions, B, H] where these begin, else zero."""
        hx = hx.unflatten(0, (-1, directions))
        begun = torch.where(self.fresh.unsqueeze(-1), 0, hx[:, 0])
        found = [torch.zeros_like(begun[:, :1]).expand(-1, self.pieces, -1).index_copy(1, self.first, begun)]
        if directions == 2:
            found.append(torch.zeros_like(found[0]).index_copy(1, self.last, hx[:, 1]))
        return torch.stack(found, 1).flatten(0, 1)

    def ends(self, states: Tensor, directions: int) -> Tensor:
        """Of every row, [layers * directions, B, H], from those of every piece."""
        found = states.unflatten(0, (-1, directions))
        ends = [found[:, at][:, place] for at, place in zip(range(directions), (self.last, self.first), strict=False)]
        return torch.stack(ends, 1).flatten(0, 1)


def begins_backwards(reset: Tensor) -> Tensor:
    """Of rows that begin anew before some steps [T, B], the same where they are read backwards: before the steps that came last before."""
    return torch.cat([torch.zeros_like(reset[:1]), reset[1:].flip(0)])
