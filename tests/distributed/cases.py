"""What ranks are asked to do in tests; each returns tensors of this rank's part."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import deeppcr
import deeppcr.nn
from deeppcr import distributed, linear
from linear.test_refine import butterworth

STRUCTURES = {
    "dense": linear.Dense,
    "diagonal": linear.Diagonal,
    "block": linear.BlockDiagonal,
    "scalar": linear.Scalar,
}


def cut(whole: Tensor, mesh, lengths, dim: int = 0) -> Tensor:
    """This rank's part, with a gradient of its own."""
    part = distributed.shard(whole, mesh, dim, lengths=lengths).detach().clone()
    return part.requires_grad_() if part.is_floating_point() or part.is_complex() else part


def system(kind: str, length: int, batch: tuple[int, ...] = (2,), width: int = 4, dtype=torch.float64, gain=0.9):
    """Blocks' data, right-hand side, initial state and weights of a loss."""
    torch.manual_seed(length)
    core = {"dense": (width, width), "diagonal": (width,), "block": (width // 2, 2, 2), "scalar": ()}[kind]
    scale = gain / {"dense": width, "block": 2}.get(kind, 1) ** 0.5
    data = scale * torch.randn(length, *batch, *core, dtype=dtype)
    rhs, weights = (torch.randn(length, *batch, width, dtype=dtype) for _ in range(2))
    return data, rhs, torch.randn(*batch, width, dtype=dtype), weights


def linear_solve(mesh, kind, lengths, reverse, dtype=torch.float64, initial=True, twice=False, gain=0.9, width=4):
    data, rhs, start, weights = system(kind, sum(lengths), dtype=dtype, gain=gain, width=width)
    data, rhs, weights = (cut(each, mesh, lengths) for each in (data, rhs, weights))
    start = start.requires_grad_()
    states = linear.solve(STRUCTURES[kind](data), rhs, start if initial else None, reverse=reverse, mesh=mesh)
    leaves = [data, rhs, *([start] if initial else [])]
    loss = (states * weights.detach()).abs().square().sum()
    if not twice:
        gradients = torch.autograd.grad(loss, leaves)
        return states.detach(), *gradients
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.abs().square().sum() for each in first), leaves)
    return states.detach(), *second


def overflowing(mesh, lengths):
    """A product of all blocks is infinite, while that direction is never taken."""
    length = sum(lengths)
    torch.manual_seed(0)
    data = torch.diag(torch.tensor([30.0, 0.5], dtype=torch.float64)).expand(length, 2, 2)
    rhs = torch.randn(length, 1, 2, dtype=torch.float64)
    rhs[..., 0] = 0
    return _solved(mesh, data, rhs, lengths)


def filtering(mesh, lengths):
    """The companion matrix of a low-pass filter: products of it lose most of their digits."""
    length = sum(lengths)
    torch.manual_seed(0)
    data = butterworth(8, 0.1).expand(length, 8, 8)
    rhs = torch.zeros(length, 1, 8, dtype=torch.float64)
    rhs[..., 0] = torch.randn(length, 1, dtype=torch.float64)
    return _solved(mesh, data, rhs, lengths)


def _solved(mesh, data, rhs, lengths):
    if mesh is None:
        return linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution())
    data, rhs = (distributed.shard(each, mesh, lengths=lengths) for each in (data, rhs))
    return linear.solve(linear.Dense(data), rhs, mesh=mesh)


def refused(mesh, wrong):
    """Rank 1 gives something else than the others."""
    odd = mesh.get_local_rank() == 1
    rhs = torch.zeros(3, 2)
    if wrong == "structure":
        return linear.solve(
            linear.Scalar(torch.zeros(3)) if odd else linear.Diagonal(torch.zeros(3, 2)), rhs, mesh=mesh
        )
    return linear.solve(linear.Diagonal(torch.zeros(3, 5 if odd else 2)), rhs, mesh=mesh)


# Loops.


