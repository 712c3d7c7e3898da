"""What every block structure must do. A structure inherits ``BlocksConformance`` and supplies ``make`` and ``dense``."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

from deeppcr import linear
from kernel_support import thorough
from linear.reference import SOLVERS, as_one_matrix, assert_same_steps, one_after_the_other

BATCHES = ((), (3,), (2, 3))
# One of a kind, for what is slow: chunks of 2 are the ones that recurse even in a short system.
ONE_OF_A_KIND = (linear.ForwardSubstitution(), linear.PCR(), linear.Hierarchical(chunk=2))

either_way = pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=str)
one_of_a_kind = pytest.mark.parametrize("solver", ONE_OF_A_KIND, ids=str)
# The rules of derivatives know the structure and the direction, not the solver.
EITHER_WAY_ONCE = [(linear.PCR(), False), (linear.Hierarchical(chunk=2), True)]
OTHERS = [each for each in itertools.product(ONE_OF_A_KIND, (False, True)) if each not in EITHER_WAY_ONCE]
either_way_once = pytest.mark.parametrize(("solver", "reverse"), [*EITHER_WAY_ONCE, *thorough(*OTHERS)], ids=str)
every_batch = pytest.mark.parametrize("batch", BATCHES, ids=str)


def assert_compiles(function, tensors: tuple[Tensor, ...]) -> None:
    """Compiled in one graph, ``function`` gives the values and the gradients it gives eagerly."""

    def value_and_gradients(run):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        value = run(*leaves)
        return value, *torch.autograd.grad(value.sin().sum(), leaves)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled), value_and_gradients(function))


class Structure:
    """The structure under test, and random float64 tensors on the device under test."""

    def make(self, length: int, batch: tuple[int, ...], width: int) -> linear.Blocks:
        raise NotImplementedError

    def dense(self, blocks: linear.Blocks, width: int) -> Tensor:
        """[L, *batch, D, D], written without any method of ``blocks``."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def put_on(self, device):
        self.device = device

    def blocks(self, length, batch=(), width=3):
        made = self.make(length, batch, width)
        return type(made)(made.data.to(self.device))

    def randn(self, *shape):
        return torch.randn(*shape, dtype=torch.float64, device=self.device)

    def system(self, length, batch=(), width=3):
        return self.blocks(length, batch, width), self.randn(length, *batch, width), self.randn(*batch, width)

    def tensors(self, length=9, batch=(2,), width=3):
        blocks, rhs, initial = self.system(length, batch, width)
        return blocks.data, rhs, initial

    def solving(self, solver, reverse=False):
        """The solution as a function of the three tensors."""
        structure = type(self.make(1, (), 1))
        return lambda data, rhs, initial=None: linear.solve(
            structure(data), rhs, initial, reverse=reverse, solver=solver
        )


