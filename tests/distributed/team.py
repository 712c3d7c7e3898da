"""Processes that share sequences: started once, then given cases by name.

A case is a function ``case(mesh, **arguments)`` of a module of the tests. It runs on every rank of a team; what each returns, or raises, comes
back in the order of the ranks.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parents[1]
#: Where cases and what they test are found; and kernels, where a case asks for them, are interpreted.
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    "TRITON_INTERPRET": "1",
}
#: Seconds that a rank waits for the others in a message.
TIMEOUT = 20
#: and that a case may take.
PATIENCE = 120


@dataclass(frozen=True)
class Raised:
    """What a case raised."""

    kind: str
    message: str
    trace: str = ""


def _work(rank: int, count: int, sizes: tuple[int, ...], store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    meshes = {size: DeviceMesh("cpu", list(range(size)), mesh_dim_names=("sequence",)) for size in sizes}
    importlib.import_module("deeppcr")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        size, module, name, arguments = order
        try:
            found = getattr(importlib.import_module(module), name)(meshes[size], **arguments)
        except Exception as error:
            found = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(found)
    dist.destroy_process_group()


class Team:
    """``count`` processes; cases are run by the first ``size`` of them."""

    def __init__(self, count: int, sizes: tuple[int, ...]):
        self.count, self.sizes = count, sizes
        context = get_context("forkserver")
        # Imported once for all ranks of all teams: each by itself takes seconds to.
        context.set_forkserver_preload(["torch.distributed", "distributed.cases", "distributed.more_cases"])
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        with mock.patch.dict(
            os.environ, _ENVIRONMENT
        ):  # which the process that they are forked from has to know before it imports
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(rank, count, sizes, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        for pipe in self.pipes:
            assert self._heard(pipe) == "ready"

    @staticmethod
    def _heard(pipe: Any) -> Any:
        assert pipe.poll(PATIENCE), "a rank did not answer"
        return pipe.recv()

    def run(self, size: int, module: str, case: str, /, **arguments: Any) -> list[Any]:
        """What each of ``size`` ranks returns, or Raised."""
        for pipe in self.pipes[:size]:
            pipe.send((size, module, case, arguments))
        return [self._heard(pipe) for pipe in self.pipes[:size]]

    def results(self, size: int, module: str, case: str, /, **arguments: Any) -> list[Any]:
        """The same, where nobody is to raise."""
        found = self.run(size, module, case, **arguments)
        for rank, each in enumerate(found):
            assert not isinstance(each, Raised), f"rank {rank}: {each.trace}"
        return found

    def run_and_kill(self, killed: int, size: int, module: str, case: str, /, **arguments: Any) -> Any:
        """What the first of the other ranks says when one of them is killed while it works."""
        for pipe in self.pipes[:size]:
            pipe.send((size, module, case, arguments))
        time.sleep(2)
        self.processes[killed].kill()
        return self._heard(self.pipes[0 if killed else 1])

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):  # it has just ended
                    pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
