"""How long kernels take to compile: which they are, without a device, and what is written of them."""

import json
import subprocess

import pytest
import torch

from deeppcr import launch, runtime
from scripts import script

bench = script("benchmarks", "compile_time")


def test_the_kernels_of_a_loop_are_found_by_direction(bench):
    kept = runtime.KERNEL_DEVICES, launch.current_stream, launch.compile_side_by_side
    loop = next(each for each in bench.TABLE if each.name == "pendulum")
    with bench.as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "JITFunction", object)  # in the tests kernels are interpreted
        found = bench.kernels_of(loop, bench.shortened(loop, torch.device("cpu")))
    names = {direction: {each.kernel.__name__ for each in every} for direction, every in found.items()}
    assert names["forward"] == {"roll", "join"}
    assert names["forward and backward"] > {"sweep", "join"}
    assert kept == (runtime.KERNEL_DEVICES, launch.current_stream, launch.compile_side_by_side)


def test_other_instructions_are_a_failure(bench, monkeypatch, tmp_path, precision):
    """What is left out may change nothing: a second compilation that gives something else is told."""
    texts = iter(["add", "add", "add", "mul"])

    class Narrow:
        one_lane_a_thread = True

    asked = bench.Asked(Narrow, 1, (), 1, None)
    Narrow.__name__ = "roll"
    monkeypatch.setattr(bench, "kernels_of", lambda loop, inputs: {"forward": [asked], "forward and backward": [asked]})
    monkeypatch.setattr(bench, "compiled", lambda asked: (next(texts), 0.5))
    path = tmp_path / "found.json"
    assert bench.main(["pendulum", "--device", "cpu", "--json", str(path), "--commit", "abc1234"]) == 1
    found = json.loads(path.read_text())
    assert [case["same"] for case in found["cases"]] == [True, False]
    assert found["targets"] == [{"name": "pendulum: longest kernel, s", "value": 0.5, "limit": 10.0, "met": True}]


def test_a_second_process_has_a_limit_of_its_own(bench, monkeypatch, tmp_path):
    times = iter([8.0, 0.6])

    def run(program, env, **how):
        assert program[2:] == ["--device", "cuda", "--here", "pendulum"]
        assert env["TRITON_CACHE_DIR"]
        return subprocess.CompletedProcess(program, 0, f"warnings\n{next(times)}\n", "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    loop = next(each for each in bench.TABLE if each.name == "pendulum")
    options = bench.parser_of("", "").parse_args(["--json", str(tmp_path / "found.json"), "--commit", "abc1234"])
    results = bench.Results("compile-time", options)
    bench.with_a_gpu([loop], results)
    assert [(claim.value, claim.met) for claim in results.claims] == [(8.0, True), (0.6, False)]
    monkeypatch.setattr(
        bench.subprocess, "run", lambda program, **how: subprocess.CompletedProcess(program, 1, "", "x\nno kernels")
    )
    bench.with_a_gpu([loop] * 3, results, 2)
    assert [case.failure for case in results.cases] == ["", *["no kernels"] * 3]
