"""The iteration made of kernels against its plain reference, and against the loop.

On a CPU the kernels are interpreted, and so the problems are small; ``--device=cuda`` runs the real thing.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, DDPM, GaussianPrior, Noise, Schedule, Window, sample
from deeppcr.diffusion.coupling import Coupling
from deeppcr.diffusion.samplers import Steps
from deeppcr.diffusion.window import iteration
from deeppcr.diffusion.window import prepared as window
from deeppcr.diffusion.window.iteration import NOISE, Iteration
from deeppcr.diffusion.window.iteration import _least_squares as least_squares
from kernel_support import Launches, pairwise, thorough

pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs
# Where products overflow, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

from deeppcr.diffusion.window import by_kernels as fused_iteration
from deeppcr.diffusion.window.by_kernels import FusedIteration

SAMPLES = (1, 3)


def made(
    length,
    samples,
    width,
    device,
    *,
    size=None,
    freeze=0.05,
    accelerate=True,
    noise=True,
    scaled=False,
    prior=None,
    bound=1.0,
):
    """The same random problem, in the midst of its iterations, for the reference and for the kernels."""
    generator = torch.Generator().manual_seed(length + 7 * samples + width)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    steps = (DDPM() if noise else DDIM()).steps(Schedule.linear(1000).take(length))
    if scaled:
        scale = 1 + torch.rand(length, generator=generator)
        steps = Steps(steps.timesteps.float() / 3, steps.keep, steps.gain, steps.signal, steps.spread,
                      steps.deviation, scale=scale)  # fmt: skip
    coupling = Coupling(prior or GaussianPrior(), steps, width, device, torch.float32)
    freeze = freeze * (1 + torch.arange(length) / length)  # another one for every step
    settings = {"size": size or length, "freeze": freeze, "bound": bound, "settled": 0.3, "accelerate": accelerate}
    settings |= {"adds_noise": noise, "eps": (1 / NOISE, 2 / NOISE)}  # so that some changes are taken for rounding
    pair = [
        kind(steps.to(device, torch.float32), coupling, samples, width, **settings)
        for kind in (Iteration, FusedIteration)
    ]
    start, shift = draw(length, samples, width, 1), 0.1 * draw(length, samples, width) if noise else None
    initial = draw(samples, width, 1)
    prefix = torch.randint(length, (samples,), generator=generator)
    if samples > 2:
        prefix[1], prefix[2] = 0, length  # the last one has finished
    last = draw(2, length, samples, width, 1), draw(2, length, samples, width, 1)
    last_sizes = torch.rand(2, length, samples, generator=generator).sub_(0.3).clamp_(0)
    values, moved = draw(length, samples, width, 1), torch.rand(length + 1, samples, generator=generator)
    used = torch.rand(length, samples, generator=generator) < 0.8
    growth = 0.9 + 0.2 * torch.rand(length, samples, generator=generator)
    measured = torch.rand(length, samples, generator=generator)
    for each in pair:
        each.hold(initial, shift)
        each.load(start)
        each.prefix.copy_(prefix)
        each.iterations.fill_(3)
        each.evaluations.fill_(11)
        each.measured.copy_(measured)
        each.values.copy_(values)
        each.moved[1:].copy_(moved[1:])
        each.used.copy_(used)
        each.growth.copy_(growth)
        if accelerate:
            each.last_updates.copy_(last[0])
            each.last_plains.copy_(last[1])
            each.last_sizes.copy_(last_sizes)
    return pair


def network(rows, times, who):
    return torch.sin(2 * rows + 0.01 * times[:, None] + who[:, None])


def shaken(reference, network, count, leave, names, trials=4):
    """By how much the reference's results change where what it extrapolates from is rounded otherwise.

    Where states are one number, the two changes of updates are parallel at the first step that extrapolates, for they are
    numbers. There the ridge alone, 1e-5, makes their multiples unique: rounding comes out 1e5 times as large, in float32 up
    to 1e-2 of them. All other numbers change by less than 2e-5.
    """
    generator, eps = torch.Generator(reference.states.device).manual_seed(0), torch.finfo(torch.float32).eps

    def shake(values):
        return values * (1 + eps * torch.randint(-1, 2, values.shape, generator=generator, device=values.device))

    def solve(*products):
        return least_squares(*map(shake, products))

    expected = copy.deepcopy(reference)
    expected.run(network, count, leave)
    most = {name: torch.zeros_like(getattr(expected, name)) for name in names}
    for _ in range(trials):
        trial = copy.deepcopy(reference)
        with mock.patch.object(iteration, "_least_squares", solve):
            trial.run(lambda *rows: shake(network(*rows)), count, leave)
        for name, change in most.items():
            now = (getattr(trial, name) - getattr(expected, name)).abs()
            torch.maximum(change, now.nan_to_num(0, 0, 0), out=change)
    return most


def compare(pair, network=network, *, rounds=2, leave=True, padding=0, tolerance=2e-5):
    """Both take so many iterations, each from where the reference is; how far each sample has got afterwards."""
    reference, fused = pair
    kept = ["states", "measured", "values", "used", "moved", "growth", "excess", "thresholds", "allowance"]
    kept += ["last_updates", "last_plains", "last_sizes"] * reference.accelerate
    names = kept
    for _ in range(rounds):
        rest = [min(reference.length - each, reference.size) for each in reference.prefix.tolist()]
        count = min(sum(rest) + padding, reference.most_rows)
        asked = []

        def watched(rows, times, who, asked=asked):
            asked.append(sorted(zip(times.tolist(), who.tolist(), rows.sum(1).tolist(), strict=True)))
            return network(rows, times, who)

        changes = shaken(reference, network, count, leave, names)
        for each in pair:
            each.run(watched, count, leave)
        for (*one, total), (*other, other_total) in zip(*asked, strict=True):
            assert one == other
            assert total == pytest.approx(other_total, rel=1e-3, abs=1e-3)
        assert fused.counters.tolist() == reference.counters.tolist()
        for name in names:
            found, expected = getattr(fused, name), getattr(reference, name)
            same = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert (same | ((found - expected).abs() <= 2 * changes[name])).all(), name
        for name in ("thresholds", "allowance"):  # which may be far below 1
            assert torch.allclose(getattr(fused, name), getattr(reference, name), rtol=1e-4, atol=0), name
        for name in kept:
            getattr(fused, name).copy_(getattr(reference, name))
    return reference.prefix.tolist()


@pytest.mark.parametrize("width", [1, 5, 130, *thorough(16)])
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("length", [1, 50, *thorough(2, 257)])
def test_every_shape(length, samples, width, device, poisoned_memory, monkeypatch):
    if length * width > 5_000:  # fewer and larger programs: the interpreter takes its time for each
        monkeypatch.setattr(fused_iteration, "_TILE", 8192)
    compare(made(length, samples, width, device))


@pairwise(noise=[True, False], accelerate=[True, False], leave=[True, False])
def test_every_setting(noise, accelerate, leave, device, poisoned_memory):
    for samples in SAMPLES:
        pair = made(50, samples, 5, device, size=9, noise=noise, accelerate=accelerate)
        compare(pair, leave=leave, padding=4)


@pytest.mark.parametrize(("length", "size"), [(70, 24), *thorough((257, 40))])
@pytest.mark.parametrize("freeze", [1e-6, 4.0, 1e9])
def test_steps_leave(freeze, length, size, device):
    """None but the first, some, or the whole window at once."""
    pair = made(length, 3, 16, device, size=size, freeze=freeze)
    for each in pair:
        each.used.fill_(1)
    before = pair[0].prefix.tolist()
    after = compare(pair, rounds=1)
    gone = [new - old for old, new in zip(before, after, strict=True)]
    assert gone[2] == 0
    assert gone[:2] == {1e-6: [1, 1], 1e9: [min(size, length - before[0]), size]}.get(freeze, gone[:2])
    assert freeze != 4.0 or 1 < gone[1] < size


def test_a_step_that_was_evaluated_once_stays(device):
    pair = made(50, 2, 5, device, freeze=1e9, bound=1e12)
    for each in pair:
        each.prefix.zero_()
        each.moved.zero_()  # from which nothing is learnt
        each.used.fill_(1)
        each.used[7, 1] = 0
    assert compare(pair, rounds=1) == [50, 7]
    assert compare(pair, rounds=1) == [50, 50]


def test_scaled_inputs_times_of_another_kind_and_a_basis(device):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(200, 7, generator=generator) * torch.arange(1, 8)
    for samples in SAMPLES:
        pair = made(50, samples, 7, device, size=20, scaled=True, prior=GaussianPrior.from_data(data))
        assert pair[0].times.dtype == torch.float32
        compare(pair, padding=3)


@pytest.mark.parametrize(("samples", "at_once"), [(9, 4), *thorough((37, 16))])
def test_more_samples_than_are_read_at_once(samples, at_once, device, monkeypatch):
    monkeypatch.setattr(fused_iteration, "_SAMPLES", at_once)
    compare(made(20, samples, 3, device, size=6), padding=5)


@pytest.mark.parametrize(("length", "width"), [(20, 20), *thorough((40, 40))])
def test_a_row_wider_than_a_tile_and_more_steps_than_a_block(length, width, device, monkeypatch):
    monkeypatch.setattr(fused_iteration, "_COLUMNS", 16)
    monkeypatch.setattr(fused_iteration, "_BLOCK", 16)
    monkeypatch.setattr(fused_iteration, "_TILE", 64)
    compare(made(length, 3, width, device, freeze=1e9), rounds=1)
    compare(made(length, 1, width, device))


def test_samples_go_back(device, monkeypatch):
    """Of those that finish, where what a step left with has grown too much since; with lower thresholds."""
    monkeypatch.setattr(fused_iteration, "_TILE", 8192)
    monkeypatch.setattr(fused_iteration, "_BLOCK", 8)
    pair = made(20, 4, 3, device, freeze=1e9, bound=40.0)
    for each in pair:
        each.growth.fill_(1)
        each.growth[15] = torch.tensor([1.0, 90.0, 90.0, 90.0], device=device)
        each.used.fill_(1)
        each.moved.zero_()  # from which nothing is learnt
        each.prefix.copy_(torch.tensor([0, 0, 20, 12]))
        each.excess[:, 2] = 1e3  # that sample has finished before
    after = compare(pair, rounds=1)
    assert after[0] == after[2] == 20
    assert 0 < after[1] < 15
    assert 12 < after[3] < 15
    assert (pair[1].thresholds < pair[1].freeze).any(0).tolist() == [False, True, False, True]
    assert pair[1].went_back.tolist() == [False, True, False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite(value, device):
    """At the first step of a window: the sample diverges. Elsewhere: that step is left out."""
    pair = made(50, 3, 5, device, size=20)
    first = pair[0].prefix.tolist()
    times = pair[0].times.tolist()

    def stray(rows, t, who):
        bad = ((who == 0) & (t == times[first[0]])) | ((who == 1) & (t == times[7])) | (t == times[25])
        return torch.where(bad[:, None], value, network(rows, t, who))

    compare(pair, stray, rounds=3)
    assert pair[1].diverged.tolist() == [1, 0, 0]
    assert torch.isfinite(pair[1].states).all()


def test_updates_that_overflow(device):
    """States so large that updates are not finite: those steps take the plain values, and no step extrapolates them."""
    pair = made(50, 1, 5, device)
    for each in pair:
        each.prefix.zero_()
        each.states[20], each.states[21] = 2.5e38, -2.5e38

    def bounded(rows, t, who):
        return network(rows.clamp(-9, 9), t, who)

    compare(pair, bounded, rounds=1)
    assert not torch.isfinite(pair[1].last_updates[0, 20:]).any()
    compare(pair, bounded, rounds=2, tolerance=1e-4)
    assert torch.isfinite(pair[1].states).all()


def test_rows_are_filled_up_with_the_last_state_of_the_first_sample(device):
    _, fused = made(50, 3, 5, device, size=9)
    active = sum(min(50 - each, 9) for each in fused.prefix.tolist())
    rows, times, who = fused.gather(27)
    assert active < 27
    assert torch.equal(rows[active:], fused.states[-1, 0, :, 0].expand(27 - active, -1))
    assert set(times[active:].tolist()) == {float(fused.times[-1])}
    assert set(who[active:].tolist()) == {0}


@pytest.mark.parametrize(("length", "size"), [(40, 20), *thorough((257, 100))])
def test_the_same_again_bit_by_bit(length, size, device):
    _, fused = made(length, 2, 5, device, size=size)
    again = copy.deepcopy(fused)
    for each in (fused, again):
        for _ in range(3):
            each.run(network, 2 * size, True)
    assert torch.equal(fused.states, again.states)
    assert torch.equal(fused.counters, again.counters)


@pytest.mark.parametrize(
    ("length", "size", "tf32"), [(16, 6, None), (16, 16, 0.5), *thorough((40, 8, None), (40, 40, 0.5))]
)
def test_whole_samples(length, size, tf32, device, monkeypatch):
    """As by the loop, in as many iterations and evaluations as by the reference."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(12, 12, generator=generator) / 4).to(device)
    noise = Noise.draw((3, 12), length, generator=generator)
    noise = Noise(noise.initial.to(device), noise.steps.to(device))
    classes = torch.tensor([0.0, 0.3, 1.0], device=device)

    spread = (1 - Schedule.linear(length).alphas_bar).sqrt().float().to(device)

    def denoiser(z, t, classes):
        return spread[t, None] * z + 0.2 * torch.tanh(z @ weight + classes[:, None])

    def run(kind):
        monkeypatch.setattr(window, "kind_for", lambda problem: kind)
        solver = Window(size=size, tf32=tf32, freeze=0.1)
        return sample(denoiser, Schedule.linear(length), noise, classes=classes, solver=solver)

    with torch.no_grad():
        loop = sample(denoiser, Schedule.linear(length), noise, classes=classes, solver=deeppcr.Loop())
        plain, fused = run(Iteration), run(FusedIteration)
    assert fused.result is Result.CONVERGED
    assert (fused.final - loop.final).abs().max() <= 1e-3
    assert fused.iterations.tolist() == plain.iterations.tolist()
    assert fused.evaluations.tolist() == plain.evaluations.tolist()
    assert torch.allclose(fused.residual, plain.residual, rtol=0.1, atol=1e-6)
    assert (fused.final - plain.final).abs().max() <= 1e-4


def test_which_problems_have_kernels(gpu):
    """On a GPU, in float32, with one slot and nothing clipped."""
    from deeppcr.diffusion.problem import Problem

    def kind(step, dtype=torch.float32, device=gpu):
        noise = Noise.draw((1, 4), 10, device=device, dtype=dtype)
        return window.kind_for(Problem(lambda z, t: z, step.steps(Schedule.linear(10)), noise))

    assert kind(DDPM()) is FusedIteration
    assert kind(DDIM()) is FusedIteration
    assert kind(DDPM(clip=1.0)) is Iteration
    assert kind(DDPM(), torch.float64) is Iteration
    assert kind(DDPM(), device="cpu") is Iteration


def test_launches(uncomputed, device):
    _, fused = made(50, 1, 5, device)
    fused.coupling.spread = lambda residuals: residuals
    for _ in range(2):
        with Launches() as made_now:
            fused.advance(fused.gather(50)[0], True)
        assert made_now.count == 5
