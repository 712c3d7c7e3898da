"""One way to compute a thing that ``kernels.py`` measures, by itself and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import deeppcr
from deeppcr_paper.timing import capture


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a CUDA graph of the caller, on the current stream, which must not be the default one.

    Everything runs on that one stream: autograd waits for the streams of earlier passes, and another one of them would
    end the capture.
    """
    for _ in range(2):
        function()
    replay, found = capture(function, torch.cuda.current_stream())
    return lambda: (replay(), found)[1]


def iterations_inside(solution: deeppcr.Solution) -> int:
    """How many a CUDA graph has to make for what a solve came to by itself: of kernels the last one only confirms."""
    confirms = solution.plan.evaluation.startswith("fused kernels")
    return max(1, int(solution.iterations.max()) - confirms)


@dataclass(frozen=True)
class Method:
    """One way to solve a problem.

    Attributes:
        run: what a user would call
        error: from what ``run`` returned to its distance from the same in float64, computed plainly
        prepare: turns ``run`` into what is checked and timed: a CUDA graph of it
        before: called before the checked run
        solution: how the last run went
        kernels: whether it runs kernels of this library, worth compiling in advance
        optional: a baseline, or a use, that may be impossible here: no failure then
        scale: what its seconds are multiplied by, where it runs but a part of a long loop
        warm_up: so often it is called before it is checked, and timed
    """

    run: Callable[[], Any]
    error: Callable[[Any], float]
    prepare: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None
    before: Callable[[], None] = lambda: None
    solution: Callable[[], deeppcr.Solution | None] = lambda: None
    kernels: bool = True
    optional: bool = False
    scale: float = 1.0
    warm_up: int = 0


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def with_captured(methods: dict[str, Method], device: torch.device, names: dict[str, str]) -> dict[str, Method]:
    """The same and, on a GPU, those of ``names`` inside a CUDA graph, last: by then every kernel has been loaded."""
    if not can_capture(device):
        return methods
    more = {new: replace(methods[old], prepare=captured) for old, new in names.items() if old in methods}
    return methods | more
