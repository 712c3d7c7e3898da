"""Kernels that are launched together: a CUDA graph by CUDA's driver itself.

PyTorch's own graphs are for whole computations: they bring memory and a state of random numbers, which all threads share. Here there are
kernels alone, on memory that is the caller's, so that nobody else is concerned.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

#: How this thread captures: what others do is none of its business, and what they capture is not disturbed.
_OF_THIS_THREAD, _RELAXED = 1, 2
#: Of a stream: it waits for no other one.
_BY_ITSELF = 1
_lock = threading.Lock()
#: By device, a stream on which nothing is ever done: kernels are captured there.
_streams: dict[int, int] = {}


@cache
def _functions() -> dict[str, Any] | None:
    """Of the driver; None where there is none."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    arguments = {
        "cuStreamCreate": [ctypes.POINTER(pointer), number],
        "cuStreamBeginCapture_v2": [pointer, number],
        "cuStreamEndCapture": [pointer, ctypes.POINTER(pointer)],
        "cuGraphInstantiateWithFlags": [ctypes.POINTER(pointer), pointer, ctypes.c_ulonglong],
        "cuGraphDestroy": [pointer],
        "cuGraphExecDestroy": [pointer],
        "cuGraphLaunch": [pointer, pointer],
        "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int)],
    }
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = {name: getattr(library, name) for name in arguments}
    except (OSError, AttributeError):
        return None
    for name, function in found.items():
        function.argtypes, function.restype = arguments[name], ctypes.c_int
    return found


class Graph:
    """Kernels that were launched once and are launched again, all of them by one call."""

    __slots__ = ("_destroy", "_launch", "_made")

    def __init__(self, functions: dict[str, Any], made: int):
        self._launch, self._destroy, self._made = functions["cuGraphLaunch"], functions["cuGraphExecDestroy"], made

    def __call__(self, stream: int) -> None:
        failed = self._launch(self._made, stream)
        if failed:
            raise RuntimeError(f"cuGraphLaunch: error {failed} of CUDA's driver")

    def __del__(self) -> None:
        self._destroy(self._made)  # what is under way ends first


def covers(device: int) -> bool:
    """Whether launches on a device can be recorded: on a GPU, and where there is a driver that can."""
    return device >= 0 and _functions() is not None


def record(launch: Callable[[int], object], device: int) -> Graph | None:
    """What ``launch`` launches on a stream that it is given, on the current device; nothing of it is done now.

    Returns:
        None where the driver refuses
    """
    functions = _functions()
    assert functions is not None
    mode = ctypes.c_int(_RELAXED)
    with _lock:
        functions["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))
        try:
            return _record(functions, launch, device)
        finally:
            functions["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))


def _record(functions: dict[str, Any], launch: Callable[[int], object], device: int) -> Graph | None:
    stream, graph, made = ctypes.c_void_p(_streams.get(device)), ctypes.c_void_p(), ctypes.c_void_p()
    if stream.value is None:
        if functions["cuStreamCreate"](ctypes.byref(stream), _BY_ITSELF) or stream.value is None:
            return None
        _streams[device] = stream.value
    if functions["cuStreamBeginCapture_v2"](stream, _OF_THIS_THREAD):
        return None
    try:
        launch(stream.value)
    finally:
        failed = functions["cuStreamEndCapture"](stream, ctypes.byref(graph))
    if failed or graph.value is None:
        return None
    failed = functions["cuGraphInstantiateWithFlags"](ctypes.byref(made), graph, 0)
    functions["cuGraphDestroy"](graph)
    return None if failed or made.value is None else Graph(functions, made.value)