class Algebra(Structure):
    @every_batch
    @pytest.mark.parametrize("width", [1, 3, 6])
    def test_to_dense_puts_every_entry_in_its_place(self, batch, width):
        blocks = self.blocks(4, batch, width)
        torch.testing.assert_close(blocks.to_dense(width), self.dense(blocks, width), rtol=0, atol=0)
        assert blocks.width in (None, width)
        assert blocks.batch_shape == batch
        assert len(blocks) == 4

    @every_batch
    @pytest.mark.parametrize("width", [1, 3, 6])
    def test_apply_is_the_product_with_a_vector(self, batch, width):
        blocks, vectors = self.blocks(4, batch, width), self.randn(4, *batch, width)
        expected = torch.einsum("...ij,...j->...i", self.dense(blocks, width), vectors)
        torch.testing.assert_close(blocks.apply(vectors), expected)

    def test_apply_broadcasts_over_the_batch(self):
        few, many = self.blocks(4, (1, 3), 6), self.blocks(4, (2, 3), 6)
        for blocks, vectors in ((few, self.randn(4, 2, 3, 6)), (many, self.randn(4, 1, 1, 6))):
            expected = torch.einsum("...ij,...j->...i", self.dense(blocks, 6), vectors)
            torch.testing.assert_close(blocks.apply(vectors), expected)

    @pytest.mark.parametrize("batches", [((), ()), ((2, 3), (2, 3)), ((1, 3), (2, 1))], ids=str)
    @pytest.mark.parametrize("width", [1, 3, 6])
    def test_compose_is_the_product_of_matrices(self, batches, width):
        second, first = (self.blocks(4, batch, width) for batch in batches)
        product = second.compose(first)
        assert type(product) is type(first)
        torch.testing.assert_close(self.dense(product, width), self.dense(second, width) @ self.dense(first, width))

    @every_batch
    def test_transpose(self, batch):
        blocks = self.blocks(4, batch, 6)
        assert type(blocks.transpose()) is type(blocks)
        torch.testing.assert_close(self.dense(blocks.transpose(), 6), self.dense(blocks, 6).mT, rtol=0, atol=0)

    @pytest.mark.parametrize("batches", [((), ()), ((2, 3), (2, 3)), ((1, 3), (2, 3))], ids=str)
    def test_outer_is_the_derivative_in_the_data(self, batches):
        blocks = self.blocks(4, batches[0], 6)
        left, right = self.randn(4, *batches[1], 6), self.randn(4, *batches[1], 6)
        data = blocks.data.requires_grad_()
        (expected,) = torch.autograd.grad((left * type(blocks)(data).apply(right)).sum(), data)
        torch.testing.assert_close(blocks.outer(left, right).sum_to_size(data.shape), expected)

    @every_batch
    def test_where_zeroes_whole_matrices(self, batch):
        blocks, keep = self.blocks(4, batch), self.randn(4, *batch) > 0
        expected = torch.where(keep[..., None, None], self.dense(blocks, 3), 0.0)
        torch.testing.assert_close(self.dense(blocks.where(keep), 3), expected, rtol=0, atol=0)

    def test_where_zeroes_what_is_not_finite(self):
        blocks = self.blocks(2)
        blocks.data[0] = float("inf")
        kept = blocks.where(torch.tensor([False, True], device=self.device))
        torch.testing.assert_close(kept.data, torch.stack([torch.zeros_like(blocks.data[1]), blocks.data[1]]))

    def test_aligned_puts_in_batch_dimensions_of_size_one(self):
        blocks = self.blocks(4, (3,))
        aligned = blocks.aligned(3)
        assert aligned.batch_shape == (1, 1, 3)
        torch.testing.assert_close(self.dense(aligned, 3)[:, 0, 0], self.dense(blocks, 3), rtol=0, atol=0)
        assert blocks.aligned(1).batch_shape == blocks.aligned(0).batch_shape == (3,)

    @pytest.mark.parametrize("steps", [slice(1, None), slice(-2, None), slice(1, 6, 2), slice(3, 3)], ids=str)
    def test_slicing_picks_steps(self, steps):
        blocks = self.blocks(7, (2,))
        assert type(blocks[steps]) is type(blocks)
        torch.testing.assert_close(self.dense(blocks[steps], 3), self.dense(blocks, 3)[steps], rtol=0, atol=0)


