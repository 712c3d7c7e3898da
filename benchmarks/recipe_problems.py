"""What ``recipes.py`` measures: the recipes of ``examples/`` at sizes that people have, and what they are held against.

Shapes: L steps, B rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deeppcr
from kernel_methods import Method, iterations_inside

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import compressor
import gae
import iir
import kalman
import langevin
import lru
import ode
import unrolled

Run = Callable[[], Tensor]
#: From what ``run`` returned to its distance from the same in float64.
Error = Callable[[Tensor], float]


@dataclass(frozen=True)
class Made:
    """A recipe on its data.

    Attributes:
        run: the recipe as a user calls it, in float32 unless said otherwise
        loop: the plain loop over the first so many steps, on the same data
        right: what is right, in float64, by that loop or by the tool that people use
        inside: what can be captured in a CUDA graph of the caller; None where nothing can
        others: tools, and other ways to the same, given what makes an error of a result
    """

    run: Run
    loop: Callable[[int], Run]
    right: Callable[[], Tensor]
    inside: Callable[[], Run] | None = None
    others: Callable[[Error], dict[str, Method]] = lambda _: {}


@dataclass(frozen=True)
class Recipe:
    """One recipe, and the sizes at which it is timed.

    Attributes:
        make: from a device and its sizes to the recipe on data
        sizes, small: those that are timed, and those of a dry run; L is the steps
        error: what results may differ by, in units of the largest
        gradients: whether results are gradients
        limits: of a method what its milliseconds are to be at most, or its time in units of another method's
    """

    name: str
    make: Callable[..., Made]
    sizes: dict[str, int]
    small: dict[str, int]
    error: float = 1e-4
    gradients: bool = False
    limits: Sequence[tuple[str, float, str | None]] = field(default=())


def both(device: torch.device, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """As they are timed, in float32 on the device; and the same values in float64 on the CPU."""
    timed = [each.to(device, torch.float32 if each.is_floating_point() else None) for each in tensors]
    return timed, [each.cpu().double() if each.is_floating_point() else each.cpu() for each in timed]


def make_ode(device: torch.device, L: int, B: int) -> Made:
    (y0, t), exact = both(device, torch.rand(B, 2), torch.linspace(0, L / 50, L + 1))
    func = ode.pendulum(damping=0.5, drive=0.3)

    def by_torchdiffeq(error: Error) -> dict[str, Method]:
        if find_spec("torchdiffeq") is None:
            return {}
        from torchdiffeq import odeint  # pyright: ignore[reportMissingImports]

        return {"torchdiffeq": Method(lambda: odeint(func, y0, t, method="rk4"), error, optional=True)}

    return Made(
        run=lambda: ode.odeint(func, y0, t),
        loop=lambda steps: lambda: ode.odeint_by_loop(func, y0, t[: steps + 1]),
        right=lambda: ode.odeint_by_loop(func, *exact),
        others=by_torchdiffeq,
    )


def make_kalman(device: torch.device, L: int, B: int) -> Made:
    (y, *model), (exact_y, *exact) = both(device, torch.randn(L, B, 1).cumsum(0) / 10, *kalman.tracker())
    seen = torch.rand(L) < 0.9
    here = seen.to(device)
    return Made(
        run=lambda: kalman.smooth(kalman.Model(*model), y, here)[1],
        loop=lambda steps: lambda: kalman.smooth_by_loop(kalman.Model(*model), y[:steps], here[:steps])[1],
        right=lambda: kalman.smooth_by_loop(kalman.Model(*exact), exact_y, seen)[1],
    )


def make_biquad(device: torch.device, L: int, B: int) -> Made:
    (x, *filters), (exact_x, *exact) = both(device, torch.randn(L, B), *iir.resonator(0.1, 0.98))
    (b0, b1, b2), (_, a1, a2) = ([float(each) for each in coefficients] for coefficients in exact)
    out = torch.empty_like(x)

    def combine(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        y = b0 * x + state[0]
        return (b1 * x - a1 * y + state[1], b2 * x - a2 * y), y

    def right() -> Tensor:
        if find_spec("scipy") is None:
            return iir.lfilter_by_loop(*exact, exact_x)
        from scipy.signal import lfilter  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(lfilter(*(each.numpy() for each in (*exact, exact_x)), axis=0))

    def others(error: Error) -> dict[str, Method]:
        start = torch.zeros_like(x[0])
        found = {
            "copy, captured": Method(lambda: out.copy_(x), lambda _: 0.0, optional=True),
            "scan": Method(
                lambda: deeppcr.scan(combine, (start, start), x, batch_dims=1)[1], error, optional=True, warm_up=3
            ),
        }
        if find_spec("scipy") is not None:
            from scipy.signal import lfilter  # pyright: ignore[reportMissingImports]

            given = [each.cpu().numpy() for each in (*filters, x)]
            run = lambda: torch.from_numpy(lfilter(*given, axis=0))  # noqa: E731
            found["scipy on the CPU"] = Method(run, lambda found: error(found.to(device)), optional=True)
        return found

    run = lambda: iir.lfilter(*filters, x)  # noqa: E731
    return Made(
        run=run,
        loop=lambda steps: lambda: iir.lfilter_by_loop(*filters, x[:steps]),
        right=right,
        inside=lambda: run,
        others=others,
    )


def make_compressor(device: torch.device, L: int, B: int) -> Made:
    rate = 48_000
    loudness = 0.55 + 0.45 * torch.sin(torch.arange(L) * (2 * torch.pi * 3 / rate))
    x = loudness.unsqueeze(-1) * torch.randn(L, B)
    xs = compressor.settings(compressor.target_gain(x, threshold=-20, ratio=4), 5, 50, rate)
    xs, exact = map(tuple, both(device, *xs))

    def inside() -> Run:
        found = deeppcr.solve(
            compressor.follow,
            torch.zeros(B, 1, device=device),
            tuple(each.unsqueeze(-1) for each in xs),
            solver=deeppcr.Newton(),
        )
        fixed = deeppcr.Newton(stop=deeppcr.FixedIterations(iterations_inside(found)))
        return lambda: compressor.smooth(xs, solver=fixed)

    return Made(
        run=lambda: compressor.smooth(xs),
        loop=lambda steps: lambda: compressor.smooth_by_loop(tuple(each[:steps] for each in xs)),
        right=lambda: compressor.smooth_by_loop(exact),
        inside=inside,
    )


def make_gae(device: torch.device, L: int, B: int) -> Made:
    given, exact = both(device, *gae.rollout(L, B))
    run = lambda: gae.gae(*given, gamma=0.99, lam=0.95)  # noqa: E731
    return Made(
        run=run,
        loop=lambda steps: lambda: gae.gae_by_loop(*(each[:steps] for each in given), gamma=0.99, lam=0.95),
        right=lambda: gae.gae_by_loop(*exact, gamma=0.99, lam=0.95),
        inside=lambda: run,
    )


def make_langevin(device: torch.device, L: int, B: int) -> Made:
    (noise, z0), (exact_noise, exact_z0) = both(device, torch.randn(L, B, 3), torch.zeros(B, 3))
    step = langevin.langevin_step(langevin.ridge, 0.05)
    return Made(
        run=lambda: langevin.chain(step, z0, noise),
        loop=lambda steps: lambda: langevin.chain_by_loop(step, z0, noise[:steps]),
        right=lambda: langevin.chain_by_loop(step, exact_z0, exact_noise),
    )


def make_mala(device: torch.device, L: int, B: int) -> Made:
    """In float64: in float32 a proposal that is nearly refused may be refused, and the chain is another one."""
    noise, log_uniform = torch.randn(L, B, 3, dtype=torch.float64), torch.rand(L, B, dtype=torch.float64).log()
    z0, step = torch.zeros(B, 3, dtype=torch.float64), langevin.mala_step(langevin.ridge, 0.3)
    start, *xs = (each.to(device) for each in (z0, noise, log_uniform))
    return Made(
        run=lambda: langevin.chain(step, start, tuple(xs)),
        loop=lambda steps: lambda: langevin.chain_by_loop(step, start, tuple(each[:steps] for each in xs)),
        right=lambda: langevin.chain_by_loop(step, z0, (noise, log_uniform)),
    )


def make_unrolled(device: torch.device, L: int, B: int) -> Made:
    given = *unrolled.data(L, B, 4), *(each[0] for each in unrolled.data(1, 256, 4))
    given, exact = both(device, *given, torch.tensor(0.1), torch.tensor(0.5))

    def gradient(train: Callable[..., Tensor], given: Sequence[Tensor], steps: int) -> Run:
        features, labels, *validation, rate, momentum = given
        batches = features[:steps], labels[:steps]
        return lambda: unrolled.meta_gradient(
            lambda *settings: train(*settings, batches), (validation[0], validation[1]), rate, momentum
        )

    return Made(
        run=gradient(unrolled.trained, given, L),
        loop=lambda steps: gradient(unrolled.trained_by_loop, given, steps),
        right=gradient(unrolled.trained_by_loop, exact, L),
    )


def make_lru(device: torch.device, L: int, B: int, channels: int) -> Made:
    layer, (u,) = lru.LRU(channels, channels).to(device), both(device, torch.randn(L, B, channels))[0]

    def gradient(run: Callable[[Tensor], Tensor], steps: int, u: Tensor = u, layer: Any = layer) -> Run:
        parameters = list(layer.parameters())

        def run_and_differentiate() -> Tensor:
            found = torch.autograd.grad(run(u[:steps]).square().mean(), parameters)
            return torch.cat([torch.view_as_real(each).flatten() if each.is_complex() else each for each in found])

        return run_and_differentiate

    def right() -> Tensor:
        exact = lru.LRU(channels, channels)
        for parameter, other in zip(exact.parameters(), layer.parameters(), strict=True):
            parameter.data = other.detach().cpu().to(torch.complex128 if other.is_complex() else torch.float64)
        return gradient(exact.by_loop, L, u.cpu().double(), exact)()

    run = gradient(layer, L)
    return Made(run=run, loop=lambda steps: gradient(layer.by_loop, steps), right=right, inside=lambda: run)


CAPTURED, COPY = "recipe, captured", "copy, captured"
RECIPES = (
    Recipe("ode", make_ode, {"L": 16_384, "B": 8}, {"L": 17, "B": 2}, error=1e-3),
    Recipe("kalman", make_kalman, {"L": 8_192, "B": 64}, {"L": 17, "B": 2}, error=1e-3),
    Recipe(
        "biquad",
        make_biquad,
        {"L": 2**19, "B": 64},
        {"L": 65, "B": 3},
        error=1e-3,
        limits=[(CAPTURED, 3.0, COPY)],
    ),
    Recipe(
        "compressor",
        make_compressor,
        {"L": 480_000, "B": 1},
        {"L": 129, "B": 1},
        error=1e-3,
        limits=[(CAPTURED, 1.0, None)],
    ),
    Recipe("gae", make_gae, {"L": 4_096, "B": 512}, {"L": 65, "B": 3}, error=1e-5, limits=[(CAPTURED, 0.06, None)]),
    Recipe("langevin", make_langevin, {"L": 8_192, "B": 8}, {"L": 9, "B": 2}, error=1e-3),
    Recipe("mala", make_mala, {"L": 4_096, "B": 4}, {"L": 9, "B": 2}, error=1e-6),
    Recipe("unrolled", make_unrolled, {"L": 4_096, "B": 32}, {"L": 9, "B": 8}, error=1e-3, gradients=True),
    Recipe(
        "lru",
        make_lru,
        {"L": 16_384, "B": 8, "channels": 128},
        {"L": 65, "B": 2, "channels": 3},
        error=1e-3,
        gradients=True,
    ),
)
