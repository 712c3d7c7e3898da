"""Verdicts follow the numbers: diffusion."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from claims_support import by_what
from deeppcr_paper import diffusion_timing
from deeppcr_paper.claims import diffusion
from deeppcr_paper.claims.check import NO, OPEN, YES, Verdict, verdict
from deeppcr_paper.claims.results import Finished
from deeppcr_paper.walkthrough import headline


class Summed(Finished):
    """A result whose summary is given."""

    @property
    def summary(self):
        return self.content["summary"]


def off(largest):
    return {"mean_error": largest / 10, "error": largest, "samples": 7}


def sampled(scale=1.5, paper=diffusion.LATENT, size="w", apart=0.0, **more):
    """Entries at ``scale`` times the paper's speed-ups on the clock, twice that by its proxy; fewer iterations and smaller errors."""
    entries = []
    for (length, width), (speedup, count, error) in paper.items():
        entry = {"data": "mnist", size: width, "L": length, **more}
        entry["seconds"] = {"loop": 1.0, "graph": 0.2, "printed": 1 / (scale * speedup), "auto": 0.01}
        entry["printed"] = {"over_loop": scale * speedup, "iterations": count / scale, **off(error / scale)}
        entry["printed"]["proxy_over_loop"] = 2 * scale * speedup
        entry["auto"] = {"over_loop": 100.0, "over_graph": 20.0, "iterations": 15.0, **off(1e-4)}
        entry["restless"] = []
        entry["batch"] = {"samples": 64, "over_fastest_loop": 0.5}
        entry["frechet"] = {"sequential": 2.0, "difference": apart, "sequential_interval": [1.9, 2.1]}
        entries.append(entry)
    return entries


def summed(name, entries, records=()):
    settings = {"seed": 0, "data": "mnist"}
    content = {"experiment": name, "device": "cuda", "settings": settings, "records": list(records), "summary": entries}
    return Summed(Path(f"{name}.json"), {"end": "2026-01-02", "commit": "abc", **content})


def test_latent_diffusion():
    good, bad = (summed("latent-diffusion", sampled(scale)) for scale in (1.5, 0.25))
    for read in (diffusion.headline, diffusion.latents, diffusion.timing_table(diffusion.LATENT)):
        assert verdict(read(good)) is Verdict.AGREES
        assert {check.holds for check in read(bad) if check.rule == "speed-up"} == {NO}
    assert by_what(diffusion.timing_table(diffusion.LATENT)(bad), "iterations").printed == "0 of 12 rows (7 samples)"
    table = diffusion.timing_rows(diffusion.LATENT)(good)
    rows = [" | ".join(row) for row in table.rows]
    assert "w = 16 | 1,024 | 11.22× | 34× | 17× | 100× | 13.4 | 8.9 | 15.0 | 0.00523 | 0.00349 | 10⁻⁴" in rows
    assert {len(row) for row in table.rows} == {len(table.heads)}
    assert verdict(diffusion.pictures(good)) is Verdict.AGREES
    assert [check.holds for check in diffusion.other_data(good)] == [OPEN, OPEN]
    colour = [{**entry, "data": "cifar10"} for entry in sampled()]
    found = diffusion.other_data(summed("latent-diffusion", colour))
    assert [check.holds for check in found if check.what.startswith("CIFAR-10, over the eager loop")] == [YES, YES]
    assert "diffusion, latents of MNIST, 1,024 × 1 × 128 | 1 s (100×)" in headline._samples(good)[0]


def test_the_proxy_and_the_clock_are_judged_each_by_itself():
    result = summed("latent-diffusion", sampled(0.55))
    held = {check.what: check.holds for check in diffusion.headline(result)}
    assert held == {diffusion.PROXY: OPEN, diffusion.CLOCK: NO}, "1.1 and 0.55 of the paper's"
    result = summed("latent-diffusion", sampled(0.65))
    held = {check.what: check.holds for check in diffusion.headline(result)}
    assert held == {diffusion.PROXY: YES, diffusion.CLOCK: NO}
    entries = sampled()
    for entry in entries:
        entry["auto"]["over_loop"] = 1e-3
    assert {check.holds for check in diffusion.headline(summed("latent-diffusion", entries))} == {YES}, (
        "not the defaults"
    )


def test_the_best_is_not_read_off_restless_times():
    entries = sampled()
    loud = entries[2]
    loud["printed"]["over_loop"] = 99.0

    def best():
        return by_what(diffusion.headline(summed("latent-diffusion", entries)), diffusion.CLOCK)

    for restless, is_best in (([], True), (["loop"], False), (["printed"], False), (["graph"], True)):
        loud["restless"] = restless
        assert best().printed.startswith("99× (w = 16, L = 1,024: ") == is_best, restless
    assert best().loop == "CUDA graph: defaults 20×"
    for entry in entries:
        entry["restless"] = ["loop"]
    assert (best().printed, best().holds) == ("times too restless", OPEN)


