"""Recurrent modules whose calls repeat: which are replayed, and that nobody can tell but by the clock.

On a CPU, where there are neither kernels nor graphs, a loop stands for the kernels of a cell, and what was recorded is done again. On a GPU it is all as it is.
"""

import copy
import gc
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deeppcr
from again import Counts, record_here
from deeppcr import Newton, Result
from deeppcr import nn as ours
from deeppcr.bounded import Bounded
from deeppcr.graphs.cache import recorded_layers
from deeppcr.nn import diagonal, recurrent, repeated, report, torch_like
from deeppcr.solution import Solution
from recurrent_problems import error, leaves_of

STEPS, ROWS, FEATURES, HIDDEN = 9, 2, 3, 2
#: So many calls, and the next one is replayed.
BEFORE = 6


class Looped:
    """Stands for a solve by kernels: its states are those of the loop, and it is settled as long as these are finite."""

    fused = promised = None
    due = False

    def __init__(self, states):
        notes = torch.stack([~leaf.detach().isfinite().all() for leaf in leaves_of(states)]).any().int().reshape(1)
        self.passes = SimpleNamespace(notes=SimpleNamespace(memory=notes.double(), unsettled=notes), done=3)

    def is_due(self):
        return Looped.due

    def judged(self, counts, memory):
        return None if any(counts) else SimpleNamespace(passes=3)


def looped(module, mode, weights, x, start, reset, passes):
    assert passes == 3
    cell, xs = module._cell(weights), module._cell_type().project(x, weights)
    states, z = [], module._nested(start)
    for at in range(len(xs)):
        if reset is not None:
            anew = reset[at].unsqueeze(-1)
            z = module._nested(tuple(torch.where(anew, torch.zeros_like(leaf), leaf) for leaf in leaves_of(z)))
        z = cell(z, xs[at])
        states.append(z)
    found = module._nested(tuple(torch.stack(leaves) for leaves in zip(*map(leaves_of, states), strict=True)))
    return found, Looped(found)


def told_of(result, *notes):
    return replace(report.looped(STEPS, ROWS, torch.device("cpu"), *notes), result=result)


def ordinary(run):
    """A call as it goes on a GPU, by the loop: all but the first of a module are by kernels."""

    def ordinary_run(self, input, hx, reset, mode):
        before = self._passed
        found = run(self, input, hx, reset, "sequential")
        if mode != "sequential":
            result = Result.CONVERGED if leaves_of(found)[0].isfinite().all() else Result.NON_FINITE
            passed = (told_of(result, ""),) * len(self._all_weights)
            self.__dict__["_passed"] = passed if before else (STEPS, ROWS, input.device, "the first of its kind")
        return found

    return ordinary_run


@pytest.fixture(autouse=True)
def graphs(device, monkeypatch):
    record_here(device, monkeypatch)
    deeppcr.clear_caches()
    if device.type == "cpu":
        for kind in (torch_like.TorchLike, diagonal.Diagonal):
            monkeypatch.setattr(kind, "_run", ordinary(kind._run))
        monkeypatch.setattr(repeated, "_launched", looped)
        monkeypatch.setattr(repeated, "_passes_of", lambda passed: (3,) * len(passed) if _went_well(passed) else None)
        monkeypatch.setattr(
            repeated, "_told", lambda about, found: (told_of(Result.CONVERGED, "replayed"),) * len(found)
        )
        monkeypatch.setattr(recurrent, "FusedSolution", Solution)
        monkeypatch.setattr(Looped, "due", False)
    else:
        monkeypatch.setattr(repeated, "is_due", lambda solves: False)
        monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (True, ""))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    deeppcr.clear_caches()


def _went_well(passed):
    return all(isinstance(each, Solution) and each.result is Result.CONVERGED for each in passed)


def made(kind="GRU", device="cpu", hidden=HIDDEN, **options):
    """A module, and itself one step after the other, which says what is right."""
    module = getattr(ours, kind)(FEATURES, hidden, device=device, dtype=torch.float64, mode="parallel", **options)
    return module, lambda *given, **how: module(*given, mode="sequential", **how)


def new_input(device, *shape, grad=False):
    return torch.randn(shape or (STEPS, ROWS, FEATURES), dtype=torch.float64, device=device, requires_grad=grad)


def called(module, *given, **how):
    """What a call returns, and whether it was replayed."""
    before = Counts.replayed
    found = module(*given, **how)
    return found, Counts.replayed > before


def warmed(module, *given, **how):
    """So often called that the next call is replayed."""
    for _ in range(BEFORE):
        module(*given, **how)
    return module


