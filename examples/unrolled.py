"""Meta-gradients: how the result of training depends on learning rate and momentum, through every step of it.

Each step of the optimiser is a step of the loop, its minibatch an entry of xs. ``loss.backward()`` through the solution is
one linear system, and takes no memory for the iterations. Parallel pays for long training of few parameters (a probe, a
calibration, the inner loop of a meta-learner), where steps contract. It does not for networks (the state is all
parameters, and each Jacobian has D x D numbers), nor at a rate at which training is unstable.

    python examples/unrolled.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import deeppcr
from compare import DEVICE, compare

State = tuple[Tensor, Tensor]


def loss_of(weights: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Of logistic regression: weights [D], features [N, D], labels [N]."""
    fit = binary_cross_entropy_with_logits(features @ weights, labels)
    return fit + 0.01 * weights.square().sum()


def descent(rate: Tensor, momentum: Tensor) -> Any:
    """One step of gradient descent with momentum, of weights and velocity."""

    def step(state: State, batch: tuple[Tensor, Tensor]) -> State:
        weights, velocity = state
        velocity = momentum * velocity - rate * torch.func.grad(loss_of)(weights, *batch)
        return weights + velocity, velocity

    return step


def trained(rate: Tensor, momentum: Tensor, batches: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """The weights [D] after all batches: features [L, N, D], labels [L, N]. Options are those of ``deeppcr.solve``."""
    start = torch.zeros_like(batches[0][0, 0])
    return deeppcr.solve(descent(rate, momentum), (start, start), batches, **options).final[0]


def trained_by_loop(rate: Tensor, momentum: Tensor, batches: tuple[Tensor, Tensor]) -> Tensor:
    start = torch.zeros_like(batches[0][0, 0])
    step, state = descent(rate, momentum), (start, start)
    for batch in zip(*batches, strict=True):
        state = step(state, batch)
    return state[0]


def meta_gradient(train: Any, validation: tuple[Tensor, Tensor], rate: Tensor, momentum: Tensor) -> Tensor:
    """[2]: of the loss on other data after ``train(rate, momentum)``, in the learning rate and in the momentum."""
    rate, momentum = (each.detach().requires_grad_() for each in (rate, momentum))
    loss = loss_of(train(rate, momentum), *validation)
    return torch.stack(torch.autograd.grad(loss, (rate, momentum)))


def data(steps: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    features = torch.randn(steps, rows, width, device=DEVICE, dtype=dtype)
    return features, (features.sum(-1) + torch.randn(steps, rows, device=DEVICE, dtype=dtype) > 0).to(dtype)


def main() -> None:
    batches, (features, labels) = data(200, 32, 4), data(1, 256, 4)
    rate, momentum = torch.tensor(0.1, device=DEVICE), torch.tensor(0.5, device=DEVICE)

    def gradient(train: Any, **options: Any) -> Tensor:
        return meta_gradient(lambda *both: train(*both, batches, **options), (features[0], labels[0]), rate, momentum)

    compare(
        "meta-gradient, 200 steps",
        lambda: gradient(trained, solver=deeppcr.Newton()),
        lambda: gradient(trained_by_loop),
        allowed=1e-3,
    )


if __name__ == "__main__":
    main()