def test_the_middle_half_of_times_tells_whether_they_are_calm():
    record = {"data": "mnist", "w": 4, "L": 10, "loop": {"seconds": [1.0] * 8 + [9.0]}}
    record |= {
        "graph": {"seconds": [1.0, 1.0, 1.5, 1.5]},
        "batch": {"samples": 1, "seconds": {"loop": [1], "auto": [1]}},
    }
    (entry,) = diffusion_timing.summarise([record])
    assert entry["restless"] == ["graph"]


def test_the_proxy_counts_one_steps_jacobian():
    record = {
        "data": "mnist",
        "w": 4,
        "L": 10,
        "loop": {"seconds": [2.0]},
        "batch": {"samples": 1, "seconds": {"loop": [1], "auto": [1]}},
    }
    record["printed"] = {
        "seconds": [4.0], "iterations": [3], "evaluations": [30], "error": [0.0], "results": ["CONVERGED"],
        "phases": {"jacobian": 3.0, "linear": 0.25, "total": 4.0},
    }  # fmt: skip
    (entry,) = diffusion_timing.summarise([record])
    assert entry["printed"]["proxy_over_loop"] == pytest.approx(2.0 / 1.3)
    assert entry["printed"]["over_loop"] == 0.5
    proxy, clock = diffusion.jacobians(summed("latent-diffusion", [], [record]))
    assert (proxy.printed[:3], proxy.holds) == ("23%", NO)
    assert (clock.printed[:3], clock.holds) == ("75%", NO)
    record["printed"]["phases"]["jacobian"] = 1.0
    assert diffusion.jacobians(summed("latent-diffusion", [], [record]))[0].holds == YES


def test_distances_are_bounded_by_the_errors_as_printed():
    near, far = sampled(), sampled()
    for entry in near + far:
        entry["printed"]["error"] = 0.09 / entry["w"] ** 0.5
    for entry in far[:1]:
        entry["printed"]["error"] = 0.11 / entry["w"] ** 0.5
    assert diffusion.distance(near).holds == YES
    assert diffusion.distance(far).holds == NO
    assert "= 0.11, noise ±0.1 (w = 16, L = 256)" in diffusion.distance(far).printed
    apart = diffusion.distance(sampled(apart=0.3))
    assert ("at most 0.3 of 2" in apart.defaults, apart.holds) == (True, YES), "the defaults decide nothing"


def test_pixel_diffusion_with_and_without_classes():
    def read(gain):
        entries = sampled(1.5, diffusion.PIXEL, "side", conditional="no")
        entries += sampled(1.5 * gain, diffusion.PIXEL, "side", conditional="yes")
        return summed("pixel-diffusion", entries)

    result = read(2)
    assert verdict(diffusion.timing_table(diffusion.PIXEL)(result)) is Verdict.AGREES
    gain, few = diffusion.classes(result)
    assert (gain.holds, gain.printed) == (YES, "in 9 of 9 sizes (7 samples)")
    assert few.holds == ""
    assert diffusion.classes(read(1.1))[0].holds == OPEN, "within the noise of four times"
    assert diffusion.classes(read(0.5))[0].holds == NO
    for entry in result.summary:
        del entry["printed"], entry["auto"]
    assert diffusion.classes(result)[0].printed == "not timed"
    assert "diffusion, images, 1,024 × 1 × 256 | 1 s (100×)" in headline._samples(read(1))[0]


def test_diffusion_iterations_and_guesses():
    def entry(space, count, last):
        each = {"iterations": count, "last": last, "samples": 3}
        return {"space": space, "w" if space == "latent" else "side": 16, "L": 1024, "printed": each, "auto": each}

    result = summed("diffusion-iterations", [entry("latent", 14, 1e-4), entry("pixel", None, 0.1)])
    assert diffusion.iterations("latent")(result)[0].holds == YES
    assert diffusion.iterations("latent")(result)[0].printed == "14 to 14 (3 samples)"
    assert [check.holds for check in diffusion.iterations("pixel")(result)] == [NO, YES]
    late = summed("diffusion-iterations", [entry("latent", 15, 1e-4)])
    assert diffusion.iterations("latent")(late)[0].holds == NO
    assert diffusion.iterations("pixel")(late)[0].holds == OPEN
    starts = {"mean": 12.0, "class-mean": 10.0}
    guesses = [
        {
            "side": 4,
            "conditional": "yes",
            "L": 64,
            "guess": name,
            **{m: {"iterations": n, "samples": 3} for m in ("printed", "auto")},
        }
        for name, n in starts.items()
    ]
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].holds == YES
    guesses[0]["printed"]["iterations"] = 10.4
    near = diffusion.guesses(summed("diffusion-guess", guesses))[0]
    assert (near.holds, near.why[:22]) == (OPEN, "So few samples do not ")
    guesses[0]["printed"] |= {"iterations": 9.0, "samples": 2}
    guesses.append({**guesses[0], "side": 8, "auto": guesses[0]["auto"], "printed": guesses[0]["printed"]})
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].printed == (
        "mean 9.0, class-mean 10.0 (2 to 3 samples)"
    )
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].holds == NO
