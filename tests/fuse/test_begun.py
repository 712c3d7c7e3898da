"""Kernels are launched before it is known that they are the right ones; where they are not, nobody sees anything of it."""

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Newton
from deeppcr.fuse import run as fuse_run
from deeppcr.sequence.fingerprint import Told
from deeppcr.ways import begun, fused, plan
from fuse.loops import by_loop
from fuse.solving import NEWTON, by_kernels, normal
from kernel_support import error, misaligned

pytestmark = pytest.mark.usefixtures("kernels")


class Seen:
    """What happens in a call: "launch" and "walk", in their order."""

    def __init__(self, monkeypatch):
        self.order = []
        walk, launch = fused.structure_of, fuse_run.Passes.__init__

        def walked(step):
            self.order.append("walk")
            return walk(step)

        def launched(*arguments, **options):
            self.order.append("launch")
            launch(*arguments, **options)

        monkeypatch.setattr(fused, "structure_of", walked)
        monkeypatch.setattr(fuse_run.Passes, "__init__", launched)

    def of(self, call):
        self.order.clear()
        found = call()
        return found, self.order


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


class Step:
    """A step with something of everything to be changed."""

    def __init__(self, device):
        self.device, self.weight, self.number = device, 0.5 * normal(2, device=device), 0.5
        self.layer = nn.Linear(2, 2, dtype=torch.float64, device=device)

    def __call__(self, z, x):
        return 0.3 * torch.sin(self.layer(z)) + self.weight * z * self.number + x


def solved(step, z0, xs):
    return deeppcr.solve(step, z0, xs, solver=NEWTON)


def warm(step, z0, xs):
    """As often as it takes for the next solve not to be held against the step itself, as the fourth is, and the eighth."""
    for _ in range(4):
        found = solved(step, z0, xs)
    assert by_kernels(found)


def problem(device):
    return Step(device), normal(2, 2, device=device), normal(6, 2, 2, device=device)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_step_that_came_before_is_launched_before_it_is_walked_through(gradients, seen, device):
    step, z0, xs = problem(device)
    with torch.set_grad_enabled(gradients):
        warm(step, z0, xs)
        found, order = seen.of(lambda: solved(step, z0, xs))
    assert order == ["launch", "walk"]
    assert found.states.requires_grad is gradients
    assert error(found.states, by_loop(step, z0, xs)) < 1e-9


#: Tensors that outlive their step's use of them.
KEPT = []


def put_away(tensor):
    KEPT.append(tensor)
    tensor.untyped_storage().resize_(0)


