"""Bad input is named: the argument, what was expected, what came."""

from copy import deepcopy
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch

import deeppcr
from deeppcr import Loop, Newton, StepError
from problems import Generator, mlp

solve = partial(deeppcr.solve, solver=Newton())
ONES = torch.ones(2, 3)
IN_PLACE = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 3))


def differentiates(z):
    return z - 0.1 * torch.autograd.grad((z**4).sum(), z, create_graph=True)[0]


def step(z, x):
    return torch.tanh(z + x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: solve(step, ONES, (torch.ones(4, 3), torch.ones(5, 3))),
            ValueError,
            r"xs: lengths differ: xs\[0\] has 4, xs\[1\] has 5.*closed over by the step",
        ),
        (lambda: solve(step, ONES, torch.ones(4, 3), length=5), ValueError, "length has 5, xs has 4"),
        (lambda: solve(step, ONES, torch.ones(0, 3)), ValueError, "xs: at least one step is needed"),
        (lambda: solve(torch.sin, ONES, length=0), ValueError, "length: at least one step"),
        (lambda: solve(torch.sin, ONES), ValueError, "length: there are no xs"),
        (lambda: solve(torch.sin, ONES, length=2.0), TypeError, "length: expected an int, got float"),
        (lambda: solve(torch.sin, ONES, length=torch.tensor(True)), TypeError, "length: expected an int, got bool"),
        (lambda: solve(torch.sin, ONES, length=True), TypeError, "length: expected an int, got bool"),
        (lambda: solve(step, ONES, torch.tensor(1.0)), ValueError, "xs: expected .* without dimensions"),
        (
            lambda: solve(step, ONES, torch.ones(3, 2).to_sparse()),
            TypeError,
            "xs: expected a dense tensor, got .*to_dense",
        ),
        (lambda: solve(step, ONES, [1.0, 2.0]), TypeError, r"xs\[0\]: expected a tensor"),
        (lambda: solve(step, ONES, [torch.ones(3)] * 7), TypeError, r"xs: is a list of 7 tensors.*torch.stack"),
        (lambda: solve(step, ONES, [torch.tensor(1.0)] * 7), ValueError, r"torch.stack"),
        (lambda: solve(step, ONES, [torch.ones(3), torch.ones(4)]), ValueError, r"lengths differ.*torch.stack"),
        (
            lambda: solve(lambda z: z[..., :2], ONES, length=3),
            StepError,
            r"changes the state's shape: expected float32\[2, 3\].*got float32\[2, 2\]",
        ),
        (lambda: solve(lambda z: torch.cat([z, z], -1), ONES, length=3), StepError, "DenseNet.*with_history"),
        (lambda: solve(lambda z: z.double(), ONES, length=3), StepError, "changes the state's dtype.*return it .to"),
        (lambda: solve(lambda z: (z, z), ONES, length=3), StepError, r"changes the state's structure.*deeppcr\.scan"),
        (lambda: solve(lambda z: [z], ONES, length=3), StepError, "Return the containers and keys that z0 has"),
        (
            lambda: solve(step, ONES[0], torch.ones(4, 2, 3)),
            StepError,
            r"It was broadcast: begin with a z0 of \[2, 3\]",
        ),
        (lambda: solve(step, [0.0, 1.0], torch.ones(4, 2)), TypeError, r"found float \(use torch.tensor\(z0\)\)"),
        (
            lambda: solve(step, ONES, torch.ones(4, 2, 3), batch_dims="1"),
            ValueError,
            "batch_dims: expected a whole number",
        ),
        (lambda: solve(step, ONES, (torch.ones(4, 2, 3), 0.5)), TypeError, r"xs\[1\]: .*got float.*is closed over"),
        (lambda: solve(lambda z: z.to("meta"), ONES, length=3), StepError, "changes the state's device"),
        (
            lambda: solve(lambda z: (z, {"a": 1}), ONES, length=3),
            StepError,
            r"structure: expected float32\[2, 3\] on cpu, got \(float32\[2, 3\] on cpu, \{'a': int\}\)",
        ),
        (lambda: solve(lambda z: None, ONES, length=3), StepError, r"returns None, not a state like float32\[2, 3\]"),
        (lambda: solve(lambda z: z.add_(1), ONES.clone(), length=3), StepError, "changes its state in place"),
        (lambda: solve([IN_PLACE] * 3, ONES.clone()), StepError, "changes its state in place"),
        (lambda: solve([IN_PLACE, deepcopy(IN_PLACE)], ONES.clone()), StepError, "changes its state in place"),
        (lambda: solve(differentiates, ONES.clone().requires_grad_(), length=3), StepError, "use torch.func.grad"),
        (lambda: solve(lambda z, x: z + x.mul_(2), ONES, torch.ones(3, 3)), StepError, "changes xs in place"),
        (lambda: solve(lambda z: z + torch.randn(3), ONES, length=3), StepError, "draws random numbers"),
        (lambda: solve(lambda z: torch.dropout(z, 0.5, True), ONES, length=3), StepError, "draws random numbers"),
        (lambda: solve(torch.add, ONES.numpy(), ONES), TypeError, r"found ndarray \(use torch\.as_tensor\(z0\)\)"),
        (lambda: solve(torch.add, ONES, ONES.numpy()), TypeError, r"got ndarray \(use torch\.as_tensor\(xs\)\)"),
        (
            lambda: solve(torch.add, ONES, ONES, ONES),
            TypeError,
            r"Several inputs of a step are one nest: solve\(step, z0, \(xs, ys\)\)",
        ),
        (
            lambda: solve(torch.add, ONES, ONES, rtol=1e-3, chunk=1),
            TypeError,
            r"solver=deeppcr\.Newton\(chunk=\.\.\., rtol=\.\.\.\)",
        ),
        (lambda: solve(torch.add, ONES, ONES, speed=1), TypeError, "unexpected keyword argument 'speed'"),
        (
            lambda: solve(torch.add, (ONES, ONES.double()), ONES),
            TypeError,
            r"convert those that differ, by \.to\(\.\.\.\)",
        ),
        (lambda: solve(torch.add, (ONES, ONES.long()), ONES), TypeError, "deeppcr.scan carries integers along"),
        (
            lambda: solve(torch.sin, torch.tensor([1.0, float("nan")]), length=3),
            ValueError,
            "z0: holds NaN, from which the plain loop alone can start",
        ),
        (
            lambda: solve(torch.sin, torch.ones(3, dtype=torch.long), length=3),
            TypeError,
            "z0: expected a floating dtype, complex64 or complex128, got torch.int64",
        ),
        (lambda: solve(torch.sin, torch.ones(3, dtype=torch.complex32), length=3), TypeError, "got torch.complex32"),
        (lambda: solve(torch.sin, [1.0], length=3), TypeError, "z0: expected a tensor"),
        (lambda: solve(torch.sin, (), length=3), ValueError, "z0: has no tensor"),
        (lambda: solve(torch.sin, torch.ones(3, 0), length=3), ValueError, "z0: is empty"),
        (lambda: solve(torch.sin, torch.eye(3).to_sparse(), length=3), TypeError, "z0: expected a dense tensor, got"),
        (lambda: solve(torch.sin, torch.ones(3, device="meta"), length=3), TypeError, "z0: is on the meta device"),
        (lambda: solve(torch.sin, (ONES, ONES.double()), length=3), TypeError, "z0: its tensors must share one dtype"),
        (lambda: solve(torch.sin, (ONES, torch.ones(3, 3)), length=3), ValueError, "z0: with batch_dims=1"),
        (
            lambda: solve(torch.sin, (torch.ones(3), torch.ones(3, 3)), length=3),
            ValueError,
            "batch_dims=0 reads one state of 12 numbers, batch_dims=1 reads 3 rows of 4 numbers each",
        ),
        (
            lambda: solve(torch.sin, {"t": torch.ones(()), "z": torch.ones(2, 3)}, length=3),
            ValueError,
            "batch_dims=0 reads one state of 7 numbers, batch_dims=1 reads rows, which these shapes do not have",
        ),
        (
            lambda: solve(torch.sin, torch.ones(3), length=3, batch_dims=2),
            ValueError,
            "z0: batch_dims=2 takes 2 leading dimensions",
        ),
        (lambda: solve(3, ONES, length=3), TypeError, "step: expected a callable"),
        (lambda: solve([torch.sin, 3], ONES), TypeError, "step: entry 1 of the list"),
        (
            lambda: solve([torch.sin] * 3, ONES, length=4),
            ValueError,
            "step: lengths differ: length has 4, step: the list has 3",
        ),
        (lambda: solve(torch.sin, ONES, length=3, solver=Newton), TypeError, "solver: expected"),
        (lambda: solve(torch.sin, ONES, length=3, gradient="implicit"), TypeError, "gradient: expected"),
        (lambda: solve(torch.sin, ONES, length=3, on_failure="ignore"), ValueError, "on_failure: expected"),
        (
            lambda: solve(torch.sin, ONES, length=3, guess=torch.ones(3, 2, 4)),
            ValueError,
            r"guess: expected states of shape \[3, 2, 3\], got float32\[3, 2, 4\]",
        ),
        (
            lambda: solve(torch.sin, ONES, length=3, guess=torch.ones(3, 2, 3).double()),
            TypeError,
            "guess: expected torch.float32",
        ),
        (
            lambda: solve(torch.sin, ONES, length=3, guess=torch.full((3, 2, 3), torch.inf)),
            ValueError,
            "guess: holds values that are not finite",
        ),
        (lambda: solve(torch.sin, ONES, length=3, guess="zeros"), TypeError, r"guess: expected .*Zeros\(\).*'zeros'"),
        (lambda: Newton(jacobian="diagonal"), TypeError, r"jacobian: expected .*DiagonalJacobian\(\).*'diagonal'"),
        (lambda: Newton(stop=deeppcr.PaperTest), TypeError, r"stop: expected UpdateTest\(\)"),
        (lambda: solve(torch.sin, ONES, length=3, guess=deeppcr.Zeros), TypeError, r"guess: pass an instance, Zeros\("),
        (
            lambda: solve(deeppcr.rowwise(step), ONES, torch.ones(4, 3)),
            ValueError,
            r"every leaf must be \[L, B, ...\] = \[4, 2",
        ),
        (lambda: solve(deeppcr.rowwise(torch.sin), torch.ones(3), length=4), ValueError, "no batch dimension"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_step_that_fails_says_what_it_was_called_with():
    with pytest.raises(RuntimeError) as raised:  # the batch first, where the steps are expected
        solve(step, ONES, torch.ones(2, 7, 3))
    note, _ = raised.value.__notes__  # and what does not fit: see below
    assert note.startswith(
        "deeppcr called step(z, x) with z: float32[2, 3] on cpu, x = xs[0]: float32[7, 3] on cpu (step 1)"
    )
    with pytest.raises(TypeError) as raised:
        solve(step, ONES, length=3)
    assert raised.value.__notes__[0] == "deeppcr called step(z) with z: float32[2, 3] on cpu (step 1)"


@pytest.mark.parametrize("solver", [None, deeppcr.Loop()])
def test_an_error_of_a_later_step_says_which_it_was(solver):
    """It is the step's own error, once."""

    def step(z, x):
        if x.sum() > 100:
            raise KeyError("too much")
        return torch.tanh(z) + x

    xs = torch.zeros(9, 2, 3)
    xs[5] = 50.0
    with pytest.raises(KeyError, match="too much") as raised:
        deeppcr.solve(step, torch.zeros(2, 3), xs, solver=solver)
    called = "deeppcr called step(z, x) with z: float32[2, 3] on cpu, x = xs[5]: float32[2, 3] on cpu (step 6)"
    assert raised.value.__notes__ == [called]
    assert raised.value.__context__ is None


def test_an_error_of_the_first_step_comes_alone():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        deeppcr.solve(
            lambda z, x: z @ torch.zeros(4, 4) + x @ torch.zeros(4, 4), torch.zeros(2, 4), torch.zeros(9, 2, 5)
        )
    assert raised.value.__context__ is None


def test_what_a_refused_step_has_changed_in_place_is_not_the_callers():
    z0, xs = ONES.clone(), torch.ones(4, 2, 3)
    for step, given in ((lambda z: z.mul_(0.5), {"length": 3}), (lambda z, x: z + x.mul_(0.5), {"xs": xs})):
        with pytest.raises(StepError, match="in place"):
            solve(step, z0, **given)
    assert torch.equal(z0, ONES)
    assert torch.equal(xs, torch.ones(4, 2, 3))


def given(blocks, **settings):
    return solve(torch.sin, ONES, length=4, solver=Newton(jacobian=deeppcr.GivenJacobian(blocks, **settings)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: given(lambda z: deeppcr.linear.Dense(torch.ones(2, 4, 4))),
            ValueError,
            r"jacobian: expected blocks of batch shape \(2,\) and width 3",
        ),
        (lambda: given(lambda z: deeppcr.linear.Dense(torch.ones(5, 3, 3))), ValueError, "jacobian: expected blocks"),
        (lambda: given(lambda z: deeppcr.linear.Dense(torch.ones(2, 3, 4))), ValueError, "jacobian: expected blocks"),
        (lambda: given(lambda z: torch.ones(2, 3, 3)), TypeError, "jacobian: the function must return"),
        (
            lambda: given(lambda z: deeppcr.linear.Diagonal(torch.ones(2, 3).double())),
            TypeError,
            "jacobian: the blocks are torch.float64",
        ),
        (lambda: given(deeppcr.linear.Scalar(torch.ones(3))), ValueError, "jacobian: 3 blocks were given for 4 steps"),
        (lambda: given(deeppcr.linear.Scalar(torch.ones(4, 5))), ValueError, "jacobian: expected blocks"),
        (
            lambda: solve(torch.sin, ONES, length=4, solver=Newton(jacobian=deeppcr.ScalarJacobian(torch.ones(3)))),
            ValueError,
            r"with L = 4, got shape \(3,\)",
        ),
        (
            lambda: solve(torch.sin, ONES, length=4, solver=Newton(jacobian=deeppcr.ScalarJacobian(torch.ones(4, 5)))),
            ValueError,
            "5 rows for a batch of 2",
        ),
        (lambda: deeppcr.HutchinsonJacobian(samples=0), ValueError, "samples"),
        (
            lambda: given(lambda z, x: None),
            TypeError,
            r"jacobian: the function is called as step is, with \(z\): there",
        ),
        (lambda: given(lambda z: torch.sin(z, "no")), TypeError, r"^sin\(\)"),  # its own mistake
    ],
)
def test_bad_jacobians_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_mistake_in_the_step_shows_as_itself():
    with pytest.raises(NameError, match="undefined"):
        solve(lambda z: undefined(z), ONES, length=3)  # noqa: F821
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        solve(lambda z, x: z @ x, ONES, torch.ones(4, 7, 7))


