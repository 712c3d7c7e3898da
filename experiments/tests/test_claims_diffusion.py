"""Verdicts follow the numbers: diffusion."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from claims_support import by_what
from deeppcr_paper.claims import diffusion, findings
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


def sampled(scale=1.0, paper=diffusion.LATENT, size="w", apart=0.0, **more):
    """Entries at ``scale`` times the paper's speed-ups, with its iterations and errors."""
    entries = []
    for (length, width), (speedup, count, error) in paper.items():
        entry = {"data": "mnist", size: width, "L": length, **more}
        entry["seconds"] = {"loop": 1.0, "graph": 0.2, "printed": 1 / (scale * speedup), "auto": 0.01}
        entry["printed"] = {"over_loop": scale * speedup, "iterations": count / scale, **off(error / scale)}
        entry["newton"] = {"over_loop": scale * speedup, "iterations": 0.9 * count / scale, **off(error / scale)}
        entry["auto"] = {"over_loop": 100.0, "over_graph": 20.0, "iterations": 15.0, **off(1e-4)}
        entry["batch"] = {"samples": 64, "over_fastest_loop": 0.5}
        entry["frechet"] = {"sequential": 2.0, "difference": apart, "sequential_interval": [1.9, 2.1]}
        entries.append(entry)
    return entries


def summed(name, entries, records=()):
    settings = {"seed": 0, "data": "mnist"}
    content = {"experiment": name, "device": "cuda", "settings": settings, "records": list(records), "summary": entries}
    return Summed(Path(f"{name}.json"), {"end": "2026-01-02", "commit": "abc", **content})


def test_latent_diffusion():
    good, bad = (summed("latent-diffusion", sampled(scale, apart=apart)) for scale, apart in ((1, 0.05), (0.5, 0.3)))
    for read in (diffusion.headline, diffusion.latents, diffusion.timing_table(diffusion.LATENT)):
        assert verdict(read(good)) is Verdict.AGREES
        assert (
            by_what(read(bad), "as printed over the eager loop" if "table" not in str(read) else "speed-up").holds == NO
        )
    assert by_what(diffusion.latents(bad), "distances").holds == NO
    assert by_what(diffusion.timing_table(diffusion.LATENT)(bad), "iterations").ours == "0 of 12 rows"
    rows = [" | ".join(row) for row in diffusion.timing_rows(diffusion.LATENT)(good).rows]
    assert (
        "w = 16 | 1,024 | 11.22× | 13.4 | 0.00523 | 11× | 13.4 (7) | 5.2·10⁻⁴ | 0.00523 | 12.1 (7) | 5.2·10⁻⁴ | 0.00523 | 100× | 20× | 15.0 (7) | 10⁻⁵ | 10⁻⁴"
        in rows
    )
    assert by_what(diffusion.timing_table(diffusion.LATENT)(bad), "path of Gaussian data").ours == "0 of 12 rows"
    for entry in good.summary:
        del entry["newton"]
    assert by_what(diffusion.timing_table(diffusion.LATENT)(good), "path of Gaussian data").holds == OPEN
    table = diffusion.timing_rows(diffusion.LATENT)(good)
    assert table.rows[0][8:13] == ["0.00195", "–", "–", "–", "100×"]
    assert {len(row) for row in table.rows} == {len(table.heads)}
    assert verdict(diffusion.pictures(good)) is Verdict.AGREES
    assert [check.holds for check in diffusion.other_data(good)] == [OPEN, OPEN]
    colour = [{**entry, "data": "cifar10"} for entry in sampled()]
    assert by_what(diffusion.other_data(summed("latent-diffusion", colour)), "CIFAR-10, as printed").holds == YES
    assert "MNIST: yes, they differ by at most 0.05 of 2" in findings.distances(good)
    assert "MNIST: no, they differ by at most 0.3 of 2" in findings.distances(bad)
    shares = [{"w": 16, "L": 256, "printed": {"phases": {"jacobian": part, "total": 1.0}}} for part in (0.02, 0.6)]
    assert diffusion.jacobians(summed("latent-diffusion", [], shares[:1]))[0].holds == YES
    assert (
        diffusion.jacobians(summed("latent-diffusion", [], shares))[0].ours
        == "2% (w = 16, L = 256) to 60% (w = 16, L = 256)"
    )
    assert "diffusion, latents of MNIST, 1,024 × 1 × 128 | 1 s (100×)" in headline._samples(good)[0]


def test_pixel_diffusion_with_and_without_classes():
    entries = sampled(1, diffusion.PIXEL, "side", conditional="no") + sampled(
        1.2, diffusion.PIXEL, "side", conditional="yes"
    )
    result = summed("pixel-diffusion", entries)
    assert verdict(diffusion.timing_table(diffusion.PIXEL)(result)) is Verdict.AGREES
    assert diffusion.classes(result)[0].holds == YES
    assert findings.classes(result).startswith(
        "As printed yes, in 9 of 9 sizes (7 samples each); in less time in 9 of 9; they take no more iterations in 9 of 9"
    )
    entries[0]["printed"]["over_loop"] *= 2
    gain, few, *_ = diffusion.classes(result)
    assert (gain.holds, few.holds, few.ours[:14]) == (NO, "", "in 9 of 9 size")
    assert findings.classes(result).startswith("As printed not always, in 8 of 9 sizes")
    entries[0]["printed"]["iterations"] /= 2
    assert diffusion.classes(result)[1].ours.startswith("in 8 of 9")
    for entry in entries:
        del entry["printed"], entry["auto"]
    assert findings.classes(result) == "Not timed."
    assert "diffusion, images, 1,024 × 1 × 256 | 1 s (100×)" in headline._samples(result)[0]


def test_diffusion_iterations_and_guesses():
    def entry(space, count, last):
        each = {"iterations": count, "last": last}
        return {"space": space, "w" if space == "latent" else "side": 16, "L": 1024, "printed": each, "auto": each}

    result = summed("diffusion-iterations", [entry("latent", 14, 1e-4), entry("pixel", None, 0.1)])
    assert diffusion.iterations("latent")(result)[0].holds == YES
    assert [check.holds for check in diffusion.iterations("pixel")(result)] == [NO, "", YES]
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
    assert (near.holds, near.why[:22]) == (YES, "The two are closer tha")
    guesses[0]["printed"] |= {"iterations": 9.0, "samples": 2}
    guesses.append({**guesses[0], "side": 8, "auto": guesses[0]["auto"], "printed": guesses[0]["printed"]})
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].ours == (
        "9.0 from mean, 10.0 from class-mean (4×4, 8×8; 2 to 3 samples of each size and start)"
    )
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].holds == NO
