"""What ranks are asked to do where something large hides what comes after it."""

from __future__ import annotations

import warnings

import torch

import deeppcr
import test_transient as alone
from deeppcr import distributed
from deeppcr.across.part import Part
from deeppcr.across.progress import Shared
from deeppcr.distributed.ranks import Ranks

SOLVERS = {
    "newton": deeppcr.Newton(),
    "jacobi": deeppcr.Jacobi(),
    "picard": deeppcr.Picard(),
    "diagonal": deeppcr.Newton(jacobian=deeppcr.DiagonalJacobian()),
}


def solved(mesh, step, z0, xs, lengths, solver="newton", chunk=None):
    """What is said of a solve, and the states of this rank; ``step``: by its name in tests/test_transient.py."""
    newton = SOLVERS[solver] if chunk is None else deeppcr.Newton(chunk=chunk)
    xs = distributed.shard(xs, mesh, lengths=lengths)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = deeppcr.solve(getattr(alone, step), z0, xs, solver=newton, mesh=mesh)
    return {
        "states": found.states,
        "result": found.result.name,
        "iterations": found.iterations.view(-1).tolist(),
        "local": None if found.local is None else found.local.view(-1).tolist(),
        "known": found.known_steps.view(-1).tolist(),
        "asked": "digits of every state were asked for" in str(found.plan),
        "told": any(issubclass(each.category, deeppcr.ConvergenceWarning) for each in caught),
    }


def died_out(mesh, seed, lengths):
    """A network whose signals fall, rest, and fall on."""
    make = torch.Generator().manual_seed(seed)
    weights, z0 = torch.randn(600, 8, 8, generator=make) / 8**0.5, torch.randn(4, 8, generator=make)
    weights = distributed.shard(weights, mesh, lengths=lengths)
    found = deeppcr.solve(lambda z, w: torch.tanh(z) @ w.mT, z0, weights, solver=deeppcr.Newton(), mesh=mesh)
    return found.result.name, found.local, int(found.iterations.max())


def hides(mesh, sizes, errors, lengths, rtol):
    """Of sizes [1 + L] of states and their errors, by what ranks tell each other."""
    initial, states = sizes[0].view(1, 1), distributed.shard(sizes[1:].view(-1, 1, 1), mesh, lengths=lengths)
    part = Part(Ranks.of(mesh), torch.tanh, initial, None, len(states), 1)
    entry, *_ = part.meet(states)
    progress = Shared(part, deeppcr.Newton(rtol=rtol), 1)
    return bool(progress.hides(states, torch.full_like(states, errors), None, entry))
