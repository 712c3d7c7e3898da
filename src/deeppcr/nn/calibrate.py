"""The times that ``cost`` reckons with: measured once for a device and a kind of network, and kept in a file.

The file lies in the user's cache folder, ``$XDG_CACHE_HOME/deeppcr`` or ``~/.cache/deeppcr``. With ``DEEPPCR_CALIBRATE=read`` in the
environment it is read and nothing is measured; with ``DEEPPCR_CALIBRATE=0`` neither is done. Where no times are known, those of an H200
are taken, scaled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..version import __version__
from .cost import Times

_log = logging.getLogger("deeppcr")
_OFF = ("0", "false", "no", "off")
#: Raised when the meaning of a number in the file changes.
_FORMAT = 2
#: Elements of the weights, and of the products of Jacobians, that are measured with at most: 256 MiB, 64 MiB.
_MOST_WEIGHTS, _MOST_PRODUCTS = 2**26, 2**24
#: Fewer layers are not worth a measurement: almost always the loop is faster, and what differs is microseconds.
_SHALLOW = 64
#: Clock cycles for which the device sleeps before what is timed: longer than the host takes to launch all of that.
_NAP = 2**22


@dataclass(frozen=True)
class Kind:
    """Networks that take about the same time: those with the same kernels, but for the exact width.

    >>> Kind.of(width=12, activation="relu", skip=4, residual=True).name
    'relu, width 16, residual blocks of 4'
    """

    padded: int
    activation: str
    skip: int = 1
    residual: bool = False

    @staticmethod
    def of(width: int, activation: str, skip: int, residual: bool) -> Kind:
        return Kind(1 << (width - 1).bit_length(), activation, skip, residual)

    @property
    def name(self) -> str:
        blocks = f", residual blocks of {self.skip}" if self.residual else ""
        return f"{self.activation}, width {self.padded}{blocks}"


#: The same work takes about as long all through a measurement, unless others use the device.
_BUSY = 1.3

_lock = threading.Lock()
#: What was measured or read from the file; None where a measurement failed, which is not tried again.
_known: dict[tuple[torch.device, Kind], Times | None] = {}


def find(device: torch.device, kind: Kind, width: int, layers: int) -> tuple[Times, str]:
    """The times of a kind of network, and where they come from.

    Measures if they are not known yet, unless that is switched off or out of place: see ``may_measure``.

    Args:
        width: of the network at hand, which is measured with: its kernels are needed anyway
        layers: of the network at hand
    """
    wanted = os.environ.get("DEEPPCR_CALIBRATE", "1").lower()
    if device.type != "cuda" or wanted in _OFF:
        return built_in(device, kind)
    with _lock:
        key = (device, kind)
        if key not in _known:
            about = describe(device)
            path = cache_file(about)
            found = read(path, about).get(kind.name)
            if found is None and not (layers >= _SHALLOW and wanted != "read" and may_measure()):
                return built_in(device, kind)
            _known[key] = found or _measure(device, kind, width, path, about)
        found = _known[key]
    return built_in(device, kind) if found is None else (found, "measured on this device")


def may_measure() -> bool:
    """Not while a CUDA graph is captured or a program compiled, nor where every run is to choose the same."""
    return not (
        torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
        or torch.are_deterministic_algorithms_enabled()
    )


def _measure(device: torch.device, kind: Kind, width: int, path: Path | None, about: dict[str, Any]) -> Times | None:
    _log.info(
        "measuring networks of this kind once (%s; %s): kernels are compiled, then about a second; kept in %s; "
        "DEEPPCR_CALIBRATE=0 switches this off",
        about["device"], kind.name, path,
    )  # fmt: skip
    try:
        with torch.no_grad(), torch.cuda.device(device), torch.autocast("cuda", enabled=False):
            found = measure(Kernels(device, kind, width, seconds_on_device, seconds_of_call), kind, width)
    except Exception as error:  # out of memory, say: the choice is worse without, but nobody's network fails for it
        _log.warning("measuring networks (%s) failed, built-in times are taken: %r", kind.name, error)
        return None
    write(path, about, kind, found)
    return found


def measure(bench: Kernels, kind: Kind, width: int) -> Times:
    """Two lengths each, whose difference is the time of a block; what is left of the shorter one is all the rest."""
    most_blocks = min(2**14, _MOST_WEIGHTS // (kind.skip * width**2))
    same = [bench.loop(64, 1)]  # again and again
    rows, block = [], []
    for many in (1, 32, 1024):
        short, long = (64, 512) if many == 1 else (32, 128)
        long = min(long, most_blocks)
        rows.append(float(many))
        block.append((bench.loop(long, many) - bench.loop(short, many)) / (long - short))
    chunks, solve, programs, step = [], [], [], []
    for many in (2**k for k in range(3, 12)):
        # Wide layers are read from memory: so many of them that they do not fit the cache.
        long = min(32 if width < 128 else 128, most_blocks // many)
        if long < 2:
            break
        short = max(1, long // 4)
        shorter = bench.round(many, short, 1)
        each = (bench.round(many, long, 1) - shorter) / (long - short)
        chunks.append(float(many))
        programs.append(float(many))
        step.append(each)
        solve.append(shorter - short * each)
        same.append(bench.loop(64, 1))
    more = min(64, _MOST_PRODUCTS // (128 * width**2))
    if 128 * more > programs[-1] and most_blocks >= 128 * 8:
        each = (bench.round(128, 8, more) - bench.round(128, 2, more)) / 6
        programs.append(128.0 * more)
        step.append(each)
    host = bench.host()
    same.append(bench.loop(64, 1))
    if max(same) > _BUSY * min(same):
        raise RuntimeError("the device is busy with something else")
    measured = tuple(rows), _rising(block), tuple(programs), _rising(step), tuple(chunks), _rising(solve)
    return Times(*host, *measured)


def _rising(values: list[float]) -> tuple[float, ...]:
    """More of the same never takes less time: what says so is noise."""
    found, most = [], 1e-9
    for value in values:
        most = max(most, value)
        found.append(most)
    return tuple(found)


@dataclass(eq=False)
class Kernels:
    """The kernels themselves on networks of zeros, as which they take as long.

    Args:
        on_device, of_call: seconds that a function takes on the device, and from its call to the end of its work
    """

    device: torch.device
    kind: Kind
    width: int
    on_device: Callable[[Callable[[], Any]], float]
    of_call: Callable[[Callable[[], Any]], float]
    weight: Tensor = torch.empty(0)
    bias: Tensor = torch.empty(0)

    def tensors(self, blocks: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, biases and an initial state; the weights are shared by all."""
        if len(self.weight) < blocks:
            layers = (blocks, self.kind.skip) if self.kind.residual else (blocks,)
            self.weight = torch.zeros(*layers, self.width, self.width, device=self.device)
            self.bias = torch.zeros(*layers, self.width, device=self.device)
        return self.weight[:blocks], self.bias[:blocks], torch.zeros(rows, self.width, device=self.device)

    def prepared(self, blocks: int, chunk: int, rows: int) -> tuple[Any, Tensor, Tensor]:
        """A network with its chunks at the start, the initial state, and where passes write what they find."""
        from . import forward

        weight, bias, initial = self.tensors(blocks, rows)
        x = torch.empty((blocks * self.kind.skip + 1, rows, self.width), device=self.device)
        layers = self.layers(chunk)
        plan = forward.plan_for(blocks, rows, self.width, layers, False, weight.device)
        found = torch.zeros(2 + plan.chunks + 1, 2, rows, device=self.device)
        network = forward.network_of(weight, bias, x, layers, plan)
        if network.plan.chunks > 1:
            network.prepare(initial, None, found, 2)
        return network, initial, found

    def layers(self, chunk: int) -> Any:
        from . import forward

        return forward.Layers(self.kind.skip, self.kind.residual, self.kind.activation, chunk=chunk)

    def loop(self, blocks: int, rows: int) -> float:
        """Seconds on the device."""
        network, initial, found = self.prepared(blocks, blocks, rows)
        return self.on_device(lambda: network.whole(initial, 0, found, 0))

    def round(self, chunks: int, chunk: int, rows: int) -> float:
        network, _, _ = self.prepared(chunks * chunk, chunk, rows)
        return self.on_device(lambda: network.one_round(0))

    def host(self) -> tuple[float, float]:
        """``Times.host_loop`` and ``host_parallel``."""
        from . import forward

        tensors = self.tensors(16, 1)

        def call(chunk: int) -> float:
            return self.of_call(lambda: forward.apply(*tensors, None, self.layers(chunk), []))

        return call(16), call(8)


