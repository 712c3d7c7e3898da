"""What ``kernels.py`` measures: each problem with the public call, its baselines and a loop in float64 to check them by.

Shapes: L steps or layers, w the width, one row unless said otherwise.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import deeppcr
from deeppcr import linear
from deeppcr.nn.base import ACTIVATIONS, Mode
from deeppcr_paper.mlp import Network
from deeppcr_paper.timing import relative_error
from kernel_methods import Method, can_capture, captured, with_captured
from kernel_training import resnet_step
from run import HAS_JAX, associative_scan

#: Weights by name: the activation, and what PyTorch's uniform(-1/sqrt(w), 1/sqrt(w)) is multiplied by.
WEIGHTS = {
    "default ReLU": ("relu", 1.0),
    "0.9 He ReLU": ("relu", 0.9 * math.sqrt(6)),
    "gain 1 tanh": ("tanh", math.sqrt(3)),
}
_NUMPY: dict[str, tuple[Callable, Callable]] = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
}


@dataclass(frozen=True)
class Problem:
    """One thing to compute.

    Attributes:
        build: makes its inputs and the methods that compute it
        gradients: whether it is built and run with autograd
        memory: whether the memory that methods take is measured too
        needs: whether a device, and this version of the library, can do it
    """

    suite: str
    parameters: dict[str, Any]
    build: Callable[[torch.device], dict[str, Method]]
    tolerance: float = 1e-4
    gradients: bool = False
    memory: bool = False
    needs: Callable[[torch.device], bool] = field(default=lambda device: True)

    @property
    def name(self) -> str:
        return ", ".join([self.suite, *(f"{key} {value}" for key, value in self.parameters.items())])


def has_kernels(width: int, device: torch.device) -> bool:
    """Whether the fused kernels take networks of this width: asked of a shallow one."""
    module = deeppcr.nn.MLP(1, width, 64, 1, device=device)
    with torch.no_grad():
        module.hidden_states(torch.zeros(1, width, device=device), "parallel")
    return module.solution is not None and module.solution.plan.evaluation == "fused kernels"


class Chain:
    """A deep network with one row, its exact states, and its exact adjoints at given states."""

    def __init__(self, weights: str, length: int, width: int, device: torch.device):
        activation, scale = WEIGHTS[weights]
        network = Network.make(length, width, device, activation=activation)
        if scale != 1:
            network = replace(network, weights=network.weights * scale)
        self.network, self.device = network, device
        self.value, self.slope = _NUMPY[activation]
        generator = torch.Generator().manual_seed(1)
        self.gradients = torch.randn(length, 1, width, generator=generator).to(device)

    @cached_property
    def exact(self) -> Tensor:
        """[L, 1, w], by a loop in float64 on the CPU."""
        z0, weights, biases = (tensor.detach().cpu().numpy() for tensor in self.network.tensors)
        z, states = z0[0].astype(float), np.empty(biases.shape)
        for step in range(len(biases)):
            z = weights[step].astype(float) @ self.value(z) + biases[step]
            states[step] = z
        return torch.from_numpy(states).unsqueeze(1).to(self.device)

    def exact_adjoints(self, states: Tensor) -> Tensor:
        """[L, 1, w], the gradients of all layers' outputs at given states: there a loop in float64 is the truth for all."""
        weights = self.network.weights.detach().cpu().numpy()
        gradients = self.gradients.squeeze(1).cpu().numpy().astype(float)
        slopes = self.slope(states.detach().squeeze(1).cpu().numpy().astype(float))
        adjoint = gradients[-1]
        adjoints = np.empty(gradients.shape)
        adjoints[-1] = adjoint
        for step in range(len(gradients) - 2, -1, -1):
            adjoint = slopes[step] * (adjoint @ weights[step + 1].astype(float)) + gradients[step]
            adjoints[step] = adjoint
        return torch.from_numpy(adjoints).unsqueeze(1).to(self.device)

    def exact_gradients(self, states: Tensor) -> list[Tensor]:
        """Of weights and biases."""
        adjoints = self.exact_adjoints(states)
        before = torch.cat([self.network.z0.unsqueeze(0), states.detach()[:-1]]).double()
        inputs = ACTIVATIONS[self.network.activation][0](before)
        return [adjoints.mT * inputs, adjoints.squeeze(1)]

    def forward_error(self, found: Tensor | Sequence[Tensor]) -> float:
        states = found if isinstance(found, Tensor) else torch.stack(list(found))
        return relative_error([states], [self.exact])

    def states(self) -> Tensor:
        """[L, 1, w], by the public call, without gradients."""
        with torch.no_grad():
            return self.network.module().hidden_states(self.network.z0, "parallel")


