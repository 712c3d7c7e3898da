"""One call holds rows of different times and samples: a denoiser that does not treat them row by row is refused."""

import functools
import gc
import types

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, Noise, Schedule, Window, parallelize, problem, sample
from deeppcr.sequence.fingerprint import Same
from kernel_support import thorough

LENGTH = 100
SCHEDULE = Schedule.linear(LENGTH)


def ideal(z, t):
    """Of Gaussian data of variance 1/4."""
    share = SCHEDULE.alphas_bar.to(z)[t.long()].unsqueeze(-1)
    return (1 - share).sqrt() * z / (1 - 0.75 * share)


def column(t):
    return t.unsqueeze(-1)


#: right in the loop, or at least in its own way, and wrong where rows of other times stand in the same call
COUPLED = {
    "the time of the first row": lambda z, t: ideal(z, t[:1].expand_as(t)),
    "a branch on the first row": lambda z, t: 1.1 * ideal(z, t) if t[0] < 20 else ideal(z, t),
    "a branch on the last row": lambda z, t: 1.1 * ideal(z, t) if t[-1] > 80 else ideal(z, t),
    "only in the first step": lambda z, t: 1.1 * ideal(z, t) if t[0] == LENGTH - 1 else ideal(z, t),
    "only in the last step": lambda z, t: 1.1 * ideal(z, t) if t[0] == 0 else ideal(z, t),
    "any row": lambda z, t: 1.1 * ideal(z, t) if (t < 20).any() else ideal(z, t),
    "the largest time": lambda z, t: 1.1 * ideal(z, t) if t.max() > 50 else ideal(z, t),
    "nothing alone": lambda z, t: ideal(z, t) + 0 * z.std(0),
    "rows that mix late": lambda z, t: ideal(z, t) + 0.3 * column((1 - t / LENGTH) ** 8) * z.mean(0),
}
SOLVERS = [Window(), Window(size=8), Window(size=LENGTH), deeppcr.Newton()]


def draw(samples=1, length=LENGTH, **settings):
    return Noise.draw((samples, 4), length, generator=torch.Generator().manual_seed(0), **settings)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", COUPLED)
def test_times_must_be_used_row_by_row(name, samples):
    for solver in SOLVERS:
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"^denoiser: .* t must be used row by row \(not as t\[0\]\)"),
        ):
            sample(COUPLED[name], SCHEDULE, draw(samples), solver=solver)


def test_classes_must_be_used_row_by_row():
    """By the last steps alone: in the first ones it does not show."""

    def denoiser(z, t, classes):
        return ideal(z, t) + 0.1 * column((t < 20) * classes[0])

    with torch.no_grad(), pytest.raises(ValueError, match="rows of different times and samples"):
        sample(denoiser, SCHEDULE, draw(3), classes=torch.tensor([0, 1, 0]), solver=Window(size=8))


class Euler:
    """As schedulers of diffusers are."""

    timesteps = torch.arange(990.0, -1.0, -10.0)

    def step(self, output, t, sample, return_dict=True):
        return (sample - 0.01 * output,)


class Model(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        self.inner, self.wrong, self.rows = nn.Linear(4, 4), wrong, []

    def forward(self, sample, timestep):
        self.rows.append(len(sample))
        output = self.inner(sample)
        return 1.1 * output if self.wrong and timestep[0] < 200 else output


def test_a_model_of_diffusers_that_branches_on_the_first_time():
    with torch.no_grad(), pytest.raises(ValueError, match="t must be used row by row"):
        parallelize(Euler(), Model(wrong=True))(torch.randn(2, 4))


def test_a_network_that_is_random_in_late_steps_only():
    def denoiser(z, t):
        return ideal(z, t) * (1 + 0.1 * column(t < 20) * torch.rand_like(z))

    for solver in (Window(size=8), deeppcr.Newton()):
        with torch.no_grad(), pytest.raises(ValueError, match="gives another result each time it is called"):
            sample(denoiser, SCHEDULE, draw(), solver=solver)


def test_a_network_that_does_not_take_a_single_row():
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="any number of rows may come, but it took 8 and not 1 of them"),
    ):
        sample(lambda z, t: ideal(z, t).squeeze(0), SCHEDULE, draw(3))


