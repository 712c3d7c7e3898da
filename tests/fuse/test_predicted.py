"""What ``deeppcr.predict`` says of kernels, and what ``solve`` does then."""

import sys

import pytest
import torch

import deeppcr
from deeppcr import runtime
from deeppcr.ways import fused, plan

predict = sys.modules["deeppcr.predict"]
KERNELS = ("loop kernel", "kernels")


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch, device):
    deeppcr.clear_caches()
    monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type})
    monkeypatch.setattr(predict, "_WORTH_IMPORTING", predict._WORTH_TRACING)
    yield
    deeppcr.clear_caches()


def loop(device, function=torch.sin, length=40):
    xs = torch.rand(length, 2, 3, generator=torch.Generator().manual_seed(0)).to(device)
    return (lambda z, x: 0.5 * function(z) + x), torch.zeros(2, 3, device=device), xs


def test_a_short_loop_is_not_worth_a_look(device):
    found = deeppcr.predict(*loop(device))
    assert all(found.basis[way].startswith("not looked at") for way in KERNELS)
    assert not set(KERNELS) & set(found.seconds)
    assert found.way == "loop"


def test_a_step_that_is_covered(device, monkeypatch):
    monkeypatch.setattr(predict, "_WORTH_IMPORTING", 0.0)
    monkeypatch.setattr(predict, "_WORTH_TRACING", 0.0)
    arguments = loop(device, length=300)
    found = deeppcr.predict(*arguments)
    assert [found.basis[way] for way in KERNELS] == ["expected", "expected"]
    assert 0 < found.seconds["loop kernel"] < found.seconds["kernels"] < 1e-3
    assert (found.way, found.why) == ("kernels", "the step has kernels")
    solution = deeppcr.solve(*arguments)
    assert "fused kernels" in solution.plan.evaluation
    assert solution.result is deeppcr.Result.CONVERGED
    torch.testing.assert_close(solution.states, deeppcr.solve(*arguments, solver=deeppcr.Loop()).states)
    deeppcr.clear_caches()
    assert not len(fused._steps) + len(fused._seen) + len(plan._records)
    assert deeppcr.ways.fused.Call(*arguments, None, None).fused is None


def test_so_few_steps_are_one_chunk(device, monkeypatch):
    monkeypatch.setattr(predict, "_WORTH_TRACING", 0.0)
    monkeypatch.setattr(predict, "_WORTH_IMPORTING", 0.0)
    for function in (torch.sin, lambda z: torch.sin(z.roll(1, -1))):
        arguments = loop(device, function, length=120)
        found = deeppcr.predict(*arguments)
        assert found.way == "loop kernel"
        assert "one chunk" in found.basis["kernels"]
        solution = deeppcr.solve(*arguments)
        assert (solution.result, int(solution.iterations.max())) == (deeppcr.Result.LOOP, 0)
        assert "so few steps take less than chunks that join" in str(solution.plan)
        # Who asks for Newton's method gets it.
        asked = deeppcr.solve(*arguments, solver=deeppcr.Newton())
        assert (asked.result, asked.iterations.min() > 0) == (deeppcr.Result.CONVERGED, True)
        torch.testing.assert_close(asked.states, solution.states)


def test_a_step_that_is_not_covered(device, monkeypatch):
    monkeypatch.setattr(predict, "_WORTH_IMPORTING", 0.0)
    monkeypatch.setattr(predict, "_WORTH_TRACING", 0.0)
    found = deeppcr.predict(*loop(device, lambda z: z.sort(-1).values))
    assert all("sort" in found.basis[way] for way in KERNELS)
    assert found.way == "loop"


def test_kernels_are_made_for_what_comes_again(device, monkeypatch):
    monkeypatch.setattr(plan, "_WORTH_KERNELS", 0.0)
    arguments = loop(device)
    assert deeppcr.predict(*arguments).way == "loop"
    assert deeppcr.solve(*arguments).result is deeppcr.Result.LOOP
    found = deeppcr.predict(*arguments)
    assert found.way == "kernels"
    assert "if they cover the step" in found.why
    assert "fused kernels" in deeppcr.solve(*arguments).plan.evaluation


def test_without_numpy_there_are_no_kernels(device, monkeypatch):
    monkeypatch.setattr(runtime, "_NUMPY", False)
    found = deeppcr.predict(*loop(device))
    assert all(found.basis[way] == "kernels need a CUDA device, Triton and NumPy" for way in KERNELS)
    with pytest.raises(ValueError, match="NumPy"):
        deeppcr.solve(*loop(device), solver=deeppcr.Loop(by="kernel"))


def test_the_source_is_a_function_however_often_it_is_asked_for():
    for _ in range(2):
        assert "v0 = sin(z0)" in deeppcr.fuse.source(lambda z: torch.sin(z), torch.zeros(4))
    assert "def sweep" in deeppcr.fuse.source(lambda z: torch.sin(z), torch.zeros(4), backward=True)


def test_what_the_default_has_learnt_is_known_to_newton(device, monkeypatch):
    """As of a solve that is captured later, whose passes are counted by one that was not."""
    monkeypatch.setattr(plan, "_WORTH_KERNELS", 0.0)
    arguments = loop(device, length=300)
    for _ in range(3):
        default = deeppcr.solve(*arguments)
    call = fused.Call(*arguments, None, None)
    (key,) = call.fused.kinds._kept
    asked = deeppcr.solve(*arguments, solver=deeppcr.Newton())
    assert [*call.fused.kinds._kept] == [key]
    assert default.plan.chunk == asked.plan.chunk < 300
