"""Recurrent modules of ours beside those of PyTorch: drawn configurations, and how far each is from float64."""

import random

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from deeppcr import nn as ours

KINDS = ("RNN", "GRU", "LSTM")
#: Roundings below this are luck: a tensor of one number may have none at all.
LEAST = {torch.float32: 2 * torch.finfo(torch.float32).eps}


def leaves_of(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, PackedSequence):
        return [nest.data]
    return [leaf for each in nest for leaf in leaves_of(each)]


class Configuration:
    """A module and its arguments, in every precision with the same numbers.

    Args:
        form: "batch", "single" (no batch) or "packed"
        start: whether an initial state is given
    """

    def __init__(self, kind, steps, rows, features, hidden, form="batch", start=False, seed=0, device="cpu", **options):
        self.kind, self.form, self.options, self.device = kind, form, options, device
        self.sizes = features, hidden
        torch.manual_seed(seed)
        self.weights = getattr(nn, kind)(*self.sizes, dtype=torch.float64, **options).float().state_dict()
        batch_first = options.get("batch_first", False)
        shape = (
            (steps, features)
            if form == "single"
            else (rows, steps, features)
            if batch_first
            else (steps, rows, features)
        )
        self.x = torch.randn(shape)
        self.lengths = torch.randint(1, steps + 1, (rows,))
        self.lengths[rows // 2] = steps
        count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        widths = [options.get("proj_size", 0) or hidden, hidden][: 2 if kind == "LSTM" else 1]
        batch = () if form == "single" else (rows,)
        self.start = [torch.randn(count, *batch, width) for width in widths] if start else None

    def module(self, where, dtype, device=None, **options):
        device = device or self.device
        made = getattr(where, self.kind)(*self.sizes, dtype=dtype, device=device, **self.options, **options)
        made.load_state_dict(self.weights)
        return made

    def run(self, module, dtype):
        """Outputs, last states, and gradients of the input, of the initial states and of all parameters."""
        device = next(module.parameters()).device
        x = self.x.to(device, dtype).requires_grad_()
        start = None if self.start is None else [leaf.to(device, dtype).requires_grad_() for leaf in self.start]
        given = x
        if self.form == "packed":
            batch_first = self.options.get("batch_first", False)
            given = pack_padded_sequence(x, self.lengths, batch_first=batch_first, enforce_sorted=False)
        hx = None if start is None else tuple(start) if self.kind == "LSTM" else start[0]
        output, last = module(given, hx)
        if self.form == "packed":
            assert isinstance(output, PackedSequence)
        found = leaves_of((output, last))
        torch.manual_seed(1)
        loss = sum((leaf * torch.randn(leaf.shape, dtype=torch.float64).to(leaf)).sum() for leaf in found)
        sources = [x, *(start or []), *module.parameters()]
        return [*(leaf.detach() for leaf in found), *torch.autograd.grad(loss, sources)]

    def errors(self, dtype, *, jointly=False):
        """Of ours and of PyTorch's, against float64, of each tensor in norm. On a GPU PyTorch's are the larger ones of its two kernels, that and
        the CPU's: where two biases cancel, one of them may have four digits more by luck.

        Args:
            jointly: the gradients of all parameters count as one vector: of a single number, which may be a difference of large ones,
                the ratio of two roundings is luck
        """
        right = self.run(self.module(nn, torch.float64), torch.float64)
        every = [self.run(self.module(nn, dtype, device), dtype) for device in {torch.device(self.device).type, "cpu"}]
        theirs = every[0]
        module = self.module(ours, dtype, mode="parallel")
        found = self.run(module, dtype)
        assert [(leaf.shape, leaf.dtype) for leaf in found] == [(leaf.shape, leaf.dtype) for leaf in theirs]
        assert len(module.solutions) == len(module._all_weights)
        if jointly:
            count = len(list(module.parameters()))
            found, right, *every = ([*each[:-count], flat(each[-count:])] for each in (found, right, *every))
        return [
            (error(one, each), max(error(other, each) for other in others))
            for one, each, *others in zip(found, right, *every, strict=True)
        ]


def flat(tensors):
    return torch.cat([each.flatten() for each in tensors])


def error(found, right):
    found, right = found.detach().cpu().double(), right.detach().cpu().double()
    size = float(right.norm())
    return float((found - right).norm()) / (size or 1.0)


def skip_where_pytorch_has_no_half_precision(kind, device):
    """Its own kernel under autocast: that of an LSTM needs more than some CPUs have."""
    try:
        with torch.autocast(device.type, torch.bfloat16):
            getattr(nn, kind)(2, 2, device=device)(torch.zeros(2, 1, 2, device=device))
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
        pytest.skip(f"PyTorch's own {kind} has no bfloat16 on this processor")


def drawn(seed, device="cpu"):
    """A configuration, most of them small."""
    draw = random.Random(seed)
    kind, hidden = draw.choice(KINDS), draw.choice((1, 2, 3, 5, 8))
    options = {
        "num_layers": draw.choice((1, 1, 2, 3)),
        "bidirectional": draw.random() < 0.4,
        "bias": draw.random() < 0.7,
        "batch_first": draw.random() < 0.4,
    }
    if kind == "RNN":
        options["nonlinearity"] = draw.choice(("tanh", "relu"))
    if kind == "LSTM" and hidden > 1 and draw.random() < 0.4:
        options["proj_size"] = draw.randrange(1, hidden)
    steps, rows = draw.choice((1, 2, 3, 17, 63, 65)), draw.choice((1, 2, 3))
    form, start = draw.choice(("batch", "batch", "single", "packed")), draw.random() < 0.5
    return Configuration(kind, steps, rows, draw.choice((1, 2, 4)), hidden, form, start, seed, device, **options)
