"""``check`` finds what a step must not do, and names it."""

import warnings
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import DiagonalJacobian, GivenJacobian, HutchinsonJacobian, ScalarJacobian, check
from deeppcr.linear import Dense, Diagonal
from deeppcr.sequence import Sequence
from deeppcr.sequence.evaluate import RandomStep
from problems import CONTRACTING, Generator, gru, plain_loop

Z0 = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """One of them may be special."""

    special: nn.Module | None = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, z):
        found = torch.tanh(self.linear(z))
        return -found if self is Layer.special else found


def test_of_a_list_every_module_is_compared(monkeypatch):
    layers = [Layer() for _ in range(20)]
    assert check(layers, Z0) == []
    for place in (0, 7, 19):
        monkeypatch.setattr(Layer, "special", layers[place])
        (finding,) = check(layers, Z0)
        assert finding.kind in (
            "evaluation",
            "slow",
        )  # a solve sees the first and the last itself, and calls them one by one
    monkeypatch.setattr(Layer, "special", layers[7])
    (finding,) = check(layers, Z0)
    assert finding.kind == "evaluation"
    assert "entry 7" in finding.message


def test_modules_of_any_group_are_compared_with_their_own_inputs(monkeypatch):
    class Shifted(Layer):
        def forward(self, z, x):
            return super().forward(z) + x

    class Other(Shifted):
        pass

    layers = [kind() for kind in (Shifted, Other) for _ in range(8)]
    xs = torch.arange(16, dtype=torch.float64)
    assert check(layers, Z0, xs) == []
    monkeypatch.setattr(Layer, "special", layers[11])
    (finding,) = check(layers, Z0, xs)
    assert (finding.kind, "entry 11" in finding.message) == ("evaluation", True)


def test_a_given_jacobian_needs_no_derivative_of_the_step():
    step = deeppcr.rowwise(lambda z, x: torch.from_numpy(np.tanh((0.5 * z + x).numpy())))
    given = GivenJacobian(lambda z, x: torch.diag_embed(0.5 / torch.cosh(0.5 * z + x) ** 2))
    assert check(step, Z0, torch.randn(10, 3, 4, dtype=torch.float64), jacobian=given) == []


@pytest.mark.parametrize("declare", [lambda step: step, deeppcr.rowwise])
def test_a_step_without_a_derivative(declare):
    """NumPy's operations have none."""
    xs = torch.randn(10, 3, 4, dtype=torch.float64)
    messages = [
        each.message for each in check(declare(lambda z, x: torch.from_numpy(np.tanh((z + x).numpy()))), Z0, xs)
    ]
    assert any("cannot be differentiated" in each and "NumPy" in each for each in messages)


def kinds(*args, **settings):
    return [finding.kind for finding in check(*args, **settings)]


@pytest.mark.parametrize("name", CONTRACTING)
def test_nothing_is_found_in_good_steps(name):
    problem = CONTRACTING[name](Generator(0, torch.float32), 20, 3)
    assert check(*problem) == []


def test_random_numbers():
    assert kinds(lambda z: torch.sin(z) + torch.randn(4), Z0, length=10) == ["random"]
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    (finding,) = check(layer, Z0, length=10)
    assert finding.kind == "random"
    assert "eval()" in finding.message
    assert check(layer.eval(), Z0, length=10) == []
    # Drawn where no vmap sees them.
    numbers = torch.Generator().manual_seed(0)
    (finding,) = check(lambda z: z + torch.rand(4, generator=numbers), Z0, length=10)
    assert finding.kind in ("side effect", "random")


def test_side_effects():
    norm = nn.BatchNorm1d(4).double()
    (finding,) = check(lambda z: norm(z), Z0, length=10)
    assert finding.kind == "side effect"
    assert "of a BatchNorm1d" in finding.message
    assert check(norm.eval(), Z0, length=10) == []
    calls, unseen = [], count(1)

    def counts(z):
        calls.append(1)
        return z + len(calls)

    (finding,) = check(counts, Z0, length=10)
    assert finding.kind == "side effect"
    assert "a function keeps 'calls'" in finding.message
    (finding,) = check(lambda z: z + next(unseen), Z0, length=10)
    assert finding.kind == "side effect"
    assert "called again" in finding.message
    assert kinds(lambda z: z.mul_(2), Z0.clone(), length=10) == ["error"]


