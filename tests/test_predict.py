"""What a solve is expected to take, and which way it would go."""

import math
import sys
import time

import pytest
import torch

import deeppcr
from deeppcr.sequence.evaluate import RandomStep
from deeppcr.sequence.trace import count_operations
from deeppcr.ways import plan


@pytest.fixture(autouse=True)
def nothing_is_known():
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()


@pytest.fixture
def unhurried(monkeypatch):
    """As many steps as there may be, also on a machine that is busy."""
    monkeypatch.setattr(sys.modules["deeppcr.predict"], "_MOST_SECONDS", 60.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [100, 1000])
def test_the_exponent_of_a_matrix_is_that_of_its_largest_eigenvalue(dtype, length, device):
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    for largest, errors in ((0.8, "errors die out"), (1.2, "errors grow")):
        eigenvalues = torch.tensor([largest, -0.5, 0.1], dtype=torch.float64)
        matrix = (basis * eigenvalues @ basis.T).to(device, dtype)
        found = deeppcr.predict(
            lambda z, m=matrix: z @ m.mT, torch.ones(2, 3, dtype=dtype, device=device), length=length
        )
        assert found.exponent == pytest.approx(math.log(largest), abs=1e-3)
        assert found.errors == errors
        assert found.probed == min(length, 256)


@pytest.mark.usefixtures("unhurried")
def test_the_exponent_is_that_of_the_states_on_the_way(device):
    """Of z(1 - z) times 4 it is the logarithm of 2; by inputs that differ from step to step, the mean."""
    chaotic = deeppcr.predict(
        lambda z: 4 * z * (1 - z), torch.rand(50, 1, dtype=torch.float64, device=device), length=300
    )
    assert chaotic.exponent == pytest.approx(math.log(2), abs=0.05)
    assert chaotic.errors == "errors grow"
    factors = torch.linspace(0.4, 0.9, 64, device=device).unsqueeze(-1)
    driven = deeppcr.predict(lambda z, x: x * z + 1, torch.ones(1, device=device), factors)
    assert driven.exponent == pytest.approx(float(factors[:48].log().mean()), abs=1e-4)


@pytest.mark.usefixtures("unhurried")
def test_units_do_not_matter(device):
    def in_metres(z):
        return torch.sin(z) * 0.7 + z.roll(1, -1) * 0.1

    units = torch.tensor([1.0, 1e9, 1e-9], dtype=torch.float64, device=device)
    z0 = torch.rand(2, 3, dtype=torch.float64, device=device)
    metres = deeppcr.predict(in_metres, z0, length=400)
    others = deeppcr.predict(lambda z: in_metres(z / units) * units, z0 * units, length=400)
    assert others.exponent == pytest.approx(
        metres.exponent, abs=0.2
    )  # apart from the first steps, by the units themselves
    assert others.errors == metres.errors == "errors die out"


UNUSED = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("step", "exponent", "errors"),
    [
        (lambda z: UNUSED.to(z.device) * 2, -math.inf, "errors die out"),
        (lambda z: torch.ones_like(z), -math.inf, "errors die out"),
        (lambda z: z.detach() * 0.5, -math.inf, "errors die out"),
        (lambda z: z * math.inf, math.nan, "states are not finite from step 1 on"),
        (lambda z: torch.sqrt(z - 1), math.nan, "states are not finite from step 2 on"),
        (lambda z: z + 0.001 * torch.cos(z), 0.0, "errors stay"),
    ],
)
def test_steps_that_are_out_of_the_ordinary(step, exponent, errors, device):
    found = deeppcr.predict(step, torch.ones(3, device=device), length=100)
    assert found.exponent == pytest.approx(exponent, abs=1e-3, nan_ok=True)
    assert found.errors == errors
    assert (found.iterations is None) == ("newton" not in found.seconds) == math.isnan(exponent)