#: What each changes: of a step, its state and its inputs, the last two returned; and whether kernels may still be launched first.
CHANGES = {
    "values": (lambda s, z, x: (s.weight.mul_(-0.5), (z + 1, x - 1))[1], True),
    "another length": (lambda s, z, x: (z, x[:5]), False),
    "other strides": (lambda s, z, x: (z, x.mT.contiguous().mT), False),
    "other places": (lambda s, z, x: (misaligned(z), misaligned(x)), False),
    "another tensor": (lambda s, z, x: (setattr(s, "weight", normal(2, device=s.device)), (z, x))[1], False),
    "another tensor beside the first": (  # which is still there to be read
        lambda s, z, x: (KEPT.append(s.weight), setattr(s, "weight", normal(2, device=s.device)), (z, x))[-1],
        True,
    ),
    "a tensor beside one without memory": (  # as those of a model that is put away
        lambda s, z, x: (put_away(s.weight), setattr(s, "weight", normal(2, device=s.device)), (z, x))[-1],
        False,
    ),
    "a tensor of another shape": (lambda s, z, x: (s.weight.set_(s.weight[:1].clone()), (z, x))[1], False),
    "a number": (lambda s, z, x: (setattr(s, "number", 0.9), (z, x))[1], True),
    "a parameter": (
        lambda s, z, x: (setattr(s.layer, "weight", nn.Parameter(normal(2, 2, device=s.device))), (z, x))[1],
        False,
    ),
    "a hook": (lambda s, z, x: (s.layer.register_forward_hook(lambda *it: 2 * it[-1]), (z, x))[1], True),
    "other rows": (lambda s, z, x: (z[:1], x[:, :1]), False),
    "another dtype": (lambda s, z, x: (z.float(), x.float()), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_seen(name, seen, device):
    change, first = CHANGES[name]
    step, z0, xs = problem(device)
    with torch.no_grad():
        warm(step, z0, xs)
        z0, xs = change(step, z0, xs)
        if name == "another dtype":
            step.layer.float()
            step.weight = step.weight.float()
        for again in range(2):
            found, order = seen.of(lambda: solved(step, z0, xs))
            assert error(found.states, by_loop(step, z0, xs)) < (1e-9 if xs.dtype is torch.float64 else 1e-4)
            assert again or (order[0] == "launch") is first


def test_gradients_are_those_of_the_tensors_that_are_there(seen, device):
    step, z0, xs = problem(device)
    warm(step, z0, xs)
    for change in ("nothing", "another tensor", "a number", "a parameter"):
        with torch.no_grad():
            CHANGES.get(change, CHANGES["values"])[0](step, z0, xs)
        sources = [step.layer.weight, step.layer.bias]
        for _ in range(2):
            ours, theirs = (
                torch.autograd.grad(states.square().sum(), sources)
                for states in (solved(step, z0, xs).states, by_loop(step, z0, xs))
            )
            for one, other in zip(ours, theirs, strict=True):
                assert error(one, other) < 1e-9, change


def test_modes_count(seen, device):
    step, z0, xs = problem(device)
    step.layer.requires_grad_(False)
    warm(step, z0, xs)
    z0.requires_grad_()
    assert solved(step, z0, xs).states.requires_grad
    with torch.no_grad():
        assert not solved(step, z0, xs).states.requires_grad
    with torch.inference_mode():
        assert solved(step, z0, xs).states.is_inference()
    with torch.autocast(device.type, torch.bfloat16):
        _, order = seen.of(lambda: solved(step, z0, xs))
        assert "launch" not in order


def test_a_step_that_never_is_what_it_was_is_no_longer_expected_to_be(seen, device):
    step, z0, xs = problem(device)
    with torch.no_grad():
        warm(step, z0, xs)
        first = []
        for _ in range(begun._MOST_MISSED + 2):
            step.number += 0.01
            solved(step, z0, xs)  # kernels of another number, which come with the second solve of a kind
            found, order = seen.of(lambda: solved(step, z0, xs))
            assert error(found.states, by_loop(step, z0, xs)) < 1e-9
            first.append(order[0])
        # Once it has settled, it is again.
        settled = [seen.of(lambda: solved(step, z0, xs))[1][0] for _ in range(3)]
    assert first[-1] == "walk"
    assert settled[-1] == "launch"


def test_nothing_is_kept_alive(device):
    step, z0, xs = problem(device)
    with torch.no_grad():
        warm(step, z0, xs)
    assert len(begun._expected) == 1
    del step
    assert len(begun._expected) == 0


def test_what_is_saved_for_a_backward_pass_is_finished_when_it_is_saved(device):
    """Who copies it then, as offloading does, or stops there, as checkpointing does, has all of it."""
    weight = torch.full((3,), 0.9, dtype=torch.float64, device=device, requires_grad=True)

    def step(z, x):
        return torch.sin(weight * z) + x

    z0, xs = normal(2, 3, device=device), normal(48, 2, 3, device=device)
    for _ in range(4):
        solved(step, 0 * z0, 0 * xs)  # which takes fewer passes
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        found = solved(step, z0, xs)
    assert by_kernels(found)
    (gradient,) = torch.autograd.grad(found.states.square().sum(), weight)
    (expected,) = torch.autograd.grad(by_loop(step, z0, xs).square().sum(), weight)
    assert error(gradient, expected) < 1e-9


def test_kernels_that_do_not_fit_are_refused_every_time(monkeypatch, device):
    from triton import OutOfResources

    step, z0, xs = problem(device)

    def refused(*_, **__):
        raise OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(fuse_run, "launch", refused)
    with torch.no_grad():
        for _ in range(3):
            found = solved(step, z0, xs)
            assert not by_kernels(found)
            assert error(found.states, by_loop(step, z0, xs)) < 1e-9


def test_modules_whose_parameters_are_swapped_can_be_converted(device):
    step, z0, xs = problem(device)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():
            warm(step, z0, xs)
        step.layer.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert step.layer.weight.dtype is torch.float32


class Known(Told):
    """A step that tells what it depends on."""

    def __init__(self, device):
        self.weight = nn.Parameter(0.5 * normal(2, device=device))

    def __call__(self, z, x):
        return torch.sin(self.weight * z) + x

    def told(self):
        return (), (self.weight,)


def set_data(weight, data):
    weight.data = data


#: What each does to the weight of a step that tells what it depends on, its state and its inputs; and whether that is as good as nothing.
LOOKS = {
    "nothing": (lambda w, z, x: (z, x), True),
    "values": (lambda w, z, x: (w.data.mul_(-0.5), x.data.mul_(2), (z + 1, x))[-1], True),
    "other data": (lambda w, z, x: (set_data(w, -0.5 * w.data), (z, x))[1], True),
    "data that lie otherwise": (lambda w, z, x: (set_data(w, (-w.data)[:1].expand(2)), (z, x))[1], False),
    "less of its data": (lambda w, z, x: (set_data(w, w.data[:1]), (z, x))[1], False),
    "no gradients of the weight": (lambda w, z, x: (w.requires_grad_(False), (z, x))[1], False),
    "other strides": (lambda w, z, x: (z, x.mT.contiguous().mT), False),
    "other places": (lambda w, z, x: (misaligned(z), misaligned(x)), False),
    "another length": (lambda w, z, x: (z, x[:5]), False),
    "other rows": (lambda w, z, x: (z[:1], x[:, :1]), False),
    "inputs that all rows share": (lambda w, z, x: (z, x[:, :1]), False),
    "inputs without gradients": (lambda w, z, x: (z, x.detach()), False),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_step_that_tells_what_it_depends_on_is_not_looked_at_again(name, seen, device):
    change, same = LOOKS[name]
    step, z0, xs = Known(device), normal(2, 2, device=device), normal(6, 2, 2, device=device).requires_grad_()
    warm(step, z0, xs)
    z0, xs = change(step.weight, z0, xs)
    for again in range(4):
        found, order = seen.of(lambda: solved(step, z0, xs))
        expected = by_loop(step, z0, xs)
        assert again or (order == ["launch"]) is same
        assert error(found.states, expected) < 1e-9
        sources = [each for each in (step.weight, z0, xs) if each.requires_grad]
        ours, theirs = (torch.autograd.grad(each.square().sum(), sources) for each in (found.states, expected))
        for one, other in zip(ours, theirs, strict=True):
            assert error(one, other) < 1e-9
    assert order == ["launch"]


def test_several_ways_to_look_are_known_at_once_and_not_more_than_some(seen, device):
    step, z0, xs = Known(device), normal(2, 2, device=device), normal(6, 2, 2, device=device)
    ways = [(z0, xs), (z0, xs.mT.contiguous().mT), (misaligned(z0), xs), (z0, xs[:5])]
    with torch.no_grad():
        for again in (False, False, True):
            for given in ways:
                found, order = seen.of(lambda given=given: solved(step, *given))
                assert not again or order == ["launch"]
                assert error(found.states, by_loop(step, *given)) < 1e-9
        for newton in [Newton(chunk=4) for _ in range(begun._MOST_LOOKS)]:  # of which none comes again
            deeppcr.solve(step, z0, xs, solver=newton)
    (expected,) = begun._expected.values()
    assert 0 < len(expected._known) <= begun._MOST_LOOKS


def test_settings_count(seen, device):
    """Of a step that is not looked at again, too: what was settled for others is not what these ask for."""
    step, z0, xs = Known(device), normal(2, 2, device=device), normal(24, 2, 2, device=device)
    coarse = Newton(chunk=4, atol=0.1, rtol=0.1)
    with torch.no_grad():
        for newton in (*[coarse] * 4, NEWTON, NEWTON, coarse, NEWTON):
            found, _ = seen.of(lambda newton=newton: deeppcr.solve(step, z0, xs, solver=newton))
            assert found.tolerance.rtol == newton.tolerance(torch.float64).rtol
            assert newton is coarse or error(found.states, by_loop(step, z0, xs)) < 1e-9


@pytest.mark.parametrize("place", ["state", "inputs"])
def test_nested_tensors_are_refused_by_an_error(place, monkeypatch, device):
    """They have no strides: whoever compares those must not end the process."""
    monkeypatch.setattr(plan, "_WORTH_KERNELS", 0.0)

    def step(z, x):
        return torch.sin(z[0]) + x[0], z[1] + x[1]

    z0, xs = (normal(2, 2, device=device),) * 2, (normal(6, 2, 2, device=device),) * 2
    with torch.no_grad():
        for _ in range(4):
            found = deeppcr.solve(step, z0, xs)
        assert by_kernels(found)
        nested = torch.nested.as_nested_tensor([*xs[0]])
        with pytest.raises(RuntimeError, match="NestedTensorImpl"):
            deeppcr.solve(step, (z0[0], nested), xs) if place == "state" else deeppcr.solve(step, z0, (xs[0], nested))


def test_kernels_that_were_refused_are_not_launched_again(seen, device):
    step, z0, xs = Known(device), normal(2, 2, device=device), normal(6, 2, 2, device=device)
    warm(step, z0, xs)
    call = fused.Call(step, z0, xs, None, None)
    call.refuse("of a test")
    found, order = seen.of(lambda: solved(step, z0, xs))
    assert "launch" not in order
    assert "of a test" in str(found.plan)


@pytest.mark.parametrize("solver", [NEWTON, None])
@pytest.mark.parametrize("lengths", [(16, 40), (40, 16)])
def test_lengths_that_stand_in_no_tensor(lengths, solver, monkeypatch, device):
    monkeypatch.setattr(plan, "_WORTH_KERNELS", 0.0)
    weight = torch.full((3,), 0.9, dtype=torch.float64, device=device, requires_grad=True)
    z0, first, second = normal(2, 3, device=device), *lengths

    def step(z):
        return torch.sin(weight * z) + 0.1

    for length in (*[first] * 4, second, first, second):
        found = deeppcr.solve(step, z0, length=length, solver=solver).states
        expected = by_loop(step, z0, length=length)
        assert error(found, expected) < 1e-9
        ours, theirs = (torch.autograd.grad(each.square().sum(), weight) for each in (found, expected))
        assert error(ours[0], theirs[0]) < 1e-9


def test_modes_count_for_a_step_that_tells_what_it_depends_on(device):
    step, z0, xs = Known(device), normal(2, 2, device=device), normal(6, 2, 2, device=device)
    with torch.no_grad():
        warm(step, z0, xs)
    for _ in range(3):
        found = solved(step, z0, xs).states
        (ours,), (theirs,) = (
            torch.autograd.grad(each.square().sum(), step.weight) for each in (found, by_loop(step, z0, xs))
        )
        assert error(ours, theirs) < 1e-9
        with torch.no_grad():
            assert not solved(step, z0, xs).states.requires_grad
        with torch.inference_mode():
            assert solved(step, z0, xs).states.is_inference()


def test_an_infinity_says_nothing_of_other_solves(device):
    """Not even where no solve is held against the step, as the third and the fifth to seventh."""
    step, z0, xs = problem(device)
    xs, infinite = normal(40, 2, 2, device=device), torch.full_like(z0, float("inf"))
    with torch.no_grad():
        warm(step, z0, xs)
        for _ in range(3):
            with pytest.raises(ValueError, match="z0: holds an infinity"):
                solved(step, infinite, xs)
            assert by_kernels(found := solved(step, z0, xs))
            assert found.result is deeppcr.Result.CONVERGED
