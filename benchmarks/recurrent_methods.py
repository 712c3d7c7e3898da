"""The ways to run a recurrent layer that ``recurrent.py`` measures, each with its check against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr
import deeppcr.nn
from kernel_methods import Method, can_capture, captured, iterations_inside

FORWARD, BOTH = "forward", "forward and backward"
TORCH, PARALLEL, AUTO, CAPTURED = "torch.nn", "parallel", "auto", ", captured"
#: Wider states have no kernels: there is nothing to be tried.
WIDEST = 128
#: The longest sequence for PyTorch: cuDNN refuses 65,536 steps. What is compared with goes on from piece to piece.
PIECE = 32_768
#: Errors may be so many times PyTorch's own; those below this are luck.
ALLOWED, LEAST = 3.0, 2 * torch.finfo(torch.float32).eps
#: Calls before a method is checked and timed, on a GPU and elsewhere: what comes again is compiled first, then recorded.
WARM_UP, FEWER = 12, 2


@dataclass(frozen=True)
class Size:
    """One layer: T steps, B rows, H the hidden size, and the features of its input."""

    kind: str
    T: int
    B: int
    H: int
    direction: str

    @property
    def parameters(self) -> dict[str, Any]:
        return {"kind": self.kind, "T": self.T, "B": self.B, "H": self.H, "direction": self.direction}


class InPieces(nn.Module):
    """A module of PyTorch on sequences of any length: the state of a piece is where the next one begins."""

    def __init__(self, module: nn.Module, steps: int | None = None):
        super().__init__()
        self.module, self.steps = module, steps or PIECE

    def forward(self, x: Tensor) -> tuple[Tensor]:
        state, outputs = None, []
        for piece in x.split(self.steps):
            output, state = self.module(piece, state)
            outputs.append(output)
        return (torch.cat(outputs),)


class Layer:
    """Modules with one set of weights, and what float64 makes of them."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.x = torch.randn(size.T, size.B, size.H, device=device)
        self.outer = torch.randn(size.T, size.B, size.H, device=device)
        self.plain = getattr(nn, size.kind)(size.H, size.H, device=device)
        exact = getattr(nn, size.kind)(size.H, size.H, device=device, dtype=torch.float64)
        exact.load_state_dict(self.plain.state_dict())
        self.right = self.run(InPieces(exact), torch.float64)()
        self.allowed = [ALLOWED * max(each, LEAST) for each in self.distances(self.run(InPieces(self.plain))())]

    def module(self, mode: str, **options: Any) -> Any:
        made = getattr(deeppcr.nn, self.size.kind)(self.size.H, self.size.H, mode=mode, device=self.device, **options)
        made.load_state_dict(self.plain.state_dict())
        return made

    def run(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
        return run_of(module, self.x.to(dtype), self.outer.to(dtype), self.size.direction)

    def distances(self, found: list[Tensor]) -> list[float]:
        """Of the outputs, of the gradient of the input, and of those of all parameters together."""
        return distances(found, self.right)

    def error(self, found: list[Tensor]) -> float:
        """In units of what is allowed."""
        return max(each / most for each, most in zip(self.distances(found), self.allowed, strict=True))


def run_of(module: Callable, x: Tensor, outer: Tensor, direction: str) -> Callable[[], list[Tensor]]:
    """Outputs, and with gradients those of the input and of all parameters."""
    x = x.detach().requires_grad_(direction == BOTH)
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(direction == BOTH):
            output = module(x)[0]
            return [output, *(torch.autograd.grad(output, [x, *parameters], outer) if direction == BOTH else ())]

    return run


@torch.no_grad()
def distances(found: list[Tensor], right: list[Tensor]) -> list[float]:
    parts = [found[:1], found[1:2], found[2:]], [right[:1], right[1:2], right[2:]]
    flat = [[torch.cat([each.double().flatten() for each in part]) for part in every if part] for every in parts]
    return [float((one - other).norm() / other.norm()) for one, other in zip(*flat, strict=True)]


def methods_of(layer: Layer, *, in_graphs: bool) -> Iterator[tuple[str, Method]]:
    """Those that run kernels of ours are checked for having some.

    Args:
        in_graphs: the same, captured in a CUDA graph, besides
    """
    size, in_graphs = layer.size, in_graphs and can_capture(layer.device)
    plain = layer.run(layer.plain)
    yield TORCH, Method(plain, layer.error, kernels=False, optional=size.T > PIECE)
    auto = layer.module("auto")
    run_auto = layer.run(auto)
    yield AUTO, Method(run_auto, layer.error, lambda run: warmed(run, auto), solution=lambda: auto.solutions[0])
    if in_graphs:
        yield TORCH + CAPTURED, Method(plain, layer.error, prepare=captured, kernels=False, optional=True)
    if not may_have_kernels(size):
        return
    parallel = layer.module("parallel")
    run = layer.run(parallel)

    def by_kernels() -> list[Tensor]:
        found = run()
        if layer.device.type == "cuda" and not parallel.solutions[0].plan.evaluation.startswith("fused"):
            raise RuntimeError(f"not by kernels: {parallel.solutions[0].plan}")
        return found

    def with_kernels(_: Any) -> Callable[[], list[Tensor]]:
        if layer.device.type == "cuda":
            make_kernels(parallel, layer.x, size.direction)
        return warmed(by_kernels, parallel)

    def inside(_: Any) -> Callable[[], Any]:
        parallel.newton = deeppcr.Newton(stop=deeppcr.FixedIterations(iterations_inside(parallel.solutions[0])))
        try:
            return captured(run)
        finally:
            parallel.newton = deeppcr.Newton()

    yield PARALLEL, Method(run, layer.error, with_kernels, solution=lambda: parallel.solutions[0], optional=True)
    if in_graphs:
        yield PARALLEL + CAPTURED, Method(run, layer.error, prepare=inside, optional=True)


def may_have_kernels(size: Size) -> bool:
    return (2 if size.kind == "LSTM" else 1) * size.H <= WIDEST


def make_kernels(module: Any, x: Tensor, direction: str) -> None:
    """Before the first solve, as ``auto`` does, which otherwise is by PyTorch's operations, and long; raises where there are none."""
    with torch.set_grad_enabled(direction == BOTH):
        module._by_solve(x, None, None, module.newton, kernels=True)


def warmed(run: Callable[[], Any], module: Any) -> Callable[[], Any]:
    """The same, once what comes again is compiled. PyTorch's kernel that is taken twice in a row is so for good."""
    for call in range(WARM_UP if next(module.parameters()).is_cuda else FEWER):
        run()
        if call and module.solutions[0].result is deeppcr.Result.LOOP:
            break
    return run


def diagonal_methods(size: Size, device: torch.device) -> Iterator[tuple[str, Method]]:
    torch.manual_seed(0)
    H = size.H
    module = deeppcr.nn.DiagonalGRU(H, H, device=device)
    x, outer = (torch.randn(size.T, size.B, H, device=device) for _ in range(2))
    exact = deeppcr.nn.DiagonalGRU(H, H, mode="sequential", device=device, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    right = run_of(exact, x.double(), outer.double(), size.direction)()
    # There is no plain implementation whose rounding could be the measure: some ten roundings are allowed.
    allowed = 1e-5 if size.direction == BOTH else 3e-6

    def error(found: list[Tensor]) -> float:
        return max(distances(found, right)) / allowed

    run = run_of(module, x, outer, size.direction)
    yield (
        "DiagonalGRU",
        Method(run, error, solution=lambda: module.solutions[0], warm_up=WARM_UP if device.type == "cuda" else FEWER),
    )
    if find_spec("pararnn") is not None:
        theirs = run_of(
            pararnn(module), x.transpose(0, 1).contiguous(), outer.transpose(0, 1).contiguous(), size.direction
        )
        yield (
            "pararnn-torch",
            Method(
                theirs,
                lambda found: error(as_ours(found, H)),
                optional=True,
                warm_up=WARM_UP if device.type == "cuda" else FEWER,
            ),
        )


def pararnn(module: Any) -> nn.Module:
    """Their layer with our weights; parameters in the order of ours."""
    from pararnn import ParaGRU, newton_apply  # pyright: ignore[reportMissingImports]

    class Layer(nn.Module):
        def __init__(self, cell: nn.Module):
            super().__init__()
            self.cell = cell

        def parameters(self, recurse: bool = True) -> Any:
            cell: Any = self.cell
            return iter([cell.W_x.weight, cell.a_z, cell.a_r, cell.a_n, cell.W_x.bias])

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (newton_apply(self.cell, x),)

    H, device = module.hidden_size, module.weight_hh_l0.device
    cell = ParaGRU(H, H, max_recurrent_norm=None, device=device, dtype=module.weight_hh_l0.dtype)
    order = gates_of(H, device)
    for name, at in (("a_r", 0), ("a_z", 1), ("a_n", 2)):
        setattr(cell, name, nn.Parameter(module.weight_hh_l0[at].detach().clone()))
    cell.W_x.weight = nn.Parameter(module.weight_ih_l0.detach()[order])
    cell.W_x.bias = nn.Parameter(module.bias_ih_l0.detach()[order])
    return Layer(cell)


def gates_of(H: int, device: torch.device) -> Tensor:
    """Their gates are update, reset, new; ours reset, update, new. Both ways it is the same exchange."""
    return torch.cat([torch.arange(H, device=device) + H * at for at in (1, 0, 2)])


def as_ours(found: list[Tensor], H: int) -> list[Tensor]:
    """Their outputs and gradients, rows first, in the order of ours."""
    first = [each.transpose(0, 1) for each in found[:2]]
    if len(found) == 1:
        return first
    weight, update, reset, new, bias = found[2:]
    order = gates_of(H, weight.device)
    return [*first, weight[order], torch.stack([reset, update, new]), bias[order]]