class Solving(Structure):
    @every_solver
    @either_way
    @pytest.mark.parametrize(
        ("length", "width"),
        [
            (1, 3),
            (3, 6),
            (65, 15),
            *(pytest.param(*size, marks=pytest.mark.thorough) for size in ((2, 1), (63, 5), (64, 3))),
        ],
    )
    def test_agrees_with_the_loop(self, length, width, solver, reverse):
        blocks, rhs, initial = self.system(length, (2,), width)
        for start in (None, initial):
            expected = one_after_the_other(self.dense(blocks, width), rhs, start, reverse)
            assert_same_steps(linear.solve(blocks, rhs, start, reverse=reverse, solver=solver), expected)

    @either_way
    def test_agrees_with_the_loop_over_a_thousand_steps(self, reverse):
        """All solvers with the same loop, which takes longer than they do."""
        blocks, rhs, initial = self.system(1000, (), 3)
        expected = one_after_the_other(self.dense(blocks, 3), rhs, initial, reverse)
        for solver in SOLVERS:
            assert_same_steps(linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver), expected)

    @every_solver
    @either_way
    @pytest.mark.parametrize("length", [1, 2, 3, 14])
    def test_agrees_with_one_large_matrix(self, length, solver, reverse):
        blocks, rhs, initial = self.system(length, (2,), 3)
        for start in (None, initial):
            expected = as_one_matrix(self.dense(blocks, 3), rhs, start, reverse)
            assert_same_steps(linear.solve(blocks, rhs, start, reverse=reverse, solver=solver), expected)

    @pytest.mark.parametrize(
        ("blocks_batch", "rhs_batch", "initial_batch"),
        [
            ((), (), ()),
            ((2, 3), (2, 3), (2, 3)),
            ((), (2, 3), ()),
            ((2, 3), (), ()),
            ((), (), (2, 3)),
            ((3,), (2, 1), (4, 1, 1)),
            ((2, 1), (3,), (3,)),
            ((1,), (3,), (2, 1)),
            ((0,), (1,), ()),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("solver", [linear.PCR(), linear.Hierarchical(chunk=3)], ids=str)
    @either_way
    def test_batches_broadcast(self, blocks_batch, rhs_batch, initial_batch, solver, reverse):
        blocks, rhs = self.blocks(8, blocks_batch, 6), self.randn(8, *rhs_batch, 6)
        initial = self.randn(*initial_batch, 6)
        batch = torch.broadcast_shapes(blocks_batch, rhs_batch, initial_batch)
        expected = one_after_the_other(
            self.dense(blocks, 6).view(8, *(1,) * (len(batch) - len(blocks_batch)), *blocks_batch, 6, 6),
            rhs.view(8, *(1,) * (len(batch) - len(rhs_batch)), *rhs_batch, 6).expand(8, *batch, 6),
            initial,
            reverse,
        )
        actual = linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver)
        torch.testing.assert_close(actual, expected)

    @every_solver
    def test_without_checks_the_couplings_are_enough(self, solver):
        blocks, rhs, _ = self.system(12, (2,), 6)
        for reverse, couplings in ((False, blocks[1:]), (True, blocks[:-1])):
            actual = linear.solve_coupled(couplings, rhs, reverse=reverse, solver=solver)
            torch.testing.assert_close(actual, linear.solve(blocks, rhs, reverse=reverse, solver=solver))


class Derivatives(Structure):
    def differentiable_system(self, length=6, width=2, blocks_batch=(), rhs_batch=(), initial_batch=()):
        return (
            self.blocks(length, blocks_batch, width).data.requires_grad_(),
            self.randn(length, *rhs_batch, width).requires_grad_(),
            self.randn(*initial_batch, width).requires_grad_(),
        )

    @either_way_once
    def test_first_derivatives_in_both_modes(self, solver, reverse):
        assert gradcheck(
            self.solving(solver, reverse),
            self.differentiable_system(),
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )

    @either_way_once
    def test_second_derivatives(self, solver, reverse):
        system = self.differentiable_system(length=4)
        assert gradgradcheck(self.solving(solver, reverse), system, check_batched_grad=True, check_fwd_over_rev=True)

    @pytest.mark.parametrize("length", [1, 2])
    def test_derivatives_of_the_shortest_systems(self, length):
        solve, system = self.solving(linear.PCR()), self.differentiable_system(length)
        assert gradcheck(solve, system, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(solve, system)

    @pytest.mark.parametrize("batches", [((), (2,), ()), ((2,), (), ()), ((), (), (2,)), ((2, 1), (2,), ())], ids=str)
    def test_derivatives_sum_over_broadcast_batches(self, batches):
        solve = self.solving(linear.PCR())
        assert gradcheck(solve, self.differentiable_system(3, 2, *batches), check_forward_ad=True)

    @pytest.mark.parametrize("wanted", ["blocks", "rhs", "initial"])
    def test_each_argument_by_itself(self, wanted):
        system = dict(zip(("blocks", "rhs", "initial"), self.differentiable_system(), strict=True))
        others = {name: tensor.detach() for name, tensor in system.items() if name != wanted}

        def solve_in(tensor):
            arguments = {**others, wanted: tensor}
            return self.solving(linear.PCR())(arguments["blocks"], arguments["rhs"], arguments["initial"])

        assert gradcheck(solve_in, system[wanted], check_forward_ad=True)

    @every_solver
    @either_way
    def test_gradients_agree_with_autograd_through_the_loop(self, solver, reverse):
        blocks, rhs, initial = self.system(65, (2,), 6)
        weights = self.randn(65, 2, 6)
        leaves = [tensor.requires_grad_() for tensor in (blocks.data, rhs, initial)]

        def gradients(states):
            return torch.autograd.grad((weights * states.sin()).sum(), leaves)

        actual = gradients(linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver))
        expected = gradients(one_after_the_other(self.dense(blocks, 6), rhs, initial, reverse))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    @every_solver
    @either_way
    def test_both_modes_of_torch_func_agree(self, solver, reverse):
        solve, system = self.solving(solver, reverse), self.tensors(10, (2,), 2)
        backward, forward = (jac(solve, argnums=(0, 1, 2))(*system) for jac in (jacrev, jacfwd))
        torch.testing.assert_close(backward, forward)

    def test_tangents_may_be_missing(self):
        data, rhs, initial = self.differentiable_system()
        solve, tangent = self.solving(linear.PCR()), self.randn(*initial.shape)
        with forward_ad.dual_level():
            states = solve(data.detach(), rhs.detach(), forward_ad.make_dual(initial.detach(), tangent))
            actual = forward_ad.unpack_dual(states).tangent
        torch.testing.assert_close(actual, solve(data, torch.zeros_like(rhs), tangent).detach())


class Transforms(Structure):
    @pytest.mark.parametrize("in_dims", [(1, None, None), (None, 0, None), (None, None, 0), (1, 0, None), (0, 1, -1)])
    @one_of_a_kind
    def test_vmap_is_the_loop_over_its_dimension(self, in_dims, solver):
        solve, rows = self.solving(solver), [self.tensors() for _ in range(4)]
        # What is not mapped over is that of the first row.
        rows = [
            [first if dim is None else own for first, own, dim in zip(rows[0], row, in_dims, strict=True)]
            for row in rows
        ]
        mapped = [
            column[0] if dim is None else torch.stack(column, dim)
            for column, dim in zip(zip(*rows, strict=True), in_dims, strict=True)
        ]
        expected = torch.stack([solve(*row) for row in rows])
        torch.testing.assert_close(vmap(solve, in_dims=in_dims)(*mapped), expected)

    def test_nested_vmap_is_a_batch(self):
        solve, (data, rhs, initial) = self.solving(linear.PCR()), self.tensors()
        rhs, initial = self.randn(4, 5, *rhs.shape), self.randn(5, *initial.shape)
        actual = vmap(vmap(solve, in_dims=(None, 0, 0)), in_dims=(None, 0, None))(data, rhs, initial)
        expected = torch.stack([torch.stack([solve(data, rhs[i, j], initial[j]) for j in range(5)]) for i in range(4)])
        torch.testing.assert_close(actual, expected)

    @either_way
    def test_vmap_of_gradients(self, reverse):
        solve, (data, rhs, initial) = self.solving(linear.Hierarchical(chunk=2), reverse), self.tensors()
        rhs = self.randn(4, *rhs.shape)
        gradients = grad(lambda *system: solve(*system).square().sum(), argnums=(0, 1, 2))
        actual = vmap(gradients, in_dims=(None, 0, None))(data, rhs, initial)
        expected = [torch.stack(rows) for rows in zip(*(gradients(data, row, initial) for row in rhs), strict=True)]
        torch.testing.assert_close(list(actual), expected)

    def test_blocks_can_leave_a_vmapped_function(self):
        blocks = self.blocks(5, (4,), 3)
        transposed = vmap(lambda data: type(blocks)(data).transpose(), in_dims=1, out_dims=1)(blocks.data)
        torch.testing.assert_close(transposed.data, blocks.transpose().data, rtol=0, atol=0)

    def test_compiles_whole(self):
        def both_ways(*system):
            return torch.cat(
                [
                    self.solving(linear.PCR())(*system),
                    self.solving(linear.Hierarchical(chunk=2), reverse=True)(*system),
                ]
            )

        assert_compiles(both_ways, self.tensors(length=4))  # two rounds; two chunks, one of them ragged


class BlocksConformance(Algebra, Solving, Derivatives, Transforms):
    """Inherit this, and give it ``make`` and ``dense``."""
