"""All steps at once: by vmap, folded into rows, or one by one; each like the loop."""

import warnings
from functools import partial
from itertools import count

import pytest
import torch

import deeppcr
from deeppcr import Newton, StepError
from deeppcr.sequence import Sequence
from problems import Generator, gru, plain_loop, relative_error


def no_vmap(z, x):
    """Control flow on values: torch.vmap cannot batch it, and forward mode can."""
    return torch.tanh(z) + x if float(x.sum()) > 0 else 0.5 * torch.sin(z) + x


class NoForwardMode(torch.autograd.Function):
    """Has no jvp, as many custom kernels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z):
        return z.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * (1 - output**2)


class NoTransforms(torch.autograd.Function):
    """Knows no functorch at all, as older custom kernels."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z.tanh())
        return z.tanh()

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * (1 - output**2)


@pytest.mark.parametrize(
    ("step", "evaluation", "derivative"),
    [
        (lambda z, x: torch.tanh(z) + x, "vmap", "forward"),
        (deeppcr.rowwise(lambda z, x: torch.tanh(z) + x), "rowwise", "forward"),
        (no_vmap, "loop", "forward"),
        (lambda z, x: NoForwardMode.apply(z) + x, "vmap", "reverse"),
        (deeppcr.rowwise(lambda z, x: NoForwardMode.apply(z) + x), "rowwise", "reverse"),
    ],
    ids=["vmap", "rowwise", "loop", "reverse", "rowwise reverse"],
)
@pytest.mark.parametrize("chunk", [1, 4])
def test_every_way_gives_the_loops_states_and_gradients(step, evaluation, derivative, chunk, device):
    make = Generator(0, torch.float64, device)
    z0, xs = make.normal(3, 4).requires_grad_(), 0.3 * make.normal(25, 3, 4)
    solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk), on_failure="raise")
    assert solution.plan.evaluation == evaluation
    assert solution.plan.derivative == derivative
    loop = plain_loop(step, z0, xs)
    assert relative_error(solution.states, loop) < 1e-9
    (ours,) = torch.autograd.grad(solution.states.square().sum(), z0)
    (loops,) = torch.autograd.grad(loop.square().sum(), z0)
    assert torch.allclose(ours, loops, rtol=1e-7)
    if evaluation == "loop":
        assert any("rowwise" in note for note in solution.plan.notes)


def test_a_step_that_no_transform_covers_says_so_and_approximations_still_work(device):
    make = Generator(0, torch.float64, device)
    step = lambda z, x: 0.4 * NoTransforms.apply(z) + x  # noqa: E731
    z0, xs = make.normal(3, 4), make.normal(25, 3, 4)
    with pytest.raises(StepError, match=r"cannot be differentiated.*need no derivative"):
        deeppcr.solve(step, z0, xs, solver=Newton())
    solution = deeppcr.solve(step, z0, xs, solver=deeppcr.Picard(), on_failure="raise")
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9


def test_folding_is_compared_with_real_steps(device):
    make = Generator(0, torch.float64, device)
    per_row = make.normal(2, 4)
    with pytest.raises(StepError, match="does not take another number of rows"):
        deeppcr.solve(deeppcr.rowwise(lambda z: torch.tanh(z + per_row)), make.normal(2, 4), length=6, solver=Newton())
    with pytest.raises(StepError, match="rows of a folded call differ"):
        deeppcr.solve(
            deeppcr.rowwise(lambda z, x: torch.tanh(z - z.mean(0) + x)),
            make.normal(2, 4),
            make.normal(6, 2, 4),
            solver=Newton(),
        )


def test_a_rowwise_step_that_gives_nan_is_not_blamed_for_its_rows(device):
    step = deeppcr.rowwise(lambda z, x: torch.where(x > 0, float("nan"), torch.tanh(z)))
    xs = torch.zeros(6, 2, 4, device=device)
    xs[:, 1] = 1
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        found = deeppcr.solve(step, torch.ones(2, 4, device=device), xs, solver=Newton())
    assert [result.name for result in found.results][1] == "NON_FINITE"
    assert found.states[:, 0].isfinite().all()


def test_rowwise_with_two_batch_dimensions(device):
    make = Generator(0, torch.float64, device)
    weight = make.normal(4, 4) / 4
    step = deeppcr.rowwise(lambda z, x: torch.tanh(z @ weight + x))
    z0, xs = make.normal(3, 2, 4), make.normal(30, 3, 2, 4)
    solution = deeppcr.solve(step, z0, xs, batch_dims=2, solver=Newton())
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9
    assert solution.iterations.shape == (3, 2)


