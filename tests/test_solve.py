"""The public call equals the plain loop: without it where the sequence contracts, with it where nothing else is right."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
from compiling import compiled_and_counted
from deeppcr import Newton, Result
from deeppcr.runtime import as_written
from deeppcr.ways.plan import Record
from kernel_support import pairwise, thorough
from problems import CHAOTIC, CONTRACTING, MARGINAL, Generator, plain_loop, relative_error

DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("length", [1, 2, 65, *thorough(3, 63, 64, 1000)])
@pairwise(name=CONTRACTING.keys(), dtype=DTYPES, chunk=[1, 16], rows=[1, 7])
def test_contracting_sequences_equal_the_loop_without_it(name, dtype, chunk, rows, length, device):
    problem = CONTRACTING[name](Generator(0, dtype, device), length, rows)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", deeppcr.ConvergenceWarning)
        solution = problem.solve(solver=Newton(chunk=chunk))
        assert solution.result is Result.CONVERGED
        assert relative_error(solution.states, problem.loop()) <= 10 * TOLERANCE[dtype]
    assert solution.iterations.shape == solution.residual.shape == (rows,)
    assert solution.residual.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTRACTING)
def test_default_settings_do_not_fall_back_on_contracting_sequences(name, dtype, device):
    problem = CONTRACTING[name](Generator(1, dtype, device), 500, 3)
    with torch.no_grad():
        solution = problem.solve()
        assert solution.result is Result.CONVERGED
        assert relative_error(solution.states, problem.loop()) <= 10 * TOLERANCE[dtype]


def recurrence_holds(problem, solution, dtype) -> bool:
    """Every step of the states satisfies the loop's equation within the tolerance."""
    states = solution.states
    previous = torch.cat([problem.z0.unsqueeze(0), states[:-1]])
    stepped = torch.vmap(problem.step)(previous, *([problem.xs] if problem.xs is not None else []))
    return bool(((stepped - states).abs().amax(-1) <= TOLERANCE[dtype] * (1 + states.abs().amax(-1))).all())


# Each in one precision here and in the other below; rounding is met by the slow recurrence.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in MARGINAL),
        ("slow recurrence", torch.float32),
        *thorough(*((name, torch.float32) for name in MARGINAL if name != "slow recurrence")),
    ],
)
@pytest.mark.parametrize("length", [400, pytest.param(1000, marks=pytest.mark.thorough)])
def test_marginal_sequences_converge_in_chunks_of_16(name, dtype, length, device):
    problem = MARGINAL[name](Generator(0, dtype, device), length, 3)
    with torch.no_grad():
        solution = problem.solve(solver=Newton(chunk=16, max_iterations=100), on_failure="raise")
        # A trajectory that amplifies rounding a thousandfold cannot be known better than that in float32.
        assert solution.result in (
            (Result.CONVERGED, Result.PRECISION_FLOOR) if dtype is torch.float32 else (Result.CONVERGED,)
        )
        assert recurrence_holds(problem, solution, dtype)
        sensitivity = 1 if name != "slow recurrence" else 100
        assert relative_error(solution.states, problem.loop()) <= 10 * sensitivity * TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float32, *thorough(torch.float64)])
