"""Results that were made up, as the paper's claims are read off them."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import made_up
from deeppcr_paper import mlp_timing, resnet_training
from deeppcr_paper.claims.results import Finished

TIMING = replace(mlp_timing.FULL, depths=(16, 64, 1024, 2**14), widths=(2, 16, 256))
TRAINING = replace(resnet_training.FULL, depths=(64, 128), seeds=2, epochs=8)


def finished(content, name="made.json", **changes):
    return Finished(Path(name), {"end": "2026-01-02T00:00:00+00:00", "commit": "abc", **content, **changes})


def by_what(checks, part):
    (found,) = [check for check in checks if part in check.what]
    return found


def trained(**changes):
    """With the same losses in both modes: what was made up has noise."""
    result = finished(made_up.resnet_training_result(replace(TRAINING, **changes), points=20))
    for record in result.records:
        if "runs" in record:
            for run in record["runs"].values():
                run["curves"]["loss"] = [0.3] * 20
    return result
