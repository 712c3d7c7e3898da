"""500 problems and their results to the last bit: did a change that was to change nothing change nothing?

Results depend on the machine, so both sides are recorded on one, by this same file:

    PYTHONPATH=OTHER_CHECKOUT/src python benchmarks/same_results.py record before.json
    PYTHONPATH=src                python benchmarks/same_results.py record after.json
    python benchmarks/same_results.py compare before.json after.json

Each problem is solved once, on one device: what repeats (CUDA graphs) and pipelines are not in it. Recorded are states, iterations, results, residuals and gradients: of tensors a hash of their bytes. Only public names are
used. Problem ``n`` depends on ``n`` alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import linear
from deeppcr.diffusion import DDIM, DDPM, CoarseStart, GaussianPrior, GaussianStart, Noise, Schedule, Window, sample

Record = dict[str, Any]
LENGTHS, WIDTHS, ROWS = (1, 2, 3, 17, 63, 64, 65, 200, 500), (1, 2, 3, 4, 8, 12), (1, 2, 3)


class Draw:
    """All that is random about one problem."""

    def __init__(self, number: int, device: str):
        self.choice, self.device = random.Random(number), device
        self.source = torch.Generator().manual_seed(number)
        self.dtype = self.pick((torch.float32, torch.float64))

    def pick(self, values: Sequence[Any]) -> Any:
        return self.choice.choice(values)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = scale * torch.randn(*shape, generator=self.source, dtype=torch.float64)
        return drawn.to(self.device, self.dtype).requires_grad_()


def digest(value: Any) -> Any:
    """A tensor as its shape, dtype and the hash of its bytes; a nest of them likewise; an error as its text."""
    if isinstance(value, Tensor):
        data = value.detach().cpu()
        numbers = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
        return [*data.shape, str(data.dtype), numbers]
    if isinstance(value, (list, tuple)):
        return [digest(each) for each in value]
    return str(value)


def gradients(states: Any, leaves: Sequence[Tensor]) -> Any:
    loss = sum((leaf * leaf.detach().cos()).sum() for leaf in pytree.tree_leaves(states))
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def solved(draw: Draw, step: Callable, z0: Any, xs: Any, closed: Sequence[Tensor] = (), **settings: Any) -> Record:
    """A solve and its gradients, as a user makes them."""
    solution = deeppcr.solve(step, z0, xs, **settings)
    leaves = [leaf for leaf in pytree.tree_leaves((z0, xs)) if isinstance(leaf, Tensor)]
    found = {name: digest(getattr(solution, name)) for name in ("states", "iterations", "residual", "exact_steps")}
    found |= {"results": digest(solution.results), "message": solution.message}
    found["plan"] = str(solution.plan)
    try:
        found["gradients"] = digest(gradients(solution.states, [*leaves, *closed]))
    except RuntimeError as error:
        found["gradients"] = str(error)
    return found


def newton(draw: Draw) -> Record:
    """Settings of a solve."""
    exact = draw.pick((deeppcr.DenseJacobian(), deeppcr.DenseJacobian(), deeppcr.ScalarJacobian(0.4)))
    jacobian = draw.pick((exact, exact, deeppcr.HutchinsonJacobian(samples=2, seed=3)))
    stop = draw.pick((deeppcr.UpdateTest(), deeppcr.UpdateTest(), deeppcr.PaperTest(), deeppcr.FixedIterations(4)))
    solver = deeppcr.Newton(
        chunk=draw.pick(("auto", "auto", 1, 2, 5, 16)),
        linear=draw.pick((deeppcr.Auto(), deeppcr.PCR(), deeppcr.ForwardSubstitution(), deeppcr.Hierarchical())),
        jacobian=jacobian,
        stop=stop,
        max_iterations=draw.pick((100, 30)),
    )
    solver = draw.pick((solver, solver, solver, deeppcr.Loop(), deeppcr.Picard(), deeppcr.Jacobi()))
    return {
        "solver": draw.pick((deeppcr.Newton(), solver, solver)),
        "guess": draw.pick((deeppcr.RepeatInitial(), deeppcr.RepeatInitial(), deeppcr.Zeros(), deeppcr.Random(seed=5))),
        "gradient": draw.pick((deeppcr.Implicit(), deeppcr.Implicit(), deeppcr.Unrolled())),
        "on_failure": draw.pick(("loop", "loop", "return", "raise")),
    }


def mlp(draw: Draw) -> Record:
    length, rows, width = draw.pick(LENGTHS), draw.pick(ROWS), draw.pick(WIDTHS)
    gain, activation = draw.pick((0.3, 0.8, 1.3, 2.5)), draw.pick((torch.relu, torch.tanh, torch.sigmoid))
    xs = (draw.normal(length, width, width, scale=gain / width**0.5), draw.normal(length, width, scale=0.3))
    step = lambda z, x: activation(z) @ x[0].mT + x[1]  # noqa: E731
    return solved(draw, step, draw.normal(rows, width), xs, **newton(draw))


def gated(draw: Draw) -> Record:
    """A recurrence that closes over its weights; ``batch_dims`` of 0, 1 and 2."""
    length, width, spread = draw.pick(LENGTHS), draw.pick(WIDTHS), draw.pick((0.8, 0.8, 4.0))
    weight, gate = (draw.normal(width, width, scale=spread / width**0.5) for _ in range(2))
    batch = draw.pick(((), (2,), (2, 3)))

    def step(z: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(z @ gate + x)
        return share * torch.tanh(z @ weight) + (1 - share) * z * 0.5

    xs, z0 = draw.normal(length, width), draw.normal(*batch, width)
    return solved(draw, step, z0, xs, (weight, gate), batch_dims=len(batch), **newton(draw))


def cell(draw: Draw) -> Record:
    """A recurrent cell of PyTorch's, its steps folded into rows."""
    length, rows, width = draw.pick(LENGTHS[:7]), draw.pick(ROWS), draw.pick((1, 3, 4))
    kind = draw.pick((nn.GRUCell, nn.LSTMCell, nn.RNNCell))
    made = kind(2, width).to(draw.device, draw.dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(draw.normal(*parameter.shape, scale=0.5 / width**0.5))
    z0 = draw.normal(rows, width)
    start = (z0, draw.normal(rows, width)) if kind is nn.LSTMCell else z0
    step = deeppcr.rowwise(lambda z, x: made(x, z))
    return solved(draw, step, start, draw.normal(length, rows, 2), [*made.parameters()], **newton(draw))


def oscillator(draw: Draw) -> Record:
    """A time stepper without inputs: damped, or chaotic."""
    damping, size = draw.pick((0.1, 0.5, 0.0)), draw.pick((0.01, 0.1))

    def slope(z: Tensor) -> Tensor:
        return torch.stack([z[..., 1], -torch.sin(z[..., 0]) - damping * z[..., 1]], -1)

    def step(z: Tensor) -> Tensor:
        middle = z + size / 2 * slope(z)
        return z + size * slope(middle)

    return solved(draw, step, draw.normal(draw.pick(ROWS), 2), None, length=draw.pick(LENGTHS), **newton(draw))


def map_of_states(draw: Draw) -> Record:
    """States as a dictionary, elementwise steps, Jacobians said to be diagonal."""
    length, rows, width = draw.pick(LENGTHS), draw.pick(ROWS), draw.pick(WIDTHS)
    rate = draw.pick((0.5, 0.9, 1.1))

    def step(z: dict, x: Tensor) -> dict:
        return {"a": rate * torch.sin(z["a"]) + x, "b": 0.5 * torch.tanh(z["b"]) + 0.1 * x}

    z0 = {"a": draw.normal(rows, width), "b": draw.normal(rows, width)}
    settings = newton(draw)
    if draw.pick((True, False)):
        settings["solver"] = deeppcr.Newton(jacobian=deeppcr.DiagonalJacobian(), chunk=draw.pick((1, 4, "auto")))
    return solved(draw, step, z0, draw.normal(length, rows, width), **settings)


def layers(draw: Draw) -> Record:
    """A list of modules, some of other kinds, as steps."""
    width, length = draw.pick(WIDTHS), draw.pick((1, 3, 17, 40))
    modules = nn.ModuleList()
    for _ in range(length):
        linear_layer = nn.Linear(width, width).to(draw.device, draw.dtype)
        with torch.no_grad():
            for parameter in linear_layer.parameters():
                parameter.copy_(draw.normal(*parameter.shape, scale=0.5 / width**0.5))
        modules.append(nn.Sequential(linear_layer, draw.pick((nn.Tanh(), nn.Tanh(), nn.SiLU()))))
    return solved(draw, modules, draw.normal(draw.pick(ROWS), width), None, [*modules.parameters()], **newton(draw))


def window_of_states(draw: Draw) -> Record:
    """A step that looks back on two states."""
    width, rows = draw.pick(WIDTHS), draw.pick(ROWS)
    step = deeppcr.with_history(lambda z, x: 0.4 * torch.tanh(z[0]) + 0.3 * torch.sin(z[1]) + x, 2)
    z0 = (draw.normal(rows, width), draw.normal(rows, width))
    return solved(draw, step, z0, draw.normal(draw.pick(LENGTHS), rows, width), **newton(draw))


def system(draw: Draw) -> Record:
    """A linear system of any structure, by any solver, in either direction."""
    length, rows, width = draw.pick(LENGTHS), draw.pick(ROWS), draw.pick((1, 2, 4, 6))
    make, shape = draw.pick(
        (
            (linear.Dense, (width, width)),
            (linear.Diagonal, (width,)),
            (linear.Scalar, (1,)),
            (linear.BlockDiagonal, (2, width // 2 or 1, width // 2 or 1)),
        )
    )
    if make is linear.BlockDiagonal:
        width = 2 * (width // 2 or 1)
    data = draw.normal(length, rows, *shape, scale=draw.pick((0.3, 0.9, 1.2)) / shape[-1] ** 0.5)
    if make is linear.Scalar:
        data = data.squeeze(-1).detach().requires_grad_()
    rhs, initial = draw.normal(length, rows, width), draw.pick((None, draw.normal(rows, width)))
    solver = draw.pick((deeppcr.Auto(), deeppcr.PCR(), deeppcr.ForwardSubstitution(), deeppcr.Hierarchical(chunk=4)))
    states = linear.solve(make(data), rhs, initial, reverse=draw.pick((False, True)), solver=solver)
    leaves = [data, rhs, *([initial] if initial is not None else [])]
    return {"states": digest(states), "gradients": digest(gradients(states, leaves))}


def network(draw: Draw) -> Record:
    """The networks of ``deeppcr.nn``, forward and backward."""
    torch.manual_seed(draw.choice.randrange(2**31))
    width, depth = draw.pick((2, 4, 8)), draw.pick((4, 16, 64))
    sizes: dict[str, int] = {"in_features": 5, "width": width, "depth": depth, "out_features": 3}
    kind = draw.pick((deeppcr.nn.MLP, deeppcr.nn.ResNet))
    made = kind(**sizes, activation=draw.pick(("relu", "tanh"))).to(draw.device, draw.dtype)
    x = draw.normal(draw.pick(ROWS), 5)
    output = made(x, mode=draw.pick(("parallel", "parallel", "sequential", "auto")))
    found = {"output": digest(output), "gradients": digest(gradients(output, [x, *made.parameters()]))}
    return found | {"plan": str(getattr(made.solution, "plan", None))}


def sampler(draw: Draw) -> Record:
    """Diffusion samples in parallel, from a network that is not trained."""
    steps, rows, width = draw.pick((1, 7, 30, 60)), draw.pick(ROWS), draw.pick((2, 5))
    weight = draw.normal(width, width, scale=0.5 / width**0.5).detach()

    def denoiser(z: Tensor, t: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z @ weight + 0.001 * t.to(z).unsqueeze(-1)) + 0.3 * z

    schedule = Schedule.linear(steps)
    noise = Noise.draw((rows, width), steps=steps, generator=draw.source, dtype=draw.dtype, device=draw.device)
    window = Window(size=draw.pick((None, 8, 16))) if draw.pick((True, False)) else Window()
    more = {"step": draw.pick((DDPM(), DDIM(), DDPM(variance="small")))}
    if draw.pick((True, False)):
        more["start"] = draw.pick((GaussianStart(), CoarseStart()))
    if draw.pick((True, False)):
        more["jacobian"] = GaussianPrior()
    solver = draw.pick((window, window, deeppcr.Loop()))
    weight.requires_grad_(draw.pick((True, False)))
    samples = sample(denoiser, schedule, noise, solver=solver, **more)
    found = {"final": digest(samples.final), "iterations": digest(samples.iterations), "result": str(samples.result)}
    if weight.requires_grad:
        found["gradients"] = digest(gradients(samples.final, [weight]))
    return found


FAMILIES = (
    *(mlp, mlp, gated, gated, cell, oscillator, map_of_states, layers, window_of_states),
    *(system, system, network, sampler),
)


def record(count: int, device: str) -> list[Record]:
    torch.set_num_threads(1)
    found = []
    for number in range(count):
        draw, family = Draw(number, device), FAMILIES[number % len(FAMILIES)]
        torch.manual_seed(number)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                result = family(draw)
            except RuntimeError as error:  # a ConvergenceError is one
                result = {"error": f"{type(error).__name__}: {error}"}
        texts = sorted({str(each.message) for each in said if each.category is deeppcr.ConvergenceWarning})
        found.append({"number": number, "family": family.__name__, **result, "warnings": texts})
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {count}", end="", file=sys.stderr, flush=True)
    return found


def compare(before: list[Record], after: list[Record]) -> int:
    """Prints what differs; how many problems do."""
    differ = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    for a, b in differ:
        parts = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        print(f"problem {a['number']} ({a['family']}): {', '.join(parts)}")
        for name in parts:
            print(f"  {name}: {a.get(name)} -> {b.get(name)}"[:400])
    failed = sum("error" in each for each in before)
    print(
        f"{len(before)} problems, {len(before) - len(differ)} the same to the last bit ({failed} of them end in an error)"
    )
    return len(differ)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    recording = parts.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--count", type=int, default=500)
    recording.add_argument("--device", default="cpu")
    comparing = parts.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if "out" in given:
        given.out.write_text(json.dumps(record(given.count, given.device), indent=1))
        return 0
    return min(1, compare(*(json.loads(path.read_text()) for path in (given.before, given.after))))


if __name__ == "__main__":
    sys.exit(main())