def loop(name: str, length: int, dtype=torch.float64):
    """A step, its initial state, its inputs and what it closes over."""
    torch.manual_seed(length)
    draw = partial(torch.randn, dtype=dtype)
    if name == "mlp":
        bias = draw(5).requires_grad_()
        return lambda z, w: torch.tanh(z @ w.mT + bias), draw(3, 5), 1.2 * draw(length, 5, 5) / 5**0.5, [bias]
    if name == "gru":
        cell = torch.nn.GRUCell(3, 4, dtype=dtype)
        return deeppcr.rowwise(lambda h, x: cell(x, h)), draw(2, 4), draw(length, 2, 3), [*cell.parameters()]
    if name == "lstm":
        cell = torch.nn.LSTMCell(3, 4, dtype=dtype)
        step = deeppcr.rowwise(lambda state, x: cell(x, state))
        return step, (draw(2, 4), draw(2, 4)), draw(length, 2, 3), [*cell.parameters()]
    if name == "elementwise":
        gain = draw(6).requires_grad_()
        return lambda z, x: torch.sin(gain * z + x), draw(2, 6), draw(length, 2, 6), [gain]
    if name == "rk4":
        friction = torch.tensor(0.1, dtype=dtype, requires_grad=True)

        def field(z, u):
            return torch.stack([z[1], u - friction * z[1] - torch.sin(z[0])])

        def step(z, u, h=0.05):
            a = field(z, u)
            b = field(z + h / 2 * a, u)
            c = field(z + h / 2 * b, u)
            return z + h / 6 * (a + 2 * b + 2 * c + field(z + h * c, u))

        return step, draw(2), 0.1 * draw(length), [friction]
    if name == "dying":  # far below its largest size, which another rank has seen
        rate = torch.tensor(0.5, dtype=dtype, requires_grad=True)
        return lambda z, x: rate * torch.sin(z) + 0 * x, 1 + draw(2, 3).abs(), draw(length, 2, 3), [rate]
    if name == "detached":  # its derivative is not that of its values
        gain = torch.tensor(0.1, dtype=dtype, requires_grad=True)
        return lambda z, x: 0.5 * z.detach() + gain * torch.sin(z) + x, 1 + draw(2, 3), draw(length, 2, 3), [gain]
    if name == "creeping":  # a part of its derivative is hidden, and on no rank by itself is much added up by it
        gain = torch.tensor(0.9, dtype=dtype, requires_grad=True)
        xs = torch.stack([draw(length, 2), torch.full((length, 2), 2e-11, dtype=dtype)], -1)
        return (
            lambda z, x: torch.stack([gain * z[..., 0], z[..., 1].detach()], -1) + x,
            1 + draw(2, 2).abs(),
            xs,
            [gain],
        )
    if name == "reset":  # what is hidden is small beside a burst before it
        gain, xs = torch.tensor(0.0, dtype=dtype, requires_grad=True), torch.zeros(length, 2, 3, dtype=dtype)
        xs[3:6], xs[6] = 1e4, 1.0
        return (
            lambda z, x: torch.where(x > 0, x + gain * z, z.detach() + 5e-8),
            torch.ones(2, 3, dtype=dtype),
            xs,
            [gain],
        )
    if name == "complex":
        turn = torch.polar(torch.full((4,), 0.9, dtype=dtype), draw(4)).requires_grad_()
        start, xs = torch.complex(draw(2, 4), draw(2, 4)), torch.complex(draw(length, 2, 4), draw(length, 2, 4))
        return lambda z, x: turn * z / (1 + z.abs()) + x, start, xs, [turn]
    raise KeyError(name)


