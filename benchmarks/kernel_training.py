"""A step of training of a deep residual network, for ``kernels.py``."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr
from kernel_methods import Method, can_capture, captured
from kernel_report import DEFAULT, REST


def plain_resnet(network: deeppcr.nn.ResNet, x: Tensor) -> Tensor:
    """The network as one would write it without this library."""
    z = network.input(x)
    skip = network.weight.shape[1]
    layers = zip(network.weight.flatten(0, 1).unbind(), network.bias.flatten(0, 1).unbind(), strict=True)
    inner = z
    for count, (weight, bias) in enumerate(layers, 1):
        inner = nn.functional.linear(torch.relu(inner), weight, bias)
        if count % skip == 0:
            inner = z = inner + z
    return network.output(torch.relu(z))


class _NoLayers(torch.autograd.Function):
    """The state as it is; the layers' parameters get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(weight, bias)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        weight, bias = ctx.saved_tensors
        return torch.zeros_like(weight), torch.zeros_like(bias), gradients[0]


def without_layers(network: deeppcr.nn.ResNet, x: Tensor) -> Tensor:
    """All of a step but the layers: what no kernel of theirs can save."""
    return network.output(torch.relu(_NoLayers.apply(network.weight, network.bias, network.input(x))))


class Training:
    """A network in training on the batches of a list, one after the other."""

    def __init__(self, network: nn.Module, batches: list[tuple[Tensor, Tensor]], forward: Callable[..., Tensor]):
        self.network, self.batches, self.forward = network, batches, forward
        self.optimiser = torch.optim.SGD(network.parameters(), lr=1e-3)
        self.kept = [tensor.detach().clone() for tensor in (*network.parameters(), *network.buffers())]
        self.place = tuple(torch.empty_like(each) for each in batches[0])
        self.next = itertools.cycle(batches)

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.forward(self.network, x), labels)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def run(self) -> Tensor:
        return self.step(*next(self.next))

    def prepare(self, _: Callable) -> Callable[[], Any]:
        """The whole step as a CUDA graph of the caller; each batch is copied to where the graph reads it."""
        for place, each in zip(self.place, self.batches[0], strict=True):
            place.copy_(each)
        replay = captured(lambda: self.step(*self.place))

        def run() -> Any:
            for place, each in zip(self.place, next(self.next), strict=True):
                place.copy_(each)
            return replay()

        return run

    @torch.no_grad()
    def restart(self) -> None:
        """As it was at first, in place: a CUDA graph goes on with the same tensors."""
        for tensor, kept in zip((*self.network.parameters(), *self.network.buffers()), self.kept, strict=True):
            tensor.copy_(kept)
        self.next = itertools.cycle(self.batches)


def resnet_step(depth: int, width: int, skip: int, batch: int, steps: int, device: torch.device) -> dict[str, Method]:
    """Forward, backward and SGD after so many steps of training, on fixed random images whose labels can be learnt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = deeppcr.nn.ResNet(784, width, depth, 10, skip, mode="parallel", warm_start=True).to(device)
        images = torch.randn(64 * batch, 784)
        labels = (images @ torch.randn(784, 10)).argmax(-1)
    batches = list(zip(images.to(device).split(batch), labels.to(device).split(batch), strict=True))
    first = Training(network, batches, lambda net, x: net(x))
    for _ in range(steps):
        first.run()
    first.optimiser.zero_grad(set_to_none=True)

    def exact(plain: Callable[..., Tensor]) -> tuple[float, tuple[Tensor, ...]]:
        """Loss and gradients of the same step in float64, on the CPU."""
        double = copy.deepcopy(network).cpu().double()
        x, y = (each.cpu() for each in batches[0])
        loss = nn.functional.cross_entropy(plain(double, x.double()), y)
        return loss.item(), torch.autograd.grad(loss, list(double.parameters()))

    by_loop = exact(plain_resnet)

    def method(forward: Callable[..., Tensor], expected: tuple = by_loop, **options: Any) -> Method:
        train, (loss, gradients) = Training(copy.deepcopy(network), batches, forward), expected

        def error(loss_found: Tensor) -> float:
            # By norms: a unit whose value is nearly zero may be on in one precision and off in the other.
            errors = [abs(loss_found.item() - loss) / abs(loss)]
            for parameter, reference in zip(train.network.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                difference = (parameter.grad.double().cpu() - reference).norm()
                errors.append((difference / (reference.norm() or 1.0)).item())
            return max(math.inf if math.isnan(each) else each for each in errors)

        if options.pop("graph", False):
            options["prepare"] = train.prepare
        return Method(
            train.run, error, before=train.restart, solution=lambda: getattr(train.network, "solution", None), **options
        )

    def mode(name: Any) -> Callable[..., Tensor]:
        return lambda net, x: net(x, mode=name)

    in_parallel = mode("parallel")
    methods = {"call": method(in_parallel), DEFAULT: method(mode("auto")), "fused loop": method(mode("sequential"))}
    methods["eager loop"] = method(plain_resnet, kernels=False)
    methods[REST] = method(without_layers, exact(without_layers), kernels=False)
    if can_capture(device):
        methods["captured"] = method(in_parallel, graph=True, optional=True)
        methods[f"{DEFAULT}, captured"] = method(mode("auto"), graph=True, optional=True)
        methods["fused loop, captured"] = method(mode("sequential"), graph=True, optional=True)
        methods["loop in a CUDA graph"] = method(plain_resnet, graph=True, kernels=False, optional=True)
    return methods
