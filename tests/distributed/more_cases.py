"""Further things that ranks are asked to do in tests: messages, networks, diffusion, training, kernels."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
import deeppcr.nn
from deeppcr import distributed
from deeppcr.diffusion import DDIM, DDPM, Noise, Schedule, Window, sample
from distributed.cases import SOLVERS, cut, leaves_of, linear_solve, solved

# What is said, and how tensors are cut.


@contextmanager
def counted():
    """Messages that this rank takes part in, and the bytes that it hands over in them, by kind."""
    said: dict[str, list[int]] = {}

    def watch(name, sent):
        given = getattr(dist, name)

        def call(*args, **options):
            said.setdefault(name, []).append(sent(*args))
            return given(*args, **options)

        return mock.patch.object(dist, name, call)

    def size(tensor, *_):
        return tensor.numel() * tensor.element_size()

    with ExitStack() as stack:
        for name in ("all_reduce", "broadcast", "send", "recv"):
            stack.enter_context(watch(name, size))
        stack.enter_context(watch("all_gather", lambda _, tensor: size(tensor)))
        stack.enter_context(
            watch("batch_isend_irecv", lambda messages: sum(size(m.tensor) for m in messages if m.op is dist.isend))
        )
        stack.enter_context(watch("all_gather_object", lambda *_: 0))
        yield said


@contextmanager
def in_rounds(few=1):
    """As among more ranks than gather everything."""
    with mock.patch("deeppcr.distributed.ranks.FEW", few), mock.patch("deeppcr.linear.sharded.FEW", few):
        yield


def solved_in_rounds(mesh, **arguments):
    with in_rounds():
        return solved(mesh, **arguments)


def linear_in_rounds(mesh, **arguments):
    with in_rounds():
        return linear_solve(mesh, **arguments)


def traffic(mesh, length, width=3, rows=2, solver="newton", rounds=False):
    """Of a solve and of its backward pass; and how many iterations it took."""
    torch.manual_seed(0)
    weight = 0.8 * torch.randn(width, width, dtype=torch.float64) / width**0.5
    xs = torch.sin(torch.arange(length * rows * width, dtype=torch.float64)).view(length, rows, width)
    xs = distributed.shard(xs, mesh).clone().requires_grad_()
    z0 = torch.zeros(rows, width, dtype=torch.float64)
    with in_rounds() if rounds else nullcontext():
        with counted() as forward:
            newton = deeppcr.Newton(stop=deeppcr.FixedIterations(4), chunk=1) if solver == "fixed" else SOLVERS[solver]
            solution = deeppcr.solve(lambda z, x: torch.tanh(z @ weight.mT + x), z0, xs, solver=newton, mesh=mesh)
        with counted() as backward:
            solution.states.sum().backward()
    return forward, backward, int(solution.iterations.max())


def memory(mesh, length, width=16):
    """Bytes of tensors that live at most while a solve runs, beyond those before it."""
    torch.manual_seed(0)
    xs = distributed.shard(torch.randn(length, 1, width), mesh).clone()
    z0 = torch.zeros(1, width)
    weight = torch.randn(width, width) / width
    gc.collect()
    with Peak() as peak:
        deeppcr.solve(lambda z, x: torch.tanh(z @ weight.mT + x), z0, xs, solver=deeppcr.Newton(chunk=1), mesh=mesh)
    return peak.most


class Peak(TorchDispatchMode):
    """How much memory the storages that operations return hold at most at a time."""

    def __init__(self):
        super().__init__()
        self.held, self.most, self.alive = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.held:
                    size, key = storage.nbytes(), storage._cdata
                    self.held[key] = size
                    self.alive += size
                    weakref.finalize(storage, self._gone, key)
        self.most = max(self.most, self.alive)
        return found

    def _gone(self, key):
        self.alive -= self.held.pop(key, 0)


def cut_and_put_together(mesh, size, lengths=None, dim=0):
    """A tensor cut up, put together, and what a loss of each rank says of it."""
    torch.manual_seed(0)
    shape = [3, 4]
    shape[dim] = size
    whole = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    part = distributed.shard(whole, mesh, dim, lengths=lengths)
    (of_whole,) = torch.autograd.grad(part.square().sum(), whole, retain_graph=True)
    leaf = part.detach().requires_grad_()
    together = distributed.gather(leaf, mesh, dim)
    weight = 1.0 + mesh.get_local_rank()
    (of_part,) = torch.autograd.grad((weight * together.square()).sum(), leaf)
    return part.detach(), together.detach(), of_whole, of_part


def with_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    whole = torch.arange(14.0).view(7, 2)
    given = distribute_tensor(whole, mesh, [Replicate()])
    part = distributed.shard(given, mesh)
    together = distributed.gather(part, mesh)
    assert isinstance(part, DTensor)
    assert part.placements == (Shard(0),)
    assert together.placements == (Replicate(),)
    return torch.equal(together.to_local(), whole)


# Networks.


def network(name, **options):
    torch.manual_seed(0)
    kind = getattr(deeppcr.nn, name)
    return kind(3, 4, dtype=torch.float64, **options)


def recurrent(mesh, name, lengths, mode=None, hx=True, reset=False, **options):
    """Outputs, last states and gradients of a network over ranks, or in one process."""
    made, total = network(name, **options), sum(lengths)
    input = torch.randn(total, 2, 3, dtype=torch.float64)
    count = len(made._all_weights)
    starts = tuple(torch.randn(count, 2, 4, dtype=torch.float64).requires_grad_() for _ in made._widths())
    resets = torch.rand(total, 2) < 0.2 if reset else None
    given = {"mode": mode or "parallel"}
    if mesh is not None:
        input, given["mesh"] = cut(input, mesh, lengths), mesh
        resets = distributed.shard(resets, mesh, lengths=lengths) if reset else None
    else:
        input.requires_grad_()
    x, dim = (input.transpose(0, 1), 1) if made.batch_first else (input, 0)
    if reset:
        given["reset"] = resets.T if made.batch_first else resets
    output, last = made(x, (starts[0] if len(starts) == 1 else starts) if hx else None, **given)
    output = output.movedim(dim, 0)
    begin = sum(lengths[: mesh.get_local_rank()]) if mesh is not None else 0
    weights = torch.cos(torch.arange(begin, begin + len(output), dtype=torch.float64))
    loss = (weights[:, None, None] * output.square()).sum()
    here = 1.0 if mesh is None or mesh.get_local_rank() == 0 else 0.0
    loss = loss + here * sum(leaf.sum() for leaf in leaves_of(last))
    shared = [*made.parameters(), *(starts if hx else [])]
    of_input, *of_shared = torch.autograd.grad(loss, [input, *shared], allow_unused=True, materialize_grads=True)
    return {
        "states": [output.detach()],
        "final": [leaf.detach() for leaf in leaves_of(last)],
        "xs": of_input,
        "shared": of_shared,
        "results": [each.result.name for each in made.solutions],
    }


def refused_network(mesh, what):
    made = network("GRU", bidirectional=what == "reset")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    if what == "packed":
        return made(torch.nn.utils.rnn.pack_sequence([x[:, 0]]), mesh=mesh)
    if what == "reset":
        return made(x, reset=torch.zeros(5, 2, dtype=torch.bool), mesh=mesh)
    if what == "start":
        return made(x, torch.zeros(1, 2, 4, dtype=torch.float32 if mesh.get_local_rank() == 1 else x.dtype), mesh=mesh)
    return made(x[..., :2] if mesh.get_local_rank() == 1 else x, mesh=mesh)


# Diffusion.


def denoised(
    mesh, step="ddim", length=60, samples=2, width=40, guided=False, solver=None, shared_loss=True, wrong=None
):
    """Samples of a small network, and the gradients of a loss."""
    torch.manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64)
    weights = [(draw(width, width) / width**0.5).requires_grad_() for _ in range(2)]
    labels = draw(3, width)

    def denoiser(z, t, classes=None):
        if wrong == "raises" and mesh.get_local_rank() == 1 and len(z) > 8:
            raise ArithmeticError("no such noise")
        hidden = torch.tanh(z @ weights[0] + torch.cos(t / 30.0).unsqueeze(-1).to(z))
        return hidden @ weights[1] + (0 if classes is None else labels[classes])

    sampler = {"ddim": DDIM(), "ddpm": DDPM()}[step]
    initial, steps = draw(samples, width), draw(length, samples, width)
    if wrong == "noise" and mesh.get_local_rank() == 1:
        initial = initial + 1
    initial.requires_grad_()
    noise = Noise(initial, steps) if step == "ddpm" else initial
    options = {"classes": torch.arange(samples) % 3, "guidance": 1.5, "unconditional": 0} if guided else {}
    if mesh is not None:
        options["mesh"] = mesh
    solver = Window(size=32) if solver is None else solver
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sample(denoiser, Schedule.linear(length), noise, step=sampler, solver=solver, **options)
    of_noise, *of_weights = torch.autograd.grad(
        found.final.square().sum(), [initial, *weights], allow_unused=True, materialize_grads=True
    )
    return {
        "final": found.final.detach(),
        "iterations": found.iterations,
        "residual": found.residual,
        "results": [each.name for each in found.results],
        "evaluations": found.evaluations,
        "noise": of_noise,
        "weights": of_weights,
    }


# Training.


class Model(torch.nn.Module):
    """A learned start, a projection, a loop over ranks and a readout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru = deeppcr.nn.GRU(3, 4, dtype=torch.float64, mode="parallel")
        self.start = torch.nn.Parameter(torch.randn(1, 1, 4, dtype=torch.float64))
        self.out = torch.nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x, mesh=None):
        output, _ = self.gru(x, self.start.expand(-1, x.shape[1], -1), mesh=mesh)
        return self.out(output)


