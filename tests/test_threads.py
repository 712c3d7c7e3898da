"""Threads that solve at the same time: each gets its own result, and the process's warnings are as they were."""

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Newton
from deeppcr.warned import catching_warnings, muted, warn
from deeppcr.ways import plan
from problems import plain_loop


@pytest.fixture
def in_turns():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def steps(device):
    def of(number):
        weight = torch.randn(3, 3, dtype=torch.float64, device=device) / 4
        return [
            lambda z, x: torch.tanh(z @ weight + x),
            lambda z, x: torch.sin(z * weight[0] + x),
            lambda z, x: 0.5 * torch.tanh(z) @ weight + x,
        ][number]

    return [of(number) for number in range(3)]


def test_every_thread_gets_its_own_result(in_turns, device, monkeypatch):
    """While others solve other problems the same way or another, and what is known is forgotten now and then."""
    monkeypatch.setitem(plan._WORTH_NEWTON, device.type, 0.0)
    monkeypatch.setitem(plan._OPERATION, device.type, (1.0, 0.0, 0.0))
    problems = []
    for step in steps(device):
        z0 = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
        xs = torch.randn(25, 2, 3, dtype=torch.float64, device=device)
        states = plain_loop(step, z0, xs)
        problems.append((step, z0, xs, states.detach(), torch.autograd.grad(states.square().sum(), z0)[0]))

    def solve(turn):
        step, z0, xs, states, gradient = problems[turn % len(problems)]
        found = deeppcr.solve(step, z0, xs, solver=(None, Newton(), Newton(chunk=4))[turn // 3 % 3]).states
        if turn % 10 == 9:
            deeppcr.clear_caches()
        torch.testing.assert_close(found, states, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), z0)[0], gradient, rtol=1e-7, atol=1e-7)

    for turn in range(9):  # what this imports on a GPU filters warnings
        solve(turn)
    filters = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(solve, range(36)))
    assert warnings.filters == filters


def test_filters_of_warnings_are_put_back_whoever_leaves_first():
    """Of two that catch warnings, the one that came first would leave with the filters of before, and the other put its own back."""
    filters, inside, left = list(warnings.filters), threading.Event(), threading.Event()

    def first():
        with catching_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            inside.set()
            left.wait(0.2)

    def second():
        inside.wait(5)
        with catching_warnings():
            warnings.simplefilter("ignore", ImportWarning)
            left.set()
            thread.join(0.2)

    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join()
    assert warnings.filters == filters


def test_who_catches_warnings_waits_for_nobody_and_hears_its_own():
    """A step that runs inside may take any lock, for which another one waits that catches warnings meanwhile."""
    elsewhere = []

    def other():
        with catching_warnings(record=True) as heard:
            warnings.warn("there", stacklevel=1)
        elsewhere.extend(heard)

    with catching_warnings(record=True) as heard:
        warnings.simplefilter("always")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(5)
        waits = thread.is_alive()
        warnings.warn("here", stacklevel=1)
    thread.join()
    assert not waits
    assert [[str(each.message) for each in those] for those in (heard, elsewhere)] == [["here"], ["there"]]


def test_one_thread_that_wants_to_hear_nothing_leaves_others_alone():
    with muted(), ThreadPoolExecutor(1) as pool:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn("here")
        with pytest.warns(ConvergenceWarning, match="there"):
            pool.submit(warn, "there").result()