def test_rows_that_influence_each_other():
    (finding,) = check(lambda z: torch.softmax(z, 0), Z0, length=10)
    assert finding.kind == "rows"
    assert "row 0 of the state changes row 1" in finding.message
    assert str(finding).startswith("rows: ")
    assert check(lambda z: torch.softmax(z, 0), Z0, length=10, batch_dims=0) == []


def test_rows_that_are_not_finite_beside_others():
    overflows = torch.full((2, 3), 0.88e308, dtype=torch.float64)
    (finding,) = check(lambda z: 0.99 * z + 0 * z.sum(0), overflows, length=1)
    assert finding.kind == "rows"


def test_only_one_step_in_the_middle_is_wrong():
    layers = [nn.Linear(4, 4).double() for _ in range(9)]
    assert check(layers, Z0, steps=9) == []
    layers[4] = lambda z: z - z.mean(0)
    assert "rows" in kinds(layers, Z0, steps=9)


def test_claimed_structure():
    mixing = lambda z: torch.tanh(z + 0.2 * z.roll(1, -1))  # noqa: E731
    (finding,) = check(mixing, Z0, length=10, jacobian=DiagonalJacobian())
    assert finding.kind == "structure"
    assert (
        "element 0 of the result depends on element 3 of the state" in finding.message or "element" in finding.message
    )
    assert check(torch.sin, Z0, length=10, jacobian=DiagonalJacobian()) == []
    right = GivenJacobian(lambda z: Diagonal(torch.cos(z)), exact=True)
    wrong = GivenJacobian(lambda z: Diagonal(torch.sin(z)), exact=True)
    misshapen = GivenJacobian(lambda z: Dense(torch.ones(3, 2, 2)), exact=True)
    prior = GivenJacobian(lambda z: Diagonal(torch.sin(z)))
    assert check(torch.sin, Z0, length=10, jacobian=right) == []
    assert check(torch.sin, Z0, length=10, jacobian=prior) == []
    assert check(mixing, Z0, length=10, jacobian=ScalarJacobian(0.5)) == []
    assert check(mixing, Z0, length=10, jacobian=HutchinsonJacobian()) == []
    (finding,) = check(torch.sin, Z0, length=10, jacobian=wrong)
    assert "claimed to be exact, but at step 1 it is off by" in finding.message
    (finding,) = check(torch.sin, Z0, length=10, jacobian=misshapen)
    assert "width 4" in finding.message


def test_slow_evaluation():
    problem = gru(Generator(0, torch.float32), 10, 3)
    assert kinds(problem.step.step, problem.z0, problem.xs) == ["slow"]
    (finding,) = check(lambda z: z if float(z.sum()) > 0 else torch.sin(z), Z0, length=10)
    assert finding.kind == "slow"
    assert "one by one" in finding.message


def test_values_that_are_not_finite():
    assert kinds(lambda z: torch.log(-z.abs()), Z0, length=10) == ["not finite"]
    xs = torch.zeros(50, 3, 4, dtype=torch.float64)
    xs[:, 0] = -torch.inf  # a mask
    masked = lambda z, x: z / 2 + x[1].exp()  # noqa: E731
    assert kinds(lambda z, x: 0.9 * z + x.exp(), Z0, xs) == []
    xs[20, 1, 2] = torch.nan
    (finding,) = [each for each in check(masked, Z0[0], xs) if each.kind == "not finite"]
    assert finding.message == "xs holds NaN at step 21, and so does what the step gives"
    assert kinds(lambda z, x: 0.9 * z + torch.nan_to_num(x[1]), Z0[0], xs) == [], "what is missing may be NaN"


def test_derivatives_that_differ_by_forward_and_by_reverse_mode():
    def partly(z):
        with torch.no_grad():
            fixed = torch.sin(z)
        return 0.5 * torch.tanh(z) + 0.3 * fixed

    with torch.no_grad():  # where nobody asks for the derivatives of autograd
        (finding,) = check(partly, Z0, length=10)
    assert finding.kind == "derivative"
    assert "torch.no_grad()" in finding.message
    (finding,) = check(partly, Z0, length=10)  # then neither has it, and it is not that of the values
    assert finding.kind == "derivative"
    assert "do not change as its derivative says" in finding.message
    assert check(lambda z: torch.zeros_like(z), Z0, length=10) == []
    assert check(lambda z: torch.relu(z) - z.abs() / 2, torch.zeros(3, 4), length=10) == []