def test_what_fails_in_late_steps_comes_as_it_is():
    def wrong(z, t):
        if (t == 0).any():
            raise RuntimeError("no such time")
        return ideal(z, t)

    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^no such time"):
        sample(wrong, SCHEDULE, draw(), solver=Window(size=8))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_denoiser_that_changes_its_input(samples):
    def changes_samples(z, t):
        return ideal(z.mul_(0.9), t)

    def changes_times(z, t):
        return ideal(z, t.floor_divide_(2))

    for denoiser in (changes_samples, changes_times):
        with torch.no_grad(), pytest.raises(ValueError, match="denoiser: changes its input z or t in place"):
            sample(denoiser, SCHEDULE, draw(samples))


class Small(nn.Module):
    """A convolution over the sample and products that are rounded differently for other numbers of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.products = nn.Conv1d(1, 8, 3, padding=1), nn.Linear(32, 4)

    def forward(self, z, t):
        hidden = torch.tanh(self.convolution(z.unsqueeze(1)).flatten(1))
        return 0.8 * z + 0.2 * self.products(hidden) + 1e-3 * column(t)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 16, 17, LENGTH])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "autocast"])
def test_networks_that_treat_rows_by_themselves_are_taken(kind, length):
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    net, schedule, noise = Small().to(dtype), SCHEDULE.take(length), draw(2, length, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        loop = sample(net, schedule, noise, solver=deeppcr.Loop())
        found = sample(net, schedule, noise, solver=Window(tolerance=0.01))
    assert (found.final - loop.final).abs().max() <= (0.01 if kind.startswith("float") else 0.3)


def test_values_that_are_not_finite_are_no_coupling():
    """Neither where the loop has them too, nor in inputs that it never sees."""

    def denoiser(z, t):
        return torch.where(column(t == 0) & (z.abs() > 0.5), float("nan"), ideal(z, t))

    with torch.no_grad():
        assert sample(denoiser, SCHEDULE, Noise(torch.zeros(1, 4)), step=DDIM()).result is Result.CONVERGED


class Watched:
    def __init__(self):
        self.times = []

    def __call__(self, z, t):
        self.times.append(t.tolist())
        return ideal(z, t)

    other = __call__


@pytest.mark.parametrize("solver", [Window(size=1), deeppcr.Newton()], ids=lambda s: type(s).__name__)
def test_steps_of_the_whole_schedule_are_looked_at_once(solver):
    """In calls that need little memory, which count for nothing."""
    denoiser = Watched()
    with torch.no_grad():
        first = sample(denoiser, SCHEDULE, draw(), solver=solver)
        calls, denoiser.times = denoiser.times, []
        again = sample(denoiser, SCHEDULE, draw(), solver=solver)
    assert len(calls) == len(denoiser.times) + 18
    assert torch.equal(first.evaluations, again.evaluations)
    spread = [call for call in calls if len(call) == 8][:2]
    assert sorted(spread[0] + spread[1]) == [round(k * 99 / 15) for k in range(16)]
    alone = [spread[part][place] for part in range(2) for place in range(8)]
    start = calls.index(spread[1]) + 1
    assert calls[start : start + 16] == [[t] for t in alone]


def test_what_counts_as_another_kind_of_run():
    denoiser, count = Watched(), []

    def run(function, length=LENGTH, **settings):
        denoiser.times = []
        sample(function, SCHEDULE.take(length), draw(1, length), **settings)
        count.append(len(denoiser.times))
        return count[-1]

    with torch.no_grad():
        before = run(denoiser)
        assert run(denoiser) == before - 18
        assert run(denoiser, solver=Window()) == before - 18
        assert run(denoiser.other) == before  # another method
        assert run(denoiser.other) == before - 18
        run(denoiser, 50)
        assert run(denoiser, 50) == count[-2] - 18


def test_a_model_is_known_however_often_it_is_wrapped():
    model, latents = Model(), torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for checks in (18, 0):
            model.rows = []
            found = parallelize(Euler(), model)(latents)
            assert len(model.rows) == int(found.iterations.max()) + 1 + checks


def mixing(z, t):
    return ideal(z, t) + 0.3 * column((1 - t / LENGTH) ** 8) * z.mean(0)


def of_flag(wrong):
    return lambda z, t: mixing(z, t) if wrong else ideal(z, t)


def of_function(wrong):
    inner = mixing if wrong else ideal
    return lambda z, t: inner(z, t)


def of_default(wrong):
    return lambda z, t, settings={"wrong": wrong}: mixing(z, t) if settings["wrong"] else ideal(z, t)


def of_keyword(wrong):
    def denoiser(z, t, *, how=wrong):
        return mixing(z, t) if how else ideal(z, t)

    return denoiser


def either(z, t, how):
    return mixing(z, t) if how else ideal(z, t)


def of_arguments(wrong):
    return functools.partial(lambda how, z, t: either(z, t, how), wrong)


def of_named_arguments(wrong):
    return functools.partial(either, how=wrong)


def of_flag_in_a_list(wrong):
    flags = [bool(wrong)]
    return lambda z, t: either(z, t, flags[0])


def of_object(wrong):
    settings = types.SimpleNamespace(wrong=wrong)
    return lambda z, t: mixing(z, t) if settings.wrong else ideal(z, t)


ANYWHERE = [
    of_flag,
    of_function,
    of_default,
    of_keyword,
    of_arguments,
    of_named_arguments,
    of_flag_in_a_list,
    of_object,
]
#: a number in a list or a dictionary may be a counter
OF_NUMBERS = [of_flag, of_keyword, of_arguments, of_named_arguments]


@pytest.mark.parametrize(
    ("made", "wrong"),
    [(made, True) for made in ANYWHERE]
    + [(of_default, "wrong"), (of_object, "wrong"), *((made, 1) for made in OF_NUMBERS)]
    + thorough(*((made, "wrong") for made in ANYWHERE if made not in (of_default, of_object))),
)
def test_a_denoiser_is_no_proof_of_others_of_the_same_code(made, wrong):
    with torch.no_grad():
        sample(made(type(wrong)()), SCHEDULE, draw(), solver=Window(size=8))
        with pytest.raises(ValueError, match="rows must not influence each other"):
            sample(made(wrong), SCHEDULE, draw(), solver=Window(size=8))


class Holder:
    def __init__(self, net):
        self.net = net

    def __call__(self, z, t):
        return self.net(z, t)


class Around(nn.Module):
    """Holds a function, and no number that would tell two of them apart."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, z, t):
        return self.function(z, t)