SOLVERS = {
    "newton": deeppcr.Newton(),
    "paper": deeppcr.Newton(chunk=1),
    "long chunks": deeppcr.Newton(chunk=7),
    "diagonal": deeppcr.Newton(jacobian=deeppcr.DiagonalJacobian()),
    "local": deeppcr.Newton(scale="local"),
    "shrunk": deeppcr.Newton(shrink=0.9),
    "hutchinson": deeppcr.Newton(jacobian=deeppcr.HutchinsonJacobian(samples=4)),
    "jacobi": deeppcr.Jacobi(),
    "scalar": deeppcr.Newton(jacobian=deeppcr.ScalarJacobian(0.9)),
    "paper's test": deeppcr.Newton(stop=deeppcr.PaperTest(1e-12, 0)),
    "fixed": deeppcr.Newton(stop=deeppcr.FixedIterations(8)),
    "loop": deeppcr.Loop(),
    "usual": None,
}


def leaves_of(nest):
    return pytree.tree_leaves(nest)


def solved(mesh, name, lengths, solver="newton", final=True, **options):
    """States, gradients of this rank's inputs, and of what is shared; and what is said of the whole."""
    step, z0, xs, shared = loop(name, sum(lengths))
    z0 = pytree.tree_map(lambda leaf: leaf.requires_grad_(), z0)
    if mesh is not None:
        xs = cut(xs, mesh, lengths)
        options["mesh"] = mesh
    else:
        xs.requires_grad_()
    solution = deeppcr.solve(step, z0, xs, solver=SOLVERS[solver], **options)
    begin = sum(lengths[: mesh.get_local_rank()]) if mesh is not None else 0
    loss = 0
    for leaf in leaves_of(solution.states):
        numbers = torch.arange(begin + 1, begin + 1 + len(leaf), dtype=torch.float64)
        weights = torch.cos(numbers).view(-1, *(1,) * (leaf.ndim - 1))
        loss = loss + (weights * leaf.abs().square()).sum()
    if final:  # on one rank only: the last state of the whole is on all
        here = 1.0 if mesh is None or mesh.get_local_rank() == 0 else 0.0
        loss = loss + here * sum(leaf.abs().sum() for leaf in leaves_of(solution.final))
    shared = [*leaves_of(z0), *shared]
    of_xs, *of_shared = torch.autograd.grad(loss, [xs, *shared], allow_unused=True, materialize_grads=True)
    return {
        "states": [leaf.detach() for leaf in leaves_of(solution.states)],
        "final": [leaf.detach() for leaf in leaves_of(solution.final)],
        "xs": of_xs,
        "shared": of_shared,
        **said_of(solution),
    }


def said(mesh, name, lengths, solver):
    """What is said of the whole, where no gradient is asked for."""
    step, z0, xs, _ = loop(name, sum(lengths))
    options = {} if mesh is None else {"mesh": mesh}
    xs = xs if mesh is None else distributed.shard(xs, mesh, lengths=lengths)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return said_of(deeppcr.solve(step, z0, xs, solver=SOLVERS[solver], on_failure="return", **options))


