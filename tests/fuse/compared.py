"""Steps with kernels, and how their states and all gradients are held against the bare loop."""

import torch
from torch.utils import _pytree as pytree

from fuse.loops import Fused, by_loop
from kernel_support import error


def normal(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=device)


def elementwise(leaves, device, rows=3, length=13, channels=4):
    """A step of so many leaves that closes over a tensor of channels, one of rows and a number."""
    weight, shift = normal(channels, device=device), normal(rows, channels, device=device)
    gain = torch.tensor(0.6, dtype=torch.float64)  # on the CPU wherever the state is

    def step(z, x):
        z = (z,) if leaves == 1 else z
        total = sum(z[1:], z[0])
        found = tuple(gain * torch.sin(weight * h + 0.3 * i * total) + x for i, h in enumerate(z))
        found = (found[0] + 0.1 * shift, *found[1:])
        return found[0] if leaves == 1 else found

    z0 = tuple(normal(rows, channels, device=device) for _ in range(leaves))
    xs = normal(length, rows, channels, device=device)
    return step, z0[0] if leaves == 1 else z0, xs, [weight, shift, gain]


def narrow(width, device, rows=3, length=13):
    """A step that mixes so many numbers, by a matrix that it closes over and one of every step that rows share."""
    weight, shift = normal(width, width, device=device) / (1 + width), normal(rows, width, device=device)

    def step(z, x):
        of_row, of_all = x
        return torch.tanh(z @ weight + 0.3 * (z @ of_all)) + of_row * shift

    xs = normal(length, rows, width, device=device), normal(length, width, width, device=device) / (1 + width)
    return step, normal(rows, width, device=device), xs, [weight, shift]


def compare(step, z0, xs, closures, chunk, rtol=1e-9, length=None, **options):
    """States, and gradients of z0, xs and closures, are those of the loop."""
    given = [*pytree.tree_leaves(z0), *pytree.tree_leaves(xs), *closures]
    given = [tensor for tensor in given if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]
    for tensor in given:
        tensor.requires_grad_()
    fused = Fused(step, z0, xs, length=length)
    ours, theirs = fused.states(chunk, **options), by_loop(step, z0, xs, length)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    losses = []
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert error(a, b) < rtol
        weights = torch.randn_like(b)
        losses.append(((a * weights).sum(), (b * weights).sum()))
    ours, theirs = (torch.autograd.grad(sum(loss), given) for loss in zip(*losses, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.device == b.device
        assert error(a, b) < rtol
    return fused