def seconds_on_device(run: Callable[[], Any], repeats: int = 5) -> float:
    """Between events around what ``run`` launches, the least of a few. All of it is launched while the device sleeps."""
    run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    nap, seconds = _NAP, []
    while len(seconds) < repeats:
        torch.cuda.synchronize()
        torch.cuda._sleep(nap)
        first.record()
        run()
        last.record()
        awake = first.query()
        last.synchronize()
        if awake and nap < 2**28:  # the host was slower than the nap is long, and would be timed too
            nap *= 2
        else:
            seconds.append(1e-3 * first.elapsed_time(last))
    return min(seconds)


def seconds_of_call(run: Callable[[], Any], repeats: int = 30) -> float:
    """From the call to the end of its work, the lower quartile.

    The least is rarer for a call that asks the device; what else the machine does makes calls longer, and never shorter.
    """
    seconds = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds[3:])[repeats // 4]


def describe(device: torch.device) -> dict[str, Any]:
    """What times hold for: with another device, or another version of what runs on it, they are measured anew."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    properties = torch.cuda.get_device_properties(device)
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "format": _FORMAT,
        "device": torch.cuda.get_device_name(device),
        "processors": properties.multi_processor_count,
        "clock_rate": getattr(properties, "clock_rate", None),
        "driver": driver() if driver else None,
        "deeppcr": __version__,
        "torch": torch.__version__,
        "triton": triton,
    }


def cache_file(about: dict[str, Any]) -> Path | None:
    """None for a user without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # as the specification of that variable has it
        folder = Path(os.path.expanduser("~")) / ".cache"
    if not folder.is_absolute():
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower()).strip("-")
    mark = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    return folder / "deeppcr" / f"times-{slug}-{mark}.json"


