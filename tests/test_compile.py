"""The kernels of systems and networks go through Triton's compiler, without a GPU: the interpreter runs code that it refuses."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeppcr.linear import fused

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
#: Bytes of shared memory that a program may have on the smallest device of Ampere's or later kind.
SMALL = 99 * 1024


#: By family: the width up to which a kernel must run on any device, and the kernels.
FAMILIES = {
    "dense": (
        128,
        {"reduce_narrow", "substitute_narrow", "miss_narrow", "_add", "repair", "reduce_wide", "substitute_wide"},
    ),
    "scans": (0, {"_reduce", "_sweep", "_clear", "_solve", "_repair"}),
    "filters": (0, {"_walk", "_join"}),
    "networks": (
        64,
        {"roll", "gather", "spread", "roll_wide", "correct_wide"}
        | {"adjoint_reduce", "adjoint_substitute", "gradients_of_layers"},
    ),
}


@pytest.mark.parametrize("sizes", ["some", pytest.param("all", marks=pytest.mark.thorough)])
def test_kernels_compile(sizes, tmp_path):
    """In one process: it takes seconds before the first kernel is compiled."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # which nobody reads here, and takes a seventh of the time
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(here / "kernel_compiler.py"), sizes]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    for family, (_, kernels) in FAMILIES.items():  # the wide kernels of systems are those of wide networks
        assert kernels <= {each["kernel"] for each in found if sizes == "some" or each["family"] == family}
    for each in found:
        width_anywhere, _ = FAMILIES[each["family"]]
        assert each["shared"] <= (SMALL if each.get("width", 0) <= width_anywhere else fused._ROOM), each