@pytest.mark.parametrize("solver", [Newton(), Loop()])
def test_inputs_of_another_dtype_get_a_hint(solver):
    with pytest.raises(
        StepError, match=r"state's dtype: .* got float64\[2, 3\] on cpu; its x has float64: give xs the dtype"
    ):
        solve(lambda z, x: z * x["a"], torch.ones(2, 3), {"a": torch.ones(4, 1, dtype=torch.float64)}, solver=solver)


@pytest.mark.parametrize("table", [dict, WeakKeyDictionary])
def test_modules_that_look_themselves_up(table):
    factors = table()

    def key(module):
        return id(module) if table is dict else module

    class Scaled(torch.nn.Linear):
        def forward(self, z):
            return factors[key(self)] * super().forward(z)

    modules = [torch.nn.Sequential(Scaled(3, 3)) for _ in range(4)]
    with pytest.raises(KeyError):  # a mistake of the step's own
        solve(modules, ONES, solver=Loop())
    for module in modules:
        factors[key(module[0])] = 0.5
    for solver in (None, Newton(), Loop()):  # which a module that stands in for others does not find
        found = solve(modules, ONES, solver=solver).states
        assert torch.allclose(found[0], modules[0](ONES))


def test_another_key_that_is_missing_is_the_mistake_of_the_step():
    class Scaled(torch.nn.Linear):
        def forward(self, z):
            return {}["factor"] * super().forward(z)

    with pytest.raises(KeyError, match="factor"):
        solve([Scaled(3, 3) for _ in range(4)], ONES)


