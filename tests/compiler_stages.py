"""How far Triton compiles a kernel that only its compiler is asked about."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from triton._C.libtriton import llvm
from triton.backends.nvidia.compiler import CUDABackend


@contextmanager
def compiled_up_to(stage):
    """Up to "ttir" the compiler has read a kernel, which is what refuses most; up to "llir" it knows its shared memory; what comes then, LLVM's
    optimiser, PTX and the assembler, refuses nothing that was written here."""
    stages = {"ttir": ("ttgir", "llir", "ptx", "cubin"), "llir": ("ptx", "cubin"), "ptx": ("cubin",), "all": ()}[stage]

    def left_out(source, metadata, *_):
        metadata.setdefault("shared", 0)
        metadata["name"] = "left out"
        return b""

    with ExitStack() as stack:
        for each in stages:
            stack.enter_context(mock.patch.object(CUDABackend, f"make_{each}", staticmethod(left_out)))
        if "ptx" in stages:
            stack.enter_context(mock.patch.object(llvm, "optimize_module"))
        yield
