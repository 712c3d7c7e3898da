"""What both examples share: the ranks that torchrun has started, as a mesh, and a device for each."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def start() -> tuple[DeviceMesh, torch.device]:
    """A mesh of one dimension, "sequence": NCCL where every rank has a GPU of its own, else gloo, which lets ranks share one."""
    local, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("nccl" if gpus >= count else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("sequence",)), device


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