def test_autocast_gets_a_hint():
    weight = torch.eye(3)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(StepError, match="autocast is on"):
        solve(lambda z: z @ weight, ONES, length=3)


def test_out_of_memory_says_what_would_fit(monkeypatch):
    problem = mlp(Generator(0, torch.float32), 1000, 4)

    def too_much(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr(deeppcr.DenseJacobian, "linearise", too_much)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"1000 steps in chunks of 2, 4 rows of width 16.*GiB.*chunk=32.*ScalarJacobian"
    ):
        problem.solve(solver=Newton(chunk=2))


def test_other_runtime_errors_are_not_taken_for_lack_of_memory(monkeypatch):
    problem = mlp(Generator(0, torch.float32), 10, 4)

    def fails(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(deeppcr.DenseJacobian, "linearise", fails)
    with pytest.raises(RuntimeError, match="something else"):
        problem.solve()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: solve(torch.sin, ONES, length=3, batch_dims=-1), ValueError, "batch_dims: expected a whole number"),
        (lambda: solve(torch.sin, ONES, length=3, batch_dims=1.0), ValueError, "batch_dims: expected a whole number"),
        (lambda: deeppcr.GivenJacobian(torch.ones(3)), TypeError, "blocks: expected linear.Dense"),
        (lambda: deeppcr.GivenJacobian(None), TypeError, "blocks: expected"),
        (lambda: deeppcr.ScalarJacobian("x"), TypeError, "value: expected a number or a tensor"),
        (lambda: deeppcr.BatchMean(torch.ones(3)), TypeError, "solution: BatchMean takes an earlier Solution"),
        (lambda: deeppcr.DenseJacobian(memory_budget="1G"), ValueError, "memory_budget"),
        (lambda: deeppcr.HutchinsonJacobian(samples=1.5), ValueError, "samples"),
        (lambda: Newton(atol="1e-3"), ValueError, "atol"),
        (lambda: Newton(atol=float("inf")), ValueError, "atol"),
        (lambda: Newton(atol=0.0, rtol=0.0), ValueError, "not both 0"),
        (lambda: Newton(max_iterations=2.5), ValueError, "max_iterations"),
        (lambda: Newton(shrink="a"), ValueError, "shrink"),
        (lambda: deeppcr.Hierarchical(chunk=2.5), ValueError, "chunk"),
        (lambda: deeppcr.rowwise(5), TypeError, "step: expected a callable"),
        (
            lambda: deeppcr.linear.solve(deeppcr.linear.Scalar(torch.ones(3)), torch.ones(3, 1), solver=deeppcr.PCR),
            TypeError,
            "solver: expected Auto",
        ),
        (
            lambda: deeppcr.check(torch.sin, ONES, length=3, jacobian=deeppcr.DiagonalJacobian),
            TypeError,
            "jacobian: expected an instance",
        ),
        (lambda: deeppcr.check(torch.sin, ONES, length=3, steps=0), ValueError, "steps"),
        (
            lambda: solve(lambda s: {"a": s["b"], "c": s["a"]}, {"a": ONES, "b": ONES}, length=3),
            StepError,
            r"expected \{'a': float32.*, 'b': float32.*\}, got \{'a': float32.*, 'c': ",
        ),
        (
            lambda: solve(lambda s: [s[0], s[1]], (ONES, ONES), length=3),
            StepError,
            r"expected \(float.*\), got \[float",
        ),
    ],
)
def test_mistakes_of_newcomers_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_settings_compare_hash_and_print(device):
    assert Newton(chunk=3) == Newton(chunk=3) != Newton(chunk=4)
    values = torch.ones(5)
    assert Newton(jacobian=deeppcr.ScalarJacobian(values)) != Newton(jacobian=deeppcr.ScalarJacobian(values))
    assert len({Newton(), Newton(chunk=2)}) == 2
    assert repr(deeppcr.Result.FINISHED_BY_LOOP) == "Result.FINISHED_BY_LOOP"
    import numpy as np

    assert solve(torch.sin, ONES, length=np.int64(5)).states.shape[0] == 5