def assert_right(found, right, module, x, *others):
    found, right = leaves_of(found), leaves_of(right)
    assert all(error(one, other) < 1e-9 for one, other in zip(found, right, strict=True))
    seeds = [torch.randn_like(each) for each in right]
    wanted = [each for each in (x, *others, *module.parameters()) if each.requires_grad]
    of_found, of_right = (torch.autograd.grad(each, wanted, seeds) for each in (found, right))
    assert all(error(one, other) < 1e-9 for one, other in zip(of_found, of_right, strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GRU", {}),
        ("GRU", {"batch_first": True, "bias": False}),
        ("RNN", {"num_layers": 2, "nonlinearity": "relu"}),
        ("LSTM", {}),
        ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ("DiagonalGRU", {"bidirectional": True}),
        ("DiagonalLSTM", {}),
    ],
)
def test_calls_that_repeat_are_replayed(kind, options, device):
    module, plain = made(kind, device, **options)
    replays = 0
    for _ in range(BEFORE + 3):
        x = new_input(device, grad=True)
        found, replayed = called(module, x)
        replays += replayed
        if replayed:
            assert_right(found, plain(x), module, x)
            module(x)  # which goes another way than ``plain``
        with torch.no_grad():
            for each in module.parameters():
                each += 0.1 * torch.randn_like(each)
    assert replays >= 3


def test_initial_states_resets_and_single_sequences(device):
    for options, given in (
        ({}, {"hx": new_input(device, 1, ROWS, HIDDEN, grad=True)}),
        ({}, {"reset": torch.rand(STEPS, ROWS, device=device) < 0.3}),
        ({"batch_first": True}, {"reset": torch.rand(STEPS, ROWS, device=device).T < 0.3}),
    ):
        module, plain = made("GRU", device, **options)
        x = new_input(device, *((ROWS, STEPS, FEATURES) if options else ()), grad=True)
        warmed(module, x, **given)
        found, replayed = called(module, x, **given)
        assert replayed
        others = [each for each in given.values() if each.requires_grad]
        assert_right(found, plain(x, **given), module, x, *others)
    for options in ({}, {"batch_first": True}):
        module, plain = made("GRU", device, **options)
        x = new_input(device, STEPS, FEATURES, grad=True)
        warmed(module, x)
        found, replayed = called(module, x)
        assert replayed
        assert_right(found, plain(x), module, x)


def test_it_is_told_how_a_replayed_call_went(device):
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    _, replayed = called(module, x)
    assert replayed
    if device.type == "cpu":
        assert module.solutions[0].plan.notes == ["replayed"]
        return
    (replay,) = module.solutions
    module(x[:, :, :], mode="parallel", hx=None)
    other = made("GRU", device, newton=Newton(capture=False))[0]
    other.load_state_dict(module.state_dict())
    for _ in range(3):
        other(x)
    (ordinary,) = other.solutions
    assert "replayed as a CUDA graph" in replay.plan.notes
    assert "replayed as a CUDA graph" not in ordinary.plan.notes
    for name in ("result", "results", "message"):
        assert getattr(replay, name) == getattr(ordinary, name)
    for name in ("iterations", "exact_steps", "known_steps"):
        assert getattr(replay, name).tolist() == getattr(ordinary, name).tolist()
        assert getattr(replay, name).device == getattr(ordinary, name).device
    assert replay.residual.shape == ordinary.residual.shape
    assert replay.updates.shape == ordinary.updates.shape
    assert replay.plan.chunk == ordinary.plan.chunk
    assert replay.states is None


def test_without_gradients(device):
    module, plain = made("GRU", device)
    for mode in (torch.no_grad, torch.inference_mode):
        x = new_input(device)
        with mode():
            warmed(module, x)
            kept = []
            for _ in range(3):  # all at once: no backward pass is waited for
                x = new_input(device)
                found, replayed = called(module, x)
                assert replayed
                kept.append((found[0], plain(x)[0]))
                module(x)
            assert all(error(one, other) < 1e-9 for one, other in kept)
            if device.type != "cpu":
                module(x)
                assert module.solutions[0].known_steps.tolist() == [STEPS] * ROWS
    found, replayed = called(module, new_input(device))
    assert not replayed  # with gradients it is another kind
    assert found[0].requires_grad


def change_data(module):
    module.weight_hh_l0.data = module.weight_hh_l0.data.clone() * 0.5


def assign(module):
    module.load_state_dict({name: 0.5 * each for name, each in module.state_dict().items()}, assign=True)


def optimise(module):
    for each in module.parameters():
        each.grad = torch.randn_like(each)
    torch.optim.SGD(module.parameters(), lr=0.1).step()


@pytest.mark.parametrize("change", [change_data, assign, optimise])
def test_weights_that_change_are_seen(change, device):
    """Wherever they lie then."""
    module, plain = made("GRU", device)
    x = new_input(device, grad=True)
    warmed(module, x)
    before = module(x)[0].detach().clone()
    for _ in range(2):
        change(module)
        found, replayed = called(module, x)
        assert replayed
        assert error(found[0], before) > 1e-3
        assert_right(found, plain(x), module, x)
        module(x)
    assert Counts.recorded == 2