def test_it_is_said_at_which_step_and_row_states_stop_being_finite(device, unhurried):
    """Also behind those that the exponent is found from."""
    z0, xs = torch.ones(3, 2, device=device), torch.zeros(100, 3, 2, device=device)
    xs[90, 1], xs[95, 2] = math.inf, math.nan
    found = deeppcr.predict(lambda z, x: 0.5 * torch.sin(z) + x, z0, xs)
    assert found.errors == "states are not finite from step 91 on (row 1; 2 rows of 3)"
    assert "states are not finite from step 91 on" in str(found)
    assert found.iterations is None
    roots = torch.ones(100, 1, device=device)
    roots[40] = 0.0
    found = deeppcr.predict(lambda z, x: 0.5 * z + torch.sqrt(x + z - z.detach()), torch.ones(1, device=device), roots)
    assert found.errors == "the derivative of step 41 is not finite"


def test_what_so_few_steps_do_not_tell_is_not_told(device):
    found = deeppcr.predict(lambda z: z - 1e-4 * torch.sin(z), torch.ones(3, device=device), length=100_000)
    assert "do not tell" in found.errors
    assert found.iterations is None
    assert found.basis["newton"] == "the iterations are not known"
    assert "newton" not in found.seconds


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_loops(length, device):
    found = deeppcr.predict(torch.cos, torch.ones(2, device=device), length=length)
    assert found.length == found.probed == length
    assert 0 < found.seconds["loop"] < 1
    assert str(found).startswith(f"{length} step")


def test_a_state_of_several_tensors_and_rows(device):
    def spring(state, force):
        position, velocity = state
        return position + 0.1 * velocity, 0.5 * velocity - 0.1 * position + force

    start = torch.rand(6, 1, device=device), torch.zeros(6, 2, device=device)[:, :1]
    found = deeppcr.predict(spring, start, torch.rand(50, 6, 1, device=device))
    assert (found.length, found.rows, found.width) == (50, 6, 2)
    assert found.state_bytes == 50 * 6 * 2 * 4
    assert found.block_bytes == 4 * math.ceil(50 / found.chunk) * 6 * 2 * 2 * 4


def test_solve_goes_the_way_that_was_predicted(monkeypatch, device):
    def step(z, x):
        return 0.5 * torch.sin(z) + x

    arguments = step, torch.zeros(3, device=device), torch.rand(100, 3, device=device)
    with torch.no_grad():
        short = deeppcr.predict(*arguments)
        assert short.way == "loop"
        assert short.basis["loop"] == "expected"
        assert deeppcr.solve(*arguments).result is deeppcr.Result.LOOP
        assert deeppcr.predict(*arguments).basis["loop"] == "measured"
        deeppcr.clear_caches()
        assert deeppcr.predict(*arguments).basis["loop"] == "expected"
        monkeypatch.setattr(plan, "_WORTH_NEWTON", {"cpu": 1e-6, "cuda": 1e-6})
        monkeypatch.setattr(plan, "_OPERATION", {"cpu": (1.0, 1e-3, 0.0), "cuda": (1.0, 1e-3, 0.0)})
        long = deeppcr.predict(*arguments)
        assert long.way == "newton"
        assert long.why.endswith("is tried")
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["deeppcr.predict"], "_newton_seconds", lambda record, loop, *_: 2 * loop)
            assert deeppcr.predict(*arguments).why.endswith(
                "where it takes as long as expected, later solves take the loop"
            )
        assert deeppcr.solve(*arguments).result is deeppcr.Result.CONVERGED
        measured = deeppcr.predict(*arguments)
        assert measured.basis["newton"] == "measured"
        assert measured.seconds["newton"] == plan._records.values()[-1].seconds["newton"]
    arguments[1].requires_grad_()
    differentiated = deeppcr.predict(*arguments)  # is another kind
    assert differentiated.basis["newton"] == "expected"
    assert "and backward about" in differentiated.why


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("has_inputs", [False, True])
def test_a_list_of_steps_goes_the_way_that_was_predicted(has_inputs, monkeypatch, device):
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(20)).to(device)
    steps = [lambda z, x, layer=layer: layer(z) + x for layer in layers] if has_inputs else layers
    arguments = steps, torch.ones(2, 3, device=device), torch.rand(20, 2, 3, device=device) if has_inputs else None
    assert deeppcr.predict(*arguments).way == "loop"
    assert deeppcr.solve(*arguments).result is deeppcr.Result.LOOP
    assert deeppcr.predict(*arguments).basis["loop"] == "measured"
    monkeypatch.setattr(plan, "_WORTH_NEWTON", {"cpu": 1e-6, "cuda": 1e-6})
    monkeypatch.setattr(plan, "_OPERATION", {"cpu": (1.0, 1e-3, 0.0), "cuda": (1.0, 1e-3, 0.0)})
    # Functions that are not stacked are called one by one.
    one_by_one = ("loop",) if device.type == "cpu" else ("loop", "graph")
    assert deeppcr.predict(*arguments).way in (one_by_one if has_inputs else ("newton",))
    assert deeppcr.solve(*arguments).result is (deeppcr.Result.LOOP if has_inputs else deeppcr.Result.CONVERGED)


