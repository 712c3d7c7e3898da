"""What is timed is called as often as it is said, in turn; what is compared is compared in earnest."""

import math
import time

import pytest
import torch

from deeppcr_paper.timing import Timing, capture, clocked, hardware, machine, measure, relative_error

CPU = torch.device("cpu")


def calling(calls, name, clock=None, seconds=0.0):
    return lambda: calls.append(name) or (clock.sleep(seconds) if clock else None)


def test_functions_take_turns_after_one_call_to_warm_up():
    calls = []
    timings = measure({name: calling(calls, name) for name in "ab"}, CPU, budget=0, repeats=(3, 9))
    assert "".join(calls) == "ab" + "aaabbb"
    assert [len(timings[name].seconds) for name in "ab"] == [3, 3]


def test_repeats_end_at_the_most_within_the_budget():
    timings = measure({"a": lambda: None}, CPU, budget=60, repeats=(2, 5))
    assert len(timings["a"].seconds) == 5
    assert all(each >= 0 for each in timings["a"].seconds)


def test_the_slow_and_the_quick_are_called_equally_often(clock):
    calls = []
    functions = {"slow": calling(calls, "s", clock, 0.25), "quick": calling(calls, "q", clock, 1 / 64)}
    timings = measure(functions, CPU, budget=1.0, repeats=(2, 20))
    assert "".join(calls) == "sq" + 2 * "ssqq", "a turn begins while there is time"
    assert {name: len(each.seconds) for name, each in timings.items()} == {"slow": 4, "quick": 4}
    assert clocked(lambda: clock.sleep(0.5) or "done", CPU) == ("done", 0.5)


def test_the_clock_is_that_of_the_machine():
    _, seconds = clocked(lambda: time.sleep(0.01), CPU)
    assert seconds >= 0.01


def test_nothing_to_time():
    assert measure({}, CPU, budget=0) == {}


def test_minimum_and_median():
    timing = Timing((3.0, 1.0, 2.0))
    assert (timing.minimum, timing.median) == (1.0, 2.0)


def test_the_worst_tensor_counts_each_in_its_own_units():
    large, small = torch.tensor([100.0, 0.0]), torch.tensor([1e-3])
    assert relative_error([large + 1, small], [large, small]) == pytest.approx(0.01)
    assert relative_error([large, 2 * small], [large, small]) == pytest.approx(1.0)
    assert relative_error([large], [large.double()]) == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(wrong):
    one = torch.ones(2)
    assert relative_error([torch.tensor([1.0, wrong])], [one]) == math.inf
    assert relative_error([torch.tensor([1.0, wrong]), one], [one, one]) == math.inf
    assert relative_error([one], [torch.tensor([1.0, wrong])]) == math.inf


def test_where_the_reference_is_zero():
    zero = torch.zeros(2)
    assert relative_error([zero], [zero]) == 0
    assert relative_error([zero + 1e-30], [zero]) == math.inf


def test_tensors_are_not_dropped():
    with pytest.raises(ValueError, match="zip"):
        relative_error([torch.ones(1)], [])


def test_the_machine_is_named(device):
    assert hardware(device)
    about = machine(device)
    assert about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    assert about["device"] == device.type


def test_a_replayed_graph_computes_anew(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    x = torch.ones(3, device=device)
    replay, found = capture(lambda: 2 * x)
    x.fill_(5)
    replay()
    assert found.tolist() == [10, 10, 10]
