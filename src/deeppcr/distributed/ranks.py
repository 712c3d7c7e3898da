"""The ranks that share a sequence: what they tell each other, packed into few messages, and how they fail together.

A rank holds a contiguous part of the steps, which may be empty; the parts follow each other in the order of the ranks. Every method that
speaks is called by all ranks alike, in the same order: it is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

#: Up to so many ranks what each has is gathered by all; among more it travels in log2 rounds of messages, each twice as far.
FEW = 8

#: Of what two neighbours hold, in the order of the steps, what both together hold.
Combine = Callable[[Tensor, Tensor], Tensor]


class RankError(RuntimeError):
    """A rank could not do its part; every rank raises this, with the same message.

    >>> import deeppcr
    >>> issubclass(deeppcr.distributed.RankError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, in the order of the steps they hold.

    Attributes:
        group: of ``torch.distributed``
        rank: which of them this one is, from 0
        count: how many they are
        backwards: they are counted from the last to the first
    """

    group: Any
    rank: int
    count: int
    backwards: bool = False

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """Of a one-dimensional mesh, such as ``mesh["sequence"]``."""
        if isinstance(mesh, Ranks):
            return mesh
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh: expected a one-dimensional DeviceMesh of torch.distributed, got {type(mesh).__name__}"
            )
        if mesh.ndim != 1:
            names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
            raise ValueError(
                f'mesh: expected one dimension, got {mesh.ndim}{names}; take the one that the steps are cut along, as mesh["sequence"]'
            )
        return Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def reversed(self) -> Ranks:
        """The same ranks for a sequence that runs from the last of them to the first."""
        return Ranks(self.group, self.count - 1 - self.rank, self.count, not self.backwards)

    def _place(self, rank: int) -> int:
        """In the group, of a rank in the order of the steps."""
        return self.count - 1 - rank if self.backwards else rank

    # What every rank hears of all.

    def gather(self, tensor: Tensor) -> Tensor:
        """What each rank has, in the order of the ranks: [...] to [ranks, ...]."""
        if self.count == 1:
            return tensor.unsqueeze(0)
        sent = self._out(tensor)
        heard = sent.new_empty(self.count, *sent.shape)
        dist.all_gather([heard[self._place(number)] for number in range(self.count)], sent, group=self.group)
        return self._back(heard, tensor)

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of all ranks, number by number. None may be NaN: what that would give depends on the backend."""
        return self._together(tensor, partial(dist.all_reduce, op=dist.ReduceOp.MAX))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, number by number."""
        return self._together(tensor, partial(dist.all_reduce, op=dist.ReduceOp.SUM))

    def spread(self, tensor: Tensor, rank: int) -> Tensor:
        """What one rank has, on all of them; of the same shape everywhere."""
        return self._together(tensor, partial(dist.broadcast, group_src=self._place(rank)))

    def _together(self, tensor: Tensor, collective: Callable[..., Any]) -> Tensor:
        if self.count == 1:
            return tensor.clone()
        heard = self._out(tensor).clone()
        collective(heard, group=self.group)
        return self._back(heard, tensor)

    def told_by(self, rank: int, text: str) -> str:
        """What one rank says, on all of them."""
        said: list[Any] = [text]
        if self.count > 1:
            dist.broadcast_object_list(said, group=self.group, group_src=self._place(rank))
        return said[0]

    # What is heard of the ranks before.

    def before(self, tensor: Tensor, combine: Combine) -> Tensor | None:
        """What all ranks before this one hold together, as ``combine`` puts it together; None on the first.

        Args:
            tensor: the same shape on every rank
        """
        return self.exchange(tensor, combine, None)[0]

    def exchange(self, tensor: Tensor, combine: Combine, measures: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """``before``, and ``maximum`` of measures [N], in one message where there are few ranks.

        Args:
            tensor: [M]
            measures: [N], of the same dtype
        """
        said = tensor.new_empty(0) if measures is None else measures
        if self.count <= FEW:
            heard = self.gather(torch.cat([tensor, said]) if len(said) else tensor)
            largest = heard[:, len(tensor) :].amax(0)
            found = None
            for each in heard[: self.rank, : len(tensor)]:
                found = each if found is None else combine(found, each)
            return found, largest
        return self._doubling(tensor, combine), self.maximum(said) if len(said) else said

    def _doubling(self, tensor: Tensor, combine: Combine) -> Tensor | None:
        """In round k each rank tells the one 2^k further on what it knows of the 2^k ranks up to itself."""
        found, upto, reach = None, tensor, 1
        while reach < self.count:
            heard = self.shifted(upto, reach)
            if heard is not None:
                found = heard if found is None else combine(heard, found)
                upto = combine(heard, upto)
            reach *= 2
        return found

    def shifted(self, tensor: Tensor, by: int = 1) -> Tensor | None:
        """What the rank so many before this one has; None where there is none. Of the same shape everywhere."""
        sent, heard = self._out(tensor), None
        messages = []
        if self.rank + by < self.count:
            messages.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=self._place(self.rank + by)))
        if self.rank >= by:
            heard = torch.empty_like(sent)
            messages.append(dist.P2POp(dist.irecv, heard, group=self.group, group_peer=self._place(self.rank - by)))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return None if heard is None else self._back(heard, tensor)

    def relay(self, first: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        """One rank after the other: each does its ``work`` on what the one before it hands over, and hands that on.

        Args:
            first: what the first rank begins with; the same shape everywhere

        Returns:
            what the last rank has made of it, on all ranks
        """
        heard = self._out(first)
        if self.rank:
            heard = torch.empty_like(heard)
            dist.recv(heard, group=self.group, group_src=self._place(self.rank - 1))
        done = self._out(work(self._back(heard, first)))
        if self.rank + 1 < self.count:
            dist.send(done, group=self.group, group_dst=self._place(self.rank + 1))
        if self.count > 1:
            dist.broadcast(done, group=self.group, group_src=self._place(self.count - 1))
        return self._back(done, first)

    # How they fail together.

    def agree(self, error: BaseException | None, *facts: int) -> list[tuple[int, ...]]:
        """Whole numbers that each rank knows, on all ranks, in their order; raises on all where one has an error.

        Args:
            error: what this rank could not do
            facts: as many on every rank; with an error they do not count
        """
        device = torch.device(self._device_types()[0])
        told = torch.tensor([error is not None, *facts], dtype=torch.long, device=device)
        heard = [tuple(each) for each in self.gather(told).tolist()]
        if any(each[0] for each in heard):
            self.fail(error)
        return [each[1:] for each in heard]

    def fail(self, error: BaseException | None) -> None:
        """Raise on all ranks what went wrong on some. An error that all have, as of an argument, stays what it is."""
        said: list[Any] = [None] * self.count
        told = None if error is None else (type(error).__name__, str(error))
        if self.count > 1:
            dist.all_gather_object(said, told, group=self.group)
        else:
            said = [told]
        if error is not None and len({None if each is None else each[0] for each in said}) == 1:
            raise error
        rank = next(rank for rank, each in enumerate(said) if each is not None)
        kind, text = said[rank]
        others = sum(each is not None for each in said) - 1
        also = f" (and {others} more)" if others else ""
        # Each rank says the same, whether it was its own error or that of another.
        raise RankError(f"rank {rank} of {self.count}{also}: {kind}: {text}") from error

    # How messages travel.

    def _device_types(self) -> list[str]:
        """Of devices whose tensors the group takes; the host's first, which need not be waited for."""
        return device_types_of(dist.get_backend_config(self.group))

    def _out(self, tensor: Tensor) -> Tensor:
        """A tensor as the group takes it: real, contiguous, on a device of its own."""
        tensor = tensor.detach().resolve_conj()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        types = self._device_types()
        return tensor.contiguous() if tensor.device.type in types else tensor.contiguous().to(types[0])

    def _back(self, heard: Tensor, like: Tensor) -> Tensor:
        heard = heard.to(like.device)
        return torch.view_as_complex(heard) if like.is_complex() else heard


def device_types_of(config: str) -> list[str]:
    """Of devices whose tensors a group takes, given its backends: by gloo, those of accelerators travel by the host.

    >>> device_types_of("cpu:gloo,cuda:gloo"), device_types_of("cuda:nccl"), device_types_of("cpu:gloo,cuda:nccl")
    (['cpu'], ['cuda'], ['cpu', 'cuda'])
    """
    pairs = [each.split(":") for each in config.split(",") if ":" in each]
    return sorted({device for device, backend in pairs if backend != "gloo" or device == "cpu"}) or ["cpu"]


class Trouble:
    """What goes wrong on a rank between two messages: kept until all can hear of it.

    >>> trouble = Trouble()
    >>> with trouble.kept():
    ...     raise ValueError("no")
    >>> trouble.error
    ValueError('no')
    """

    error: Exception | None = None

    def take(self) -> Exception | None:
        """The error, which others are about to hear of."""
        error, self.error = self.error, None
        return error

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is raised inside waits; of several the first."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error