def test_nothing_of_the_callers_is_touched(device):
    net = torch.nn.Linear(3, 3).to(device)
    z0 = torch.ones(2, 3, device=device, requires_grad=True)
    before, drawn = z0.detach().clone(), torch.get_rng_state()
    deeppcr.predict(lambda z: torch.tanh(net(z)), z0, length=50)
    assert torch.equal(z0, before)
    assert z0.grad is None
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_slow_steps_are_few(device):
    calls = []

    def slow(z):
        calls.append(time.sleep(0.05))
        return 0.5 * z

    begin = time.perf_counter()
    found = deeppcr.predict(slow, torch.ones(2, device=device), length=1000)
    assert time.perf_counter() - begin < 2
    assert len(calls) < (20 if device.type == "cpu" else 60)  # on a GPU it is traced, too
    assert 50 <= found.seconds["loop"] < 100


@pytest.mark.usefixtures("unhurried")
def test_the_table(device):
    found = deeppcr.predict(lambda z: 0.5 * torch.cos(z), torch.ones(3, device=device), length=1000)
    lines = str(found).splitlines()
    assert lines[0] == "1,000 steps, 1 row of 3 numbers"
    assert f"{found.exponent:+.2g} a step, by 256 steps: errors die out" in lines[1]
    assert lines[3].endswith("11.7 KiB of states, 8.86 KiB of blocks")
    assert len(lines) == 4 + 5 + 1
    assert all(line[25] == " " and line[34:36] == "  " for line in lines[4:9])
    if device.type == "cpu":
        assert "needs a CUDA device" in lines[5]
        assert "kernels need a CUDA device, Triton and NumPy" in lines[6]


def test_iterations_are_a_bound_where_errors_stay(device):
    """A loop that is nearly linear takes one or two, whatever the exponent says."""
    z0 = torch.ones(2, 3, device=device)
    stays = deeppcr.predict(lambda z: z + 0.001 * torch.cos(z), z0, length=200)
    assert f"up to about {stays.iterations}, in chunks" in str(stays)
    assert "up to" not in str(deeppcr.predict(lambda z: torch.cos(z) / 2, z0, length=200))


def test_what_is_left_to_the_loop_is_predicted_so(device):
    """What keeps a state of its own, changes with every call, or is hooked: Newton refuses it, and the loop takes it."""
    calls = [0]

    def counting(z, x):
        calls[0] += 1
        return torch.tanh(z) / calls[0] + x

    norm = torch.nn.BatchNorm1d(2).to(device)
    z0, xs = torch.randn(4, 2, device=device), torch.randn(60, 4, 2, device=device)
    for step in (counting, lambda z, x: norm(z) + x):
        for _ in range(2):
            prediction = deeppcr.predict(step, z0, xs)
            assert (prediction.way, list(prediction.seconds)) == ("loop", ["loop"])
            assert prediction.why.startswith("one step after the other: step: ")
            assert "loop, by Python" in str(prediction)
            assert deeppcr.solve(step, z0, xs).result is deeppcr.Result.LOOP


