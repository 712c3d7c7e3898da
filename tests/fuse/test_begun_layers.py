"""Weights of a recurrent layer that are other ones by now, where its kernels are launched without a look at its step."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import deeppcr
from deeppcr.ways import begun, fused
from kernel_support import thorough

pytestmark = pytest.mark.usefixtures("kernels")


class Half(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


def assigned(layer, other):
    layer.load_state_dict({name: each.clone() for name, each in other.state_dict().items()}, assign=True)


def copied(layer, other):
    layer.load_state_dict(other.state_dict())


def parametrized(layer, other):
    parametrize.register_parametrization(layer, "weight_hh_l0", Half())
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original.copy_(3 * layer.parametrizations.weight_hh_l0.original)
        other.load_state_dict({name: getattr(layer, name) for name in other.state_dict()})


def replaced(layer, other):
    layer.weight_hh_l0 = nn.Parameter(-layer.weight_hh_l0.detach())
    other.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("kind", ["GRU", *thorough("LSTM")])
@pytest.mark.parametrize("change", [assigned, copied, parametrized, replaced])
def test_other_weights_are_seen(change, kind, device, monkeypatch):
    certain = []

    def begin(call, newton):
        ready = begun.begin(call, newton)
        certain.append(ready is not None and ready.certain)
        return ready

    monkeypatch.setattr(fused, "begin", begin)
    layer = getattr(deeppcr.nn, kind)(4, 4, mode="parallel", device=device, dtype=torch.float64)
    other = getattr(nn, kind)(4, 4, device=device, dtype=torch.float64)
    inputs = torch.randn(9, 2, 4, dtype=torch.float64, device=device)
    with torch.no_grad():
        for _ in range(4):
            layer(inputs)
        assert certain[-1]
        change(layer, other)
        for _ in range(2):
            torch.testing.assert_close(layer(inputs)[0], other(inputs)[0])
        weights = {name: each.detach() + 0.1 for name, each in other.named_parameters()}
        if change is not parametrized:
            expected = torch.func.functional_call(other, weights, (inputs,))[0]
            torch.testing.assert_close(torch.func.functional_call(layer, weights, (inputs,))[0], expected)
            torch.testing.assert_close(layer(inputs)[0], other(inputs)[0])
