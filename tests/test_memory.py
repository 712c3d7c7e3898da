"""Memory, measured: the implicit gradient does not grow with the iterations, chunks store fewer blocks."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
from deeppcr import FixedIterations, GivenJacobian, Implicit, Newton, Unrolled
from deeppcr.linear import Dense
from deeppcr.linearised import Linearised
from deeppcr.sequence import Sequence
from problems import Generator, mlp


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes alive at once among the storages that operations return."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor.untyped_storage())
        return result

    def track(self, storage):
        key = storage._cdata
        if key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.release, key, size)

    def release(self, key, size):
        self.seen.discard(key)
        self.alive -= size


def peak(run) -> int:
    run()  # what is set up once does not count
    with PeakMemory() as memory:
        run()
    return memory.peak


def training_step(gradient, iterations):
    problem = mlp(Generator(0, torch.float32), 256, 2, width=16, activation=torch.tanh)
    weights = problem.xs[0].requires_grad_()
    solver = Newton(stop=FixedIterations(iterations), chunk=1)

    def run():
        weights.grad = None
        problem.solve(solver=solver, gradient=gradient).states.sum().backward()

    return run


def test_the_implicit_gradient_does_not_remember_the_iterations():
    two, eight = (peak(training_step(Implicit(), count)) for count in (2, 8))
    assert eight <= 1.02 * two
    unrolled_two, unrolled_eight = (peak(training_step(Unrolled(), count)) for count in (2, 8))
    assert unrolled_eight > 1.8 * unrolled_two  # or the measurement sees nothing


def test_chunks_store_one_block_each(monkeypatch):
    stored = []
    linearise = deeppcr.DenseJacobian.linearise

    def recorded(self, *args):
        ends, blocks = linearise(self, *args)
        stored.append(blocks.data.numel())
        return ends, blocks

    monkeypatch.setattr(deeppcr.DenseJacobian, "linearise", recorded)
    problem = mlp(Generator(0, torch.float32), 512, 8, width=16)
    used = {}
    for chunk in (1, 8, 64):
        stored.clear()
        solver = Newton(stop=FixedIterations(1), chunk=chunk)
        with torch.no_grad():
            used[chunk] = peak(lambda solver=solver: problem.solve(solver=solver))
        assert stored[-1] == 512 // chunk * 8 * 16 * 16
    one_set_of_blocks = 512 * 8 * 16 * 16 * 4
    assert used[1] > 2 * one_set_of_blocks
    assert used[8] < 1.0 * one_set_of_blocks
    assert used[64] < 0.5 * one_set_of_blocks  # most of it the inputs and one evaluation of all steps


def test_the_budget_bounds_what_forming_the_blocks_takes():
    problem = mlp(Generator(0, torch.float32), 512, 2, width=16)
    blocks = 512 * 2 * 16 * 16 * 4

    def run(budget):
        solver = Newton(jacobian=deeppcr.DenseJacobian(memory_budget=budget), stop=FixedIterations(1), chunk=1)
        with torch.no_grad():
            problem.solve(solver=solver)

    assert peak(lambda: run(blocks // 8)) < 0.8 * peak(lambda: run(None))


class Held(deeppcr.DenseJacobian):
    """Notes how many of the blocks that it formed before are still there when it forms others."""

    def evaluate(self, sequence, previous, steps):
        found = super().evaluate(sequence, previous, steps)
        made.append(weakref.ref(found[1].data.untyped_storage()))
        held.append(sum(each() is not None for each in made[:-1]))
        return found


made, held = [], []


def test_products_with_parts_of_the_jacobians_hold_one_part_at_a_time():
    problem = mlp(Generator(0, torch.float32), 24, 2, width=4)
    sequence = Sequence(problem.step, problem.z0, problem.xs)
    states = sequence.layout.pack(problem.loop().detach(), lead=1)
    jacobian = Held(memory_budget=4 * 2 * 4 * 4 * 4 * 6)
    steps = Linearised(sequence, states)
    assert jacobian.steps_at_once(sequence) < 12
    adjoint = torch.randn_like(states)
    assert torch.allclose(steps._by(jacobian, adjoint), steps.pull(adjoint), atol=1e-5)
    assert len(held) > 2
    assert not any(held)


def test_blocks_are_neither_copied_nor_kept_beyond_their_iteration():
    """Alive at once, in units of all blocks: the weights, the blocks, and the products of two rounds of the reduction."""
    length, width = 256, 32
    problem = mlp(Generator(0, torch.float32), length, 1, width=width, activation=torch.tanh)
    jacobian = GivenJacobian(lambda z, x: Dense(x[0] * (1 - torch.tanh(z) ** 2).unsqueeze(-2)), exact=True)
    solver = Newton(jacobian=jacobian, chunk=1, linear=deeppcr.linear.PCR(), stop=FixedIterations(3))
    with torch.no_grad():
        used = peak(lambda: problem.solve(solver=solver))
    assert used <= 4.5 * length * width**2 * 4


def test_blocks_that_come_in_one_piece_are_not_copied():
    made = []

    class Noted(GivenJacobian):
        def evaluate(self, *arguments):
            made.append(super().evaluate(*arguments))
            return made[-1]

    problem = mlp(Generator(0, torch.float32), 64, 1, width=8)
    noted = Noted(lambda z, x: Dense(x[0] * (z > 0).unsqueeze(-2)), exact=True)
    _, blocks = noted.linearise(Sequence(*problem), torch.ones(64, 1, 8), 1)
    assert blocks.data is made[0][1].data
