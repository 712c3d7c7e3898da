"""Images from noise with the window of steps spread over ranks: each has the denoiser, and evaluates its share of the rows of every call.

torchrun --nproc-per-node=4 examples/distributed/sampling.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from start import say, start
from torch import Tensor, nn

import deeppcr
from deeppcr.diffusion import DDIM, Schedule, Window, sample


class Denoiser(nn.Module):
    """A small convolutional network that is told the time; untrained, which is all the same to how it is evaluated."""

    def __init__(self, channels: int = 32):
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 1, 3, padding=1)
        self.time = nn.Linear(2, channels)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        angle = t.to(z.dtype) / 1000
        when = self.time(torch.stack([torch.sin(angle), torch.cos(angle)], -1))[..., None, None]
        hidden = torch.tanh(self.first(z) + when)
        return 0.9 * z + 0.3 * self.last(torch.tanh(self.middle(hidden)))


@torch.no_grad()
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--side", type=int, default=16, help="of an image")
    given = arguments.parse_args()
    mesh, device = start()
    torch.manual_seed(0)  # the same network and the same noise on every rank
    denoiser = Denoiser().to(device).eval()
    noise = torch.randn(2, 1, given.side, given.side).to(device)
    schedule = Schedule.linear(given.steps)
    window = Window(size=min(64, given.steps))

    def timed(**options):
        dist.barrier()
        begin = time.perf_counter()
        found = sample(denoiser, schedule, noise, step=DDIM(), **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found, time.perf_counter() - begin

    timed(solver=window, mesh=mesh["sequence"])  # the first call looks at the denoiser
    spread, took = timed(solver=window, mesh=mesh["sequence"])
    alone, alone_took = timed(solver=window)
    loop, loop_took = timed(solver=deeppcr.Loop())
    off = float((spread.final - loop.final).abs().max())
    assert off < 1e-2, off
    say(
        f"{given.steps} steps, window of {window.size}, over {mesh.size()} ranks on {device.type}: {spread.results[0].name} after "
        f"{int(spread.iterations.max())} iterations (alone {int(alone.iterations.max())}), {off:.1e} from the loop; "
        f"{took:.2f} s, on one rank {alone_took:.2f} s, the loop {loop_took:.2f} s"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