def test_recurrent_cells_without_folding_still_work(device):
    problem = gru(Generator(0, torch.float64, device), 12, 2)
    unfolded = problem.step.step
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of PyTorch's, at every call, that say nothing of what to do
        solution = deeppcr.solve(unfolded, problem.z0, problem.xs, solver=Newton())
    assert relative_error(solution.states, problem.loop()) < 1e-9
    assert any("gru_cell" in note and "deeppcr.rowwise(step)" in note for note in solution.plan.notes)


def test_nests_of_states_and_inputs(device):
    make = Generator(0, torch.float64, device)

    def step(state, x):
        return {
            "a": torch.tanh(state["a"]) + x["u"][0],
            "b": [0.5 * state["b"][0] + state["a"].sum(-1, keepdim=True) * x["v"]],
        }

    z0 = {"a": make.normal(2, 3), "b": [make.normal(2, 1)]}
    xs = {"u": (make.normal(20, 3),), "v": make.normal(20)}
    solution = deeppcr.solve(step, z0, xs, solver=Newton())
    assert set(solution.states) == {"a", "b"}
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9


def one_in_another(wrap, unwrap):
    """A step on a pair, of which one tensor lies in a container of its own."""
    return lambda state, x: (torch.tanh(state[0] + unwrap(state[1]) + x), wrap(unwrap(state[1]) / 2 + state[0].sin()))


@pytest.mark.parametrize("solver", [None, Newton(), deeppcr.Loop()])
@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [(lambda t: (t,), lambda w: w[0]), (lambda t: [t], lambda w: w[0]), (lambda t: {"m": t}, lambda w: w["m"]), (lambda t: ((t,),), lambda w: w[0][0])],
)  # fmt: skip
def test_containers_of_one_tensor_in_others(wrap, unwrap, solver, device):
    make = Generator(0, torch.float64, device)
    step, z0, xs = one_in_another(wrap, unwrap), (make.normal(3, 4), wrap(make.normal(3, 4))), make.normal(20, 3, 4)
    for start, body in (
        (z0, step),
        ({"h": z0[0], "m": z0[1]}, lambda s, x: dict(zip(("h", "m"), step((s["h"], s["m"]), x), strict=True))),
    ):
        states = deeppcr.solve(body, start, xs, solver=solver).states
        assert relative_error(states, plain_loop(body, start, xs)) < 1e-9
        assert type(states) is type(start)
    latest = lambda states, x: wrap(torch.tanh(unwrap(states[0]) / 2 - unwrap(states[1]) / 3 + x))  # noqa: E731
    history, window = deeppcr.with_history(latest, 2), (z0[1], z0[1])
    states = deeppcr.solve(history, window, xs, solver=solver).states
    assert relative_error(states, plain_loop(history, window, xs)) < 1e-9


def test_nothing_is_no_state_of_several_containers():
    with pytest.raises(StepError, match="changes the state's structure"):
        deeppcr.solve(lambda z: (), ((torch.ones(2, 3),),), length=4, solver=deeppcr.Loop())


def test_scalar_states_without_dimensions(device):
    z0 = torch.tensor(0.5, dtype=torch.float64, device=device)
    solution = deeppcr.solve(torch.cos, z0, length=40, solver=Newton())
    assert solution.states.shape == (40,)
    assert solution.iterations.shape == ()
    assert relative_error(solution.states, plain_loop(torch.cos, z0, length=40)) < 1e-9


def test_inputs_that_are_not_contiguous_or_offset(device):
    make = Generator(0, torch.float64, device)
    xs = make.normal(4, 60).T[5:55]
    z0 = make.normal(4, 6).T[1:4]
    step = lambda z, x: torch.tanh(z + x)  # noqa: E731
    assert relative_error(deeppcr.solve(step, z0, xs, solver=Newton()).states, plain_loop(step, z0, xs)) < 1e-9