@pytest.mark.parametrize("name", MARGINAL)
@pytest.mark.parametrize("length", [400, pytest.param(1000, marks=pytest.mark.thorough)])
def test_marginal_sequences_are_right_with_default_settings(name, dtype, length, device):
    problem = MARGINAL[name](Generator(0, dtype, device), length, 3)
    with torch.no_grad():
        solution = problem.solve()
        assert recurrence_holds(problem, solution, dtype)
        sensitivity = 1 if name != "slow recurrence" else 100
        assert relative_error(solution.states, problem.loop()) <= 10 * sensitivity * TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize(
    ("name", "length", "dtype", "chunk"),
    [
        ("logistic", 2000, torch.float32, "auto"),
        ("lorenz", 500, torch.float64, "auto"),
        *(
            pytest.param(name, 5000, dtype, chunk, marks=pytest.mark.thorough)
            for name in CHAOTIC
            for dtype in DTYPES
            for chunk in ("auto", 1)
        ),
    ],
)
def test_chaotic_sequences_hold_or_were_finished_by_the_loop_and_say_so(name, length, dtype, chunk, device):
    problem = CHAOTIC[name](Generator(0, dtype, device), length, 2)
    with torch.no_grad():
        solution = problem.solve(solver=Newton(chunk=chunk))
        assert recurrence_holds(problem, solution, dtype)
    assert solution.result is Result.FINISHED_BY_LOOP
    assert all(0 < int(exact) < length for exact in solution.exact_steps)
    assert "one step at a time" in solution.message
    assert any("gave up" in note for note in solution.plan.notes)
    assert solution.iterations.max() <= 15


def test_the_exact_part_of_a_chaotic_sequence_is_the_loops_own(device):
    problem = CHAOTIC["logistic"](Generator(3, torch.float64, device), 400, 2)
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = problem.solve(solver=Newton(chunk=1, max_iterations=20), on_failure="return")
    states, loop = solution.states, problem.loop()
    assert solution.result is Result.NOT_CONVERGED
    for row in range(2):
        exact = int(solution.exact_steps[row])
        assert exact >= int(solution.iterations[row]) >= 5  # at least one more for every iteration
        assert torch.allclose(states[:exact, row], loop[:exact, row], atol=1e-9)


def test_all_ways_to_fail(device):
    problem = CHAOTIC["logistic"](Generator(3, torch.float64, device), 400, 2)
    one_by_one = Newton(
        chunk=1
    )  # in kernels' few chunks, of which each pass makes another one exact, it would get there
    with pytest.raises(deeppcr.ConvergenceError, match=r"up to step \d+ exact"):
        problem.solve(solver=one_by_one, on_failure="raise")
    with pytest.warns(deeppcr.ConvergenceWarning, match="one step at a time") as caught:
        solution = problem.solve(solver=one_by_one)
    assert caught[0].filename == __file__.replace("test_solve", "problems")  # the caller's line, not the library's
    assert relative_error(solution.states, problem.loop()) < 1e-12
    problem.z0.requires_grad_()
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = problem.solve(solver=one_by_one, on_failure="return")
    with pytest.raises(RuntimeError, match="did not converge"):
        solution.states.sum().backward()
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = problem.solve(on_failure="return", gradient=deeppcr.Unrolled(), solver=Newton(max_iterations=2))
    with pytest.raises(RuntimeError, match="did not converge"):
        solution.states.sum().backward()


@pytest.mark.parametrize("gradient", [deeppcr.Implicit(), deeppcr.Unrolled()])
def test_a_gradient_that_is_asked_for_by_name_is_refused_too(gradient, device):
    """A backward pass visits only what lies on the way to what it is asked for: a regulariser alone must not be the answer."""
    z0 = torch.full((1, 1), 0.3, device=device, requires_grad=True)
    rate = torch.tensor(4.0, device=device, requires_grad=True)
    shift = torch.zeros(300, 1, device=device, requires_grad=True)
    step = lambda z, x: rate * z * (1 - z) + x  # noqa: E731
    with pytest.warns(deeppcr.ConvergenceWarning):
        states = deeppcr.solve(step, z0, shift, on_failure="return", gradient=gradient, solver=Newton()).states
    for leaf in (z0, rate, shift):
        loss = states.sum() + 0.1 * (leaf**2).sum()
        with pytest.raises(RuntimeError, match="did not converge"):
            torch.autograd.grad(loss, leaf, retain_graph=True)
        (known,) = torch.autograd.grad(0 * states.sum() + (leaf**2).sum(), leaf, retain_graph=True)
        assert torch.allclose(known, 2 * leaf)  # of states that the loss leaves out
    with pytest.warns(deeppcr.ConvergenceWarning):
        frozen = deeppcr.solve(
            lambda z: 4 * z * (1 - z), z0.detach(), length=300, on_failure="return", gradient=gradient, solver=Newton()
        )
    assert not frozen.states.requires_grad


