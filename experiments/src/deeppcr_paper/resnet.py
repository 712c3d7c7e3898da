"""Training residual networks, several at a time in lockstep: the same images, one pass layer by layer, one in parallel.

Shapes: B rows, w the width, L layers in steps of ``skip``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr
from deeppcr.gradient import GradientOverflow
from deeppcr.nn.base import ACTIVATIONS

from .data import Images, digits, mnist
from .experiment import Context, OutOfTime
from .replay import ReplayedSteps
from .settings import setting
from .store import PaperError
from .timing import no_collection, own_stream, synchronise

#: Steps of a window that are taken one by one, and timed, where the others are replayed.
TIMED = 2
#: Passes before the clock starts: the first solve of a kind compiles, the second is recorded as a CUDA graph.
WARM_UP = 3
#: Seconds between checkpoints of a cell.
CHECKPOINT = 60.0
CLASSES = 10
DTYPES = {"float32": torch.float32, "float64": torch.float64}
GUESSES = ("batch-mean", "random", "zeros", "first-layer")


@dataclass(frozen=True)
class Settings:
    """What the experiments on training share.

    Attributes:
        depths: layers between the input and the output layer
        epochs: of the training
        steps: the training ends after so many, if there are more in the epochs
        rate: of plain stochastic gradient descent
        window: steps that make one point of a curve
        seeds: runs with seed, seed + 1, ...
        timed_seeds: of so many of them passes are timed; the others, replayed as a whole, can share a device
        data: "mnist" or "digits"
        train, test: how many images; None for all
        eager_steps: forward passes of the eager loop that are timed
        iterations: fixed numbers of Newton iterations; 0 stops by the paper's test
        guesses: where Newton starts
        dtype: "float32" or "float64", in which two trainings that should be the same do not drift apart by rounding
        solver: "paper" (chunks of 1, its test) or "default" (this library's: its test is stricter)
    """

    depths: tuple[int, ...] = (256, 512, 1024)
    width: int = 16
    skip: int = 4
    activation: str = setting("relu", choices=ACTIVATIONS)
    batch: int = 8
    epochs: int = 8
    steps: int | None = None
    rate: float = 1e-3
    window: int = 100
    seeds: int = 5
    timed_seeds: int = setting(1, least=0)
    data: str = setting("mnist", choices=("mnist", "digits"))
    train: int | None = None
    test: int | None = None
    eager_steps: int = 200
    iterations: tuple[int, ...] = setting((0,), least=0)
    guesses: tuple[str, ...] = setting(("batch-mean",), choices=GUESSES)
    dtype: str = setting("float32", choices=DTYPES)
    solver: str = setting("paper", choices=("paper", "default"))
    seed: int = 0


def adapt(settings: Settings, context: Context) -> Settings:
    """Quick runs take MNIST, too, where its folder was given."""
    uneven = [depth for depth in settings.depths if depth % settings.skip]
    if uneven:
        raise PaperError(f"depths: expected multiples of skip = {settings.skip}, got {uneven[0]}")
    return replace(settings, data="mnist") if context.data_dir is not None else settings


def images(settings: Settings, context: Context) -> Images:
    """On the device; read once a run."""
    if "images" not in context.cache:
        found = digits() if settings.data == "digits" else mnist(context.data_dir)
        context.cache["images"] = found.first(settings.train, settings.test).to(context.device, DTYPES[settings.dtype])
        if len(context.cache["images"].train_labels) < settings.batch:
            raise PaperError(f"batch: {settings.batch} images, but there are fewer to train with")
    return context.cache["images"]


def newton(settings: Settings, iterations: int = 0) -> deeppcr.Newton:
    """The paper's method, with its test or with a fixed number of iterations; or the library's defaults."""
    if settings.solver == "default":
        return deeppcr.Newton(stop=deeppcr.FixedIterations(iterations)) if iterations else deeppcr.Newton()
    stop = deeppcr.FixedIterations(iterations) if iterations else deeppcr.PaperTest(1e-4, 1e-4)
    return deeppcr.Newton(chunk=1, stop=stop, max_iterations=15)


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
            "eager" or "parallel"
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
        self.device, self.mode, self.timed = images.train.device, mode, timed
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
        self.forward: Callable[[Tensor], Tensor] = self.network
        # With the fused kernels, or a fixed number of iterations, nothing in a step asks the host: it is one CUDA graph.
        probe = images.train.new_empty(settings.batch, settings.width)
        kernels = mode in ("sequential", "parallel") and self.network._has_kernels(probe, mode)
        fixed = mode == "parallel" and isinstance(self.network.newton.stop, deeppcr.FixedIterations)
        self.replayable = kernels or (fixed and self.device.type == "cuda")
        self._replayed: ReplayedSteps | None = None
        self._report: Any = None  # of the recorded pass: how to read what a replay has found
        self.method = "parallel" if mode == "parallel" else "loop"
        if mode == "sequential" and self.replayable:
            self.method = "fused"
            self.forward = lambda x: self.network(x, mode="sequential")
        elif mode != "parallel":
            self.forward = _LayerByLayer(self.network)
            if mode == "sequential" and self.device.type == "cuda":
                self.method = "graph"
                sample = images.train[: settings.batch].clone()
                with no_collection():
                    self.forward = torch.cuda.make_graphed_callables(self.forward, (sample,))  # pyright: ignore
        self.diverged: int | None = None
        self.losses: list[float] = []  # since the last point of the curves
        self.curves: dict[str, list[Any]] = {}
        self.test_accuracy: list[float] = []
        self._window: dict[str, list[float]] = {}

    def prepare(self) -> None:
        """Before every pass: a random guess is new, and the same whenever so many passes went before."""
        self.passes += 1
        if self._random is not None:
            self._random.normal_(generator=self._generator.manual_seed(self.passes))

    def advance(self, images: Images, order: Tensor, first: int, count: int, number: int) -> None:
        """Take steps ``first`` to ``first + count`` of the epoch, with the images ``order`` [epoch, batch] names.

        Args:
            number: of the first of them, counted from the beginning of the training
        """
        timed = min(count, TIMED if self.timed else 0) if self.replayable else count
        for index in range(first, first + timed):
            picked = order[index]
            self.step(images.train[picked], images.train_labels[picked], number + index - first)
        if timed < count and self.diverged is None:
            self.replay(images, order, first + timed, count - timed, number + timed)

    def replay(self, images: Images, order: Tensor, first: int, count: int, number: int) -> None:
        if self._replayed is None or self._replayed.order is not order or count > len(self._replayed.losses):
            state = [*self.network.parameters(), self.network.activations]
            self._replayed = ReplayedSteps(
                self.forward, self.optimiser, state, images, order, count, self.prepare, self._found
            )
            self._report = self.network._passed
        synchronise(self.device)
        begun = time.perf_counter()
        losses, hits, passes = self._replayed.run(first, count)
        seconds = (time.perf_counter() - begun) / count
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            self.diverged, count = number + bad[0], bad[0]
        self.losses += losses[:count]
        found: dict[str, list[float]] = {"loss": losses, "accuracy": hits}
        if self.timed:
            found["replayed_seconds"] = [seconds] * count
        if passes is not None and isinstance(self._report, deeppcr.Solution):
            iterations, exact = passes[:count].unbind(1)
            found["iterations"] = iterations.double().mean(1).tolist()
            found["not_converged"] = (exact < len(self.network.weight)).any(1).double().tolist()
        elif passes is not None:
            taken = [replace(self._report, found=each).passes_taken() for each in passes.cpu().unbind()]
            found["iterations"] = [fmean(self._report.iterations(each)) for each in taken]
            found["not_converged"] = [float(0 in each) for each in taken]
        for name, values in found.items():
            self._window.setdefault(name, []).extend(values[:count])

    def _found(self) -> Tensor | None:
        """What the last parallel pass found out about itself: by the kernels, or its iterations and exact steps, [2, B]."""
        report = self.network._passed if self.mode == "parallel" else None
        if isinstance(report, deeppcr.Solution):
            return torch.stack([report.iterations, report.exact_steps])
        return None if report is None else report.found

    def warm_up(self, images: Images, batch: int) -> None:
        """Some passes, forward and backward, that leave no trace: all is compiled and recorded before anything is timed."""
        network, passes = self.network, self.passes
        kept, warm = network.activations.clone(), network._warm
        for _ in range(WARM_UP):
            self.prepare()
            nn.functional.cross_entropy(self.forward(images.train[:batch]), images.train_labels[:batch]).backward()
            self.optimiser.zero_grad(set_to_none=True)
        network.activations.copy_(kept)
        network._warm, self.passes = warm, passes

    def step(self, x: Tensor, labels: Tensor, number: int) -> None:
        """One step of training; none once the loss is no longer finite."""
        if self.diverged is not None:
            return
        synchronise(self.device)
        begun = time.perf_counter()
        self.prepare()
        scores = self.forward(x)
        synchronise(self.device)
        passed = time.perf_counter()
        loss = nn.functional.cross_entropy(scores, labels)
        self.optimiser.zero_grad(set_to_none=True)
        try:
            loss.backward()
            self.optimiser.step()
        except GradientOverflow:  # with such a gradient, the next step would have no loss
            self.diverged = number + 1
        synchronise(self.device)
        ended = time.perf_counter()
        value = loss.item()
        if not math.isfinite(value):
            self.diverged = number
            return
        self.losses.append(value)
        found = {
            "loss": value,
            "accuracy": (scores.argmax(-1) == labels).float().mean().item(),
        }
        if self.timed:
            found |= {"forward_seconds": passed - begun, "step_seconds": ended - begun}
        if self.mode == "parallel":
            solution = self.network.solution
            assert solution is not None
            found["iterations"] = solution.iterations.float().mean().item()
            good = (deeppcr.Result.CONVERGED, deeppcr.Result.ITERATIONS_DONE)
            found["not_converged"] = float(solution.result not in good)
        for name, each in found.items():
            self._window.setdefault(name, []).append(each)

    def close_window(self, number: int) -> None:
        """A point of each curve: mean and standard deviation over the window."""
        window, self._window, self.losses = self._window, {}, []
        if not window:
            return
        self.curves.setdefault("step", []).append(number)
        for name, values in window.items():
            self.curves.setdefault(name, []).append(fmean(values))
            self.curves.setdefault(f"{name}_std", []).append(pstdev(values))

    @torch.no_grad()
    def test(self, images: Images) -> None:
        """Accuracy on the test images, layer by layer: the network as it is, however it was trained."""
        hits = 0
        for x, labels in zip(images.test.split(1000), images.test_labels.split(1000), strict=True):
            hits += int((self.network(x, mode="sequential").argmax(-1) == labels).sum())
        self.test_accuracy.append(hits / len(images.test_labels))

    def record(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "curves": self.curves,
            "test_accuracy": self.test_accuracy,
            "diverged": self.diverged,
        }

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
        self.network.activations = state["activations"].to(self.device)
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
    first, distances, apart = 0, [], []
    kept = context.load_checkpoint()
    if kept is not None and set(kept["runners"]) == set(runners):
        first, distances, apart = kept["step"], kept["distances"], kept["apart"]
        for name, runner in runners.items():
            runner.load(kept["runners"][name])
    with own_stream(context.device):
        order = torch.empty(per_epoch, settings.batch, dtype=torch.long, device=context.device)
        for runner in runners.values():
            runner.warm_up(images, settings.batch)
        step, shuffled, saved = first, None, time.monotonic()
        while step < total:
            epoch, index = divmod(step, per_epoch)
            if epoch != shuffled:
                generator = torch.Generator().manual_seed((1000 * seed + epoch) % 2**63)
                picked = torch.randperm(len(images.train_labels), generator=generator)[: order.numel()]
                order.copy_(picked.view_as(order))
                shuffled = epoch
            # To the end of the window, of the epoch or of the training, whichever comes first.
            count = min(settings.window - step % settings.window, per_epoch - index, total - step)
            for runner in runners.values():
                if runner.diverged is None:
                    runner.advance(images, order, index, count, step)
            step += count
            if step % per_epoch == 0 or step == total:
                for runner in runners.values():
                    if runner.diverged is None:
                        runner.test(images)
            if step % settings.window and step < total:
                continue
            if len(runners) == 2:
                one, other = runners.values()
                distances.append(distance(one, other))
                apart.append(max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=False)), default=0.0))
            for runner in runners.values():
                runner.close_window(step)
            context.watcher.part(step / total)
            late = _out_of_time(context)
            if step < total and (late or time.monotonic() - saved > CHECKPOINT):
                states = {name: runner.state() for name, runner in runners.items()}
                context.save_checkpoint({"step": step, "distances": distances, "apart": apart, "runners": states})
                saved = time.monotonic()
                if late:
                    raise OutOfTime
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


def _out_of_time(context: Context) -> bool:
    try:
        context.check_time()
    except OutOfTime:
        return True
    return False


def last(curve: list[float]) -> float | None:
    """The mean of the last tenth of a curve, of ten points at most; None where there are none.

    >>> last([5.0] * 95 + [2.0] * 5), last([9.0, 8.0, 7.0]), last([])
    (3.5, 7.0, None)
    """
    points = max(1, min(10, len(curve) // 10))
    values = [value for value in curve[-points:] if isinstance(value, (int, float))]
    return fmean(values) if values else None