def test_two_threads_at_once(device):
    from concurrent.futures import ThreadPoolExecutor

    problems = [gru(Generator(seed, torch.float64, device), 40, 2) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        solutions = list(pool.map(lambda problem: problem.solve(), problems))
    for problem, solution in zip(problems, solutions, strict=True):
        assert relative_error(solution.states, problem.loop()) < 1e-9


def test_a_step_index_outside_every_group_is_an_error(device):
    sequence = Sequence([torch.sin, torch.cos], torch.ones(2, device=device))
    with pytest.raises(IndexError):
        sequence.step(2, torch.ones(1, 2, device=device))


def test_unbatched_states_taken_apart_into_numbers(device):
    """The natural way to write an ODE: forward mode promotes the tangents of tensors without dimensions."""
    step = lambda z: torch.stack([0.9 * z[0] - 0.1 * z[1], 0.1 * z[0]])  # noqa: E731
    z0 = torch.ones(2, device=device, requires_grad=True)
    solution = deeppcr.solve(step, z0, length=100, solver=Newton())
    assert solution.states.dtype == torch.float32
    assert relative_error(solution.states, plain_loop(step, z0, length=100)) < 1e-4
    solution.states[-1].sum().backward()
    for jacobian in (deeppcr.HutchinsonJacobian(), deeppcr.ScalarJacobian(0.5)):
        deeppcr.solve(step, z0, length=100, solver=Newton(jacobian=jacobian)).states.sum().backward()
    number = torch.tensor(1.0, device=device)
    assert deeppcr.solve(lambda z: 0.5 * torch.cos(z), number, length=50, solver=Newton()).states.shape == (50,)


def test_in_place_steps_are_found_where_packing_copies(device):
    strided = torch.full((2, 2, 3), 10.0, device=device).transpose(1, 2)
    with pytest.raises(StepError, match="in place"):
        deeppcr.solve(lambda z: z.mul_(0.5).add_(1), strided, length=5, solver=Newton())
    with pytest.raises(StepError, match="in place"):
        deeppcr.solve(
            lambda s: (s[0].mul_(0.5).add_(1), s[1]), (strided[:, 0], strided[:, 1]), length=5, solver=Newton()
        )


@pytest.mark.parametrize(
    "step", [lambda z, x: 0.1 * torch.tanh(z) + x[:1], lambda z, x: 0.1 * torch.tanh(z[:1] + z) + x]
)
def test_folding_is_compared_with_other_steps_too(step, device):
    make = Generator(0, torch.float32, device)
    with pytest.raises(StepError, match="folded"):
        deeppcr.solve(deeppcr.rowwise(step), make.normal(3, 4), make.normal(50, 3, 4), solver=Newton())


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("driven", [slice(61, 90), slice(77, 78), slice(-1, None)])
@pytest.mark.parametrize("rows", [1, 3])
def test_folding_is_compared_where_inputs_hardly_ever_differ(driven, rows, device):
    """Were it not, all steps would see the input of the first, and the residual would be tiny. (Kernels fold nothing.)"""
    xs = torch.zeros(200, rows, 2, dtype=torch.float64, device=device)
    xs[driven] = 1
    step, z0 = lambda z, x: 0.5 * torch.tanh(z) + x[0], torch.zeros(rows, 2, dtype=torch.float64, device=device)
    with pytest.raises(StepError, match="folded call differ"):
        deeppcr.solve(deeppcr.rowwise(step), z0, xs, solver=Newton())
    assert deeppcr.check(deeppcr.rowwise(step), z0, xs)


def test_folding_is_compared_within_the_range_of_the_inputs(device):
    """Numbers that serve as indices: out of range, they would end a process on a GPU."""
    table, times = torch.linspace(0, 1, 50, device=device), torch.arange(50.0, device=device)
    asked = []

    def step(z, x):
        asked.append((float(x.min()), float(x.max())))
        return torch.tanh(z) / 2 + table[x.long()].unsqueeze(-1)

    z0, xs = torch.zeros(30, 2, device=device), times[:, None].expand(50, 30)
    solution = deeppcr.solve(deeppcr.rowwise(step), z0, xs, solver=deeppcr.Jacobi())
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-4
    assert min(low for low, _ in asked) == 0
    assert max(high for _, high in asked) == 49


@pytest.mark.parametrize("step", [lambda x: x[:1], lambda x: x[-1:]], ids=["first", "last"])
@pytest.mark.parametrize("rows", [1, 3])
def test_folding_is_compared_where_whole_numbers_hardly_ever_differ(step, rows, device):
    table = torch.randn(5, 4, dtype=torch.float64, device=device)
    tokens = torch.zeros(200, rows, dtype=torch.long, device=device)
    tokens[77] = 2
    z0 = torch.zeros(rows, 4, dtype=torch.float64, device=device)
    with pytest.raises(StepError, match="folded call differ"):
        deeppcr.solve(deeppcr.rowwise(lambda z, x: 0.5 * torch.tanh(z) + table[step(x)]), z0, tokens, solver=Newton())


def test_check_compares_every_step_of_a_folded_call(device):
    """Rows that one value couples: nothing that a solve looks at brings it to light."""
    tokens = torch.arange(600, device=device).view(200, 3) % 5
    tokens[77] = 7
    step = deeppcr.rowwise(lambda z, x: 0.5 * torch.tanh(z) + torch.where(x == 7, x.double().mean(), 0).unsqueeze(-1))
    (finding,) = deeppcr.check(step, torch.zeros(3, 2, dtype=torch.float64, device=device), tokens)
    assert finding.kind == "evaluation"
    assert "step 78 evaluated together with the others differs" in finding.message


def test_a_rowwise_step_that_takes_only_its_own_inputs_is_not_given_others(device):
    def step(z, x):
        if not torch.equal(x, x.round()):
            raise ValueError("whole numbers only")
        return torch.tanh(z) / 2 + x

    xs = torch.arange(20.0, device=device)[:, None, None].expand(20, 3, 2)
    z0 = torch.zeros(3, 2, device=device)
    solution = deeppcr.solve(deeppcr.rowwise(step), z0, xs, solver=Newton())
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-5
    xs = torch.zeros_like(xs)
    xs[-1] = 1  # the last step is real, and is compared all the same
    with pytest.raises(StepError, match="rows of a folded call differ"):
        deeppcr.solve(deeppcr.rowwise(lambda z, x: step(z, x[:1].expand(len(x), 2))), z0, xs, solver=Newton())


def test_what_nothing_requires_a_gradient_of_has_none(device):
    z0 = torch.ones(2, 3, device=device)
    for steps in (
        [lambda z, k=k: torch.tanh(z) * k for k in (0.5, 0.6, 0.7)],
        [partial(torch.mul, torch.full((3,), k, device=device)) for k in (0.5, 0.6, 0.7)],
    ):
        assert not deeppcr.solve(steps, z0, solver=Newton()).states.requires_grad


def test_dictionaries_whose_keys_come_back_in_another_order(device):
    step = lambda s: {"b": torch.tanh(s["a"]), "a": 0.5 * s["b"] + 1}  # noqa: E731
    state = {"a": torch.ones(2, 3, device=device), "b": torch.zeros(2, 3, device=device)}
    solution = deeppcr.solve(step, state, length=30, solver=Newton())
    for _ in range(30):
        state = step(state)
    assert all(torch.allclose(solution.states[name][-1], state[name], atol=1e-4) for name in "ab")


def test_a_step_with_a_state_of_its_own_is_found_after_the_loop(device):
    calls = count(1)  # how far it is, nobody sees

    def counts(z):
        return torch.tanh(z) / 2 + next(calls)

    with pytest.raises(StepError, match="keeps a state of its own"):
        deeppcr.solve(counts, torch.ones(2, 3, device=device), length=50, solver=Newton())


def test_inference_tensors(device):
    weight = torch.randn(3, 3, device=device) / 3
    with torch.inference_mode():
        z0, xs = torch.ones(2, 3, device=device), torch.randn(50, 2, 3, device=device)
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        assert relative_error(deeppcr.solve(step, z0, xs, solver=Newton()).states, plain_loop(step, z0, xs)) < 1e-4
    with torch.no_grad():
        assert relative_error(deeppcr.solve(step, z0, xs, solver=Newton()).states, plain_loop(step, z0, xs)) < 1e-4


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_compared_on_states_of_the_loop_which_a_step_may_take_as_indices(rows):
    table, asked = torch.randn(11, 1), []

    def step(z, x):
        index = z[:, :1].round().long()
        asked.append(index)
        return torch.cat([z[:, :1], torch.tanh(z[:, 1:] + table[index.squeeze(1).clamp(0, 10)] + x)], 1)

    z0 = torch.tensor([[10.0, 0.3]]).repeat(rows, 1)
    Sequence(deeppcr.rowwise(step), z0, torch.rand(20, rows, 1))
    assert {int(i) for each in asked for i in each.flatten()} == {10}