def misled(mesh, lengths):
    """Errors of the guess are wiped out by the first half as far as a tolerance sees, and come back in the second."""
    half = sum(lengths) // 2
    factors = torch.tensor([0.5] * half + [2.0] * half, dtype=torch.float64).view(-1, 1, 1).expand(-1, 2, 3)
    guess, options = factors.cumprod(0), {}
    if mesh is not None:
        factors, guess = (distributed.shard(each, mesh, lengths=lengths) for each in (factors, guess))
        options["mesh"] = mesh
    z0 = 1.1 * torch.ones(2, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solver = deeppcr.Jacobi()
        return said_of(
            deeppcr.solve(lambda z, x: x * z, z0, factors, solver=solver, guess=guess, on_failure="return", **options)
        )


def said_of(solution):
    return {
        "result": solution.result.name,
        "iterations": solution.iterations,
        "residual": solution.residual,
        "exact": solution.exact_steps,
        "known": solution.known_steps,
        "message": solution.message,
    }


# What goes wrong.


def broken(mesh, lengths, what, on_failure="loop", solver="newton"):
    """A loop of which something goes wrong at step 8 of the whole."""
    torch.manual_seed(0)
    xs = torch.randn(sum(lengths), 2, 3, dtype=torch.float64)
    z0 = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)

    def step(z, x):
        return torch.tanh(0.5 * z + x)

    if what == "non-finite":
        xs[7, 1, 2] = torch.nan
    if what.startswith("overflow"):
        step = lambda z, x: z * z + x  # noqa: E731
        xs[5 if what == "overflow in a rank's first step" else 7 :] = 1e200
    if what == "raises":
        xs[7] = 77.0

        def step(z, x):
            if float(x.abs().max()) > 70:  # of steps that are evaluated one by one alone
                raise ArithmeticError("77 is no input")
            return torch.tanh(0.5 * z + x)

    if what == "backward":
        xs[7] = 77.0
        step = _NoBackward.step
    if what == "logistic":
        z0 = torch.full((2, 3), 0.3, dtype=torch.float64, requires_grad=True)
        step = lambda z, x: 3.99 * z * (1 - z) + 0 * x  # noqa: E731
    options = {}
    if mesh is not None:
        xs, options["mesh"] = distributed.shard(xs, mesh, lengths=lengths), mesh
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = deeppcr.solve(step, z0, xs, solver=SOLVERS[solver], on_failure=on_failure, **options)
    states = solution.states
    gradient = None
    if (what == "non-finite" and on_failure == "loop") or (
        not what.startswith("overflow") and not solution.result.failed
    ):
        (gradient,) = torch.autograd.grad(states.sum(), z0)
    said = said_of(solution) | {"description": solution.description}
    told = sorted({each.category.__name__ for each in caught if each.category is deeppcr.ConvergenceWarning})
    return said | {"states": states.detach(), "z0": gradient, "warned": told}


class _NoBackward(torch.autograd.Function):
    """Raises in its backward pass at one step, when all steps are evaluated at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, x):
        return torch.tanh(0.5 * z + x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, gradient):
        _, x, output = ctx.saved_tensors
        if not torch._C._are_functorch_transforms_active() and x.max() > 70:
            raise ArithmeticError("no derivative at 77")
        pulled = gradient * (1 - output**2)
        return 0.5 * pulled, pulled

    @staticmethod
    def jvp(ctx, z, x):
        return z

    @staticmethod
    def step(z, x):
        return _NoBackward.apply(z, x)


def refused_solve(mesh, what):
    rank, xs, z0, options = mesh.get_local_rank(), torch.zeros(3, 2), torch.zeros(2), {}
    if what == "z0 differs":
        z0 = z0 + rank
    if what == "solver differs":
        options["solver"] = deeppcr.Loop() if rank else deeppcr.Newton()
    if what == "tolerance differs":
        options["solver"] = deeppcr.Newton(rtol=1e-3 if rank else 1e-6)
    if what == "on_failure differs":
        options["on_failure"] = "return" if rank else "loop"
    if what == "z0 changes places":
        z0 = torch.tensor([1.0, 2.0] if rank else [2.0, 1.0])
    if what == "z0 differs beside something large":
        z0 = torch.tensor([1e8, 1.0 + rank])
    if what == "shape differs":
        z0 = torch.zeros(2 + rank)
        xs = torch.zeros(3, 2 + rank)
    if what == "no steps":
        xs = xs[:0]
    if what == "unrolled":
        options["gradient"] = deeppcr.Unrolled()
    if what == "kept":
        options["keep"] = "last"
    if what == "graph":
        options["solver"] = deeppcr.Loop(by="graph")
    if what == "guess" and rank == 1:
        options["guess"] = torch.zeros(7, 2)
    if what == "step" and rank == 1:
        xs = torch.zeros(3, 5)
    if what == "mesh":
        mesh = "sequence"
    return deeppcr.solve(lambda z, x: z + x, z0, xs, mesh=mesh, **options)


def endless(mesh):
    """Solves until somebody ends it."""
    while True:
        solved(mesh, "rk4", [50, 50])
