"""The benchmark of recipes: what it checks before it times, and what it writes."""

import sys
from dataclasses import replace

import pytest
import torch

from scripts import script

bench = script("benchmarks", "recipes")


@pytest.fixture
def run(bench, dry_run, monkeypatch):
    monkeypatch.setattr(sys.modules["kernels"], "LONG", 0.0)  # nothing is repeated
    monkeypatch.setattr(bench, "WARM_UP", 0)
    return dry_run


def test_a_dry_run(run, bench, device, capsys):
    code, record = run()
    assert code == 0
    assert record["experiment"] == "recipes-quick"
    assert record["commit"] == "abc1234"
    for method in ("recipe", "loop"):
        cases = [case for case in record["cases"] if case["method"] == method]
        assert [case["parameters"]["recipe"] for case in cases] == [recipe.name for recipe in bench.RECIPES]
        assert all(case["passed"] and case["seconds"] for case in cases)
    assert [target["limit"] for target in record["targets"]] == [3.0, 1.0, 0.06]
    assert all((target["value"] is not None) == (device.type == "cuda") for target in record["targets"])
    assert ("not measured" in capsys.readouterr().out) == (device.type != "cuda")


def test_what_is_wrong_is_not_timed(run, monkeypatch):
    gae = sys.modules["gae"]
    right = gae.gae
    monkeypatch.setattr(gae, "gae", lambda *given, **settings: 1.001 * right(*given, **settings))
    code, record = run("--only", "gae")
    assert code == 1
    (wrong,) = (case for case in record["cases"] if case["method"] == "recipe")
    assert wrong["error"] > 1
    assert not wrong["passed"]
    assert wrong["seconds"] == []


def test_a_loop_in_parts_is_scaled(run, bench, monkeypatch):
    monkeypatch.setattr(bench, "PART", 13)
    _, record = run("--only", "gae")
    assert next(case for case in record["cases"] if case["method"] == "loop")["scale"] == 5


def test_what_is_captured_is_right(bench, device):
    """Whether or not a device can capture it."""
    inside = []
    for recipe in bench.RECIPES:
        torch.manual_seed(0)
        made = recipe.make(device, **recipe.small)
        if made.inside is not None:
            inside.append(recipe.name)
            error = bench.relative_error([made.inside()()], [made.right().to(device)])
            assert error <= recipe.error, recipe.name
    assert {recipe.name for recipe in bench.RECIPES if recipe.limits} <= set(inside)


def test_targets_are_ratios_or_milliseconds(bench):
    recipe = replace(bench.RECIPES[0], limits=[("a", 2.0, "b"), ("a", 3.0, None), ("c", 1.0, None), ("a", 1.0, "c")])
    cases = [
        bench.Case("recipes", {}, name, 1.0, passed=True, seconds=[2 * least, least])
        for name, least in (("a", 4e-3), ("b", 1e-3))
    ]
    claims = bench.claims_of(recipe, cases)
    assert [claim.value for claim in claims] == pytest.approx([4.0, 4.0, None, None])
    assert [claim.name for claim in claims][:2] == ["ode: a, over b", "ode: a, ms"]


def test_an_unknown_recipe_is_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "soup"])
    assert "no such recipe: soup" in capsys.readouterr().err
