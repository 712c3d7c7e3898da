"""The steps of a rank by kernels that were made of the step: its chunks rolled out, with their Jacobians.

What ranks join, and what they say to each other, is the same with kernels and without; and the step itself measures the residual in the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..jacobian import DenseJacobian
from ..linear import Blocks, Dense, Diagonal
from ..newton import Newton
from ..runtime import launching
from ..ways.fused import Call

if TYPE_CHECKING:  # it needs Triton and NumPy
    from ..fuse.run import Run


class Kernels:
    """Chunks of this rank by kernels.

    Attributes:
        elementwise: the Jacobian of a row is a diagonal
        chunk: how many steps a chunk is to have
    """

    call: Call

    def __init__(self, call: Call):
        from ..fuse.kinds import first_chunk
        from ..fuse.run import Run

        (fused, length), self.call = call.known, call
        layout, program = fused.layout, fused.kernels.program
        with torch.no_grad():
            starts = [leaf.detach() for leaf in call.states]
            bases = [base.detach() for base in fused.bases(call.inputs, fused.closures(call.reached))]
            self.run: Run = Run(fused.kernels, layout.pack_leaves(starts), bases, length)
        self.refusal: str | None = None
        if not self.run.has_one_matrix or program.dtype != layout.dtype:
            self.refusal = "elementwise steps on several tensors, and half precision, have none over ranks"
        self.elementwise: bool = not self.run.shape.tiled and program.width == 1
        self.chunk: int = first_chunk(length, layout.rows * program.channels, program)

    @staticmethod
    def of(newton: Newton, *given: Any) -> Kernels | str:
        """Those of a step, or why there are none; ``given``: step, z0, xs, length and batch_dims, as for ``solve``."""
        if newton.jacobian != DenseJacobian() or newton.shrink != 1.0:
            return "there are none for these settings of Newton's method"
        call = Call(*given)
        fused = call.refusal or call.fused
        if fused is None:
            fused = call.make() if call.comes_again() else "the first of its kind"
        if isinstance(fused, str):
            return fused
        found = Kernels(call)
        return found.refusal or found

    def linearise(self, starts: Tensor, chunk: int, first: int) -> tuple[Tensor, Blocks] | None:
        """The states after the chunks from chunk ``first`` on, and their Jacobians; None where kernels do not fit the device."""
        from triton import OutOfResources

        try:
            with launching(self.run.device):
                ends, products = self.run.roll_out(starts, chunk, first * chunk)
        except OutOfResources as error:
            self.call.refuse(f"its kernels do not fit the device ({error})")
            return None
        return ends, Diagonal(products) if self.elementwise else Dense(products)

    def roll_out(self, starts: Tensor, chunk: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """As of a Sequence: the states after the chunks, and all states."""
        with launching(self.run.device):
            return self.run.roll_out(starts, chunk, first * chunk, product=False)
