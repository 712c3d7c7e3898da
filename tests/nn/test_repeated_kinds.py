"""Which calls of recurrent modules are replayed, what is kept for them, and what becomes of those that go wrong."""

import copy
import gc
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
from again import Counts
from deeppcr import Newton, Result
from deeppcr.bounded import Bounded
from deeppcr.graphs.cache import recorded_layers
from deeppcr.nn import repeated
from recurrent_problems import error
from repeating import (
    BEFORE,
    FEATURES,
    HIDDEN,
    ROWS,
    STEPS,
    Looped,
    assert_right,
    called,
    made,
    new_input,
    warmed,
)

pytestmark = pytest.mark.usefixtures("graphs")


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


def test_what_is_wrong_is_said_of_calls_that_repeat_too(device):
    """A tuple of one is no initial state, though all that it holds is as it was."""
    module, _ = made("GRU", device)
    x, start = new_input(device), new_input(device, 1, ROWS, HIDDEN)
    warmed(module, x, start)
    assert called(module, x, start)[1]
    with pytest.raises((TypeError, AttributeError)):
        module(x, (start,))


def test_another_default_device_changes_nothing(device):
    """What the host reads lies in its memory."""
    module, plain = made("GRU", device)
    x = new_input(device, grad=True)
    with torch.device("meta" if device.type == "cpu" else device):
        warmed(module, x)
        found, replayed = called(module, x)
    assert replayed
    assert_right(found, plain(x), module, x)


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


def test_recordings_that_do_not_pay_are_not_made_for_ever(device, monkeypatch):
    monkeypatch.setattr(repeated, "_MOST_UNPAID", 3)
    module, _ = made("GRU", device)
    x = new_input(device)
    for _ in range(5):
        for _ in range(BEFORE):
            module(x)
        recorded_layers.clear()
    assert Counts.recorded == 2 * 3


def test_of_many_kinds_few_are_recorded_until_they_have_paid(device, monkeypatch):
    """Sequences of all lengths would have a recording made for each, and thrown away before it is needed again."""
    monkeypatch.setattr(repeated, "_MOST_UNPAID", 2)
    monkeypatch.setattr(repeated, "_PAYS", 4)
    module, _ = made("GRU", device)
    inputs = [new_input(device, STEPS + more, ROWS, FEATURES) for more in range(4)]
    with torch.no_grad():
        for _ in range(BEFORE):
            for x in inputs:
                module(x)
        assert Counts.recorded == 2
        for _ in range(4):
            for x in inputs:
                module(x)
        assert Counts.recorded == 4


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


def test_calls_of_another_kind_between(device):
    """One by PyTorch's own kernel, as of a short batch or in a validation, is not of this kind."""
    module, plain = made("GRU", device)
    replays = 0
    for _ in range(2 * BEFORE):
        x = new_input(device, grad=True)
        found, replayed = called(module, x)
        replays += replayed
        assert_right(found, plain(x), module, x)
    assert replays


def test_recordings_that_failed_do_not_count(device, monkeypatch):
    """And where there was no memory, there may be later."""
    module, _ = made("GRU", device)
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "Layer", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        for more in range(repeated._MOST_UNPAID + 1):
            warmed(module, new_input(device, STEPS + more, ROWS, FEATURES))
    x = new_input(device)
    warmed(module, x)
    assert called(module, x)[1]
