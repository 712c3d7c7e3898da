"""What tests of ``torch.compile`` share."""

from __future__ import annotations

import torch


def compiled_and_counted(function, backend="aot_eager", **options):
    """``function`` compiled in one piece, and the list that its graphs are put into, one for each compilation."""
    # Not before a test runs: it imports Triton, which then no longer asks whether to interpret.
    from torch._dynamo.backends.registry import lookup_backend

    torch.compiler.reset()
    graphs, compiler = [], lookup_backend(backend)

    def counting(graph, inputs):
        graphs.append(graph)
        return compiler(graph, inputs)

    return torch.compile(function, backend=counting, fullgraph=True, **options), graphs


def value_and_gradients(function, *tensors, changing=0):
    """What ``function`` gives, and the gradients of a sum of it in all tensors; of the first ``changing`` ones the length may change."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    for leaf in leaves[:changing]:
        torch._dynamo.mark_dynamic(leaf, 0)
    value = function(*leaves)
    return value, *torch.autograd.grad(value.sin().sum(), leaves)