def test_weights_that_are_made_anew_in_each_call(device):
    """One recording does for them, too."""
    module, plain = made("GRU", device)
    weight_norm(module, "weight_hh_l0")
    x = new_input(device, grad=True)
    warmed(module, x)
    for _ in range(3):
        optimise(module)
        found, replayed = called(module, x)
        assert replayed
        assert_right(found, plain(x), module, x)
        module(x)
    assert Counts.recorded == 2


def test_frozen_weights_and_other_precisions_are_other_kinds(device):
    module, plain = made("GRU", device)
    x = new_input(device, grad=True)
    warmed(module, x)
    module.weight_hh_l0.requires_grad_(False)
    found, replayed = called(module, x)
    assert not replayed
    assert_right(found, plain(x), module, x)
    module.weight_hh_l0.requires_grad_(True)
    module(x)
    module.float()
    found, replayed = called(module, x.float())
    assert not replayed
    assert found[0].dtype is torch.float32


def test_two_calls_before_a_backward_pass(device):
    """Of two, the second goes another way, and both have their gradients; as where a layer stands twice in a model."""
    module, plain = made("GRU", device, hidden=FEATURES)
    x, other = new_input(device, grad=True), new_input(device, grad=True)
    warmed(module, x)
    first, replayed = called(module, x)
    second, again = called(module, other)
    assert replayed
    assert not again
    assert_right(first, plain(x), module, x)
    assert_right(second, plain(other), module, other)
    module(x)
    stacked, replayed = called(module, called(module, x)[0][0])
    assert not replayed
    assert_right(stacked, plain(plain(x)[0]), module, x)


def test_a_training_loop_is_replayed_throughout(device):
    """Though what the call before returned is alive when the next one comes."""
    module, _ = made("GRU", device)
    twin = copy.deepcopy(module)
    for number in range(BEFORE + 4):
        x = new_input(device)
        outputs, replayed = called(module, x)
        loss = outputs[0].square().mean()
        loss.backward()
        twin(x, mode="sequential")[0].square().mean().backward()
        assert replayed == (number >= BEFORE)
        for net in (module, twin):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
        assert all(error(*each) < 1e-9 for each in zip(module.parameters(), twin.parameters(), strict=True))


def test_checkpointing_and_hooks_of_saved_tensors(device):
    module, plain = made("GRU", device)
    x = new_input(device, grad=True)
    warmed(module, x)
    for reentrant in (False, True):
        found = checkpoint(lambda x: module(x)[0], x, use_reentrant=reentrant)
        (of_found,) = torch.autograd.grad(found.sum(), x) if not reentrant else _backwards(found, x)
        (right,) = torch.autograd.grad(plain(x)[0].sum(), x)
        assert error(of_found, right) < 1e-9
    module(x)
    with torch.autograd.graph.save_on_cpu():
        found, replayed = called(module, x)
    assert not replayed
    assert_right(found, plain(x), module, x)


def _backwards(found, x):
    x.grad = None
    found.sum().backward()
    return (x.grad,)


