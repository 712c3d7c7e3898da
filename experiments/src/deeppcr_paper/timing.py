"""How everything here is timed and compared, and what a time has to be read with: the machine it was taken on."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from torch import Tensor

from deeppcr.graphs import record

T = TypeVar("T")


#: The best of several sizes is not read off times whose middle half is wider than this part of their median: noise would win.
RESTLESS = 1 / 3


def spread(repeats: Sequence[float]) -> float:
    """The middle half of the repeats, of two both, over their median.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.6666666666666666
    """
    low, _, high = (
        quantiles(repeats, n=4, method="inclusive") if len(repeats) > 2 else (min(repeats), None, max(repeats))
    )
    return (high - low) / median(repeats)


def counted(repeats: Sequence[float], turn: int) -> list[float]:
    """Those that count of what ``measure`` took in turns of so many calls: the first of each finds caches as another function left them.

    >>> counted([9.0, 1.0, 2.0, 9.0, 1.0, 1.0], turn=3), counted([9.0], turn=3)
    ([1.0, 2.0, 1.0, 1.0], [9.0])
    """
    return [each for number, each in enumerate(repeats) if turn < 2 or number % turn] or list(repeats)


def calm(repeats: Sequence[float] | None) -> bool:
    """Whether the best may be read off these times; where nothing was timed, nothing disturbs."""
    return not repeats or spread(repeats) <= RESTLESS


@dataclass(frozen=True)
class Timing:
    """Seconds of every repeat, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return median(self.seconds)


def measure(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    budget: float,
    repeats: tuple[int, int] = (5, 100),
) -> dict[str, Timing]:
    """Time functions that do the same job, in turn and equally often, so that what else the machine does hits all of them alike.

    Each is called once to warm up. A turn is the fewest calls of each, one after the other: the quick are not timed just after
    the slow only, with cold caches, and the first of them need not count (``counted``). What runs on the device is waited for before the clock starts and stops.

    Args:
        functions: what to call, by name
        device: where they run
        budget: seconds after which no further turn begins
        repeats: the fewest and the most calls of each, whatever the budget

    Returns:
        a Timing for each name
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    fewest, most = repeats
    for begun in range(0, most, fewest):
        for name, function in functions.items():
            seconds[name] += [clocked(function, device)[1] for _ in range(min(fewest, most - begun))]
        if sum(map(sum, seconds.values())) >= budget:
            break
    return {name: Timing(tuple(each)) for name, each in seconds.items()}


def clocked(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and its seconds."""
    synchronise(device)
    begun = time.perf_counter()
    found = call()
    synchronise(device)
    return found, time.perf_counter() - begun


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(function: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> tuple[Callable[[], None], Any]:
    """Record what ``function`` launches on the GPU as a CUDA graph.

    ``function`` must not call autograd's engine where there were passes on other streams: it makes these wait for the
    capture, as long as anything of those passes is alive, and that invalidates the capture.

    Args:
        stream: where it has been called before; None for a new one, on which it is called once

    Returns:
        a function that replays it, and what ``function`` returned: tensors that every replay fills anew
    """
    if stream is None:
        stream = torch.cuda.Stream()
        with record.on_stream(stream):
            function()
    gc.collect()  # none is collected in a capture
    return record.capture(function, stream)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Everything inside goes to one new stream of a GPU: a pass with autograd can be recorded there after eager ones."""
    with record.on_stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def single_thread() -> Iterator[None]:
    """PyTorch works with one thread on a CPU: for small tensors, which many threads only wait for each other over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def relative_error(found: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """The largest difference in each tensor in units of its largest element, the worst over all; NaN counts as infinite.

    >>> relative_error([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    0.5
    """
    worst = 0.0
    for one, other in zip(found, reference, strict=True):
        difference, scale = (one.to(other.dtype) - other).abs().max().item(), other.abs().max().item()
        if difference == 0:  # where gradients have vanished, both may be zero
            continue
        ratio = difference / scale if scale else float("inf")
        worst = max(worst, ratio) if ratio == ratio else float("inf")
    return worst


def hardware(device: torch.device) -> str:
    """The name of the processor or of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    """What a time was measured on, for a caption or a file of results."""
    return {
        "hardware": hardware(device),
        "device": device.type,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
