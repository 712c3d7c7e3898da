"""A model whose modules become parallel, and back: it notices nothing."""

import copy
import io

import pytest
import torch
from torch import distributed, nn

from deeppcr import Newton
from deeppcr import nn as ours
from one_rank import one_rank
from recurrent_problems import error


class Tagger(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.encode = nn.GRU(3, 4, bidirectional=True, **options)
        self.decode = nn.LSTM(8, 4, **options)
        self.last = nn.ModuleDict({"rnn": nn.RNN(4, 2, nonlinearity="relu", **options)})

    def forward(self, words):
        encoded, _ = self.encode(self.embed(words))
        decoded, _ = self.decode(encoded)
        return self.last["rnn"](decoded)[0]


def names(model):
    return [name for name, _ in model.named_modules()]


def test_a_model_gives_what_it_gave_and_comes_back(device):
    model = Tagger(dtype=torch.float64).double().to(device)
    words = torch.randint(0, 11, (20, 2), device=device)
    before, keys = model(words), {name: set(vars(module)) for name, module in model.named_modules()}
    parameters, listed = list(model.parameters()), names(model)
    found = ours.convert(model, mode="parallel", newton=Newton(chunk=4))
    assert {name: type(module) for name, module in found.items()} == {
        "encode": ours.GRU,
        "decode": ours.LSTM,
        "last.rnn": ours.RNN,
    }
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert names(model) == listed
    assert error(model(words), before) < 1e-10
    assert model.encode.solutions[0].plan.chunk == 4
    assert ours.convert(model) == {}  # they are ours already
    assert list(ours.revert(model)) == ["encode", "decode", "last.rnn"]
    assert torch.equal(model(words), before)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    assert type(model.decode) is nn.LSTM
    assert model.decode.mode == "LSTM"


def test_training_goes_on(device):
    """An optimiser made before, hooks, and checkpoints in both directions."""
    model = Tagger(dtype=torch.float64).double().to(device)
    twin, seen = copy.deepcopy(model), []
    words = torch.randint(0, 11, (20, 2), device=device)
    optimisers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, twin)]
    model.encode.register_forward_hook(lambda module, arguments, found: seen.append(type(module)))
    for step in range(3):
        if step == 1:
            ours.convert(model, mode="parallel")
        for each, optimiser in zip((model, twin), optimisers, strict=True):
            optimiser.zero_grad()
            each(words).square().sum().backward()
            optimiser.step()
    assert seen == [nn.GRU, ours.GRU, ours.GRU]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert error(one, other) < 1e-9
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = Tagger(dtype=torch.float64).double().to(device)
    fresh.load_state_dict(torch.load(file))
    assert error(fresh(words), model(words)) < 1e-10


def test_a_model_that_is_distributed_already(tmp_path):
    if not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    with one_rank(tmp_path):
        model, words = Tagger(), torch.randint(0, 11, (20, 2))
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(words).sum().backward()
        expected = [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        assert len(ours.convert(wrapped, mode="parallel")) == 3
        wrapped(words).sum().backward()
        for one, other in zip(model.parameters(), expected, strict=True):
            assert error(one.grad, other) < 1e-4


def test_a_single_module_and_one_that_is_named_twice():
    gru = nn.GRU(3, 4)
    assert ours.convert(gru) == {"": gru}
    assert type(gru) is ours.GRU
    assert gru.run_mode == "auto"
    shared = nn.LSTM(3, 3)
    model = nn.ModuleList([shared, shared])
    assert list(ours.convert(model)) == ["0"]
    assert model[1] is shared
    assert type(shared) is ours.LSTM


def test_what_is_somebodys_own_is_left_alone():
    class Own(nn.GRU):
        def forward(self, x):
            return super().forward(x)[0]

    model = nn.ModuleList([Own(3, 4), nn.GRUCell(3, 4), nn.Linear(3, 3)])
    assert ours.convert(model) == {}
    assert type(model[0]) is Own


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, z):
        return z + 0.1 * torch.tanh(self.linear(z))


def stack(count, make):
    return nn.Sequential(*(make() for _ in range(count)))


def plain_block():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def test_deep_networks_of_equal_layers():
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), stack(64, plain_block))
    before = model(x)
    assert list(ours.convert(model, mode="parallel")) == ["1"]
    assert type(model[1]) is ours.Sequential
    assert torch.allclose(model(x), before, atol=1e-5)
    assert model[1].solution is not None
    ours.revert(model)
    assert type(model[1]) is nn.Sequential
    assert "mode" not in vars(model[1])
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "layers",
    [
        stack(63, plain_block),  # too few
        stack(64, lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout())),  # random
        stack(64, lambda: nn.BatchNorm1d(4)),  # rows are held together
        stack(64, lambda: Residual(4)),  # nobody knows
        nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(64))),  # not alike
        nn.Sequential(*(nn.LeakyReLU(0.1 * (count % 2)) for count in range(64))),  # nor these
    ],
)
def test_other_networks_are_left_alone(layers):
    assert ours.convert(layers) == {}
    assert type(layers) is nn.Sequential


def test_blocks_of_the_callers_own():
    layers, x = stack(64, lambda: Residual(4)), torch.randn(3, 4)
    before = layers(x)
    assert ours.convert(layers, mode="parallel", blocks=[Residual]) == {"": layers}
    assert torch.allclose(layers(x), before, atol=1e-5)


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got list"):
        ours.convert([])
    with pytest.raises(TypeError, match="model: expected"):
        ours.revert(None)
    with pytest.raises(TypeError, match="blocks: expected classes of modules"):
        ours.convert(nn.Linear(2, 2), blocks=[torch.tanh])
    with pytest.raises(ValueError, match="mode: expected one of"):
        ours.convert(nn.Linear(2, 2), mode="fast")


def test_converting_again_sets_the_mode():
    model = nn.Sequential(nn.GRU(3, 4))
    ours.convert(model, mode="parallel")
    assert ours.convert(model, mode="sequential") == {}
    assert model[0].run_mode == "sequential"


def test_layers_with_hooks_stay():
    """In parallel a layer is called more than once a pass."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(64)))
    model[5].register_forward_hook(lambda *_: None)
    assert ours.convert(model) == {}


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_parametrized_modules_are_converted_and_reverted(kind):
    """Whose class a parametrization has made, before or after; when it goes, what is left is the kind that the module has become."""
    x, theirs = torch.randn(20, 2, 3), getattr(nn, kind)
    model = nn.Sequential(theirs(3, 4))
    module = model[0]
    nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    right = module(x)[0]
    assert list(ours.convert(model, mode="parallel")) == ["0"]
    assert isinstance(module, getattr(ours, kind))
    found = module(x)[0]
    assert module.solutions[0].result.name == "CONVERGED"
    assert torch.allclose(found, right, atol=1e-6)
    slopes = [torch.autograd.grad(each.sum(), list(module.parameters())) for each in (found, right)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)
    assert ours.convert(model, mode="sequential") == {}
    assert module.run_mode == "sequential"
    assert list(ours.revert(model)) == ["0"]
    assert not isinstance(module, getattr(ours, kind))
    assert torch.equal(module(x)[0], right)
    ours.convert(model)
    nn.utils.parametrize.remove_parametrizations(module, "weight_hh_l0")
    assert type(module) is getattr(ours, kind)
    nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    ours.revert(model)
    nn.utils.parametrize.remove_parametrizations(module, "weight_hh_l0")
    assert type(module) is theirs
    assert torch.allclose(module(x)[0], right, atol=1e-6)