def forward(weights: str, length: int, width: int, device: torch.device, *, loops: Sequence[str]) -> dict[str, Method]:
    """All states. ``loops``: which of "eager loop" and "loop in a CUDA graph" stand beside it."""
    chain = Chain(weights, length, width, device)
    network = chain.network

    def by_module(mode: Mode) -> Method:
        module = network.module()  # one each: it keeps how its last pass went
        return Method(
            lambda: module.hidden_states(network.z0, mode), chain.forward_error, solution=lambda: module.solution
        )

    methods = {"call": by_module("parallel"), "fused loop": by_module("sequential")}
    loop = Method(network.loop, chain.forward_error, kernels=False)
    if "eager loop" in loops:
        methods["eager loop"] = loop
    if can_capture(device):
        methods["captured"] = replace(by_module("parallel"), prepare=captured)
        methods["fused loop, captured"] = replace(methods["fused loop"], prepare=captured)
        if "loop in a CUDA graph" in loops:
            methods["loop in a CUDA graph"] = replace(loop, prepare=captured)
    return methods


def backward(weights: str, length: int, width: int, device: torch.device, *, loops: bool) -> dict[str, Method]:
    """The gradients of all layers' outputs from those of the states, at the states of the parallel pass."""
    from deeppcr.nn import forward

    chain = Chain(weights, length, width, device)
    network, gradients, states = chain.network, chain.gradients, chain.states()
    x = torch.cat([network.z0.unsqueeze(0), states])
    layers = forward.Layers(skip=1, residual=False, activation=network.activation)

    exact = cache(lambda: chain.exact_adjoints(states))

    def error(found: Tensor) -> float:
        return relative_error([found], [exact()])

    slopes = ACTIVATIONS[network.activation][1](states)

    def loop() -> Tensor:
        adjoint = gradients[-1]
        adjoints = [adjoint]
        steps = zip(network.weights[1:].unbind(), slopes[:-1].unbind(), gradients[:-1].unbind(), strict=True)
        for weight, slope, gradient in reversed(list(steps)):
            adjoint = torch.addcmul(gradient, adjoint @ weight, slope)
            adjoints.append(adjoint)
        return torch.stack(adjoints[::-1])

    methods = {"call": Method(lambda: forward.adjoint(network.weights, x, gradients, layers)[0], error)}
    names = {"call": "captured"}
    if loops:
        # What one layer's adjoint is to the next; the last has none after it, so its block is not used.
        following = network.weights.roll(-1, 0)
        blocks = (following.unsqueeze(1) * slopes.unsqueeze(-2)).mT.contiguous()
        methods["eager loop"] = Method(loop, error, kernels=False)
        methods["Algorithm 1"] = Method(
            lambda: linear.solve(linear.Dense(blocks), gradients, reverse=True, solver=linear.PCR()),
            error,
            kernels=False,
        )
        names["Algorithm 1"] = "Algorithm 1, captured"
    return with_captured(methods, device, names)


def training(weights: str, length: int, width: int, device: torch.device, *, both: bool) -> dict[str, Method]:
    """The gradients of weights and biases by ``torch.autograd.grad`` through the public call; ``both``: forward pass too."""
    chain = Chain(weights, length, width, device)
    module = chain.network.module()
    parameters = (module.weight, module.bias)

    def states() -> Tensor:
        return module.hidden_states(chain.network.z0, "parallel")

    if both:

        def step() -> tuple[Tensor, ...]:
            found = states()
            return (found.detach(), *torch.autograd.grad(found, parameters, chain.gradients))

        def error(found: tuple[Tensor, ...]) -> float:
            apart = relative_error(found[1:], chain.exact_gradients(found[0]))
            return max(chain.forward_error(found[0]), apart)

        return with_captured({"call": Method(step, error)}, device, {"call": "captured"})

    kept = states()  # its graph is kept, so the backward pass alone is called again and again

    def back() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept, parameters, chain.gradients, retain_graph=True)

    return {"call": Method(back, lambda found: relative_error(found, chain.exact_gradients(kept)))}


