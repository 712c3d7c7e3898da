"""What warm public calls take of the host, on a GPU: python benchmarks/host_time.py

Not how long a call takes: until it returns, with nothing waiting on the device. The least of several runs, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deeppcr import linear, nn

CALLS, RUNS = 50, 20


def host_time(call: Callable[[], Any]) -> float:
    for _ in range(10):  # compiles, loads, and fills the caches
        call()
    least = float("inf")
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, time.perf_counter() - begun)
    return 1e6 * least / CALLS


def calls(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    def system(structure: type[linear.Blocks], *data: int, width: int) -> Callable[[], Any]:
        blocks, rhs = structure(torch.rand(data, device=device) / width), torch.rand(data[0], width, device=device)
        return lambda: linear.solve(blocks, rhs)

    yield "linear.solve, Dense, L = 1,024, w = 16", system(linear.Dense, 1024, 16, 16, width=16)
    yield "linear.solve, Dense, L = 16,384, w = 4", system(linear.Dense, 16384, 4, 4, width=4)
    yield "linear.solve, Diagonal, one sequence of 2^20", system(linear.Diagonal, 2**20, 1, width=1)
    yield "linear.solve, Diagonal, 64 sequences of 16,384", system(linear.Diagonal, 16384, 64, width=64)
    yield "linear.solve, BlockDiagonal, L = 1,024, 4 of 2 x 2", system(linear.BlockDiagonal, 1024, 4, 2, 2, width=8)
    x = torch.rand(1, 4, device=device)
    mlp = nn.MLP(4, 4, 1024, 3, mode="parallel", device=device).requires_grad_(False)
    resnet = nn.ResNet(4, 4, 256, 3, skip=4, mode="parallel", device=device).requires_grad_(False)
    yield "MLP, 1,024 layers, forward (waits for the device)", lambda: mlp(x)
    yield "ResNet, 256 layers, forward (waits for the device)", lambda: resnet(x)


if __name__ == "__main__":
    for name, call in calls(torch.device("cuda")):
        print(f"{host_time(call):8.1f}  {name}")
