"""Recurrent modules whose calls repeat are replayed, and nobody can tell but by the clock."""

import copy

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from again import Counts
from deeppcr import Newton
from recurrent_problems import error, leaves_of
from repeating import (
    BEFORE,
    FEATURES,
    HIDDEN,
    ROWS,
    STEPS,
    assert_right,
    called,
    made,
    new_input,
    warmed,
)

pytestmark = pytest.mark.usefixtures("graphs")


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
    long = device.type == "cuda" and kind.startswith("Diagonal")  # of few steps its kernels make one chunk
    replays, steps = 0, 400 if long else STEPS
    for _ in range(BEFORE + 3):
        x = new_input(device, steps, ROWS, FEATURES, grad=True)
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


@pytest.mark.parametrize(("kind", "options"), [("GRU", {}), ("GRU", {"batch_first": True}), ("LSTM", {})])
def test_the_last_states_do_not_change_with_the_outputs(kind, options, device):
    """As an activation in place changes those."""
    module, _ = made(kind, device, **options)
    x = new_input(device)
    with torch.no_grad():
        warmed(module, x)
        found, replayed = called(module, x)
    assert replayed
    last = [each.clone() for each in leaves_of(found[1])]
    found[0].zero_()
    assert all(map(torch.equal, last, leaves_of(found[1])))


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
