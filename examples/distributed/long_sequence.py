"""A sequence of a million steps over ranks: an oscillator that noise drives, by Runge-Kutta, and the gradient in its friction.

Each rank draws the noise of its own steps, holds the states of its own steps, and no rank ever has all of them.

    torchrun --nproc-per-node=4 examples/distributed/long_sequence.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from start import say, start
from torch import Tensor

import deeppcr


def oscillator(friction: Tensor, h: float = 0.02):
    """``step(z, u)`` of a pendulum at [..., 2] angle and speed, pushed by u."""

    def slope(z: Tensor, u: Tensor) -> Tensor:
        angle, speed = z.unbind(-1)
        return torch.stack([speed, u - friction * speed - torch.sin(angle)], -1)

    def step(z: Tensor, u: Tensor) -> Tensor:
        a = slope(z, u)
        b = slope(z + h / 2 * a, u)
        c = slope(z + h / 2 * b, u)
        return z + h / 6 * (a + 2 * b + 2 * c + slope(z + h * c, u))

    return step


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=2**20, help="of all ranks together")
    total = arguments.parse_args().steps
    mesh, device = start()
    rank, count = mesh.get_local_rank(), mesh.size()
    own = total // count + (rank < total % count)
    generator = torch.Generator(device).manual_seed(rank)
    pushes = 0.5 * torch.randn(own, generator=generator, device=device, dtype=torch.float64)
    friction = torch.tensor(0.5, device=device, dtype=torch.float64, requires_grad=True)
    step, z0 = oscillator(friction), torch.tensor([1.0, 0.0], device=device, dtype=torch.float64)

    dist.barrier()
    begin = time.perf_counter()
    solution = deeppcr.solve(step, z0, pushes, mesh=mesh["sequence"])
    found = time.perf_counter() - begin
    # The mean energy of all steps; each rank has its part of it, and of its gradient.
    energy = (solution.states[:, 1].square() / 2 + 1 - torch.cos(solution.states[:, 0])).sum() / total
    energy.backward()
    took = time.perf_counter() - begin
    sums = torch.stack([energy.detach(), friction.grad])
    dist.all_reduce(sums)

    if rank == 0:  # which holds the first steps: the plain loop bears them out
        z, off = z0, 0.0
        for state, push in zip(solution.states[:500].detach(), pushes[:500], strict=False):
            z = step(z, push).detach()
            off = max(off, float((z - state).abs().max()))
        assert off < 1e-8, off
    say(
        f"{total} steps over {count} ranks on {device.type}: {solution.result.name} after {int(solution.iterations)} iterations, residual "
        f"{float(solution.residual):.1e}; {found:.1f} s, with the gradient {took:.1f} s; energy {sums[0]:.4f}, d energy / d friction {sums[1]:.4f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
