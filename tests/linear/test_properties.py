"""Whatever the shapes, the structure, the dtype, the solver and the direction."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from deeppcr import linear
from linear.reference import STRUCTURES, one_after_the_other, random_blocks

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

solvers = st.one_of(
    st.sampled_from([linear.ForwardSubstitution(), linear.PCR(), linear.Auto()]),
    st.integers(2, 12).map(lambda chunk: linear.Hierarchical(chunk=chunk)),
)


@st.composite
def broadcasting_batches(draw):
    """Three batch shapes that broadcast: each a tail of one shape, with some dimensions of size 1."""
    whole = draw(st.lists(st.integers(1, 3), max_size=3))

    def part():
        tail = whole[draw(st.integers(0, len(whole))) :]
        return tuple(draw(st.sampled_from([1, size])) for size in tail)

    return part(), part(), part()


@st.composite
def systems(draw, dtypes=tuple(TOLERANCE), max_length=70, max_width=7):
    """A function from a device to blocks, rhs and initial."""
    structure, dtype = draw(st.sampled_from(STRUCTURES)), draw(st.sampled_from(dtypes))
    length, width = draw(st.integers(1, max_length)), draw(st.integers(1, max_width))
    batches, seed, with_initial = draw(broadcasting_batches()), draw(st.integers(0, 2**31)), draw(st.booleans())

    def on(device):
        torch.manual_seed(seed)
        blocks = random_blocks(structure, length, batches[0], width)
        rhs, initial = torch.randn(length, *batches[1], width), torch.randn(*batches[2], width)
        return (
            structure(blocks.data.to(device, dtype)),
            rhs.to(device, dtype),
            initial.to(device, dtype) if with_initial else None,
        )

    return on


def in_float64(blocks, rhs, initial, reverse):
    """The reference on the whole batch, for the values as they were rounded."""
    width = rhs.shape[-1]
    batch = torch.broadcast_shapes(
        blocks.batch_shape, rhs.shape[1:-1], initial.shape[:-1] if initial is not None else ()
    )
    rhs = rhs.view(len(rhs), *(1,) * (len(batch) - rhs.ndim + 2), *rhs.shape[1:]).expand(len(rhs), *batch, width)
    matrices = blocks.aligned(len(batch)).to_dense(width)
    return one_after_the_other(
        matrices.double(), rhs.double(), initial.double() if initial is not None else None, reverse
    )


@given(make=systems(), solver=solvers, reverse=st.booleans())
def test_every_solver_agrees_with_the_loop(make, solver, reverse, device):
    blocks, rhs, initial = make(device)
    actual = linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver)
    expected = in_float64(blocks, rhs, initial, reverse)
    assert actual.dtype == rhs.dtype
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp(min=1).item()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[rhs.dtype], atol=TOLERANCE[rhs.dtype] * scale)


@given(make=systems(dtypes=(torch.float64,)), solver=solvers, reverse=st.booleans())
def test_the_solution_satisfies_its_equations(make, solver, reverse, device):
    blocks, rhs, initial = make(device)
    states = linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver)
    batch_dims = states.ndim - 2
    start = torch.zeros_like(states[:1]) if initial is None else initial.expand(states.shape[1:]).unsqueeze(0)
    previous = torch.cat([states[1:], start]) if reverse else torch.cat([start, states[:-1]])
    rhs = rhs.view(len(rhs), *(1,) * (batch_dims - rhs.ndim + 2), *rhs.shape[1:])
    torch.testing.assert_close(states, blocks.aligned(batch_dims).apply(previous) + rhs)


@given(make=systems(dtypes=(torch.float64,)), solver=solvers)
def test_reverse_is_the_same_system_turned_round(make, solver, device):
    blocks, rhs, initial = make(device)
    turned = linear.solve(type(blocks)(blocks.data.flip(0)), rhs.flip(0), initial, solver=solver).flip(0)
    torch.testing.assert_close(linear.solve(blocks, rhs, initial, reverse=True, solver=solver), turned)


@given(make=systems(dtypes=(torch.float64,)), solver=solvers, reverse=st.booleans())
def test_backward_is_the_transpose_of_the_solution(make, solver, reverse, device):
    blocks, rhs, _ = make(device)
    rhs.requires_grad_()
    states = linear.solve(blocks, rhs, reverse=reverse, solver=solver)
    weights = torch.randn_like(states)
    (gradient,) = torch.autograd.grad(states, rhs, weights)
    # <weights, S rhs> = <S^T weights, rhs>, for the solution is linear in rhs.
    torch.testing.assert_close((gradient * rhs).sum(), (weights * states).sum())


@given(make=systems(dtypes=(torch.float64,), max_length=130), solver=solvers, cut=st.floats(0, 1))
def test_a_system_can_be_cut_in_two(make, solver, cut, device):
    blocks, rhs, initial = make(device)
    whole = linear.solve(blocks, rhs, initial, solver=solver)
    at = math.ceil(cut * (len(rhs) - 1))
    if at == 0:
        return
    first = linear.solve(blocks[:at], rhs[:at], initial, solver=solver)
    second = linear.solve(blocks[at:], rhs[at:], first[-1], solver=solver)
    torch.testing.assert_close(torch.cat([first, second]), whole)
