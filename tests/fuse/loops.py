"""What the tests of steps as kernels share: loops as they stand, and a step's program computed by NumPy."""

import math

import numpy as np
import torch
from torch.utils import _pytree as pytree

from deeppcr import Newton
from deeppcr.fuse.back import Apply, chunk_of, pull_back
from deeppcr.fuse.compiled import Kernels
from deeppcr.fuse.expressions import FUNCTIONS
from deeppcr.fuse.kinds import Kind
from deeppcr.fuse.program import program_of
from deeppcr.fuse.run import Run, solve
from deeppcr.fuse.trace import TRACING, one_row
from deeppcr.sequence.layout import Layout
from fuse.emitted import NumPyLanguage
from kernel_support import error


def by_loop(step, z0, xs=None, length=None):
    """The states of the bare loop, a nest like z0, [L, ...] each."""
    states, z = [], z0
    for l in range(length or len(pytree.tree_leaves(xs)[0])):
        z = step(z) if xs is None else step(z, pytree.tree_map(lambda leaf, l=l: leaf[l], xs))
        states.append(z)
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)


class Fused:
    """A step with its kernels, on one problem."""

    def __init__(self, step, z0, xs=None, *, length=None, batch_dims=None):
        self.layout = Layout.of(z0, batch_dims)
        self.step, self.z0, self.xs = step, z0, xs
        self.inputs = [] if xs is None else pytree.tree_leaves(xs)
        self.length = length or len(self.inputs[0])
        first = None if xs is None else pytree.tree_map(lambda leaf: leaf[0], xs)
        with TRACING:
            self.row = one_row(step, self.layout, first)
            self.program = program_of(self.row, self.layout)
        self.kernels = Kernels(self.program)

    def bases(self):
        closures = [tensor.to(self.layout.device) for tensor in self.row.closures]
        return self.program.parts.values(self.inputs, closures, self.layout.device)

    def run(self):
        return Run(self.kernels, self.layout.pack(self.z0), self.bases(), self.length)

    def solve(self, chunk, *, newton=Newton(), guess=None, rolls=0):
        """What the kernels find, by chunks that are so large at first."""
        self.kind = Kind(self.length, chunk, rolls)
        return solve(self.run(), self.kind, newton.tolerance(self.layout.dtype), guess)

    def states(self, chunk, **options):
        """The same as states, differentiable."""
        run, bases = self.run(), self.bases()
        found = self.solve(chunk, **options)
        return self.layout.nest(
            Apply.of(run, self.layout, (found.states, chunk_of(run, found.chunk)), pytree.tree_leaves(self.z0), bases)
        )

    def of_step(self, l, adjoint=None):
        """What the program says of step l from z0 on, by NumPy: values [B, D], Jacobians [R, K, K] and, by base, cotangents [B, ...].

        Args:
            adjoint: [B, D], of the values
        """
        program, rows, real = self.program, self.layout.rows, np.float64
        channels, width = program.channels, program.width
        names = {**FUNCTIONS, "tl": NumPyLanguage, "REAL": real}
        lanes = self.layout.pack(self.z0).detach().reshape(rows, width, channels)
        for k in range(width):
            names[f"z{k}"] = lanes[:, k].reshape(-1).numpy().astype(real)
            if adjoint is not None:
                names[f"w{k}"] = adjoint.reshape(rows, width, channels)[:, k].reshape(-1).numpy().astype(real)
        where = {}
        for read in program.reads:
            leaf = program.leaves[read.leaf]
            base = self.bases()[leaf.base].detach()
            at_step = base[l] if leaf.per_step else base
            flat = (at_step if leaf.per_row else at_step.expand(rows, *at_step.shape)).reshape(rows, -1)
            place = torch.arange(channels) * leaf.spacing + leaf.offset if program.elementwise else [read.offset]
            values = flat[:, place].reshape(-1).numpy()
            names[read.value.name] = values if read.value.kind != "real" else values.astype(real)
            where[read.value.name] = leaf.base, place
        wanted = [*program.values, *(each for row in program.jacobian for each in row)]
        if adjoint is not None:
            wanted += [value for _, value in program.cotangents]
        lines = [line for level in (0, 1) for line in program.code.lines(level, wanted)]
        texts = [program.code.text(each) for each in wanted]
        names.update({f"n{at}": real(number) for at, number in enumerate(program.code.numbers)})
        with np.errstate(all="ignore"):
            exec("\n".join(lines), names)
            found = [
                torch.from_numpy(np.broadcast_to(eval(text, names), rows * channels).astype(real)) for text in texts
            ]
        values = torch.stack(found[:width], 1).reshape(rows, channels, width).mT.reshape(rows, -1)
        jacobians = torch.stack(found[width : width + width**2], -1).unflatten(-1, (width, width))
        cotangents = {}
        if adjoint is not None:
            for (read, _), value in zip(program.cotangents, found[width + width**2 :], strict=True):
                index, place = where[read.value.name]
                size = math.prod(program.parts.bases[index].shape)
                into = cotangents.setdefault(index, torch.zeros(rows, size, dtype=torch.float64))
                for c in range(channels):
                    into[:, place[c]] += value.reshape(rows, channels)[:, c]
        return values, jacobians, cotangents


def check_any_chunk(fused, rounding):
    """Cotangents are pulled back to the same by chunks of any size."""
    found, run = fused.solve(4), fused.run()
    given = torch.randn_like(found.states)
    initial, bases = pull_back(run, found.states, given, 13)
    for chunk in (1, 5):
        of_initial, of_bases = pull_back(run, found.states, given, chunk)
        for a, b in zip((of_initial, *of_bases), (initial, *bases), strict=True):
            assert error(a, b) < rounding