def test_another_default_device_changes_nothing():
    with torch.device("meta"):
        noisy = solve(
            torch.sin, ONES, length=20, guess=deeppcr.Random(), solver=Newton(jacobian=deeppcr.DiagonalJacobian())
        )
    assert noisy.result is deeppcr.Result.CONVERGED


@pytest.mark.parametrize("solver", [None, Newton(), Loop()])
def test_xs_that_lie_batch_first(solver):
    with pytest.raises(RuntimeError) as raised:
        solve(lambda z, x: torch.tanh(z) + x, torch.ones(4, 3), torch.ones(4, 50, 3), solver=solver)
    assert "if xs is [4, 50, 3] = [batch, steps, ...], hand over xs.transpose(0, 1)" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError) as raised:
        solve(lambda z, x: z + x, torch.ones(4, 3), torch.ones(50, 4, 2), solver=solver)
    assert "transpose" not in "".join(getattr(raised.value, "__notes__", []))


@pytest.mark.parametrize("solver", [None, Newton(), Loop()])
def test_a_batch_without_rows(solver):
    z0, xs = torch.ones(0, 3, requires_grad=True), torch.ones(5, 0, 3)
    found = solve(lambda z, x: z + x, z0, xs, solver=solver)
    assert found.states.shape == (5, 0, 3)
    assert found.final.shape == (0, 3)
    assert found.iterations.shape == found.known_steps.shape == (0,)
    assert "no row" in repr(found)
    found.states.sum().backward()
    assert z0.grad.shape == (0, 3)
    assert solve(lambda z: z, (z0, z0[:, 0]), length=4, batch_dims=1, keep="last").states[1].shape == (1, 0)
    assert solve(lambda z, x: z + x, z0, xs, lengths=torch.zeros(0, dtype=torch.long)).states.shape == (5, 0, 3)
    with pytest.raises(ValueError, match="z0: is empty"):  # a state of no numbers is something else
        solve(lambda z: z, torch.ones(3, 0), length=4, solver=solver)


