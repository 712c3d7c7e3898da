"""Compiles kernels for an H200 on any machine, and prints what they need: python kernel_compiler.py [all]

The interpreter runs kernels that the compiler refuses. So every launch of each family of calls is caught, and its kernel
compiled for what it was given. Run by ``test_compile.py``, in a process whose Triton does not interpret.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import triton

from deeppcr import linear
from deeppcr.linear.kernels import biquad, block_diagonal, dense, diagonal, lookback, recurrence
from deeppcr.nn import adjoint, forward

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from compiler_stages import compiled_up_to
from hopper import HOPPER, source_for

found: list[dict] = []
#: All sizes that differ in how they are compiled, or some that reach every kernel in each of its forms, of which one is compiled further than read.
EVERY = "all" in sys.argv
already: set[tuple] = set()
names: set[tuple] = set()


def compile_for(kernel, arguments, constants, options):
    source = source_for(kernel, [*arguments, *constants])
    asked = source.signature, source.constants, source.attrs, options
    key = (kernel.fn.__module__, kernel.fn.__name__, *map(str, asked))
    if key not in already:
        already.add(key)
        name = (kernel.fn.__module__, kernel.fn.__name__, of.get("width"))
        small = name in names and "tf32x3" not in constants  # products are what shared memory is for
        with compiled_up_to("all" if EVERY else "ttir" if small else "llir"):
            compiled = triton.compile(source, target=HOPPER, options=options)
        names.add(name)
        found.append({"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared, **of})


def caught(kernel, programs, arguments, constants, *, warps, integers=(), registers=None):
    if programs:
        compile_for(kernel, arguments, constants, {"num_warps": warps} | ({"maxnreg": registers} if registers else {}))


if __name__ != "__main__":
    raise ImportError("a program by itself: from here on no kernel is launched")
for module in (biquad, block_diagonal, dense, diagonal, lookback, recurrence, adjoint, forward):
    module.launch = caught
forward.Report.passes_taken = lambda report: [2]
of: dict = {}


def dense_systems():
    for of["width"] in (3, 16, 32, 64, 128, 256) if EVERY else (3, 64):
        data, rhs = torch.empty(99, 2, *[of["width"]] * 2), torch.empty(100, 2, of["width"])
        dense.solve_coupled(linear.Dense(data), rhs, reverse=True)


def scans():
    for of["channels"], length in ((1, 2**20), (3, 8), (8, 2**18), (16, 1000)) if EVERY else ((1, 2**20),):
        data, rhs = torch.empty(length - 1, of["channels"]), torch.empty(length, of["channels"])
        diagonal.solve_coupled(linear.Diagonal(data), rhs)
    for of["channels"], length in ((16, 2**14), (32, 2**15), (2048, 2048)) if EVERY else ((16, 2**14),):
        data, rhs = torch.empty(length - 1, of["channels"]), torch.empty(length, of["channels"])
        plan = lookback.choose(length, of["channels"])
        lookback.run(linear.Diagonal(data), rhs, False, plan if EVERY else replace(plan, run=2))  # runs are unrolled
    for of["size"] in (2, 5) if EVERY else (2,):
        data, rhs = torch.empty(999, 3, of["size"], of["size"]), torch.empty(1000, 3 * of["size"])
        block_diagonal.solve_coupled(linear.BlockDiagonal(data), rhs)


def filters():
    for of["channels"], length, dtype in (
        ((64, 2**19, torch.float32), (3, 20, torch.float64)) if EVERY else ((64, 2**19, torch.float32),)
    ):
        x = torch.empty(1, of["channels"], dtype=dtype).expand(length, -1)
        with mock.patch.object(torch, "empty_like", lambda like, **_: like):
            biquad.run(torch.empty(5, dtype=torch.float64), x, reverse=True)


def networks():
    kinds = ((3, "tanh", 2), (32, "sigmoid", 1), (64, "relu", 1), (128, "relu", 1))
    for of["width"], activation, skip in kinds if EVERY else (kinds[0], kinds[3]):
        blocks, width = 256, of["width"]
        weight = torch.empty(blocks, *[skip] * (skip > 1), width, width)
        start, x = torch.empty(1, width), torch.empty(blocks * skip + 1, 1, width)
        for chunk in (8, blocks) if EVERY or width == 3 else (8,):
            layers = forward.Layers(skip, skip > 1, activation, chunk=chunk)
            forward.run(weight, torch.empty(weight.shape[:-1]), start, None, layers)
            adjoint.all_gradients(weight, x, start, layers)
            if chunk == blocks:  # gradients of all states, not of the last alone
                adjoint.adjoint(weight, x, torch.empty(blocks, 1, width), layers)


for of in ({"family": "dense"}, {"family": "scans"}, {"family": "filters"}, {"family": "networks"}):
    {"dense": dense_systems, "scans": scans, "filters": filters, "networks": networks}[of["family"]]()
json.dump(found, sys.stdout)