def data(length, rows):
    torch.manual_seed(1)
    return torch.randn(length, rows, 3, dtype=torch.float64), torch.randn(length, rows, 2, dtype=torch.float64)


def trained(mesh, how, length=22, rows=4, steps=3):
    """Parameters after some steps of training; ``how``: "alone", "ddp" or "fsdp"; over half of the ranks for rows, and two for steps."""
    model, (x, y) = Model(), data(length, rows)
    scale, sequence = 1.0, None
    if how != "alone":
        grid = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("data", "sequence"))
        sequence = grid["sequence"]
        x, y = (distributed.shard(each, grid["data"], 1) for each in (x, y))
        x, y = (distributed.shard(each, sequence, 0, lengths=[9, length - 9]) for each in (x, y))
        if how == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            flat = init_device_mesh("cpu", (mesh.size(),))
            for part in (model.gru, model.out, model):
                fully_shard(part, mesh=flat)
        scale = float(mesh.size())  # they average what is to be summed up
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x, mesh=sequence) - y).square().sum() / (length * rows)
        (scale * loss).backward()
        optimizer.step()
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).detach() for each in model.parameters()]


# Kernels.


def fused(mesh, kind, lengths):
    """The second solve of a kind, whose chunks are rolled out by kernels, interpreted; without a mesh, the loop."""
    torch.manual_seed(0)
    width = {"elementwise": 5, "narrow": 3, "tile": 12}[kind]
    weight = (0.8 * torch.randn(width, width) / width**0.5).requires_grad_()
    gain = (0.8 * torch.rand(width)).requires_grad_()
    shared = gain if kind == "elementwise" else weight
    xs, z0 = torch.randn(sum(lengths), 2, width), torch.randn(2, width).requires_grad_()

    def step(z, x):
        return torch.tanh((gain * z if kind == "elementwise" else z @ weight.mT) + x)

    if mesh is None:
        xs, solver = xs.requires_grad_(), deeppcr.Loop()
        solution = deeppcr.solve(step, z0, xs, solver=solver)
    else:
        xs = cut(xs, mesh, lengths)
        with mock.patch("deeppcr.runtime.KERNEL_DEVICES", {"cpu"}):
            for _ in range(2):
                solution = deeppcr.solve(step, z0, xs, solver=deeppcr.Newton(chunk=4), mesh=mesh)
    begin = sum(lengths[: mesh.get_local_rank()]) if mesh is not None else 0
    weights = torch.cos(torch.arange(begin, begin + len(xs), dtype=torch.float32))[:, None, None]
    of_xs, *of_shared = torch.autograd.grad(
        (weights * solution.states).sum(), [xs, z0, shared], allow_unused=True, materialize_grads=True
    )
    return {
        "states": [solution.states.detach()],
        "final": [solution.final.detach()],
        "xs": of_xs,
        "shared": of_shared,
        "notes": solution.plan.notes,
        "result": solution.result.name,
    }


