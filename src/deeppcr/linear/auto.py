"""The solver that is taken where nobody asks for another: by what those made of PyTorch's operations take. Operations are counted, and each
has a price.

A price is what one batched operation costs the host, whatever its size, plus the work in it. The prices were fitted to
times on one CPU core and on an H200; only their ratios matter for a choice, and these differ little between machines.
On a GPU the host is nearly all there is; on a CPU products of blocks soon cost more than the steps that they save.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..runtime import is_traced
from .blocks import Blocks, Diagonal, Scalar
from .fused import Fused
from .hierarchical import Hierarchical
from .pcr import PCR
from .solver import ForwardSubstitution, LinearSolver

_CHUNKS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Auto(LinearSolver):
    """Fused() where there are kernels, else what is expected to take the least time; ``choose`` says what and why.

    >>> import torch
    >>> from deeppcr import linear
    >>> Auto().choose(linear.Dense(torch.zeros(7, 2, 2)))
    (PCR(), 'expected: 0.039 ms; ForwardSubstitution(): 0.084 ms, Hierarchical(chunk=4): 0.15 ms')
    """

    repeatable = True
    fuses = True

    def choose(self, couplings: Blocks, rhs: Tensor | None = None) -> tuple[LinearSolver, str]:
        length = len(couplings) + 1
        traced = is_traced(couplings.data) or (rhs is not None and is_traced(rhs))
        if not traced and Fused().refusal(couplings) is None:
            return Fused(), "there are kernels for these blocks"
        data = couplings.data
        width = 0 if isinstance(couplings, (Diagonal, Scalar)) else int(data.shape[-1])
        side = max(width, 1)
        blocks = int(data.shape[1:].numel()) // side**2
        vectors = blocks if rhs is None else max(blocks, int(rhs.shape[1:].numel()) // side)
        cpu = data.device.type == "cpu"
        if torch.compiler.is_compiling():  # nobody reads the reason then, and a compiler sees through no cache
            return pick(length, width, blocks, vectors, cpu), ""
        return pick_and_explain(length, width, blocks, vectors, cpu)

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        return self.choose(couplings, rhs)[0].solve_coupled(couplings, rhs, reverse=reverse)


@dataclass(frozen=True)
class Prices:
    """Seconds.

    Attributes:
        step: of forward substitution
        round: of PCR
        part: of Hierarchical: one operation on step k of all chunks of a level
        element: a product of two numbers on a diagonal
        product, vector: coefficients of w, w^2, w^3 for a product of two blocks, of a block and a vector
    """

    step: float
    round: float
    part: float
    element: float
    product: tuple[float, float, float]
    vector: tuple[float, float, float]


_CPU = Prices(12e-6, 13e-6, 15e-6, 0.7e-9, (10e-9, 0.3e-9, 0.01e-9), (3e-9, 0.27e-9, 0.0))
_GPU = Prices(36e-6, 85e-6, 50e-6, 2e-12, (0.0, 4e-12, 0.12e-12), (0.0, 2e-12, 0.0))

Solver = ForwardSubstitution | PCR | Hierarchical


def expected(length: int, width: int, blocks: int, vectors: int, cpu: bool) -> tuple[float, float, float, int]:
    """Seconds of ForwardSubstitution, of PCR and of the best Hierarchical, and the chunk of that.

    Args:
        length: L, unknown states
        width: w of a dense block; 0 for numbers on a diagonal
        blocks: how many there are in a step: rows of the batch, if each has its own, times those on the diagonal
        vectors: how many of that width meet them
    """
    prices = _CPU if cpu else _GPU
    product = blocks * _price(prices, prices.product, width)
    vector = vectors * _price(prices, prices.vector, width)
    chunk, least = 0, float("inf")
    for each in _CHUNKS:
        if chunk and each >= length - 1:  # a single chunk is forward substitution
            break
        seconds = hierarchical_seconds(length, each, product, vector, prices)
        if seconds < least:
            chunk, least = each, seconds
    return forward_seconds(length, vector, prices), pcr_seconds(length, product + vector, prices), least, chunk


def pick(length: int, width: int, blocks: int, vectors: int, cpu: bool) -> Solver:
    """The solver that is expected to take the least time; arguments as above."""
    forward, pcr, hierarchical, chunk = expected(length, width, blocks, vectors, cpu)
    if forward <= pcr and forward <= hierarchical:
        return ForwardSubstitution()
    return PCR() if pcr <= hierarchical else Hierarchical(chunk=chunk)


@lru_cache(maxsize=4096)
def pick_and_explain(length: int, width: int, blocks: int, vectors: int, cpu: bool) -> tuple[Solver, str]:
    """The same, and what it was compared with.

    >>> pick_and_explain(64, 4, 1, 1, cpu=True)
    (PCR(), 'expected: 0.098 ms; ForwardSubstitution(): 0.76 ms, Hierarchical(chunk=4): 0.31 ms')
    """
    solver = pick(length, width, blocks, vectors, cpu)
    *seconds, chunk = expected(length, width, blocks, vectors, cpu)
    times = dict(zip((ForwardSubstitution(), PCR(), Hierarchical(chunk=chunk)), seconds, strict=True))
    least = times.pop(solver)
    others = ", ".join(f"{other}: {1e3 * each:.2g} ms" for other, each in times.items())
    return solver, f"expected: {1e3 * least:.2g} ms; {others}"


def _price(prices: Prices, coefficients: tuple[float, float, float], width: int) -> float:
    if width == 0:
        return prices.element
    linear, square, cubic = coefficients
    return width * (linear + width * (square + width * cubic))


def forward_seconds(length: int, vector: float, prices: Prices) -> float:
    return (length - 1) * (prices.step + vector)


def pcr_seconds(length: int, work: float, prices: Prices) -> float:
    """Round k works on all rows but the first 2^k."""
    seconds, stride = 0.0, 1
    while stride < length:
        seconds += prices.round + (length - stride) * work
        stride *= 2
    return seconds


def hierarchical_seconds(length: int, chunk: int, product: float, vector: float, prices: Prices) -> float:
    """A level reduces and substitutes its chunks by 2 C - 1 operations; two more put their ends and states together."""
    steps, seconds = length - 1, 0.0
    while steps > chunk:
        chunks = -(-steps // chunk)
        seconds += (2 * chunk + 1) * prices.part + chunks * ((chunk - 1) * (product + vector) + chunk * vector)
        steps = chunks - 1
    return seconds + forward_seconds(steps + 1, vector, prices)
