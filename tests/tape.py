"""CUDA graphs without a GPU: the operations of a function, written down with their tensors and numbers and done again.

As in a graph, nothing of the function's Python runs again: what it closed over, read or decided when it was recorded stays.
"""

from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deeppcr.graphs.record import Recorder
from deeppcr.runtime import CAPTURING


class Tape(Recorder):
    recorded = 0

    def record(self, function):
        self.rehearse(function)
        with _Writer() as writer:
            function()
        Tape.recorded += 1
        return writer.replay


def capture(function):
    """As a caller captures a CUDA graph: what does again what ``function`` does, which is told that it is captured.

    An operation that would ask the host raises.
    """
    with patch.dict(CAPTURING, {"cpu": lambda: True}), _Writer() as writer:
        function()
    return writer.replay


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(arguments):
    """Of an operation, whose arguments are at most lists: any nest would take longer than the operation."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


class _Writer(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asks = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if asks or func is torch.ops.aten.lift_fresh.default:  # the latter copies from the host
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        found = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        leaves = [found] if isinstance(found, Tensor) else pytree.tree_leaves(found)
        made = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and not (leaf._is_zerotensor() or leaf.is_meta)
            and _storage(leaf) not in given  # a view follows by itself
        ]
        self.lines.append((func, args, kwargs, leaves, made))
        return found

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, leaves, made in self.lines:
                again = func(*args, **kwargs)
                if made:
                    again = [again] if isinstance(again, Tensor) else pytree.tree_leaves(again)
                for index in made:
                    leaves[index].copy_(again[index])