def test_loop_is_a_solver_as_well(device):
    problem = CONTRACTING["lstm"](Generator(0, torch.float64, device), 20, 3)
    problem.z0[0].requires_grad_()
    solution = problem.solve(solver=deeppcr.Loop())
    assert solution.result is Result.LOOP
    assert relative_error(solution.states, problem.loop()) == 0
    (gradient,) = torch.autograd.grad(solution.states[0].sum(), problem.z0[0])
    (expected,) = torch.autograd.grad(problem.loop()[0].sum(), problem.z0[0])
    assert torch.equal(gradient, expected)
    assert solution.iterations.tolist() == [0, 0, 0]
    assert "Solution(LOOP" in repr(solution)


def test_half_precision_states(device):
    for dtype in (torch.bfloat16, torch.float16):
        problem = CONTRACTING["mlp tanh"](Generator(0, dtype, device), 200, 3)
        with torch.no_grad():
            solution = problem.solve(on_failure="raise")
            assert solution.states.dtype == dtype
            assert relative_error(solution.states.float(), problem.loop().float()) < 0.1


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_batch_dims_say_what_is_a_row(batch_dims, device):
    make = Generator(0, torch.float64, device)
    weight = make.normal(4, 4) / 4
    problem_z0, xs = make.normal(3, 5, 4), make.normal(50, 3, 5, 4)
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
    solution = deeppcr.solve(step, problem_z0, xs, batch_dims=batch_dims, solver=Newton())
    assert solution.iterations.shape == problem_z0.shape[:batch_dims]
    assert solution.states.shape == (50, 3, 5, 4)
    assert relative_error(solution.states, plain_loop(step, problem_z0, xs)) < 1e-9


def test_the_plan_says_what_was_chosen(device):
    solution = CONTRACTING["mlp relu"](Generator(0, torch.float64, device), 200, 2).solve()
    text = str(solution.plan)
    assert "evaluation: vmap" in text
    assert "derivative: forward" in text
    assert f"chunk: {solution.plan.chunk}" in text
    assert "PCR" in text or "Hierarchical" in text