class Observer(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_is_never_replayed(device):
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    assert called(module, x)[1]
    with Observer():
        assert not called(module, x)[1]
    with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
        assert not called(module, x)[1]
    assert not called(module, x, mode="sequential")[1]
    for _ in range(2):  # after a pass by PyTorch nothing is expected
        module(x)
    assert called(module, x)[1]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not called(module, x)[1]
    finally:
        torch.use_deterministic_algorithms(False)
    module.newton = Newton(capture=False)
    for _ in range(BEFORE + 2):
        assert not called(module, x)[1]


def test_random_numbers_are_drawn_anew(device):
    module, _ = made("GRU", device, num_layers=2, dropout=0.5)
    x = new_input(device)
    for _ in range(BEFORE + 2):
        assert not called(module, x)[1]
    module.eval()
    warmed(module, x)
    assert called(module, x)[1]


def test_large_calls_are_not_recorded(device, monkeypatch):
    for more, recorded in ((-1, 0), (0, 1)):
        module, _ = made("GRU", device)
        x = new_input(device)
        weights = sum(each.nbytes for each in module.parameters())
        monkeypatch.setattr(repeated, "_LARGEST", x.nbytes + x.nbytes // FEATURES * HIDDEN + weights + more)
        warmed(module, x)
        assert len(recorded_layers) == recorded


def test_a_call_that_is_not_settled_is_made_again(device):
    """And told of as ever. What was recorded is let go of, until calls have gone well again."""
    module, plain = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    broken = x.clone()
    broken[4, 1] = torch.nan
    with nullcontext() if device.type == "cpu" else pytest.warns(deeppcr.ConvergenceWarning):
        found, _ = called(module, broken)
    assert module.solutions[0].result is Result.NON_FINITE
    assert found[0][:4].isfinite().all()
    assert found[0][:, 0].isfinite().all()
    assert not found[0][4:, 1].isfinite().any()
    assert len(recorded_layers) == 0
    warmed(module, x)
    found, replayed = called(module, x)
    assert replayed
    assert error(found[0], plain(x)[0]) < 1e-9


def test_recordings_that_do_not_pay_are_not_made_for_ever(device):
    module, _ = made("GRU", device)
    x = new_input(device)
    for _ in range(6):
        for _ in range(BEFORE):
            module(x)
        recorded_layers.clear()
    assert Counts.recorded == 2 * (repeated._MOST_WASTED + 1)


def test_passes_that_are_not_needed_are_not_made_for_ever(device, monkeypatch):
    monkeypatch.setattr(repeated, "_SPARE", 2)
    monkeypatch.setattr(repeated.Layer, "needed_all", lambda self, found: False)
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    for _ in range(2):
        assert called(module, x)[1]
    assert not called(module, x)[1]
    assert len(recorded_layers) == 0


def test_a_recording_that_fails_is_not_tried_again(device, monkeypatch):
    module, plain = made("GRU", device)
    monkeypatch.setattr(Counts, "fails", True)
    x = new_input(device, grad=True)
    warmed(module, x)
    monkeypatch.setattr(Counts, "fails", False)
    for _ in range(BEFORE):
        found, replayed = called(module, x)
        assert not replayed
    assert Counts.recorded == 0
    assert_right(found, plain(x), module, x)


def test_the_step_itself_bears_out_some_of_the_calls(device, monkeypatch):
    """The second, the fourth ... go their ordinary way, which holds them against the step."""
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    monkeypatch.setattr(Looped, "due", True)
    monkeypatch.setattr(repeated, "is_due", lambda solves: True)
    assert not called(module, x)[1]
    monkeypatch.setattr(Looped, "due", False)
    monkeypatch.setattr(repeated, "is_due", lambda solves: False)
    assert called(module, x)[1]


def test_what_is_kept_is_bounded_and_ends_with_the_module(device, monkeypatch):
    kept = Bounded(2, 2**30)
    monkeypatch.setattr(repeated, "recorded_layers", kept)
    modules = [made("GRU", device)[0] for _ in range(3)]
    x = new_input(device)
    for module in modules:
        warmed(module, x)
    assert len(kept) == 2
    assert not called(modules[0], x)[1]
    assert called(modules[2], x)[1]
    if device.type == "cpu":  # where what stands for a graph keeps the function
        return
    del module, modules
    gc.collect()
    assert len(kept) == 0


def test_caches_are_cleared(device):
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    deeppcr.clear_caches()
    assert len(recorded_layers) == 0
    for _ in range(BEFORE - 3):
        assert not called(module, x)[1]


def test_copies_hold_no_graphs(device):
    module, _ = made("GRU", device)
    x = new_input(device)
    warmed(module, x)
    found, replayed = called(module, x)
    assert replayed
    twin = copy.deepcopy(module)
    assert twin.solutions == ()
    again, replayed = called(twin, x)
    assert not replayed
    assert error(found[0], again[0]) < 1e-9


def test_threads_have_their_own_results(device):
    module, plain = made("GRU", device)
    inputs = [new_input(device) for _ in range(4)]
    warmed(module, inputs[0])
    right = [plain(x)[0].detach() for x in inputs]
    module(inputs[0])
    found = [[] for _ in inputs]

    def run(at):
        for _ in range(8):
            found[at].append(module(inputs[at])[0].detach())

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(inputs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(len(each) == 8 for each in found)
    assert all(error(one, right[at]) < 1e-9 for at, each in enumerate(found) for one in each)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_stream_has_graphs_of_its_own():
    device = torch.device("cuda")
    module, plain = made("GRU", device)
    x = new_input(device, grad=True)
    warmed(module, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert not called(module, x)[1]
        warmed(module, x)
        found, replayed = called(module, x)
        assert replayed
        assert_right(found, plain(x), module, x)
    torch.cuda.current_stream().wait_stream(stream)
    assert len(recorded_layers) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_callers_own_capture_is_left_alone():
    device = torch.device("cuda")
    module, plain = made("GRU", device, newton=Newton(stop=deeppcr.FixedIterations(6)))
    module.run_mode = "auto"
    x = new_input(device)
    warmed(module, x)
    assert called(module, x)[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, replayed = called(module, x)
    assert not replayed
    x.copy_(new_input(device))
    graph.replay()
    assert error(found[0], plain(x)[0]) < 1e-9
