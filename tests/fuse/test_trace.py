"""What a step is found to be: its closures, its rows, what is done before the kernels; and its program against PyTorch, by NumPy.

Shapes: B rows, D numbers of the state, L steps. ``CASES`` make a step, z0, xs and batch_dims of random numbers in float64.
"""

import functools
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from deeppcr.fuse import derivatives
from deeppcr.fuse.expressions import NotCovered
from deeppcr.fuse.parts import take_apart
from deeppcr.fuse.step import FusedStep
from deeppcr.fuse.trace import one_row
from deeppcr.sequence.layout import Layout
from fuse.loops import Fused
from kernel_support import thorough

#: closed over as a global variable
GAIN = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Cell(nn.Module):
    """A step as a module, with a parameter, a buffer and modules in it."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, z, x):
        return torch.tanh(self.linear(z)) * self.scale + x


def affine(z, x, weight=None, shift=0.1):
    return torch.sin(z * weight) + shift * x


def elementwise_gru(z, x):
    reset, update, new = x.chunk(3, -1)
    candidate = torch.tanh(new + torch.sigmoid(reset + 0.3 * z) * z)
    gate = torch.sigmoid(update - 0.2 * z)
    return gate * z + (1 - gate) * candidate


def pendulum(z, x):
    angle, speed = z.unbind(-1)
    return z + 0.05 * torch.stack([speed, -torch.sin(angle) - 0.3 * speed + x[..., 0]], -1)


def written_in_place(z, x):
    h = torch.zeros_like(z)
    h[..., 0] = torch.sin(z[..., 1]) + x[..., 0]
    h[..., 1:] = z[..., :-1] * x[..., 1:]
    h[..., 2] += z[..., 0] ** 2
    return h


def kalman(state, x):
    mean, covariance = state["mean"], state["covariance"]
    turn = mean.new_tensor([[1.0, 0.1], [-0.1, 0.9]])
    mean, covariance = (
        (turn @ mean.unsqueeze(-1)).squeeze(-1),
        turn @ covariance @ turn.mT + 0.1 * torch.eye(2).to(mean),
    )
    gain = covariance[..., 0] / (covariance[..., :1, 0] + 0.5)
    missed = x - mean[..., :1]
    left = torch.eye(2).to(mean) - torch.stack([gain, torch.zeros_like(gain)], -1)
    return {"covariance": left @ covariance, "mean": mean + gain * missed}


def closing(function, held):
    """``function(held, z, ...)`` as a step that closes over ``held``."""
    return lambda *arguments: function(held, *arguments)


CASES = {
    # elementwise
    "xs with rows": lambda: (lambda z, x: 0.5 * torch.sin(z) + x, normal(3, 4), normal(5, 3, 4), None),
    "xs shared by rows": lambda: (lambda z, x: 0.5 * torch.sin(z) * x, normal(3, 4), normal(5, 4), None),
    "a number for every step": lambda: (lambda z, x: torch.cos(z) * x, normal(3, 4), normal(5), None),
    "a number for every row": lambda: (lambda z, x: torch.cos(z) * x, normal(3, 4), normal(5, 3, 1), None),
    "no xs": lambda: (torch.cos, normal(3, 4), None, None),
    "one row": lambda: (lambda z, x: torch.cos(z) * x, normal(1, 4), normal(5, 1, 4), None),
    "no rows": lambda: (lambda z, x: torch.cos(z) * x, normal(4), normal(5, 4), None),
    "a single number": lambda: (lambda z, x: torch.cos(z) * x, normal(()), normal(5), 0),
    "rows of single numbers": lambda: (lambda z, x: torch.cos(z) * x, normal(4), normal(5, 4), 1),
    "two dimensions of rows": lambda: (lambda z, x: torch.cos(z) * x, normal(2, 3, 4), normal(5, 2, 3, 4), 2),
    "matrix": lambda: (lambda z, x: torch.cos(z) * x, normal(2, 3, 4), normal(5, 2, 3, 4), 1),
    "as many rows as numbers": lambda: (lambda z, x: torch.cos(z) * x, normal(4, 4), normal(5, 4, 4), None),
    "as many rows as numbers, xs shared": lambda: (lambda z, x: torch.cos(z) * x, normal(4, 4), normal(5, 4), None),
    "closure with rows": lambda: (closing(lambda w, z, x: torch.cos(z) * x + w, normal(3, 4)), normal(3, 4), normal(5, 4), None),
    "closure with one row": lambda: (closing(lambda w, z, x: torch.cos(z) * x + w, normal(1, 4)), normal(3, 4), normal(5, 4), None),
    "closure of one number": lambda: (closing(lambda w, z: torch.cos(z * w), normal(())), normal(3, 4), None, None),
    "global": lambda: (lambda z, x: torch.sin(z * GAIN) + x, normal(2, 3), normal(5, 2, 3), None),
    "default and partial": lambda: (functools.partial(affine, weight=normal(3), shift=0.3), normal(2, 3), normal(5, 2, 3), None),
    "list": lambda: (closing(lambda held, z, x: torch.sin(z * held[0]) + held[1]["shift"] * x, [normal(3), {"shift": normal(())}]),
                     normal(2, 3), normal(5, 2, 3), None),
    "gates": lambda: (elementwise_gru, normal(2, 4), normal(5, 2, 12), None),
    "projected": lambda: (closing(lambda w, z, x: elementwise_gru(z, x @ w), normal(5, 12)), normal(2, 4), normal(5, 2, 5), None),
    "projected, xs shared": lambda: (closing(lambda w, z, x: elementwise_gru(z, x @ w), normal(5, 12)), normal(2, 4), normal(5, 5), None),
    "two leaves": lambda: (lambda z, x: (torch.sin(z[1]) + x, z[0] * z[1]), (normal(2, 4), normal(2, 4)), normal(5, 2, 4), None),
    "three leaves, a nest": lambda: (
        lambda z, x: {"a": (z["b"] * 0.3, torch.sin(z["a"][0])), "b": z["a"][1] + x["in"][0]},
        {"a": (normal(2, 4), normal(2, 4)), "b": normal(2, 4)}, {"in": [normal(5, 2, 4)]}, None,
    ),
    "keys in another order": lambda: (
        lambda z, x: {"b": z["a"] * x, "a": torch.sin(z["b"])}, {"a": normal(2, 3), "b": normal(2, 3)}, normal(5, 3), None,
    ),
    "booleans": lambda: (lambda z, x: torch.where(x, torch.sin(z), 0.5 * z), normal(2, 3), torch.rand(5, 2, 3) > 0.5, None),
    "integers": lambda: (lambda z, x: torch.sin(z) * x + x // 2, normal(2, 3), torch.randint(-3, 3, (5, 3)), None),
    "a nest of kinds": lambda: (
        lambda z, x: torch.where(x[0], z * x[1]["k"], torch.cos(z)), normal(2, 3),
        (torch.rand(5, 2, 1) > 0.5, {"k": torch.randint(-3, 3, (5, 2, 3))}), None,
    ),
    # narrow
    "pendulum": lambda: (pendulum, normal(3, 2), normal(5, 3, 1), None),
    "written in place": lambda: (written_in_place, normal(3, 3), normal(5, 3, 3), None),
    "product": lambda: (closing(lambda w, z, x: torch.tanh(z @ w) + x, normal(3, 3)), normal(2, 3), normal(5, 2, 3), None),
    "product, as many rows": lambda: (closing(lambda w, z, x: torch.tanh(z @ w) + x, normal(3, 3)), normal(3, 3), normal(5, 3, 3), None),
    "product with xs": lambda: (lambda z, x: torch.tanh(z @ x.mT), normal(2, 3), normal(5, 3, 3), None),
    "product with xs of rows": lambda: (lambda z, x: (x @ z.unsqueeze(-1)).squeeze(-1), normal(2, 3), normal(5, 2, 3, 3), None),
    "two dimensions of rows, mixing": lambda: (closing(lambda w, z, x: torch.tanh(z @ w) + x, normal(3, 3)), normal(2, 2, 3), normal(5, 2, 2, 3), 2),
    "no rows, mixing": lambda: (closing(lambda w, z, x: torch.tanh(w @ z) + x, normal(3, 3)), normal(3), normal(5, 3), None),
    "module": lambda: (Cell(3), normal(2, 3), normal(5, 2, 3), None),
    "method": lambda: (Cell(3).forward, normal(2, 3), normal(5, 2, 3), None),
    "widest": lambda: (closing(lambda w, z, x: torch.tanh(z @ w) + x, normal(8, 8)), normal(2, 8), normal(5, 8), None),
    "einsum": lambda: (closing(lambda w, z: torch.einsum("ijk,bj,bk->bi", w, z, z.sin()), normal(3, 3, 3)), normal(2, 3), None, None),
    "layer norm": lambda: (closing(lambda w, z, x: F.layer_norm(z, (4,), w) + x, normal(4)), normal(2, 4), normal(5, 4), None),
    "softmax": lambda: (lambda z, x: F.softmax(z * x, -1) - 0.3, normal(2, 4), normal(5, 4), None),
    "chunk, cat and roll": lambda: (
        lambda z, x: torch.cat([h.roll(1, -1) * x for h in z.chunk(2, -1)][::-1], -1), normal(2, 4), normal(5, 2), None,
    ),
    "a tensor made in the step": lambda: (
        lambda z, x: z.flip(-1) * torch.tensor([0.1, 0.2, 0.3], dtype=z.dtype) + x, normal(2, 3), normal(5, 3), None,
    ),
    "mean and covariance": lambda: (
        kalman, {"mean": normal(2, 2), "covariance": torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)}, normal(5, 2, 1), 1,
    ),
    "projected, narrow": lambda: (
        closing(lambda w, z, x: torch.tanh(z.flip(-1) + (x @ w).reshape(-1, 2)), normal(70, 2)), normal(3, 2), normal(5, 3, 70), None,
    ),
    "numbers of channels, made in the step": lambda: (
        lambda z: torch.sin(z) * torch.tensor([1.0, 2.0, 3.0], dtype=z.dtype), normal(2, 3), None, None,
    ),
    "detached": lambda: (lambda z, x: torch.sin(z.detach()) * x + 0.3 * z * x.detach(), normal(2, 3), normal(5, 3), None),
    "detached, mixing": lambda: (lambda z, x: torch.sin(z.detach()) * x + 0.3 * z.flip(-1) * x.detach(), normal(2, 3), normal(5, 3), None),
    "constant": lambda: (lambda z, x: torch.ones_like(z) * x, normal(2, 3), normal(5, 3), None),
    "xs are the states": lambda: (lambda z, x: x, normal(2, 3), normal(5, 2, 3), None),
    "as it is": lambda: (lambda z, x: z, normal(2, 3), normal(5, 2, 3), None),
}  # fmt: skip


def problem(name):
    step, z0, xs, batch_dims = CASES[name]()
    return Fused(step, z0, xs, length=5, batch_dims=batch_dims)


#: what others show, too
ALIKE = {
    "one row", "a single number", "two leaves", "keys in another order", "method", "as many rows as numbers, xs shared", "product",
    "no rows, mixing", "projected, xs shared", "closure with one row", "matrix", "a number for every row", "a nest of kinds", "gates",
    "product with xs", "einsum", "module", "three leaves, a nest", "integers", "as it is", "widest", "two dimensions of rows", "no rows", "rows of single numbers", "global", "booleans", "layer norm",
    "as many rows as numbers", "chunk, cat and roll", "constant", "no xs", "detached", "list", "pendulum", "xs are the states", "softmax", "closure of one number", "product, as many rows", "default and partial",
}  # fmt: skip


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in ALIKE), *thorough(*sorted(ALIKE))])
def test_a_program_computes_what_the_step_does(name):
    """Values of all rows, Jacobians, and cotangents of all that comes from outside; against autograd through the step."""
    fused, at = problem(name), 3
    layout, program = fused.layout, fused.program
    outside = [leaf for leaf in (*fused.inputs, *fused.row.closures) if leaf.is_floating_point()]
    needed = [leaf.requires_grad for leaf in outside]
    for leaf in outside:
        leaf.requires_grad_()
    initial, adjoint = layout.pack(fused.z0).detach().requires_grad_(), normal(layout.rows, layout.width)
    z, x = layout.unpack(initial), None if fused.xs is None else tree_map(lambda leaf: leaf[at], fused.xs)
    expected = layout.pack(layout.in_order(fused.step(z) if x is None else fused.step(z, x)))
    values, jacobians, cotangents = fused.of_step(at, adjoint)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-12)

    of_initial, *of_outside = (
        torch.autograd.grad(expected, [initial, *outside], adjoint, allow_unused=True, materialize_grads=True)
        if expected.requires_grad
        else map(torch.zeros_like, [initial, *outside])
    )
    by_lane = adjoint.reshape(layout.rows, program.width, -1).mT.reshape(-1, program.width)
    pulled = (jacobians.mT @ by_lane.unsqueeze(-1)).reshape(layout.rows, -1, program.width).mT
    torch.testing.assert_close(pulled.reshape(of_initial.shape), of_initial, rtol=1e-11, atol=1e-11)

    ours = [torch.zeros_like(leaf) for leaf in outside]
    for index, base in enumerate(fused.bases()):
        if index in cotangents and base.requires_grad:
            meta = program.parts.bases[index]
            given = cotangents[index] if meta.per_row else cotangents[index].sum(0)
            whole = torch.zeros_like(base)
            into = whole[at] if meta.per_step else whole
            into.copy_(given.reshape(into.shape))
            found = torch.autograd.grad(base, outside, whole, allow_unused=True, materialize_grads=True)
            ours = [one + other for one, other in zip(ours, found, strict=True)]
    for one, other in zip(ours, of_outside, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for leaf, was in zip(outside, needed, strict=True):
        leaf.requires_grad_(was)


@pytest.mark.parametrize(
    ("name", "elementwise", "rows_of"),
    [
        ("xs with rows", True, [True]),
        ("xs shared by rows", True, [False]),
        ("as many rows as numbers", True, [True]),
        ("as many rows as numbers, xs shared", True, [False]),
        ("closure with rows", True, [False, True]),
        ("product, as many rows", False, [True, False]),
        ("product with xs of rows", False, [True]),
        ("two dimensions of rows, mixing", False, [True, False]),
    ],
)
def test_rows_and_mixing_are_told_apart(name, elementwise, rows_of):
    step, z0, xs, batch_dims = CASES[name]()
    row = one_row(step, Layout.of(z0, batch_dims), xs[0])
    assert row.has_rows == tuple(rows_of)
    assert take_apart(row, 8, 128).elementwise == elementwise


def test_projections_of_xs_are_done_before_the_kernels():
    """In one piece, of which the gates are parts; and what is seen of them lies in it, not in copies."""
    program = problem("projected").program
    (base,) = program.parts.bases
    assert base.shape == (1, 12)
    assert base.per_step
    assert base.per_row
    assert [(leaf.offset, leaf.spacing) for leaf in program.leaves] == [(0, 1), (4, 1), (8, 1)]
    assert program.parts.shown[0] == (True, True)


def test_what_a_step_makes_lies_on_its_device():
    """Also where there are no inputs and no closures that would say which that is."""
    fused = Fused(lambda z: torch.sin(z) * (1 + torch.arange(3, device=z.device)), torch.randn(2, 3), length=5)
    (base,) = fused.program.parts.values([], [], torch.device("meta"))
    assert (base.device.type, tuple(base.shape)) == ("meta", (3,))


def test_xs_are_read_where_they_lie():
    fused = problem("gates")
    (base,) = fused.bases()
    assert base.data_ptr() == fused.xs.data_ptr()


def test_changed_numbers_give_the_same_source():
    """So what was compiled serves them, too."""

    def source(gain):
        return Fused(lambda z: gain * torch.sin(z), normal(2, 3), length=5).kernels.forward_source

    assert source(0.37) == source(0.52)


def test_tensors_that_a_step_closes_over_are_found_once():
    weight, inner = normal(3), normal(3)

    def helper(z):
        return z * inner

    def step(z, x):
        return torch.sin(weight * z) + weight * x + helper(z)

    row = one_row(step, Layout.of(normal(2, 3), None), normal(3))
    assert [id(tensor) for tensor in row.closures] == [id(weight), id(inner)]


def looks_at_values(z):
    return z + 1 if z.sum() > 0 else z - 1


def without_gradients(z):
    with torch.no_grad():
        factor = torch.sin(z)
    return factor * z


def by_numpy(z):
    return torch.from_numpy(np.sin(z.numpy()))


def through_float32(z):
    return torch.sin(z.float()).double()


@pytest.mark.parametrize(
    ("step", "width", "reason"),
    [
        (lambda z: z.sort(-1).values, 3, "aten.sort is not covered"),
        (looks_at_values, 3, "cannot be traced"),
        (without_gradients, 3, "switches gradients off"),
        (by_numpy, 3, "cannot be traced"),
        (through_float32, 3, "float64 beside other floating dtypes"),
        (lambda z: z.flip(-1), 9, "mixes 9 numbers is not covered in float64"),
        (lambda z: z.flip(-1), 129, "mixes 129 numbers is not covered .up to 128."),
        (lambda z: tuple(0.5 * h for h in z), (9,), "a state of 9 tensors is not covered"),
        (lambda z: z * math.pi + torch.rand_like(z), 3, "rand"),
        (lambda z: torch.fft.fft(z).real, 3, "not covered"),
    ],
)
def test_what_is_not_covered_is_named(step, width, reason):
    z0 = normal(2, width) if isinstance(width, int) else tuple(normal(2, 3) for _ in range(*width))
    with pytest.raises(NotCovered, match=reason):
        Fused(step, z0, length=5).kernels.forward_source  # noqa: B018


def test_a_tensor_on_another_device_is_not_covered():
    """Kernels could not read it; a single number is moved."""
    layout = replace(Layout.of(torch.randn(2, 3), None), device=torch.device("cuda", 0))
    for held in (torch.randn(3), torch.randn(1)):
        step = closing(lambda held, z: z * held.to(z.device), held)
        with pytest.raises(NotCovered, match="a tensor on cpu is not covered"):
            FusedStep.of(step, layout, None, None, [held])


def test_autocast_is_not_covered():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotCovered, match="autocast"):
        Fused(torch.cos, normal(2, 3), length=5)


def test_derivatives_are_traced_outside_of_inference_mode(monkeypatch):
    """Where some versions of PyTorch differentiate nothing; nor do they on tensors that were made there."""
    traced = []

    def watched(function, **options):
        def run(*examples):
            assert not torch.is_inference_mode_enabled()
            assert not any(each.is_inference() for each in examples)
            traced.append(make_fx(function, **options)(*examples))
            return traced[-1]

        return run

    monkeypatch.setattr(derivatives, "make_fx", watched)
    with torch.inference_mode():
        fused = Fused(lambda z: torch.sin(z[..., [1, 0]]) * torch.tensor([0.3, 0.7]), torch.randn(3, 2), length=5)
        assert not any(constant.is_inference() for constant in fused.row.graph.buffers())
        assert fused.program.jacobian
        assert fused.program.cotangents == []
    assert len(traced) == 3
    assert any(list(graph.buffers()) for graph in traced)


def test_nothing_is_left_behind_by_tracing():
    """Neither random numbers nor gradients, nor what modules hold."""
    cell, before = Cell(3), torch.get_rng_state()
    kept = {name: (value.clone(), value._version) for name, value in cell.state_dict().items()}
    fused = Fused(cell, normal(2, 3), normal(5, 2, 3))
    torch.random.set_rng_state(before)
    fused.kernels.forward_source, fused.kernels.backward_source  # noqa: B018
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in cell.state_dict().items():
        assert torch.equal(value, kept[name][0])
        assert value._version == kept[name][1]
    assert all(each.grad is None for each in cell.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.thorough
def test_threads_write_what_one_does():
    """PyTorch traces with global settings; code is written line by line. Each step by itself, then all at once."""
    makers = [
        lambda: Fused(pendulum, normal(3, 2), normal(5, 3, 1)),
        lambda: Fused(lambda z, x: F.softmax(z * x, -1) - 0.3, normal(2, 4), normal(5, 4)),
        lambda: Fused(elementwise_gru, normal(2, 4), normal(5, 2, 12)),
    ]
    alone = [(fused.kernels.backward_source, fused.kernels.forward_source) for fused in (make() for make in makers)]
    found, shared = [None] * 6, makers[1]()

    def work(place):
        fused = makers[place]() if place < 3 else shared
        found[place] = fused.kernels.backward_source, fused.kernels.forward_source

    threads = [threading.Thread(target=work, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [*alone, *[alone[1]] * 3]
