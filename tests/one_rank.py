"""A process group of this process alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        # gloo's threads need the interpreter to let go of what they reduced. The last reference to the group may be a local variable
        # of the test: PyTorch then waits for these threads while it holds the interpreter, for ever where they are late.
        time.sleep(0.1)
        distributed.destroy_process_group()
