"""Training residual networks, several at a time in lockstep: the same images, one pass layer by layer, one in parallel.

Shapes: B rows, w the width, L layers in steps of ``skip``.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr
from deeppcr.graphs.record import no_collection
from deeppcr.linearised import GradientOverflow

from .data import Images
from .experiment import Context, OutOfTime
from .lean_resnet import Pass
from .replay import ReplayedSteps
from .resnet import Settings
from .timing import clocked, own_stream

#: Steps of a window that are launched by Python, and timed, where the others can be replayed as CUDA graphs.
TIMED = 2
#: Passes before the clock starts: the first solve of a kind compiles, the second is recorded as a CUDA graph.
WARM_UP = 3
#: Seconds between checkpoints of a cell.
CHECKPOINT = 60.0
CLASSES = 10


class _LayerByLayer(nn.Module):
    """One call a layer, as PyTorch has it: ``mode="sequential"`` is one kernel on a GPU."""

    def __init__(self, network: deeppcr.nn.ResNet):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        network = self.network
        return network.output(network._apply_activation(network._loop(network.input(x))[-1]))


class Runner:
    """One network in training, and the curves of it.

    Args:
        mode: "sequential" (the fastest that goes layer by layer: on a GPU one kernel or, where there is none, a CUDA graph),
            "eager", "parallel" or "printed" (the paper's method in plain PyTorch)
        newton: of the parallel mode
        guess: of the parallel mode: "batch-mean", "random", "zeros", "first-layer"
        timed: whether passes are timed; where all steps could be replayed, some of every window are taken one by one for it
    """

    def __init__(
        self,
        settings: Settings,
        depth: int,
        seed: int,
        images: Images,
        mode: str,
        newton: deeppcr.Newton | None = None,
        guess: str = "batch-mean",
        timed: bool = True,
    ):
        self.device, self.images, self.mode, self.timed = images.train.device, images, mode, timed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # on the CPU: the same network on every device
            network = deeppcr.nn.ResNet(
                images.train.shape[1],
                settings.width,
                depth,
                CLASSES,
                settings.skip,
                settings.activation,
                mode="parallel",
                newton=newton,
                warm_start=guess == "batch-mean",
            )
        self.network = network.to(self.device, images.train.dtype)
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=settings.rate)
        self.passes = 0
        self._random: Tensor | None = None  # the guess of a pass
        if guess == "random":
            self._random = images.train.new_zeros(depth // settings.skip, settings.batch, settings.width)
            self._generator = torch.Generator(self.device)
            self.network.guess = self._random
        elif guess == "zeros":
            self.network.guess = deeppcr.Zeros()
        # With the fused kernels, or a fixed number of iterations, nothing in a step asks the host: it is one CUDA graph.
        probe = images.train.new_empty(settings.batch, settings.width)
        kernels = mode in ("sequential", "parallel") and _has_kernels(self.network, probe, mode)
        fixed = mode == "parallel" and isinstance(self.network.newton.stop, deeppcr.FixedIterations)
        self.replayable = kernels or (fixed and self.device.type == "cuda")
        self._replayed: ReplayedSteps | None = None
        self._report: Any = None  # of the recorded pass: how to read what a replay has found
        self.method, self.forward = self._forward_of(images.train[: settings.batch])
        # Of the method as printed iterations are graphs, not steps: how many there are is seen between them.
        in_graphs = mode == "printed" and self.device.type == "cuda"
        self.graphed = Pass(self.network, settings.batch, graph=True) if in_graphs else None
        self.diverged: int | None = None
        self.window: dict[str, list[float]] = {}  # what was found in every step since the last point of the curves
        self.curves: dict[str, list[Any]] = {}
        self.test_accuracy: list[float] = []

    def _forward_of(self, x: Tensor) -> tuple[str, Callable[[Tensor], Tensor]]:
        """What the mode comes to on this device, and the pass of it; x is a batch of images."""
        if self.mode == "parallel":
            return "parallel", self.network
        if self.mode == "printed":
            return "printed", Pass(self.network, len(x))
        if self.mode == "sequential" and self.replayable:
            return "fused", lambda x: self.network(x, mode="sequential")
        eager = _LayerByLayer(self.network)
        if self.mode == "eager" or self.device.type != "cuda":
            return "loop", eager
        gc.collect()  # none is collected in a capture
        with no_collection():
            return "graph", torch.cuda.make_graphed_callables(eager, (x.clone(),))  # pyright: ignore

    def prepare(self) -> None:
        """Before every pass: a random guess is new, and the same whenever so many passes went before."""
        self.passes += 1
        if self._random is not None:
            self._random.normal_(generator=self._generator.manual_seed(self.passes))

    def warm_up(self, batch: int) -> None:
        """Some passes, forward and backward, that leave no trace: all is compiled and recorded before anything is timed."""
        network, images, passes = self.network, self.images, self.passes
        kept, warm = network.activations.clone(), network._warm
        for forward in (self.forward, *([self.graphed] if self.graphed else [])):
            for _ in range(WARM_UP):
                self.prepare()
                nn.functional.cross_entropy(forward(images.train[:batch]), images.train_labels[:batch]).backward()
                self.optimiser.zero_grad(set_to_none=True)
        network.activations.copy_(kept)
        network._warm, self.passes = warm, passes

    def advance(self, order: Tensor, first: int, count: int, number: int) -> None:
        """Take steps ``first`` to ``first + count`` of the epoch, with the images that ``order`` [epoch, batch] names.

        Args:
            number: of the first of them, counted from the beginning of the training
        """
        launched = min(count, TIMED if self.timed else 0) if self.replayable or self.graphed else count
        for index in range(launched if self.replayable else count):
            picked = order[first + index]
            pictures, labels = self.images.train[picked], self.images.train_labels[picked]
            self.take_step(pictures, labels, number + index, self.graphed if index >= launched else None)
        if self.replayable and launched < count and self.diverged is None:
            self.replay(order, first + launched, count - launched, number + launched)

    def take_step(self, x: Tensor, labels: Tensor, number: int, graphed: Pass | None = None) -> None:
        """One step of training, by ``graphed`` where it is given; none once the loss is no longer finite."""
        if self.diverged is not None:
            return
        forward = graphed or self.forward
        (scores, loss, passed), took = clocked(lambda: self._descend(x, labels, number, forward), self.device)
        found = {"loss": loss.item()}
        if not math.isfinite(found["loss"]):
            self.diverged = number
            return
        found["accuracy"] = (scores.argmax(-1) == labels).float().mean().item()
        if self.timed:
            prefix = "graphed_" if graphed else ""
            found |= {f"{prefix}forward_seconds": passed, f"{prefix}step_seconds": took}
        if isinstance(forward, Pass):
            found |= {"iterations": forward.newton.iterations, "not_converged": float(not forward.newton.is_met)}
        elif self.mode == "parallel":
            solution = self.network.solution
            assert solution is not None
            found["iterations"] = solution.iterations.float().mean().item()
            good = (deeppcr.Result.CONVERGED, deeppcr.Result.ITERATIONS_DONE)
            found["not_converged"] = float(solution.result not in good)
        for name, value in found.items():
            self.window.setdefault(name, []).append(value)

    def _descend(
        self, x: Tensor, labels: Tensor, number: int, forward: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, float]:
        """The scores, the loss, and the seconds of the forward pass."""

        def prepared() -> Tensor:
            self.prepare()
            return forward(x)

        scores, passed = clocked(prepared, self.device)
        loss = nn.functional.cross_entropy(scores, labels)
        self.optimiser.zero_grad(set_to_none=True)
        try:
            loss.backward()
            self.optimiser.step()
        except GradientOverflow:  # with such a gradient, the next step would have no loss
            self.diverged = number + 1
        return scores, loss, passed

    def replay(self, order: Tensor, first: int, count: int, number: int) -> None:
        """The same as so many steps one by one, in one CUDA graph each."""
        if self._replayed is None or self._replayed.order is not order or count > len(self._replayed.losses):
            state = [*self.network.parameters(), self.network.activations]
            self._replayed = ReplayedSteps(
                self.forward, self.optimiser, state, self.images, order, count, self.prepare, self._found
            )
            self._report = self.network._passed
        replayed = self._replayed
        (losses, hits, passes), took = clocked(lambda: replayed.run(first, count), self.device)
        finite = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), count)
        if finite < count:
            self.diverged = number + finite
        if not finite:
            return
        found: dict[str, list[float]] = {"loss": losses[:finite], "accuracy": hits[:finite]}
        passes = None if passes is None else passes[:finite]
        if self.timed:
            found["replayed_seconds"] = [took / count] * finite
        if passes is not None and isinstance(self._report, deeppcr.Solution):
            iterations, exact = passes.unbind(1)
            found["iterations"] = iterations.double().mean(1).tolist()
            found["not_converged"] = (exact < len(self.network.weight)).any(1).double().tolist()
        elif passes is not None:
            taken = [replace(self._report, found=each).passes_taken() for each in passes.cpu().unbind()]
            found["iterations"] = [fmean(self._report.iterations(each)) for each in taken]
            found["not_converged"] = [float(0 in each) for each in taken]
        for name, values in found.items():
            self.window.setdefault(name, []).extend(values)

    def _found(self) -> Tensor | None:
        """What the last parallel pass found out about itself: by the kernels, or its iterations and exact steps, [2, B]."""
        report = self.network._passed if self.mode == "parallel" else None
        if isinstance(report, deeppcr.Solution):
            return torch.stack([report.iterations, report.exact_steps])
        return None if report is None else report.found

    def close_window(self, number: int) -> None:
        """A point of each curve: mean and standard deviation over the window."""
        window, self.window = self.window, {}
        if window:
            self.curves.setdefault("step", []).append(number)
        for name, values in window.items():
            self.curves.setdefault(name, []).append(fmean(values))
            self.curves.setdefault(f"{name}_std", []).append(pstdev(values))

    @torch.no_grad()
    def test(self) -> None:
        """Accuracy on the test images, layer by layer: the network as it is, however it was trained."""
        hits, labels = 0, self.images.test_labels
        for x, expected in zip(self.images.test.split(1000), labels.split(1000), strict=True):
            hits += int((self.network(x, mode="sequential").argmax(-1) == expected).sum())
        self.test_accuracy.append(hits / len(labels))

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("method", "curves", "test_accuracy", "diverged")}

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs; taken between windows."""
        return {
            "parameters": self.network.state_dict(),
            "activations": self.network.activations,
            "warm": self.network._warm,
            "passes": self.passes,
            **self.record(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["parameters"])
        self.network.activations.copy_(state["activations"])
        self.network._warm, self.passes = state["warm"], state["passes"]
        self.curves, self.test_accuracy, self.diverged = state["curves"], state["test_accuracy"], state["diverged"]


def train(
    runners: dict[str, Runner], images: Images, settings: Settings, seed: int, context: Context
) -> dict[str, Any]:
    """Train them all on the same batches.

    Returns:
        for every runner its curves, and, where there are two, for every point the largest difference of a parameter,
        and the largest difference of the losses of a step since the point before
    """
    per_epoch = len(images.train_labels) // settings.batch
    total = settings.epochs * per_epoch
    if settings.steps is not None:
        total = min(total, settings.steps)
    done, distances, apart = 0, [], []
    kept = context.load_checkpoint()
    if kept is not None and set(kept["runners"]) == set(runners):
        done, distances, apart = kept["step"], kept["distances"], kept["apart"]
        for name, runner in runners.items():
            runner.load(kept["runners"][name])

    def save() -> None:
        states = {name: runner.state() for name, runner in runners.items()}
        context.save_checkpoint({"step": done, "distances": distances, "apart": apart, "runners": states})

    with own_stream(context.device):
        order = torch.empty(per_epoch, settings.batch, dtype=torch.long, device=context.device)
        for runner in runners.values():
            runner.warm_up(settings.batch)
        shuffled, saved = None, time.monotonic()
        while done < total:
            epoch, index = divmod(done, per_epoch)
            if epoch != shuffled:
                generator = torch.Generator().manual_seed((1000 * seed + epoch) % 2**63)
                picked = torch.randperm(len(images.train_labels), generator=generator)[: order.numel()]
                order.copy_(picked.view_as(order))
                shuffled = epoch
            # To the end of the window, of the epoch or of the training, whichever comes first.
            count = min(settings.window - done % settings.window, per_epoch - index, total - done)
            for runner in runners.values():
                if runner.diverged is None:
                    runner.advance(order, index, count, done)
            done += count
            if done % per_epoch == 0 or done == total:
                for runner in runners.values():
                    if runner.diverged is None:
                        runner.test()
            if done % settings.window and done < total:
                continue
            if len(runners) == 2:
                one, other = runners.values()
                distances.append(distance(one, other))
                losses = zip(one.window.get("loss", []), other.window.get("loss", []), strict=False)
                apart.append(max((abs(a - b) for a, b in losses), default=0.0))
            for runner in runners.values():
                runner.close_window(done)
            context.watcher.part(done / total)
            if done < total:
                try:
                    context.check_time()
                except OutOfTime:
                    save()
                    raise
                if time.monotonic() - saved > CHECKPOINT:
                    save()
                    saved = time.monotonic()
            if all(runner.diverged is not None for runner in runners.values()):
                break
    found: dict[str, Any] = {"runs": {name: runner.record() for name, runner in runners.items()}}
    if len(runners) == 2:
        found["parameter_distance"], found["loss_distance"] = distances, apart
    return found


@torch.no_grad()
def distance(one: Runner, other: Runner) -> float:
    """The largest difference of a parameter."""
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def _has_kernels(network: deeppcr.nn.ResNet, hidden: Tensor, mode: str) -> bool:
    """Whether the fused kernels do what is asked: the paper's own method, say, they do not."""
    return network._may_use_kernels(hidden) and network._way(network.weight, hidden, mode) is not None
