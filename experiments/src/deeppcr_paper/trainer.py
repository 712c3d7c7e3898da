"""Training that can be stopped at any time: going on gives the same network, bit by bit, as never having stopped
(on the same machine; on a CPU with as many threads, since the order of sums depends on them).

While a network is trained its state is kept in ``<name>.training.safetensors``: parameters, the optimisers' states and that
of the random numbers. Once it is finished there is ``<name>.safetensors`` with the parameters alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deeppcr.runtime import full_precision

from . import tensor_files
from .experiment import Context, OutOfTime
from .store import PaperError

#: Seconds between checkpoints.
CHECKPOINT = 60.0
#: A curve of a loss has so many points.
POINTS = 100


@dataclass
class Trainer:
    """Modules, what changes them, and how far they have come.

    Attributes:
        about: settings that make the network what it is, as JSON has them; a file with others is not taken
        modules: what is trained, by name
        optimisers: by name
        generator: of all random numbers of the training, on the device
        losses: names of what ``step`` returns
        step: one step of training; returns the losses, [k], without waiting for the device
        steps: how many there are
        finish: is called after the last one, before the network is kept
    """

    about: dict[str, Any]
    modules: dict[str, nn.Module]
    optimisers: dict[str, torch.optim.Optimizer]
    generator: torch.Generator
    losses: tuple[str, ...]
    step: Callable[[], Tensor]
    steps: int
    finish: Callable[[], None] = lambda: None
    done: int = 0
    seconds: float = 0.0
    curves: dict[str, list[float]] = field(default_factory=dict)

    def run(self, context: Context, path: Path | None) -> dict[str, Any]:
        """Train to the end, or load what was.

        Args:
            path: of the finished network; None to keep nothing

        Returns:
            the curves of the losses, the steps and the seconds that they took
        """
        unfinished = None if path is None else path.with_suffix(".training.safetensors")
        if path is not None and path.exists():
            self._load(path)
            return self.record
        if unfinished is not None and unfinished.exists():
            self._load(unfinished)
        # Ten bits of mantissa do for training, and are several times as fast.
        with torch.enable_grad(), _reproducible(), full_precision(context.device, tf32=True):
            self._train(context, unfinished)
            self.finish()
        if path is not None and unfinished is not None:
            tensor_files.save(path, self._parameters(), self._texts())
            unfinished.unlink(missing_ok=True)
        return self.record

    @property
    def record(self) -> dict[str, Any]:
        return {"steps": self.done, "seconds": self.seconds, "curves": self.curves}

    def _train(self, context: Context, unfinished: Path | None) -> None:
        window = max(self.steps // POINTS, 1)
        saved = begun = time.monotonic()
        while self.done < self.steps:
            count = min(window, self.steps - self.done)
            total = self.step()
            for _ in range(count - 1):
                total = total + self.step()
            self.done += count
            self.curves.setdefault("step", []).append(self.done)
            for name, value in zip(self.losses, (total / count).tolist(), strict=True):  # waits for the device
                self.curves.setdefault(name, []).append(value)
                if not math.isfinite(value):
                    raise PaperError(
                        f"training diverged: the {name} loss is {value} before step {self.done}; try another --seed"
                    )
            context.watcher.part(self.done / self.steps)
            late = context.is_late
            if self.done < self.steps and (late or time.monotonic() - saved > CHECKPOINT):
                self.seconds += time.monotonic() - begun
                if unfinished is not None:
                    tensor_files.save(unfinished, self._state(), self._texts())
                saved = begun = time.monotonic()
                if late:
                    raise OutOfTime
        self.seconds += time.monotonic() - begun

    def _texts(self) -> dict[str, str]:
        return {"about": json.dumps(self.about), "record": json.dumps(self.record)}

    def _parameters(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, module in self.modules.items()
            for key, tensor in module.state_dict().items()
        }

    def _state(self) -> dict[str, Tensor]:
        moments = {
            f"optimiser.{name}.{number}.{key}": tensor
            for name, optimiser in self.optimisers.items()
            for number, entries in optimiser.state_dict()["state"].items()
            for key, tensor in entries.items()
        }
        return self._parameters() | moments | {"generator": self.generator.get_state()}

    def _load(self, path: Path) -> None:
        tensors, texts = tensor_files.load(path)
        try:
            about, record = json.loads(texts["about"]), json.loads(texts["record"])
        except (LookupError, ValueError):
            raise PaperError(f"{path}: not written by deeppcr; move it away and run again") from None
        if about != self.about:
            wrong = [name for name in {**about, **self.about} if about.get(name) != self.about.get(name)]
            raise PaperError(f"{path}: of other settings ({', '.join(wrong)}); move it away and run again")
        self.done, self.seconds, self.curves = record["steps"], record["seconds"], record["curves"]
        states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in self.optimisers}
        try:
            for name, module in self.modules.items():
                module.load_state_dict({key: tensors[f"{name}.{key}"] for key in module.state_dict()})
            for name, tensor in tensors.items():
                if name.startswith("optimiser."):
                    _, optimiser, number, key = name.split(".")
                    states[optimiser].setdefault(int(number), {})[key] = tensor
            for name, optimiser in self.optimisers.items():
                if states[name]:
                    optimiser.load_state_dict({**optimiser.state_dict(), "state": states[name]})
            if "generator" in tensors:
                self.generator.set_state(tensors["generator"])
        except (LookupError, ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise PaperError(f"{path}: not the tensors of this network ({why}); move it away and run again") from None


def adamw(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    """One kernel for all parameters, on a GPU: the networks are small and many."""
    parameters = list(module.parameters())
    return torch.optim.AdamW(parameters, lr=rate, fused=parameters[0].device.type == "cuda")


@contextmanager
def _reproducible() -> Iterator[None]:
    """Convolutions whose gradients are summed in one order."""
    kept = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept
