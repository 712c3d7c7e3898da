"""What rides along with the state of ``scan``, counters and masks: known beforehand, or left to the loop; never wrong."""

import copy
import ctypes
import pickle
import sys

import numpy
import pytest
import torch
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import Loop, Newton, Result, scan
from deeppcr.sequence.riders import courses
from plain_scan import SOLVERS, assert_same, normal, plain_scan

# Of riders (n, k: integers; m: truths) and an input (x: integers), what becomes of n, k and m; and whether that takes no loop.
RIDERS = {
    "counters": (lambda n, k, m, x: (n + 1, 2 + k, m), True),
    "sums, differences": (lambda n, k, m, x: (n + x, k - x * x, m), True),
    "products that wrap around": (lambda n, k, m, x: (n * 3, x * k, m), True),
    "largest, smallest": (lambda n, k, m, x: (torch.maximum(n, x), torch.minimum(x - 5, k), m), True),
    "any, all": (lambda n, k, m, x: (n, k, m | (x > 8)), True),
    "all": (lambda n, k, m, x: (n, k, ~(x > 8) & m), True),
    "parity": (lambda n, k, m, x: (n, k, m ^ (x % 2 == 0)), True),
    "logical": (lambda n, k, m, x: (n, k, torch.logical_or(m, x - 7)), True),
    "the last input": (lambda n, k, m, x: (x.expand(2).clone(), n + 0, k > 3), True),
    "one that follows another": (lambda n, k, m, x: (n + k, k + 1, m | (n > 20)), True),
    "a constant": (lambda n, k, m, x: (torch.zeros_like(n), k.new_full((2,), 4), torch.ones_like(m)), True),
    "in circles": (lambda n, k, m, x: ((n * 3 + 1) % 17, k + n, m), False),
    "itself twice": (lambda n, k, m, x: (n + n, k, m), False),
    "from something": (lambda n, k, m, x: (x - n, k, ~m), False),
    "two that need each other": (lambda n, k, m, x: (k + x, n - 1, m & (n > k)), False),
}


@pytest.mark.parametrize("length", [1, 2, 65])
@pytest.mark.parametrize("name", RIDERS)
def test_what_rides_along_is_known_beforehand(name, length, device, monkeypatch):
    change, at_once = RIDERS[name]
    current = [torch.tensor(each, device=device) for each in ([0, 7], [-3, 2], [False, True])]
    xs, state = torch.randint(-9, 10, (length,), device=device), [torch.ones(3, device=device)]
    loops = []
    with monkeypatch.context() as patched:  # what a loop over the steps ends with
        patched.setattr(torch, "stack", lambda each, stack=torch.stack: loops.append(each) or stack(each))
        found = courses(lambda state, riders, inputs: list(change(*riders, *inputs)), state, current, [xs])
    assert (not loops) is at_once
    for step in range(length + 1):
        for ours, theirs in zip(found, current, strict=True):
            assert len(ours) == length + 1
            torch.testing.assert_close(ours[step], theirs)
        current = change(*current, xs[step]) if step < length else current


def test_small_integers_wrap_around(device):
    start, xs = torch.tensor([100, -100], dtype=torch.int8, device=device), torch.full((9,), 100, device=device)
    combine = lambda n, x: (n + x.to(torch.int8), n)  # noqa: E731
    assert_same(scan(combine, start, xs), plain_scan(combine, start, xs))


FOLLOWERS = {
    "compared": lambda h, n, x: n + (h.sum() > 0),
    "rounded": lambda h, n, x: h.sum().long(),
    "written to": lambda h, n, x: n.clone().copy_(h.sum()),
    "made, then written to": lambda h, n, x: torch.zeros_like(n).copy_(h.sum()),
    "a view written to": lambda h, n, x: _by_view(n, h.sum()),
    "looked at": lambda h, n, x: n + (1 if h.sum() > 0 else 2),
    "drawn": lambda h, n, x: n + torch.randint(0, 1, (), device=h.device),
}


def _by_view(n, value):
    found = n.clone().reshape(1)
    found.view(1, 1)[0, 0] = value.long()
    return found.reshape(())


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_follows_the_state_is_left_to_the_loop(name, device):
    follow, xs = FOLLOWERS[name], normal(9, 3, device=device)
    init = (torch.ones(3, dtype=torch.float64, device=device), torch.tensor(0, device=device))
    combine = lambda carry, x: ((torch.sin(carry[0]) + x, follow(*carry, x)), carry[0] * carry[1])  # noqa: E731
    carry, ys, solution = scan(combine, init, xs, solver=Newton(), return_solution=True)
    assert_same((carry, ys), plain_scan(combine, init, xs))
    assert solution.result is Result.LOOP
    assert any("what the carry holds beside floating tensors" in note for note in solution.plan.notes)


def test_in_place_on_the_way_to_the_state_is_none_of_its_riders_business(device):
    layer = torch.nn.Linear(3, 3, dtype=torch.float64, device=device)  # on one row it squeezes in place

    def combine(carry, x):
        h, n = carry
        after = torch.tanh(layer(h)).mul_(0.5)
        return (after + x, n + 1), after

    init = (torch.ones(3, dtype=torch.float64, device=device), torch.tensor(0, device=device))
    xs = normal(9, 3, device=device)
    carry, ys, solution = scan(combine, init, xs, solver=Newton(), return_solution=True)
    assert solution.result is Result.CONVERGED
    assert_same((carry, ys), plain_scan(combine, init, xs), rtol=1e-8, atol=1e-9)


#: Ways by which Python gets at a value. Most of them are no operation of PyTorch's.
READS = {
    "item": lambda value: value.item(),
    "float": float,
    "int": lambda value: int(value * 2**20) / 2**20,
    "bool": lambda value: 2 * bool(value > 1),
    "in": lambda value: 2 * (True in (value > 1).reshape(1)),
    "format": lambda value: float(f"{value:.9f}"),
    "tolist": lambda value: value.tolist(),
    "tolist of data": lambda value: value.data.tolist(),
    "numpy": lambda value: value.numpy(force=True),
    "asarray": lambda value: numpy.asarray(value.detach().cpu()),
    "dlpack": lambda value: numpy.from_dlpack(value.detach().cpu()),
    "deepcopy": lambda value: copy.deepcopy(value.detach()).cpu().numpy(),
}
# All but these is found out by the step alone.
UNSEEN = {
    "print": lambda value: float(str(value.detach().cpu()).split("(")[1].split(",")[0]),
    "address": lambda value: ctypes.c_double.from_address(value.detach().cpu().data_ptr()).value,
    "pickle": lambda value: pickle.loads(pickle.dumps(value.detach())).item(),
}
RARE = 7  # no place where a few tries would look


def counts(read, of_state):
    def combine(carry, x):
        mean, count = carry
        count = count + int(read(mean if of_state else x) > 1)
        mean = mean + (x - mean) / (2 + count)
        return (mean, count), mean * count

    return combine


def rare_event(device):
    xs = torch.linspace(-0.5, 0.5, 33, dtype=torch.float64, device=device)
    xs[RARE] = 9
    return (torch.zeros((), dtype=torch.float64, device=device), torch.tensor(0, device=device)), xs


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=str)
@pytest.mark.parametrize("of_state", [False, True], ids=["input", "state"])
@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_values_is_left_to_the_loop(name, of_state, solver, device):
    (init, xs), combine = rare_event(device), counts(READS[name], of_state)
    carry, ys, solution = scan(combine, init, xs, solver=solver, return_solution=True)
    expected = plain_scan(combine, init, xs)
    assert expected[0][1] > 0  # of which the first step tells nothing
    assert_same((carry, ys), expected)
    assert "the step looks at values of tensors" in str(solution.plan)


@pytest.mark.parametrize("of_state", [False, True], ids=["input", "state"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_step_that_reads_values_unseen_is_found_out(name, of_state, device):
    (init, xs), combine = rare_event(device), counts(UNSEEN[name], of_state)
    carry, ys, solution = scan(combine, init, xs, return_solution=True)
    assert_same((carry, ys), plain_scan(combine, init, xs))
    if (name, device.type) != (
        "address",
        "cuda",
    ):  # of a copy on the CPU, which no transform has: such a step is a loop at once
        assert "not what operations say of it" in str(solution.plan)


def count_alone(count, x):
    return count + (x > 1), x * count


def count_beside_a_state(carry, x):
    mean, count = carry
    return (mean + (x - mean) / (2 + count), count + (x > 1)), mean * count


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=str)
@pytest.mark.parametrize("combine", [count_alone, count_beside_a_state])
@pytest.mark.parametrize("wrong", [1, RARE, -1])
def test_what_rides_along_is_held_against_the_step_at_every_place(wrong, combine, solver, device, monkeypatch):
    init, xs = rare_event(device)
    init = init[1] if combine is count_alone else init

    def courses_with_a_mistake(*given):
        (path,) = courses(*given)
        path[wrong] += 1
        return [path]

    monkeypatch.setattr(sys.modules["deeppcr.scan"], "courses", courses_with_a_mistake)
    carry, ys, solution = scan(combine, init, xs, solver=solver, return_solution=True)
    assert_same((carry, ys), plain_scan(combine, init, xs))
    assert "not what operations say of it" in str(solution.plan)


def in_place_alone(n, x):
    n += x > 1
    return n, x * n


def in_place_beside_a_state(carry, x):
    m, n = carry
    n += x > 1
    return (m * 0.9 + x, n), m * n


def in_place_and_not_handed_on(carry, x):
    m, n = carry
    return (m * 0.9 + x, n.add_(x > 1) * 2), m * n


def all_in_place(carry, x):
    m, n = carry
    n += x > 1
    m += x
    return (m, n), m * n


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("combine", [in_place_alone, in_place_beside_a_state, in_place_and_not_handed_on, all_in_place])
def test_counters_that_are_changed_in_place_count(combine, solver, device):
    init, xs = rare_event(device)
    init = init[1] if combine is in_place_alone else init
    carry, ys, solution = scan(combine, init, xs, solver=solver, return_solution=True)
    again = pytree.tree_map(torch.clone, init)
    states = []
    for step in range(len(xs)):
        again, y = combine(again, xs[step])
        torch.testing.assert_close(ys[step], y)
        states += [again[0].clone()] if len(pytree.tree_leaves(init)) > 1 else []
    assert_same(carry, again)
    assert_same(solution.states, (torch.stack(states),) if states else ())
    assert solver is SOLVERS[2] or "is changed in place" in str(solution.plan)
    assert_same(init, rare_event(device)[0][-1] if combine is in_place_alone else rare_event(device)[0])


def test_a_counter_of_inputs_that_are_changed_in_place_counts(device):
    combine = lambda n, x: (n + x.add_(1), x * n)  # noqa: E731
    start, xs = torch.tensor(0, device=device), torch.arange(9, device=device)
    found = scan(combine, start, xs.clone())  # which the plain loop changes, too
    assert_same(found, plain_scan(combine, start, xs.clone()))


def test_a_counter_that_is_written_to_behind_the_back_of_pytorch_counts():
    def combine(carry, x):
        m, n = carry
        ctypes.c_int64.from_address(n.data_ptr()).value += 1
        return (m * 0.9 + x, n), m * n

    init, xs = rare_event("cpu")
    carry, ys = scan(combine, init, xs)
    assert carry[1] == len(xs)
    assert_same(ys, plain_scan(combine, pytree.tree_map(torch.clone, init), xs)[1])


@pytest.mark.parametrize("first", [0, 3], ids=["always", "later"])
def test_an_output_that_the_next_step_changes_is_refused(first, device):
    def combine(n, x):
        n = n.add_(x) if x >= first else n + x
        return n, n

    with pytest.raises(
        deeppcr.StepError, match="changes the carry, and with it an output of the step before, in place"
    ):
        scan(combine, torch.zeros((), device=device), torch.arange(6.0, device=device), solver=Loop())


def test_the_loop_has_states_that_are_numbers(device):
    combine = lambda c, x: ((c[0] + x, c[1] + (c[0] > 0)), c[0])  # noqa: E731
    init, xs = (torch.zeros((), device=device), torch.tensor(0, device=device)), torch.randn(10, device=device)
    carry, ys, solution = scan(combine, init, xs, return_solution=True)
    assert_same((carry, ys), plain_scan(combine, init, xs))
    torch.testing.assert_close(solution.states[0][:-1], ys[1:])
    *_, solution = scan(
        combine, init, torch.where(torch.arange(10, device=device) == 4, torch.inf, xs), return_solution=True
    )
    assert (solution.result, solution.exact_steps.item()) == (Result.NON_FINITE, 4)