def test_evaluation_that_differs_from_the_step_alone():
    """A step that looks at how many dimensions it is given computes something else under vmap."""

    def peeks(z):
        return z + (1.0 if torch._C._functorch.peek_interpreter_stack() is not None else 0.0)

    assert kinds(peeks, Z0, length=10) == ["evaluation"]


def test_modules_are_found_wherever_the_step_holds_them():
    norm = nn.BatchNorm1d(4).double()
    cell = deeppcr.rowwise(lambda z, x: norm(z) + x)
    xs = torch.randn(10, 3, 4, dtype=torch.float64)
    assert "side effect" in kinds(lambda z, x: cell.step(z, x), Z0, xs)
    assert kinds([norm] * 4, Z0) == ["side effect"]
    (finding,) = check([nn.Tanh(), norm], Z0)
    assert "changes the buffer 'num_batches_tracked' of a BatchNorm1d" in finding.message


def test_a_step_that_multiplies_in_half_precision_is_called_that():
    """With other steps beside it, it rounds otherwise: not for want of a function of its state. (On a GPU it may round alike.)"""
    torch.manual_seed(0)
    layer, z0 = torch.nn.Linear(16, 16), torch.randn(3, 16)

    def step(z):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(z)
        return torch.tanh(y.float())

    with pytest.raises(deeppcr.StepError, match=r"multiplies in torch\.bfloat16, while its state is torch\.float32"):
        deeppcr.solve(step, z0, length=50, solver=deeppcr.Newton())
    assert [finding.kind for finding in deeppcr.check(step, z0, length=50)] == ["precision"]
    loose = deeppcr.Newton(atol=2e-2, rtol=2e-2)
    assert deeppcr.solve(step, z0, length=50, solver=loose).result is deeppcr.Result.CONVERGED


def test_layers_in_place_and_steps_that_differentiate():
    """The first of a list is named; in the middle, what is overwritten is a copy of the solver's."""
    layers = [
        torch.nn.Linear(4, 4),
        *(torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4)) for _ in "abc"),
    ]
    (finding,) = deeppcr.check(layers[1:], torch.randn(2, 4))
    assert "changes its state in place" in finding.message
    assert deeppcr.check(layers, torch.randn(2, 4)) == []

    def step(z):
        return z - 0.1 * torch.autograd.grad((z**4).sum(), z, create_graph=True)[0]

    (finding,) = deeppcr.check(step, torch.randn(2, 4, requires_grad=True), length=5)
    assert "torch.func.grad" in finding.message


@pytest.mark.parametrize("length", [1, 2, 40])
def test_derivatives_of_several_steps_at_once(length):
    """Of torch.linalg.solve with a transposed right-hand side they are wrong, and of a single step right."""
    make = Generator(0, torch.float64)
    matrix, z0, xs = (
        torch.eye(4, dtype=torch.float64) + 0.1 * make.normal(4, 4),
        make.normal(3, 4),
        make.normal(length, 3, 4),
    )

    def step(z, x):
        return torch.tanh(torch.linalg.solve(matrix, z.T).T + x)

    found = deeppcr.check(step, z0, xs)
    assert [each.kind for each in found] in ([], ["derivative"])  # where PyTorch has the fault
    assert all("torch.linalg.solve" in each.message for each in found)
    start = z0.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        states = deeppcr.solve(step, start, xs, solver=deeppcr.Newton()).states
    ours, loops = (torch.autograd.grad(each.sum(), start)[0] for each in (states, plain_loop(step, start, xs)))
    assert torch.allclose(ours, loops, rtol=1e-8)  # whoever has the fault

    def batched(z, x):
        return torch.tanh(torch.linalg.solve(matrix, z.unsqueeze(-1)).squeeze(-1) + x)

    assert "derivative" not in [each.kind for each in deeppcr.check(batched, z0, xs)]


def test_what_a_later_step_does_is_called_by_its_name(monkeypatch):
    """What shows only after the first step is told as it is there: random numbers are random, whenever they are drawn."""
    original, calls = Sequence.step, []

    def step(self, index, state):
        calls.append(index)
        if len(calls) == 2:
            raise RandomStep("step: draws random numbers")
        return original(self, index, state)

    monkeypatch.setattr(Sequence, "step", step)
    (finding,) = check(torch.sin, Z0, length=10)
    assert finding.kind == "random"
