"""All steps at once: by vmap, folded into rows, stacked from a list, or one by one; each like the loop."""

import warnings
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

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


class Block(nn.Module):
    def __init__(self, width, slope=0.1):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.slope = slope
        self.register_buffer("shift", torch.randn(width))

    def forward(self, z):
        return nn.functional.leaky_relu(self.linear(z), self.slope) + 0.1 * self.shift


def check_list(layers, z0, said, xs=None):
    with torch.no_grad():
        loop = plain_loop_over(layers, z0, xs)
    solution = deeppcr.solve(layers, z0, xs, solver=Newton())
    assert relative_error(solution.states, loop) < 1e-9
    assert any(said in note for note in solution.plan.notes)
    return solution


def plain_loop_over(layers, z, xs=None):
    states = []
    for index, layer in enumerate(layers):
        z = layer(z) if xs is None else layer(z, xs[index])
        states.append(z)
    return torch.stack(states)


def test_modules_of_equal_structure_are_stacked(device):
    layers = nn.ModuleList(Block(4) for _ in range(20)).double().to(device)
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    solution = check_list(layers, z0, "20 stacked in 1 groups")
    loss = solution.states.square().sum()
    ours = torch.autograd.grad(loss, list(layers.parameters()))
    loops = torch.autograd.grad(plain_loop_over(layers, z0).square().sum(), list(layers.parameters()))
    for a, b in zip(ours, loops, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


def test_modules_that_differ_in_any_attribute_are_not(device):
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    mixed = [Block(4, slope=0.1 if i % 2 else 0.3).double().to(device) for i in range(10)]
    mixed.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().to(device))
    hooked = Block(4).double().to(device)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    mixed += [hooked, torch.sin, torch.sin, lambda z: 0.5 * z]
    solution = check_list(mixed, z0, "12 stacked in 3 groups, 3 called one by one")
    assert solution.plan.evaluation == "loop, vmap"
    parameters = [p for layer in mixed if isinstance(layer, nn.Module) for p in layer.parameters()]
    ours = torch.autograd.grad(solution.states.sum(), parameters)
    loops = torch.autograd.grad(plain_loop_over(mixed, z0).sum(), parameters)
    for a, b in zip(ours, loops, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_training_mode_shapes_and_extra_tensors_tell_modules_apart():
    from deeppcr.sequence.stack import _same_structure

    base = Block(4)
    assert _same_structure(base, Block(4))
    assert not _same_structure(base, Block(5))
    assert not _same_structure(base, Block(4).eval())
    assert not _same_structure(base, torch.sin)
    assert not _same_structure(nn.Tanh(), nn.Tanh())  # nothing to stack
    extra = Block(4)
    extra.table = torch.ones(3)
    other = Block(4)
    other.table = torch.ones(3)
    assert not _same_structure(extra, other)  # a tensor that is no buffer: not compared
    assert not _same_structure(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert not _same_structure(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for value, twin, different in (
        ([1, (2, 3)], [1, (2, 3)], [1, (2, 4)]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        (1, 1, 1.0),
    ):
        one, two, three = Block(4), Block(4), Block(4)
        one.setting, two.setting, three.setting = value, twin, different
        assert _same_structure(one, two)
        assert not _same_structure(one, three)


def test_a_list_with_inputs_for_every_step(device):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, z, x):
            return torch.tanh(self.linear(z)) + x

    make = Generator(0, torch.float64, device)
    layers = [Gated().double().to(device) for _ in range(12)]
    xs = make.normal(12, 4)
    check_list(layers, make.normal(3, 4), "12 stacked", xs)
    check_list([*layers[:11], lambda z, x: torch.sin(z) + x], make.normal(3, 4), "1 called one by one", xs)
    check_list([lambda z, x: torch.sin(z) + x] * 12, make.normal(3, 4), "12 stacked", xs)


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


def test_what_nothing_requires_a_gradient_of_has_none_and_what_a_later_callable_closes_over_has(device):
    z0 = torch.ones(2, 3, device=device)
    for steps in (
        [lambda z, k=k: torch.tanh(z) * k for k in (0.5, 0.6, 0.7)],
        [partial(torch.mul, torch.full((3,), k, device=device)) for k in (0.5, 0.6, 0.7)],
    ):
        assert not deeppcr.solve(steps, z0, solver=Newton()).states.requires_grad
    weight = torch.full((3,), 0.5, device=device, requires_grad=True)
    steps = [torch.tanh, lambda z: z * weight, torch.sin]
    (ours,) = torch.autograd.grad(deeppcr.solve(steps, z0, solver=Newton()).states.sum(), weight)
    (loops,) = torch.autograd.grad(plain_loop_over(steps, z0).sum(), weight)
    assert torch.allclose(ours, loops, rtol=1e-4)


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


def test_threads_that_share_one_model(device):
    import sys
    from concurrent.futures import ThreadPoolExecutor

    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)).double().to(device)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with torch.no_grad(), ThreadPoolExecutor(4) as pool:
            inputs = [torch.randn(2, 4, dtype=torch.float64, device=device) for _ in range(16)]
            solutions = list(pool.map(lambda z0: deeppcr.solve(layers, z0, solver=Newton()), inputs))
    finally:
        sys.setswitchinterval(before)
    for z0, solution in zip(inputs, solutions, strict=True):
        assert relative_error(solution.states, plain_loop_over(layers, z0)) < 1e-9
    assert all(isinstance(p, nn.Parameter) for layer in layers for p in layer.parameters())


def test_backward_hooks_keep_a_module_out_of_the_stack(device):
    layers = [nn.Linear(4, 4).double().to(device) for _ in range(6)]
    layers[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(0 * g for g in inputs))
    with torch.no_grad():  # where they do no harm
        solution = deeppcr.solve(layers, torch.randn(2, 4, dtype=torch.float64, device=device), solver=Newton())
    assert any("1 called one by one" in note for note in solution.plan.notes)


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
