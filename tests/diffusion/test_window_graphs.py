"""What a window keeps for its next run: buffers, calls filled up to few sizes, graphs; and where there are none, why."""

import copy
from types import SimpleNamespace

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDPM, CoarseStart, GaussianStart, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.start import as_start
from deeppcr.diffusion.window import prepared as window
from deeppcr.graphs.cache import prepared_samplers
from deeppcr.solution import Plan
from diffusion import digits
from diffusion.recorded import Recorded
from diffusion.test_sample import noise_for


@pytest.mark.parametrize("start", [GaussianStart(), CoarseStart(stride=8)])
def test_runs_on_kept_buffers_with_calls_filled_up(net, start, device, monkeypatch):
    """What CUDA graphs replay, without them: the buffers of the first run, rows filled up, other noise and classes."""
    monkeypatch.setattr(window, "Replayed", Recorded)
    schedule, solver, prepared, earlier = digits.TRAINING.take(100), Window(size=48), None, []
    for seed, classes in ((0, [1, 2, 3]), (1, [4, 4, 9]), (2, [0, 8, 7])):
        noise, classes = noise_for(3, 100, seed=seed, device=device), torch.tensor(classes, device=device)
        problem = Problem(net, DDPM().steps(schedule), noise, classes, 1.5, digits.NOTHING)
        with torch.no_grad():
            prepared = prepared or window.Prepared(solver, problem, digits.prior())
            outcome = prepared.run(solver, problem, start, Plan())
            loop = sample(net, schedule, noise, classes=classes, guidance=1.5, unconditional=10, solver=deeppcr.Loop())
        assert outcome.results == [Result.CONVERGED] * 3
        found = problem.unflatten(outcome.states[-1, ..., 0])
        assert (found - loop.final).abs().max() <= 1e-3
        assert problem.denoiser.classes is classes
        tensors = {name: each for name, each in vars(outcome).items() if isinstance(each, torch.Tensor)}
        earlier += [(name, each, each.clone()) for name, each in tensors.items()]
    assert len(earlier) == 3 * 7
    for name, each, was in earlier:  # which the next run is not to overwrite
        assert torch.equal(each, was), name
    assert prepared.runs == 3
    keys = prepared.replayed.keys
    assert keys[0] == ("begin", start, keys[1][2])
    assert [key for key in keys if key[0] != "iterate"] == [keys[0], ("finish",)] * 2
    counts = [key[1] for key in keys if key[0] == "iterate"]
    assert counts[0] == 3 * 48
    assert all(count % 5 == 0 for count in counts[1:] if count < 3 * 48)  # a 32nd of 3 x 48
    assert len(set(counts)) > 1


def test_a_start_that_was_given_is_not_replayed(net, device, monkeypatch):
    """It lies somewhere else in every run; the rest is replayed."""
    monkeypatch.setattr(window, "Replayed", Recorded)
    schedule, solver = digits.TRAINING.take(20), Window()
    problem = Problem(net, DDPM().steps(schedule), noise_for(2, 20, device=device))
    with torch.no_grad():
        prepared = window.Prepared(solver, problem, digits.prior())
        for _ in range(2):
            prepared.run(solver, problem, as_start(torch.zeros(20, 2, *problem.shape, device=device)), Plan())
    assert {name for name, *_ in prepared.replayed.keys} == {"iterate", "finish"}


def test_why_there_are_no_graphs(monkeypatch):
    """Autocast is no reason: what it casts is cast in the graphs."""
    at = {name: SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda")}
    assert Window().no_graphs(at["cpu"]) == "the noise is on the cpu"
    assert Window(graphs=False).no_graphs(at["cuda"]) == "graphs=False"
    assert Window().no_graphs(at["cuda"]) is None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert Window().no_graphs(at["cuda"]) is None


def test_the_plan_of_a_gpu_tells_about_its_graphs(net, device, monkeypatch):
    """Without one: what is replayed stands in for the graphs."""
    monkeypatch.setattr(window, "Replayed", Recorded)
    monkeypatch.setattr(Window, "no_graphs", lambda self, problem: None)
    solver, said = Window(), []
    for refusal in (None, None, "a host waits"):
        with torch.no_grad():
            if refusal:
                prepared_samplers.values()[0].replayed.refusal = refusal
            said.append(
                sample(net, digits.TRAINING.take(20), noise_for(1, 20, device=device), solver=solver).plan.notes
            )
    assert "no CUDA graphs: the first run of its kind; the next one is recorded" in said[0]
    assert "CUDA graphs" in said[1]
    assert "no CUDA graphs: a host waits" in said[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tf32", [None, 0.05])
@pytest.mark.parametrize("start", [None, CoarseStart(stride=16)])
def test_graphs_replay_what_was_computed(tf32, start):
    net = copy.deepcopy(digits.trained()).cuda()
    solver = Window(tf32=tf32)
    with torch.no_grad():
        for round in range(5):
            noise = noise_for(2, 200, seed=round, device="cuda")
            classes = torch.tensor([round, 9 - round], device="cuda")
            given = (net, digits.TRAINING, noise)
            found = sample(*given, classes=classes, jacobian=digits.prior(), solver=solver, start=start)
            loop = sample(*given, classes=classes, solver=deeppcr.Loop())
            assert found.result is Result.CONVERGED
            assert (found.final - loop.final).abs().max() <= 1e-3
            assert (0 < round < 4) == ("CUDA graphs" in found.plan.notes)  # not on the first run of its kind
            if round == 2:
                net.leave.weight.mul_(1.02)  # in place: the graphs that there are see it
            if round == 3:
                net.leave.weight = torch.nn.Parameter(0.98 * net.leave.weight)  # elsewhere: they are made anew
    assert len(prepared_samplers) == 2
