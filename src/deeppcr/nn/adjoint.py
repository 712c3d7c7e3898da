"""The backward pass of networks of narrow layers: the adjoint in parallel over chunks of layers, then all gradients.

Shapes: T layers in ``blocks`` blocks of ``skip``, N chunks of blocks, B rows, w the width. ``x`` [T + 1, B, w] holds the
input of every layer and the last output.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import aligned, launch, repeat
from ..linear.kernels import dense
from ..linear.kernels.narrow import is_finite, multiply
from ..linear.kernels.wide import places_of
from .kernels import activate
from .layers import ACTIVATIONS, Layers

#: Sizes that a kernel is not compiled for anew.
_SIZES = ["rows", "blocks", "chunk_blocks"]
#: A program that multiplies no blocks holds wider ones in its registers; its warps, and the layers on their way to it.
HELD_WITHOUT_PRODUCT, WIDE_LOOP = 128, (8, 3)
#: Rows up to which one program sums a layer's gradients; of more, the matrix units take the product.
_FEW_ROWS = 64


@triton.jit(do_not_specialize=_SIZES)
def adjoint_reduce(
    weights, x, gradients, products, starts, rows, blocks, chunk_blocks,
    SKIP: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, EVERY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One equation for a chunk: from the adjoint of its last block's output to that of the chunk before it.

    Chunks are counted from the end: program q takes the q-th from the end, and writes starts[q + 1].
    EVERY: ``gradients`` are of the outputs of all blocks [blocks, B, w], else of the last one alone [B, w].
    """
    q, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, inside, square = places_of(WIDTH, PADDED)
    chunks = (blocks + chunk_blocks - 1) // chunk_blocks
    first = (chunks - 1 - q) * chunk_blocks
    last = tl.minimum(first + chunk_blocks, blocks)
    product = (i[:, None] == i[None, :]).to(tl.float32)
    term = tl.zeros((PADDED,), tl.float32)
    for back in tl.range(1, last - first + 1, num_stages=STAGES):
        block = tl.cast(last - back, tl.int64)
        product_before = product
        term_before = term
        for k in tl.static_range(SKIP):
            layer = block * SKIP + (SKIP - 1 - k)
            w = tl.load(weights + layer * WIDTH * WIDTH + i[None, :] * WIDTH + i[:, None], mask=square, other=0.0)
            z = tl.load(x + (layer * rows + row) * WIDTH + i, mask=inside, other=0.0)
            slope = activate(z, ACTIVATION)[1]
            product = multiply(w * slope[:, None], product, PRECISION)
            term = tl.sum(w * term[None, :], 1) * slope
        if RESIDUAL:
            product += product_before
            term += term_before
        if EVERY:
            term += tl.load(gradients + ((block - 1) * rows + row) * WIDTH + i, mask=inside, other=0.0)
    out = tl.cast(q * rows + row, tl.int64)
    tl.store(products + out * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], product, mask=square)
    tl.store(starts + (out + rows) * WIDTH + i, term, mask=inside)
    if q == 0:
        last_gradient = gradients
        if EVERY:
            last_gradient += tl.cast(blocks - 1, tl.int64) * rows * WIDTH
        known = tl.load(last_gradient + row * WIDTH + i, mask=inside, other=0.0)
        tl.store(starts + row * WIDTH + i, known, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def adjoint_substitute(
    weights, x, gradients, starts, adjoints, initial, rows, blocks, chunk_blocks,
    SKIP: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr, EVERY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """From the adjoint at the end of every chunk those of all its layers' outputs [T, B, w], and of the initial state.

    Where the last start is not finite, a product overflowed although the adjoints may not: then the first program takes
    all blocks of its row one after the other. WHOLE: there is one chunk.
    """
    q, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, inside, square = places_of(WIDTH, PADDED)
    chunks = 1 if WHOLE else (blocks + chunk_blocks - 1) // chunk_blocks
    first = 0 if WHOLE else (chunks - 1 - q) * chunk_blocks
    last = blocks if WHOLE else tl.minimum(first + chunk_blocks, blocks)
    if not WHOLE:
        final = tl.load(starts + ((chunks - 1) * rows + row) * WIDTH + i, mask=inside, other=0.0)
        if not is_finite(final):
            first = tl.where(q == 0, 0, last)
    adjoint = tl.load(starts + (q * rows + row) * WIDTH + i, mask=inside, other=0.0)
    for back in tl.range(1, last - first + 1, num_stages=STAGES):
        block = tl.cast(last - back, tl.int64)
        before = adjoint
        for k in tl.static_range(SKIP):
            layer = block * SKIP + (SKIP - 1 - k)
            tl.store(adjoints + (layer * rows + row) * WIDTH + i, adjoint, mask=inside)
            w = tl.load(weights + layer * WIDTH * WIDTH + i[None, :] * WIDTH + i[:, None], mask=square, other=0.0)
            z = tl.load(x + (layer * rows + row) * WIDTH + i, mask=inside, other=0.0)
            adjoint = tl.sum(w * adjoint[None, :], 1) * activate(z, ACTIVATION)[1]
        if RESIDUAL:
            adjoint += before
        if EVERY:
            before_first = tl.cast(block == 0, tl.int64)
            gradient = tl.load(
                gradients + ((block - 1 + before_first) * rows + row) * WIDTH + i, mask=inside, other=0.0
            )
            adjoint += tl.where(block == 0, 0.0, gradient)
    if (first == 0) & (last > first):
        tl.store(initial + row * WIDTH + i, adjoint, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def gradients_of_layers(
    x, adjoints, weight_gradients, bias_gradients, rows,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one layer's weights and biases, from the adjoints of its output and from its inputs."""
    layer = tl.program_id(0).to(tl.int64)
    i, inside, square = places_of(WIDTH, PADDED)
    of_weights = tl.zeros((PADDED, PADDED), tl.float32)
    of_biases = tl.zeros((PADDED,), tl.float32)
    for row in tl.range(0, rows, num_stages=STAGES):
        at = (layer * rows + row) * WIDTH + i
        adjoint = tl.load(adjoints + at, mask=inside, other=0.0)
        value = activate(tl.load(x + at, mask=inside, other=0.0), ACTIVATION)[0]
        of_weights += adjoint[:, None] * value[None, :]
        of_biases += adjoint
    tl.store(weight_gradients + layer * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], of_weights, mask=square)
    tl.store(bias_gradients + layer * WIDTH + i, of_biases, mask=inside)


def adjoint(weight: Tensor, x: Tensor, gradients: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """The gradients of all layers' outputs [T, B, w] and of the initial state.

    Args:
        weight: [blocks, (skip,) w, w]
        x: [T + 1, B, w], as the forward pass left it
        gradients: of the blocks' outputs [blocks, B, w], or of the last block's alone [B, w]
    """
    rows, width = x.shape[1:]
    if width > (HELD_WITHOUT_PRODUCT if layers.backward_blocks(weight.shape[0]) == weight.shape[0] else dense.NARROW):
        return _adjoint_wide(weight, x, gradients, layers)
    adjoints, initial = x.new_empty(x.shape[0] - 1, rows, width), x.new_empty(rows, width)
    tensors = (weight, x, gradients, adjoints, initial)
    repeat(("adjoint", *_kind_of(*tensors[:3]), layers), tensors, lambda: _solve(*tensors, layers))
    return adjoints, initial


def all_gradients(weight: Tensor, x: Tensor, gradients: Tensor, layers: Layers) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of weights, of biases and of the initial state: as ``adjoint``, which takes the same."""
    rows, width = x.shape[1:]
    if width > dense.NARROW or rows > _FEW_ROWS:
        adjoints, initial = adjoint(weight, x, gradients, layers)
        values = ACTIVATIONS[layers.activation].function(x[:-1])
        of_weights = adjoints.mT * values if rows == 1 else torch.bmm(adjoints.mT, values)
        return of_weights.view_as(weight), adjoints.sum(1).view(weight.shape[:-1]), initial
    count = x.shape[0] - 1
    adjoints, initial = x.new_empty(count, rows, width), x.new_empty(rows, width)
    of_weights, of_biases = torch.empty_like(weight), x.new_empty(weight.shape[:-1])
    tensors = (weight, x, gradients, adjoints, initial)

    def make() -> None:
        _solve(*tensors, layers)
        shape = dense.Shape(width)
        warps, stages = shape.without
        constants = (layers.activation, width, shape.padded, stages)
        launch(gradients_of_layers, count, (x, adjoints, of_weights, of_biases, rows), constants, warps=warps)

    repeat(("gradients", *_kind_of(*tensors[:3]), layers), (*tensors, of_weights, of_biases), make)
    return of_weights, of_biases, initial


def _kind_of(weight: Tensor, x: Tensor, gradients: Tensor) -> tuple:
    """What the launches depend on, of tensors that are contiguous and begin at multiples of 16 bytes."""
    return weight.shape, x.shape, gradients.ndim, gradients.data_ptr() % 16, x.device


def _solve(weight: Tensor, x: Tensor, gradients: Tensor, adjoints: Tensor, initial: Tensor, layers: Layers) -> None:
    """Fill ``adjoints`` and ``initial``."""
    blocks, (rows, width) = weight.shape[0], x.shape[1:]
    chunk = layers.backward_blocks(blocks)
    chunks = -(-blocks // chunk)
    shape, every = dense.Shape(width), gradients.ndim == 3
    constants = (layers.skip, layers.residual, layers.activation, width, shape.padded)
    if chunks == 1:
        starts = aligned(gradients[-1] if every else gradients)
    else:
        starts = x.new_empty(chunks, rows, width)
        products = x.new_empty(chunks - 1, rows, width, width)
        arguments = (weight, x, gradients, products, starts, rows, blocks, chunk)
        warps, stages = shape.with_products
        how = (*constants, shape.precision, every, stages)
        launch(adjoint_reduce, (chunks - 1) * rows, arguments, how, warps=warps)
        dense.solve_in_place(products, starts)
    arguments = (weight, x, gradients, starts, adjoints, initial, rows, blocks, chunk)
    warps, stages = shape.without if width <= dense.NARROW else WIDE_LOOP
    how = (*constants, chunks == 1, every, stages)
    launch(adjoint_substitute, chunks * rows, arguments, how, warps=warps)


def _adjoint_wide(weight: Tensor, x: Tensor, gradients: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """The adjoint of layer l - 1 is ``diag(f'(x_l)) W_l^T`` times that of layer l, plus its own gradient."""
    blocks = weight.shape[0]
    if gradients.ndim == 2:
        gradients = torch.cat([gradients.new_zeros(blocks - 1, *gradients.shape), gradients.unsqueeze(0)])
    slopes, adjoints = ACTIVATIONS[layers.activation].slope(x[:-1]), torch.empty_like(gradients)
    transposed = dense.Chain(weight[1:].mT, 0, True, 2)
    scales = dense.Chain(slopes[1:], 0, True)
    chunk = min(layers.backward_blocks(blocks), max(1, blocks - 1))
    rhs, states = dense.Chain(gradients, 1, True), dense.Chain(adjoints, 1, True)
    dense.solve_chain(transposed, rhs, states, chunk, scales)
    return adjoints, slopes[0] * (adjoints[0] @ weight[0])