def test_a_scan_inside_a_transform_is_refused_in_our_words():
    with pytest.raises(RuntimeError, match=r"deeppcr\.scan cannot run inside a torch\.func transform"):
        torch.vmap(lambda z: deeppcr.scan(lambda c, x: (c + x, c), z, torch.ones(5, 3))[0])(torch.ones(2, 3))


def test_lengths_as_a_list():
    xs = torch.ones(5, 2, 1)
    found = solve(lambda z, x: z + x, torch.zeros(2, 1), xs, lengths=[2, 5])
    assert found.final.flatten().tolist() == [2.0, 5.0]
    for wrong in ([2.0, 5.0], [True, False], "25"):
        with pytest.raises(TypeError, match="lengths: expected a tensor of integers, or a list of them"):
            solve(lambda z, x: z + x, torch.zeros(2, 1), xs, lengths=wrong)


def test_steps_of_a_scan_backwards_are_told_in_the_numbers_of_the_caller():
    xs = torch.ones(40, 2)
    xs[6] = torch.inf
    with pytest.warns(
        deeppcr.ConvergenceWarning, match=r"step 7 produced .*; xs\[0\] holds an infinity there.* from its last step"
    ):
        deeppcr.scan(lambda z, x: (0.5 * z + x, z), torch.zeros(2), xs, reverse=True, solver=Newton())