def test_a_step_that_solve_refuses_has_no_prediction(device):
    z0, xs = torch.zeros(2, 1, device=device), torch.randn(60, 2, 1, device=device)
    for ask in (deeppcr.solve, deeppcr.predict):
        with pytest.raises(RandomStep):
            ask(lambda z, x: torch.nn.functional.dropout(z) + x, z0, xs)


def test_of_no_rows_there_is_nothing_to_do(device):
    arguments = (lambda z, x: torch.tanh(z) + x), torch.zeros(0, 3, device=device), torch.zeros(5, 0, 3, device=device)
    assert deeppcr.solve(*arguments).result is deeppcr.Result.LOOP
    assert deeppcr.check(*arguments) == []
    prediction = deeppcr.predict(*arguments)
    assert (prediction.length, prediction.rows, prediction.width, prediction.way) == (5, 0, 3, "loop")
    assert "there is no row" in str(prediction)


def test_of_a_way_that_did_not_work_no_time_is_told(device):
    arguments = torch.cos, torch.ones(3, device=device)
    deeppcr.solve(*arguments, length=40)
    record = plan._records.values()[-1]
    record.took("newton", 1.0)
    record.bar("newton", "in vain")
    assert deeppcr.predict(*arguments, length=40).basis["newton"] == "expected"


def test_bad_input_is_named(device):
    with pytest.raises(ValueError, match="length"):
        deeppcr.predict(torch.cos, torch.ones(2, device=device))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        deeppcr.predict(torch.cos, torch.ones(2, device=device), length=3)


def test_operations_are_counted_without_views():
    z = torch.ones(4, 4)
    assert count_operations(lambda: torch.tanh(z.mT[1:] @ z).unsqueeze(0) + 1) == 3


@pytest.mark.usefixtures("unhurried")
def test_iterations_follow_from_how_long_errors_live(device):
    """In chunks of 16: errors that live for 6 of them, for less than one, for all of 63."""
    z0 = torch.ones(2, device=device)
    slow, quick, chaotic = (
        deeppcr.predict(step, z0, length=1000)
        for step in (lambda z: 0.99 * z + 1, lambda z: 0.1 * z + 1, lambda z: 1 - 1.99 * z.square() * 0.9)
    )
    assert [found.chunk for found in (slow, quick, chaotic)] == [16, 16, 16]
    assert slow.iterations == round(4 + 0.7 / (16 * -math.log(0.99)))
    assert quick.iterations == 4
    assert chaotic.errors == "errors grow"
    assert chaotic.iterations == round(4 + 0.7 * 63)
    assert chaotic.seconds["newton"] > chaotic.seconds["loop"]  # it gives up, and the loop is taken


def test_of_one_step_nothing_is_said_of_errors(device):
    found = deeppcr.predict(torch.sin, torch.ones(3, device=device), length=1)
    assert "no step after it" in found.errors
    assert "errors stay" not in str(found)
    assert found.iterations == 1


def test_an_exponent_that_is_none_is_not_printed_as_a_number(device):
    found = deeppcr.predict(lambda z: z / 0, torch.ones(3, device=device), length=1)
    assert math.isnan(found.exponent)
    assert "nan" not in str(found)
    assert "not known, by 1 step: states are not finite from step 1 on" in str(found)


def test_what_was_measured_is_that_of_the_same_kind(device):
    """Solves that differ in numbers only are of one kind; another step, shape, dtype, length or wish for gradients makes another."""
    weight, z0 = torch.randn(3, 3, device=device), torch.ones(2, 3, device=device)
    step = lambda z: torch.tanh(z @ weight)  # noqa: E731
    deeppcr.solve(step, z0, length=30)

    def is_measured(step, z0, length):
        return deeppcr.predict(step, z0, length=length).basis["loop"] == "measured"

    other, double = torch.randn(3, 3, device=device), weight.double()
    assert is_measured(step, 2 * z0, 30)
    assert not is_measured(lambda z: torch.sin(z @ other), z0, 30)
    assert not is_measured(step, z0[:1], 30)
    assert not is_measured(step, z0, 31)
    assert not is_measured(step, z0.clone().requires_grad_(), 30)
    assert not is_measured(lambda z: torch.tanh(z @ double), z0.double(), 30)
