"""Graphs of a step's derivatives, before anything is made of them."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from deeppcr.fuse import derivatives


def test_traced_derivatives_note_what_every_operation_gives():
    """Shapes, strides and kinds, on stand-ins without memory, with which one can go on."""

    def function(x, count):
        return torch.func.jvp(lambda z: torch.where(z.mT > 0, z.mT.double() ** 2, 0.5) @ z[:2].double(), (x,), (x,))[
            1
        ], count

    examples, found = (torch.randn(3, 2).mT, torch.tensor([1, 2])), {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, node):
            found[node] = super().run_node(node)
            return found[node]

    graph = derivatives.traced(function, *examples)
    Noting(graph).run(*examples)
    values = {node: value for node, value in found.items() if isinstance(value, torch.Tensor)}
    assert len(values) > 8
    for node, value in values.items():
        noted = node.meta["val"]
        assert isinstance(noted, FakeTensor)
        assert (noted.shape, noted.dtype, noted.device) == (value.shape, value.dtype, value.device)
        assert (noted + noted).shape == value.shape
    assert {value.dtype for value in values.values()} >= {torch.float32, torch.float64, torch.bool, torch.int64}
    assert [node.meta["val"].stride() for node in graph.graph.nodes if node.op == "placeholder"] == [(1, 2), (1,)]
