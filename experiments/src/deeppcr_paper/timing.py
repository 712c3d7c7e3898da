"""How everything here is timed and compared, and what a time has to be read with: the machine it was taken on."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from deeppcr.graphs.record import no_collection as no_garbage

T = TypeVar("T")


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
    repeats: tuple[int, int] = (3, 100),
    taken: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Timing]:
    """Time functions that do the same job, in turn, so that what else the machine does hits all of them alike.

    Each is called once to warm up, unless it has been timed before. A turn lasts a twentieth of the budget or one call, so
    that the quick are not timed just after the slow only, with cold caches. What runs on the device is waited for before the
    clock starts and stops.

    Args:
        functions: what to call, by name
        device: where they run
        budget: seconds for all of them; each has an equal share, so that a slow one takes nothing away from the others
        repeats: the fewest and the most calls of each, whatever the budget
        taken: seconds of repeats from before, by name

    Returns:
        a Timing for each name
    """
    seconds = {name: list((taken or {}).get(name, ())) for name in functions}
    for name, function in functions.items():
        if not seconds[name]:
            function()
    fewest, most = repeats

    def is_done(name: str) -> bool:
        mine = seconds[name]
        return len(mine) >= most or (len(mine) >= fewest and sum(mine) >= budget / len(functions))

    while any(not is_done(name) for name in functions):
        for name, function in functions.items():
            turn = time.perf_counter()
            while not is_done(name):
                _, took = clocked(function, device)
                seconds[name].append(took)
                if time.perf_counter() - turn >= budget / 20:
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


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what ``function`` launches on the GPU as a CUDA graph.

    ``function`` must not call autograd's engine: it makes streams of earlier, eager passes wait for the capture, as long
    as anything of those passes is alive, and that invalidates the capture.

    Returns:
        a function that replays it, and what ``function`` returned: tensors that every replay fills anew
    """
    # Libraries set themselves up on the first calls in a stream, which a capture does not allow: so it is the same one.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = function()
    return graph.replay, found


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Everything inside goes to one new stream of a GPU: a pass with autograd can be recorded there after eager ones."""
    if device.type != "cuda":
        yield
        return
    stream, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


@contextmanager
def single_thread() -> Iterator[None]:
    """PyTorch works with one thread on a CPU: for small tensors, which many threads only wait for each other over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage first, and none inside."""
    gc.collect()
    with no_garbage():
        yield


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