@pytest.mark.parametrize("solver", [None, Newton(), deeppcr.Loop()], ids=str)
class TestWhatDoesNotFitIsTold:
    """Beside what the step itself raises."""

    @staticmethod
    def notes(error, *arguments, **options):
        with pytest.raises(error) as raised:
            deeppcr.solve(*arguments, **options)
        return "".join(raised.value.__notes__)

    def test_a_step_that_takes_no_input(self, solver):
        notes = self.notes(TypeError, lambda z: 0.5 * z, torch.ones(2, 3), torch.ones(20, 2, 3), solver=solver)
        assert "since xs is given a step is called as step(z, x)" in notes

    def test_a_step_that_takes_one_where_there_is_none(self, solver):
        notes = self.notes(TypeError, lambda z, x: 0.5 * z, torch.ones(2, 3), length=20, solver=solver)
        assert "without xs a step is called as step(z)" in notes

    def test_inputs_of_another_batch(self, solver):
        notes = self.notes(
            RuntimeError, lambda z, x: 0.5 * z + x, torch.ones(2, 3), torch.ones(20, 4, 3), solver=solver
        )
        assert (
            "xs has 4 rows where z0 has 2: [20, 4, 3], of which a step sees [4, 3], beside a state of [2, 3]" in notes
        )


def test_a_generator_of_its_own_in_the_step():
    """Refused as PyTorch's own is by Newton's method. A loop may draw: of a generator that nobody knows of it is not seen."""
    generator = torch.Generator()
    step = lambda z, x: 0.5 * z + x + 0.01 * torch.randn(z.shape, generator=generator)  # noqa: E731
    with pytest.raises(StepError, match="draws random numbers"):
        deeppcr.solve(step, torch.ones(2, 3), torch.ones(200, 2, 3), solver=Newton())


@pytest.mark.parametrize("solver", [None, Newton(), Newton(chunk=4), deeppcr.Jacobi(), deeppcr.Loop()], ids=str)
@pytest.mark.parametrize("kind", [ValueError, IndexError, TypeError, RuntimeError, NameError])
def test_what_a_step_raises_by_itself_comes_through_as_it_is(kind, solver):
    """Also where it does so late, and steps are evaluated at once, by a transform that has complaints of its own."""

    def step(z, x):
        if float(x.sum()) > 3:
            raise kind("my own complaint")
        return 0.5 * torch.tanh(z) + x

    xs = torch.zeros(50, 2, 3)
    xs[30] = 1.0
    with pytest.raises(kind) as caught:
        deeppcr.solve(step, torch.zeros(2, 3), xs, solver=solver)
    assert type(caught.value) is kind
    assert str(caught.value) == "my own complaint"
    assert caught.traceback[-1].name == "step"