def test_a_network_that_is_gone_is_no_proof_of_the_next(monkeypatch):
    """Which may lie where it lay: here everything lies at one address, since Python's memory promises none."""
    monkeypatch.setattr(Same, "__hash__", lambda self: 1)
    denoiser = Holder(Around(ideal))
    with torch.no_grad():
        sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))
        denoiser.net = Around(mixing)
        with pytest.raises(ValueError, match="rows must not influence each other"):
            sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))


def test_an_object_that_calls_another_function_is_looked_at_anew():
    denoiser = Holder(ideal)
    with torch.no_grad():
        sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))
        denoiser.net = mixing
        with pytest.raises(ValueError, match="rows must not influence each other"):
            sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))


FLAGS = types.SimpleNamespace(wrong=False)
function = ideal


def calls_global(z, t):
    return function(z, t)


@pytest.mark.parametrize("denoiser", [calls_global, lambda z, t: either(z, t, FLAGS.wrong)], ids=["function", "flag"])
def test_another_global_variable_is_looked_at_anew(denoiser, monkeypatch):
    with torch.no_grad():
        sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))
        monkeypatch.setitem(globals(), "function", mixing)
        monkeypatch.setattr(FLAGS, "wrong", True)
        with pytest.raises(ValueError, match="rows must not influence each other"):
            sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))


def test_a_denoiser_in_training_is_looked_at_once():
    """Made anew around the same network for every call, with other values, and other tensors of the same shape."""
    net, weight = Small(), torch.tensor(1.0)
    calls = []

    def made(weight, embedding):
        def denoiser(z, t):
            calls.append(len(z))
            return weight * net(z, t) + embedding

        return denoiser

    spent = []
    for number in range(4):
        calls.clear()
        with torch.no_grad():
            found = sample(made(weight, torch.zeros(4) + 0.01 * number), SCHEDULE, draw())
            weight.mul_(1.01)
            for each in net.parameters():
                each.mul_(1.01)
        spent.append(len(calls) - int(found.iterations.max()))
    assert spent == [19, 1, 1, 1]