def test_solving_compiled_steps_and_compiled_callers(device):
    problem = CONTRACTING["mlp tanh"](Generator(0, torch.float64, device), 60, 2)
    loop = problem.loop()
    compiled_step = torch.compile(problem.step, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(deeppcr.solve(compiled_step, problem.z0, problem.xs, solver=Newton()).states, loop) < 1e-9
    caller = torch.compile(
        lambda z0, xs: deeppcr.solve(problem.step, z0, xs, solver=Newton()).states * 1.0, backend="aot_eager"
    )
    with torch.no_grad():
        assert relative_error(caller(problem.z0, problem.xs), loop) < 1e-9


@pytest.mark.parametrize("solver", [None, Newton(), deeppcr.Loop()], ids=["default", "Newton", "loop"])
def test_a_compiled_step_is_still_compiled_where_its_user_calls_it(solver, device):
    """PyTorch never compiles what it first met while somebody watched its operations, as ``solve`` does."""
    problem = CONTRACTING["mlp tanh"](Generator(0, torch.float64, device), 60, 2)
    step, graphs = compiled_and_counted(lambda z, x: problem.step(z, x))
    with torch.no_grad():
        deeppcr.solve(step, problem.z0, problem.xs, solver=solver)
        graphs.clear()
        step(problem.z0.repeat(3, 1), pytree.tree_map(lambda each: each[0], problem.xs))
    assert graphs


def test_kernels_are_made_of_a_compiled_step(device):
    step = torch.compile(lambda z, x: torch.tanh(0.5 * z) + x, backend="eager")
    assert "tanh" in deeppcr.fuse.source(step, torch.zeros(3, 4, device=device), torch.ones(50, 3, 4, device=device))


def stance_elsewhere():
    """The compiler's setting, as another thread sees it."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: torch._dynamo.eval_frame._stance.stance).result()


def test_the_compiler_is_told_by_thread():
    import torch._dynamo  # what was never imported compiles nothing

    with as_written(), as_written():
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        assert stance_elsewhere() == "default"
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_what_the_compiler_is_told_while_another_thread_solves_is_kept():
    import torch._dynamo

    solving, told = as_written(), torch.compiler.set_stance
    solving.__enter__()
    with ThreadPoolExecutor(1) as threads:
        setting = threads.submit(told, "eager_on_recompile").result()
        solving.__exit__(None, None, None)
        assert torch._dynamo.eval_frame._stance.stance == stance_elsewhere() == "eager_on_recompile"
        with as_written():
            assert stance_elsewhere() == "eager_on_recompile"
        threads.submit(setting.__exit__, None, None, None).result()  # after the solve: to what it found
    assert torch._dynamo.eval_frame._stance.stance == stance_elsewhere() == "default"


def test_what_the_compiler_was_told_before_is_kept():
    with torch.compiler.set_stance("eager_on_recompile"):
        with as_written():
            assert stance_elsewhere() == "eager_on_recompile"
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    with as_written():
        assert stance_elsewhere() == "default"


def test_a_trace_is_refused():
    """It would keep what was found as constants."""
    step = lambda z: torch.sin(z)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda z: deeppcr.solve(step, z, length=20).states, (torch.ones(2),))


@pytest.mark.parametrize(
    "step", [lambda z, x: torch.tanh(z) + x["a"], lambda z, x: torch.tanh(z) * x["a"].sum().item() ** 0 + x["a"]]
)
def test_gradients_through_xs_take_time_in_proportion_to_the_length(step):
    """The gradient of one entry of xs is a tensor as large as all of them: those are not to be made for every step."""

    class Count(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.entries += func is torch.ops.aten.select_backward.default
            return func(*args, **(kwargs or {}))

    xs, z0 = torch.randn(50, 2, 3, requires_grad=True), torch.zeros(2, 3)
    states = deeppcr.solve(step, z0, {"a": xs}, solver=deeppcr.Loop()).states
    with Count() as count:
        (found,) = torch.autograd.grad(states.square().sum(), xs)
    assert count.entries <= 1  # the first step is taken by itself
    (expected,) = torch.autograd.grad(plain_loop(lambda z, x: step(z, {"a": x}), z0, xs).square().sum(), xs)
    assert torch.allclose(found, expected)


def test_a_step_with_branches_of_pytorch():
    """Whether it draws from a generator of its own cannot be watched."""

    def step(z, x):
        return torch.cond(x.sum() > 0, lambda z, x: 0.5 * z + x, lambda z, x: x - 0.5 * z, (z, x))

    z0, xs = torch.zeros(2, 3), torch.randn(6, 2, 3)
    with torch.no_grad():
        found = deeppcr.solve(step, z0, xs).states
        assert torch.equal(found, deeppcr.solve(step, z0, xs, solver=deeppcr.Loop()).states)


def test_a_failure_to_converge_is_not_explained_by_shapes():
    with pytest.raises(deeppcr.ConvergenceError) as caught:
        deeppcr.solve(
            lambda z, matrix: torch.tanh(3 * z @ matrix), torch.randn(4, 3), torch.randn(60, 3, 3),
            solver=deeppcr.Newton(max_iterations=1), on_failure="raise",
        )  # fmt: skip
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("file", ["project.py", "torchrl/trainer.py", "deeppcr_models/train.py"])
def test_a_warning_stands_at_the_line_of_the_user(file):
    """Also where the user's folder begins like that of a library."""
    folder = Path((torch if "torch" in file else deeppcr).__file__).parent.parent
    names = {"deeppcr": deeppcr}
    source = "def go(z0, xs):\n    return deeppcr.solve(lambda z, x: z * z * 1e20 + x, z0, xs)\n"
    exec(compile(source, str(folder / file), "exec"), names)
    with pytest.warns(deeppcr.ConvergenceWarning) as caught:
        names["go"](torch.ones(2, 3), torch.ones(30, 2, 3))
    assert (caught[0].filename, caught[0].lineno) == (str(folder / file), 2)


def test_a_step_that_rounds_otherwise_beside_others_is_left_to_the_loop_by_default(monkeypatch):
    """Nobody asked for all steps at once."""
    monkeypatch.setattr(Record, "choose", lambda record: ("newton", "is tried"))
    torch.manual_seed(0)
    layer, z0, xs = torch.nn.Linear(16, 16), torch.randn(3, 16), torch.randn(50, 3, 16)

    def step(z, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(z)
        return torch.tanh(y.float() + x)

    with torch.no_grad():
        loop = deeppcr.solve(step, z0, xs, solver=deeppcr.Loop())
        found = deeppcr.solve(step, z0, xs)
    assert found.result is Result.LOOP
    assert torch.equal(found.states, loop.states)


@pytest.mark.parametrize("solver", [None, Newton(), deeppcr.Loop()])
def test_gradients_of_no_rows_are_zeros(solver, device):
    """As the loop's: an empty batch is to leave no parameter without a gradient."""
    layer, xs = torch.nn.Linear(4, 4, device=device), torch.zeros(5, 0, 4, device=device, requires_grad=True)
    states = deeppcr.solve(
        lambda z, x: torch.tanh(layer(z)) + x, torch.zeros(0, 4, device=device), xs, solver=solver
    ).states
    assert states.shape == (5, 0, 4)
    states.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (xs, *layer.parameters()))


def test_of_no_rows_nothing_is_asked_that_has_no_numbers_yet_or_lies_apart(device):
    z0, xs = torch.zeros(0, 3, device=device), torch.zeros(5, 0, device=device)
    lazy, apart = torch.nn.LazyLinear(3, device=device), torch.nn.Parameter(torch.eye(3, device=device).to_sparse())
    for step in (lambda z, x: lazy(z), lambda z, x: (apart @ z.mT).mT):
        assert deeppcr.solve(step, z0, xs).states.shape == (5, 0, 3)


def test_of_no_rows_no_step_is_taken(device):
    """Not one that finds the largest of no numbers; and what it would return is not looked at."""
    z0, xs = torch.zeros(0, 4, device=device), torch.zeros(9, 0, 4, device=device)
    scale = torch.full((3,), torch.nan, dtype=torch.float64, device=device, requires_grad=True)
    given = {"a": z0, "b": z0.to(torch.complex64)}
    found = deeppcr.solve(lambda z, x: [z["a"] / x.max() * scale], given, xs)
    assert [(name, leaf.shape, leaf.dtype) for name, leaf in found.states.items()] == [
        ("a", (9, 0, 4), torch.float32),
        ("b", (9, 0, 4), torch.complex64),
    ]
    (found.states["a"].sum() + found.states["b"].real.sum()).backward()
    assert scale.grad is not None
    assert not scale.grad.any()
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=torch.float64, device=device) for _ in range(3))
    deeppcr.solve(layers, z0.double()).states.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in layers.parameters())


def test_a_length_that_a_tensor_holds_is_that_length(device):
    """Also in how a solve goes: by default as the loop, which is not to be looked for in the length's type."""
    lengths = (20, torch.tensor(20), torch.tensor(20, device=device))
    found = [deeppcr.solve(torch.cos, torch.ones(3, device=device), length=length) for length in lengths]
    assert {each.result for each in found} == {found[0].result}
    assert all(torch.equal(each.states, found[0].states) for each in found)