def dense_solve(length: int, width: int, device: torch.device, *, peer: bool = False) -> dict[str, Method]:
    """Reflections times 0.999: products neither vanish nor grow, so rounding has its say. ``peer``: JAX's scan, if there is
    one, instead of ours."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(length, width, generator=generator)
    unit = normal / normal.norm(dim=-1, keepdim=True)
    data = 0.999 * (torch.eye(width) - 2 * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    rhs = torch.randn(length, width, generator=generator)
    there, terms = data.to(device), rhs.to(device)

    def error(found: Tensor) -> float:
        blocks, exact = data.numpy(), rhs.double().numpy().copy()
        for step in range(1, length):
            exact[step] += blocks[step].astype(float) @ exact[step - 1]
        return relative_error([found.cpu()], [torch.from_numpy(exact)])

    if not peer:
        ours = {"call": Method(lambda: linear.solve(linear.Dense(there), terms), error)}
        return with_captured(ours, device, {"call": "captured"})
    if not HAS_JAX:
        return {}
    # Compiled when it is first called, so that an installation without a GPU fails there, and only there.
    scan: list[Callable] = []

    def run() -> Any:
        if not scan:
            scan.append(associative_scan(linear.Dense, there, terms))
        return scan[0]()

    def jax_error(found: Any) -> float:
        return error(found.tensors()[0])

    return {"jax.lax.associative_scan": Method(run, jax_error, kernels=False, optional=True)}


def diagonal_solve(length: int, sequences: int, device: torch.device) -> dict[str, Method]:
    """Signs times 0.99. The copy moves as many bytes: it reads and writes half of what the solve reads and writes."""
    generator = torch.Generator(device).manual_seed(0)
    data, rhs = (torch.randn(length, sequences, device=device, generator=generator) for _ in range(2))
    data = 0.99 * data.sign()

    def error(found: Tensor) -> float:
        factors, terms = (tensor.double().cpu() for tensor in (data, rhs))
        if sequences == 1:  # a million steps: numbers of Python are the fastest
            pairs = zip(factors.flatten().tolist(), terms.flatten().tolist(), strict=True)
            states = itertools.accumulate(pairs, lambda z, pair: pair[0] * z + pair[1], initial=0.0)
            exact = torch.tensor(list(states)[1:], dtype=torch.float64).unsqueeze(1)
        else:
            factors, exact = factors.numpy(), terms.numpy()
            for step in range(1, length):
                exact[step] += factors[step] * exact[step - 1]
            exact = torch.from_numpy(exact)
        return relative_error([found], [exact.to(device)])

    half = 3 * rhs.numel() // 2
    source, target = torch.ones(half, device=device), torch.zeros(half, device=device)
    methods = {
        "call": Method(lambda: linear.solve(linear.Diagonal(data), rhs), error),
        "copy": Method(
            lambda: target.copy_(source), lambda found: float(not torch.equal(found, source)), kernels=False
        ),
    }
    return with_captured(methods, device, {"call": "captured", "copy": "copy, captured"})


def _kernels_can_run(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def problems(quick: bool) -> Iterator[Problem]:
    """All of them, in the order of the table; the peer comes last, so that nobody shares the process with it while timed."""
    length = 64 if quick else 16_384
    narrow = (4,) if quick else (4, 8, 16, 32, 64)
    wide = () if quick else (128, 256)
    loops = ("eager loop", "loop in a CUDA graph")

    def network(suite: str, weights: str, width: int, build: Callable, **options: Any) -> Problem:
        parameters = {"weights": weights, "L": length, "w": width}
        return Problem(suite, parameters, partial(build, weights, length, width), **options)

    for width in narrow + wide:
        needs = partial(has_kernels, width) if width in wide else lambda device: True
        yield network(
            "forward", "default ReLU", width, partial(forward, loops=loops), memory=width == narrow[-1], needs=needs
        )
    for width in narrow:
        yield network("backward", "default ReLU", width, partial(backward, loops=True), needs=_kernels_can_run)
    for weights in ("0.9 He ReLU", "gain 1 tanh"):
        for width in (4,) if quick else (4, 8, 16, 64):
            yield network("forward", weights, width, partial(forward, loops=()))
            yield network("backward", weights, width, partial(backward, loops=False), needs=_kernels_can_run)
    systems = ((1_024, 16), (16_384, 4), (16_384, 16), (16_384, 32), (16_384, 64), (65_536, 16))
    systems = ((100, 3),) if quick else systems
    for steps, width in systems:
        yield Problem("dense solve", {"L": steps, "w": width}, partial(dense_solve, steps, width))
    for steps, sequences in ((100, 5), (1000, 1)) if quick else ((16_384, 2_048), (2**20, 1)):
        parameters = {"L": steps, "sequences": sequences}
        yield Problem("diagonal solve", parameters, partial(diagonal_solve, steps, sequences))
    for power in range(3, 5) if quick else range(3, 13):
        steps, width = 2**power, 4 if quick else 16
        build = partial(forward, "default ReLU", steps, width, loops=loops[:1])
        yield Problem("break-even", {"L": steps, "w": width}, build)
    # Last those that capture autograd: should one of these captures fail, nothing comes after it that it could harm.
    for width in narrow:
        yield network("gradients", "default ReLU", width, partial(training, both=False), gradients=True)
    for width in narrow:
        yield network("forward and backward", "default ReLU", width, partial(training, both=True), gradients=True)
    parameters = (
        {"depth": 16, "w": 4, "skip": 4, "batch": 2} if quick else {"depth": 1_024, "w": 16, "skip": 4, "batch": 8}
    )
    step = partial(resnet_step, *parameters.values(), 3 if quick else 100)
    yield Problem("ResNet step", parameters, step, tolerance=1e-2, gradients=True)
    for steps, width in systems:
        yield Problem("dense solve", {"L": steps, "w": width}, partial(dense_solve, steps, width, peer=True))