def test_what_a_denoiser_notes_is_no_other_kind():
    """How often it was called, and what with."""
    counts, log, named = [0], [], {"calls": 0}

    def denoiser(z, t):
        counts[0] += 1
        named["calls"] += 1
        log.append(f"{len(z)} rows")
        return ideal(z, t)

    spent = []
    with torch.no_grad():
        for _ in range(3):
            before = counts[0]
            found = sample(denoiser, SCHEDULE, draw(), solver=Window(size=8))
            spent.append(counts[0] - before - int(found.iterations.max()))
    assert spent == [19, 1, 1]


class Labelled(Watched):
    def __call__(self, z, t, classes=None):
        return super().__call__(z, t).to(z)


class Products(nn.Module):
    """Multiplies in the precision of its weight, or in one that it is told."""

    def __init__(self):
        super().__init__()
        self.linear, self.dtype, self.times = nn.Linear(4, 4), None, []

    def forward(self, z, t):
        self.times.append(t.tolist())
        dtype = self.dtype or self.linear.weight.dtype
        return 0.1 * nn.functional.linear(z.to(dtype), self.linear.weight.to(dtype)).to(z)


KINDS = {
    "the shape of a sample": (Labelled, lambda denoiser: {"noise": draw_like((1, 5))}),
    "the dtype of the noise": (Labelled, lambda denoiser: {"noise": draw_like((1, 4), dtype=torch.bfloat16)}),
    "guidance": (Labelled, lambda denoiser: {"classes": torch.tensor([1]), "guidance": 2.0, "unconditional": 0}),
    "the dtype of parameters": (Products, lambda denoiser: denoiser.to(torch.bfloat16) and {}),
    "a dtype that a module holds": (Products, lambda denoiser: setattr(denoiser, "dtype", torch.bfloat16) or {}),
}


def draw_like(shape, **settings):
    return Noise.draw(shape, LENGTH, generator=torch.Generator().manual_seed(0), **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_run_is_looked_at_anew(kind):
    make, change = KINDS[kind]
    denoiser, called = make(), []

    def run(noise=None, **settings):
        denoiser.times = []
        sample(denoiser, SCHEDULE, noise or draw(), solver=Window(size=8, tolerance=0.1), **settings)
        called.append(len(denoiser.times))

    with torch.no_grad():
        run()
        run()
        assert called[1] == called[0] - 18
        settings = change(denoiser)
        run(**settings)
        run(**settings)
    assert called[3] == called[2] - 18 - (3 if "dtype" in kind else 0)  # what half precision rounds is looked at, too


def test_what_is_known_of_a_denoiser_is_bounded():
    def made(number):
        return lambda z, t: ideal(z, t) + 1e-6 * number

    schedule, noise = SCHEDULE.take(2), draw(1, 2)
    with torch.no_grad():
        for number in range(problem._KINDS + 5):
            sample(made(number), schedule, noise)
    assert 0 < len(problem._by_themselves[made(0).__code__]) <= problem._KINDS


def test_denoisers_are_not_kept_alive():
    gc.collect()
    before = len(problem._by_themselves)
    with torch.no_grad():
        denoiser = Watched()
        sample(denoiser, SCHEDULE, draw())
        assert len(problem._by_themselves) == before + 1
        del denoiser
        gc.collect()
    assert len(problem._by_themselves) == before


def test_denoisers_that_cannot_be_remembered_are_looked_at_every_time():
    class Slotted:
        __slots__ = ("calls",)

        def __call__(self, z, t):
            self.calls += 1
            return ideal(z, t)

    denoiser, counts = Slotted(), []
    with torch.no_grad():
        for _ in range(2):
            denoiser.calls = 0
            sample(denoiser, SCHEDULE, draw())
            counts.append(denoiser.calls)
    assert counts[0] == counts[1]


def test_inside_inference_mode():
    with torch.inference_mode():
        assert sample(lambda z, t: ideal(z, t), SCHEDULE, draw()).result is Result.CONVERGED
