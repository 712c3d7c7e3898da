"""The diffusion experiments: the loop is the loop, trained networks are kept, distances and curves are what they say."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn")

import deeppcr
import made_up_diffusion
from deeppcr.diffusion import GaussianStart, Noise, Window, sample
from deeppcr_paper import (
    denoisers,
    diffusion_guess,
    diffusion_iterations,
    diffusion_timing,
    frechet,
    latent_diffusion,
    models,
    pixel_diffusion,
)
from deeppcr_paper import sampling as sampling_module
from deeppcr_paper.denoisers import TrainingSettings, latent_model, pixel_model
from deeppcr_paper.experiment import Context
from deeppcr_paper.sampling import Draw, Sampling, errors, pack, paper_newton, timed, unpack
from deeppcr_paper.store import PaperError
from small_results import TINY

TRAINING = TrainingSettings("tiny")


@pytest.fixture(scope="module")
def context(pytestconfig, tmp_path_factory):
    device = torch.device(pytestconfig.getoption("--device"))
    return Context(device, models=tmp_path_factory.mktemp("models"))


@pytest.fixture(
    scope="module", params=["latent", "conditional", pytest.param("pixel", marks=pytest.mark.thorough, id="pixel")]
)
def sampling(request, context):
    """Latents, and images with classes, are all there is to tell apart; images without are another combination of it."""
    if request.param == "latent":
        return Sampling(latent_model(TRAINING, "digits", 4, context), 32)
    return Sampling(pixel_model(TRAINING, "digits", 4, request.param == "conditional", context), 32)


def test_every_way_to_sample_finds_the_same(sampling):
    draw = sampling.draw(5, seed=3)
    reference = sampling.loop(draw)
    by_library = sample(
        sampling.denoiser,
        sampling.schedule,
        Noise(draw.initial, draw.added),
        classes=draw.classes,
        solver=deeppcr.Loop(),
    ).final
    assert max(errors(by_library, reference)) < 1e-4
    parallel = sampling.parallel(draw)
    assert max(errors(parallel.final, reference)) < 1e-3
    assert parallel.result is deeppcr.Result.CONVERGED
    one, *_ = draw.split(1)
    assert max(errors(sampling.printed(one).final, reference[:1])) < 1e-2
    parts = torch.cat([sampling.loop(part) for part in draw.split(2)])
    assert max(errors(parts, reference)) < 1e-4


def test_in_parallel_means_as_the_library_has_it(sampling, monkeypatch):
    assert sampling.window == Window(tolerance=diffusion_timing.TimingSettings().tolerance)
    monkeypatch.setattr(sampling, "window", replace(sampling.window, freeze=0.25, size=8))
    solvers, parallel = [], sampling.parallel
    monkeypatch.setattr(
        sampling, "parallel", lambda draw, **more: solvers.append(more["solver"]) or parallel(draw, **more)
    )
    draw = sampling.draw(1, seed=1)
    with pytest.warns(deeppcr.ConvergenceWarning):
        diffusion_iterations.window_errors(sampling, draw, sampling.loop(draw), 2)
    assert solvers == [replace(sampling.window, max_iterations=count, graphs=False) for count in (1, 2)]


def test_batches_are_timed_once_everything_is_set_up(clock):
    """Graphs of the parallel solve are recorded in its second and third call."""
    calls = {"loop": 0, "parallel": 0}

    class Counted:
        device = torch.device("cpu")

        def draw(self, samples, seed):
            return seed

        def loop(self, draw):
            calls["loop"] += 1
            clock.sleep(9 if calls["loop"] == 1 else 1)

        def parallel(self, draw):
            calls["parallel"] += 1
            clock.sleep(9 if calls["parallel"] <= 3 else 2)

    found = diffusion_timing.time_batch(Counted(), diffusion_timing.TimingSettings())
    assert found["seconds"] == {"loop": [1], "auto": [2, 2, 2]}


def test_a_captured_loop_takes_new_noise(sampling):
    if sampling.device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    run = sampling.captured_loop(sampling.draw(2, seed=0))
    for seed in (1, 2):
        draw = sampling.draw(2, seed=seed)
        assert max(errors(run(draw), sampling.loop(draw))) < 1e-4


def test_phases_are_parts_of_the_whole(sampling):
    phases, _ = sampling.phases(sampling.draw(1, seed=0))
    assert phases["jacobian"] > 0
    assert phases["linear"] > 0
    assert phases["jacobian"] + phases["linear"] <= phases["total"]


@pytest.mark.parametrize("sampling", ["latent"], indirect=True)
def test_the_paper_method_is_timed_within_a_budget(sampling, monkeypatch):
    draws = sampling.draw(2, seed=0).split(1)
    reference = torch.cat([sampling.loop(draw) for draw in draws])
    found = sampling.time_printed(draws, reference, budget=60)
    assert len(found["seconds"]) == len(found["error"]) == 2
    assert found["phases"]["total"] < 60
    assert "repeats" not in found
    runs = []
    printed = Sampling.printed
    monkeypatch.setattr(Sampling, "printed", lambda self, *a, **k: runs.append(1) or printed(self, *a, **k))
    for set_up, count, remark in ((0.0, 1, "first run took far too long"), (60.0, 2, "second run took too long, too")):
        monkeypatch.setattr(sampling_module, "SET_UP", set_up)
        runs.clear()
        found = sampling.time_printed(draws, reference, budget=1e-6)
        assert len(runs) == count  # none for the phases beside the one that is kept
        assert found["seconds"] == [found["phases"]["total"]]
        assert remark in found["repeats"]
        assert len(found["error"]) == 1
        assert max(found["error"]) < 1e-2
    record = diffusion_timing.time_printed(sampling, draws, reference, budget=1e-6)
    assert record["repeats"] == found["repeats"]


@pytest.mark.parametrize("sampling", ["latent"], indirect=True)
def test_the_paper_method_starts_from_the_path_of_gaussian_data_too(sampling):
    draws = sampling.draw(2, seed=0).split(1)
    reference = torch.cat([sampling.loop(draw) for draw in draws])
    record = diffusion_timing.time_newton(sampling, draws, reference, budget=60)
    assert len(record["iterations"]) == 2
    assert max(record["error"]) < 1e-2
    start = GaussianStart()
    assert record["iterations"] == [int(sampling.printed(draw, start=start).iterations.max()) for draw in draws]


@pytest.mark.parametrize("sampling", ["latent"], indirect=True)
def test_a_first_run_that_sets_up_is_not_the_one_that_counts(sampling, monkeypatch):
    draws = sampling.draw(2, seed=0).split(1)
    phases, taken = Sampling.phases, [5.0]  # of the first run; the others as they are

    def slow_at_first(self, *arguments):
        found, samples = phases(self, *arguments)
        return {**found, "total": taken.pop() if taken else found["total"]}, samples

    monkeypatch.setattr(Sampling, "phases", slow_at_first)
    found = sampling.time_printed(draws, sampling.loop(Draw.together(draws)), budget=4.0)
    assert len(found["seconds"]) == 2
    assert max(*found["seconds"], found["phases"]["total"]) < 4
    assert "repeats" not in found


def test_runs_end_with_the_budget_and_not_before_the_fewest():
    calls = []
    seconds, found = timed(lambda x: calls.append(x) or x + 1, range(9), torch.device("cpu"), budget=0.0, fewest=3)
    assert (calls, found, len(seconds)) == ([0, 1, 2], [1, 2, 3], 3)
    assert len(timed(abs, range(9), torch.device("cpu"))[0]) == 9


def test_draws_together_are_those_of_each(sampling):
    draws = [sampling.draw(count, seed=count) for count in (2, 3)]
    together = sampling.loop(Draw.together(draws))
    apart = torch.cat([sampling.loop(draw) for draw in draws])
    assert max(errors(together, apart)) < 1e-4


def test_the_noise_is_the_same_for_the_same_seed(sampling):
    one, other, third = (sampling.draw(2, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(one.added, other.added)
    assert not torch.equal(one.added, third.added)


def test_errors_after_every_iteration(sampling):
    """Going on by one iteration at a time is the same as stopping after so many."""
    draw = sampling.draw(1, seed=1)
    reference = sampling.loop(draw)
    curve = diffusion_iterations.newton_errors(sampling, draw, reference, 4)
    start = sampling.model.mean.expand(sampling.length, 1, *sampling.model.shape)
    for count in (1, 3):
        newton = paper_newton(stop=deeppcr.FixedIterations(count))
        found = errors(sampling.printed(draw, newton, start).final, reference)[0]
        assert curve[count] == pytest.approx(found, rel=0.05, abs=1e-5)
    assert len(curve) == 5
    assert curve[-1] < curve[0] / 10
    with pytest.warns(deeppcr.ConvergenceWarning):
        falling = diffusion_iterations.window_errors(sampling, draw, reference, 30)
    assert len(falling) == 31
    assert falling[-1] < 1e-3 < falling[1]


def test_networks_are_kept_and_shared(context, monkeypatch):
    first = latent_model(TRAINING, "digits", 4, context)
    again = Context(context.device, models=context.models)
    monkeypatch.setattr(denoisers.Denoising, "step", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(denoisers.Autoencoding, "step", lambda *_: pytest.fail("trained again"))
    second = latent_model(TRAINING, "digits", 4, again)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.test, second.test)
    z, t = first.train[:3], torch.full((3,), 0.5, device=context.device)
    assert torch.equal(first.network(z, t), second.network(z, t))
    assert first.training == second.training
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        latent_model(TrainingSettings("tiny", seed=1), "digits", 4, Context(context.device, models=context.models))


def dark_pictures(device) -> torch.Tensor:
    """A bright square in one of four corners, and black."""
    squares = torch.full((256, 1, 8, 8), -1.0)
    for i in range(256):
        top, left = 4 * (i % 2), 4 * (i // 2 % 2)
        squares[i, 0, top : top + 3, left : left + 3] = 1.0
    return squares.to(device)


def autoencoding(device, rate: float) -> denoisers.Autoencoding:
    preset = replace(denoisers.PRESETS["short"], autoencoder_batch=32, autoencoder_rate=rate, base=8)
    torch.manual_seed(0)
    autoencoder = models.Autoencoder(8, side=8, base=8, hidden=64).to(device)
    return denoisers.Autoencoding(autoencoder, dark_pictures(device), preset)


def test_dark_images_are_learnt(context):
    """From grey, they drove every pixel to black for good."""
    task, generator = autoencoding(context.device, rate=2e-3), torch.Generator(context.device).manual_seed(0)
    first = task.step(generator)[0]
    for _ in range(30):
        last = task.step(generator)[0]
    assert last < 0.5 * first
    task.finish(generator)
    images = task.autoencoder.decode(task.autoencoder.encode(task.images))
    assert images.std() > 0.1


def test_an_autoencoder_that_learnt_nothing_is_no_good(context):
    task = autoencoding(context.device, rate=0.0)
    with torch.no_grad():
        task.autoencoder.decoder.layers[-2].bias.fill_(-20.0)
    with pytest.raises(PaperError, match="has learnt nothing"):
        task.finish(torch.Generator(context.device).manual_seed(0))


def test_a_network_that_was_cut_short(context, tmp_path):
    pixel_model(TRAINING, "digits", 4, True, context)
    for whole in context.models.glob("pixel-*.safetensors"):  # and what other tests have trained
        (tmp_path / whole.name).write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(PaperError, match=f"{tmp_path}.*: cut short"):
        pixel_model(TRAINING, "digits", 4, True, Context(context.device, models=tmp_path))


def test_latents_are_white_and_decode_to_images(context):
    model = latent_model(TRAINING, "digits", 4, context)
    assert torch.allclose(torch.cov(model.train.mT).cpu(), torch.eye(4), atol=0.2)
    assert model.decode(model.test).shape == (len(model.test), 1, 8, 8)
    conditional = pixel_model(TRAINING, "digits", 4, True, context)
    assert conditional.class_means.shape == (10, 1, 4, 4)
    threes = conditional.train[conditional.labels == 3]
    assert torch.allclose(conditional.class_means[3], threes.mean(0))


def test_training_lowers_the_loss(context):
    curve = pixel_model(TRAINING, "digits", 4, True, context).training["denoiser"]["curves"]["noise"]
    assert curve[-1] < 0.5 * curve[0]


def test_distances_of_known_distributions():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    data = data @ torch.linalg.cholesky(torch.cov(data.mT)).inverse().mT  # covariance 1
    reference = frechet.Reference(data)
    assert reference.distance(data) < 1e-6
    assert reference.distance(3 * data - 2 * data.mean(0)) == pytest.approx(2 * 3**0.5, rel=1e-6)  # sum of (3 - 1)^2
    turned = data @ torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    assert reference.distance(turned - turned.mean(0) + data.mean(0)) < 1e-6


def test_the_bootstrap_pairs_the_samples():
    generator = torch.Generator().manual_seed(0)
    data, samples = (torch.randn(500, 2, generator=generator) for _ in range(2))
    same = frechet.compare(data, samples, samples, draws=20, seed=0)
    assert same["difference"] == 0
    assert same["difference_interval"] == [0, 0]
    low, high = same["sequential_interval"]
    assert low < same["sequential"] < high
    moved = frechet.compare(data, samples, samples + 1, draws=20, seed=0)
    low, high = moved["difference_interval"]
    assert 0.5 < low < moved["difference"] < high


def test_the_interval_is_about_what_was_found():
    """With many dimensions for its samples, the bootstrap by itself lies beside it."""
    data, samples = (torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    found = frechet.compare(data, samples, samples, draws=50, seed=0)
    low, high = found["parallel_interval"]
    assert low < found["parallel"] < high
    assert high - low < 0.2 * found["parallel"]


def test_pictures_come_back():
    images = torch.rand(3, 3, 8, 8) * 2 - 1
    found = unpack(pack(images))
    assert found.shape == images.shape
    assert (found.float() / 127.5 - 1 - images).abs().max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize("module", [pixel_diffusion, diffusion_iterations, diffusion_guess])
def test_sides_that_do_not_fit(module, context):
    for side in (3, 16):
        settings = replace(module.QUICK, sides=(side,))
        with pytest.raises(PaperError, match=f"got {side}"):
            list(module.cells(settings, Context(context.device)))


def test_colour_takes_its_own_widths():
    found = list(latent_diffusion.models_of(latent_diffusion.FULL))
    assert found == [("mnist", 16), ("mnist", 32), ("mnist", 64), ("mnist", 128), ("cifar10", 128), ("cifar10", 256)]


def test_a_cell_of_latent_diffusion(context):
    settings = replace(latent_diffusion.QUICK, **{**TINY["latent-diffusion"], "budget": 60.0})
    record = latent_diffusion.measure({"data": "digits", "w": 4, "L": 32}, settings, context)
    assert len(record["loop"]["seconds"]) == settings.loop_runs
    assert len(record["auto"]["seconds"]) == len(record["auto"]["error"]) == settings.runs
    assert max(record["auto"]["error"]) < settings.tolerance
    assert ("graph" in record) == (context.device.type == "cuda")
    distance = record["frechet"]
    assert abs(distance["difference"]) < 1e-3 * distance["sequential"] + 1e-4
    both = [unpack(each).int() for each in record["pictures"].values()]
    assert (both[0] - both[1]).abs().max() <= 1


def test_a_summary_is_made_of_medians():
    settings = replace(latent_diffusion.FULL, widths=(16,), steps=(256,), data=("mnist",))
    result = made_up_diffusion.latent_result(settings)
    (entry,) = diffusion_timing.summarise(result["records"])
    record = result["records"][1]
    seconds = {name: sorted(record[name]["seconds"]) for name in ("loop", "graph", "auto")}
    middle = {name: (each[(len(each) - 1) // 2] + each[len(each) // 2]) / 2 for name, each in seconds.items()}
    assert entry["auto"]["over_loop"] == pytest.approx(middle["loop"] / middle["auto"])
    assert entry["auto"]["over_graph"] == pytest.approx(middle["graph"] / middle["auto"])
    assert entry["auto"]["error"] == max(record["auto"]["error"])
    assert entry["batch"]["over_fastest_loop"] == pytest.approx(0.8)  # the graph's second over 1.25


def test_starts_share_the_loop(context, monkeypatch):
    changed = {"printed_sides": (8,), "runs": 2, "loop_runs": 2}
    settings = replace(diffusion_guess.QUICK, **{**TINY["diffusion-guess"], **changed})
    looped, loop = [], Sampling.loop
    monkeypatch.setattr(Sampling, "loop", lambda self, draw: looped.append(1) or loop(self, draw))
    cell = {"side": 4, "conditional": "yes", "L": 32}
    one, other = (diffusion_guess.measure({**cell, "guess": guess}, settings, context) for guess in ("mean", "zeros"))
    assert len(looped) == 3  # all samples at once, and two by one
    assert one["loop"] == other["loop"]
    assert len(one["loop"]["seconds"]) == len(one["auto"]["seconds"]) == 2
    assert "printed" not in one
    entries = diffusion_guess.summarise([{**cell, "guess": "mean", **one}])
    assert len(diffusion_guess.lines(entries)) == 2
    settings = replace(settings, printed_sides=(4,))
    assert "printed" in diffusion_guess.measure({**cell, "guess": "mean"}, settings, context)


def test_the_start_of_a_class(context):
    settings = replace(diffusion_guess.QUICK, **TINY["diffusion-guess"])
    model = pixel_model(TRAINING, "digits", 4, True, context)
    assert diffusion_guess.start_of("class-mean", model, settings).mean.shape == (10, 1, 4, 4)
    assert diffusion_guess.start_of("zeros", model, settings).mean.abs().max() == 0
    sampling = Sampling(model, 32, settings.tolerance)
    draw = sampling.draw(1, seed=0)
    for guess in diffusion_guess.GUESSES:
        start = diffusion_guess.start_of(guess, model, settings)
        assert max(errors(sampling.parallel(draw, start=start).final, sampling.loop(draw))) < 1e-3