def read(path: Path | None, about: dict[str, Any]) -> dict[str, Times]:
    """By the name of their kind. A file that is missing, broken or about something else holds nothing."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
        if content["about"] != about:
            return {}
        return {str(name): Times.from_json(each) for name, each in content["times"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(path: Path | None, about: dict[str, Any], kind: Kind, times: Times) -> None:
    """Add to the file, whole or not at all; where that is impossible, the times last as long as the process."""
    if path is None:
        return
    kept = {name: asdict(each) for name, each in read(path, about).items()} | {kind.name: asdict(times)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"about": about, "times": kept}, file, indent=1)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        _log.info("the times could not be kept: %s", error)


def _of_an_h200() -> tuple[dict[str, Any], dict[int, Times]]:
    """What they hold for, and those of networks with ReLU by width."""
    content = json.loads(Path(__file__).with_name("h200.json").read_text())
    times = {name: Times.from_json(each) for name, each in content["times"].items()}
    widths = {int(found[1]): times[name] for name in times if (found := re.fullmatch(r"relu, width (\d+)", name))}
    return content["about"], widths


def built_in(device: torch.device, kind: Kind) -> tuple[Times, str]:
    """Without a measurement: those of an H200, scaled by multiprocessors and clock rate."""
    about, widths = _of_an_h200()
    nearest = min(widths, key=lambda width: abs(width.bit_length() - kind.padded.bit_length()))
    times = widths[nearest].of_blocks(kind.skip)
    if device.type != "cuda":
        return times, "as on an H200"
    here = torch.cuda.get_device_properties(device)
    ours, theirs = getattr(here, "clock_rate", None), about["clock_rate"]  # which not every version of torch tells
    scaled = times.scaled(here.multi_processor_count / about["processors"], ours / theirs if ours and theirs else 1.0)
    return scaled, "built-in times of an H200, scaled"