def written_at_once(mesh, folder):
    """All ranks write the same source of kernels to a fresh folder at the same moment, and import it."""
    from deeppcr.fuse import compiled, kept

    source = deeppcr.fuse.source(lambda z: torch.sin(z) * 0.5, torch.zeros(3))
    with mock.patch.object(kept, "_folder", return_value=Path(folder)):
        compiled.module_of.cache_clear()
        dist.barrier(mesh.get_group())
        module = compiled.module_of(source + f"# {folder}\n")
    return hasattr(module, "roll"), Path(module.__file__).read_text() == source + f"# {folder}\n"


def vanishing(mesh, lengths):
    """A ReLU network whose states die out: below the tolerance their signs are not known, and its derivative is all about signs."""
    torch.manual_seed(0)
    weights = (torch.randn(sum(lengths), 16, 16) / 4).requires_grad_()
    z0, options = torch.randn(4, 16), {}
    own = weights
    if mesh is not None:
        own, options["mesh"] = distributed.shard(weights, mesh, lengths=lengths), mesh
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solver = deeppcr.Newton() if mesh is not None else deeppcr.Loop()
        solution = deeppcr.solve(lambda z, w: torch.relu(z) @ w.mT, z0, own, solver=solver, **options)
    (gradient,) = torch.autograd.grad(solution.states.square().sum() + solution.states.sum(), weights)
    return gradient, solution.result.name, [str(each.message) for each in caught]
