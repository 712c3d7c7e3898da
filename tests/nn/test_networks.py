"""Networks in parallel over their layers agree with themselves layer by layer."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from deeppcr import ConvergenceWarning, Loop, Newton, Random, Result, Zeros
from deeppcr.nn import MLP, ResNet, Sequential
from kernel_support import pairwise
from one_rank import one_rank
from problems import relative_error

TIGHT = Newton(atol=1e-12, rtol=1e-12)


def build(kind, depth, activation, dtype, device, **settings):
    torch.manual_seed(0)
    options = {"activation": activation, "dtype": dtype, "device": device, **settings}
    return (
        MLP(5, 8, depth, 3, **options)
        if kind == "mlp"
        else ResNet(5, 8, depth, 3, skip=options.pop("skip", 1), **options)
    )


def outputs_and_gradients(net, x, mode):
    x = x.clone().requires_grad_()
    out = net(x, mode=mode)
    gradients = torch.autograd.grad(out.square().sum(), [x, *net.parameters()])
    return out, gradients


NETWORKS = [("mlp", 1, 1), ("mlp", 5, 1), ("mlp", 64, 1), ("mlp", 257, 1), ("resnet", 1, 1), ("resnet", 4, 4)]
NETWORKS += [("resnet", 5, 5), ("resnet", 64, 4), ("resnet", 256, 4), ("resnet", 257, 1)]


@pairwise(
    network={" ".join(map(str, network)): network for network in NETWORKS},
    activation={"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "silu": nn.functional.silu},
    rows=[1, 8],
    exactness={"float64": (torch.float64, TIGHT, 1e-9), "float32": (torch.float32, None, 1e-4)},
)
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_both_modes_agree_in_outputs_and_gradients(network, activation, rows, exactness, device):
    (kind, depth, skip), (dtype, newton, tolerance) = network, exactness
    settings = {"skip": skip} if kind == "resnet" else {}
    net = build(kind, depth, activation, dtype, device, newton=newton, **settings)
    x = torch.randn(rows, 5, dtype=dtype, device=device)
    out, gradients = outputs_and_gradients(net, x, "parallel")
    result = net.solution.result
    expected, expected_gradients = outputs_and_gradients(net, x, "sequential")
    if (kind, depth) != ("resnet", 257):
        assert result is Result.CONVERGED
    elif not isinstance(activation, str):
        # With every layer skipped the network amplifies errors: the loop has to finish it, and rounding grows, too.
        tolerance *= 10
    assert relative_error(out, expected) <= tolerance
    largest = max(float(g.abs().max()) for g in expected_gradients)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * max(float(theirs.abs().max()), 1e-3 * largest)


def test_the_resnet_is_the_papers(device):
    net = build("resnet", 8, "relu", torch.float64, device, skip=4)
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    z = net.input(x)
    for block in range(2):
        before = z
        for k in range(4):
            z = torch.relu(z) @ net.weight[block, k].mT + net.bias[block, k]
        z = z + before
    assert torch.allclose(net(x, mode="parallel"), net.output(torch.relu(z)), atol=1e-9)


def test_the_warm_start_is_state_but_not_in_the_checkpoint_unless_asked(device):
    x = torch.randn(8, 5, device=device)
    newton = Newton(chunk=1)
    plain = build("mlp", 200, "relu", torch.float32, device, mode="parallel", newton=newton)
    warm = build("mlp", 200, "relu", torch.float32, device, mode="parallel", newton=newton, warm_start=True)
    warm.load_state_dict(plain.state_dict())
    assert "activations" not in warm.state_dict()
    first = warm(x)
    cold = warm.solution.iterations.max()
    again = warm(x)
    assert warm.solution.iterations.max() < cold
    assert relative_error(again, first) < 1e-4
    warm.eval()
    before = warm.activations.clone()
    warm(torch.randn(3, 5, device=device))
    assert torch.equal(before, warm.activations)
    saved = build(
        "mlp", 200, "relu", torch.float32, device, mode="parallel", newton=newton, warm_start=True, save_warm_start=True
    )
    saved(x)
    restored = build(
        "mlp", 200, "relu", torch.float32, device, mode="parallel", newton=newton, warm_start=True, save_warm_start=True
    )
    restored.load_state_dict(saved.state_dict())
    restored(x)
    assert restored.solution.iterations.max() < cold


@pytest.mark.parametrize("kind", ["mlp", "resnet"])
def test_the_guess_is_where_newton_starts(kind, device):
    x = torch.randn(4, 5, dtype=torch.float64, device=device)
    options = {"mode": "parallel", "newton": Newton(chunk=1)}
    net = build(kind, 100, "tanh", torch.float64, device, **options)
    expected, cold = net(x), net.solution.iterations.max()
    for guess in (Zeros(), Random(seed=2)):
        other = build(kind, 100, "tanh", torch.float64, device, guess=guess, **options)
        assert relative_error(other(x), expected) < 1e-9
        assert not torch.equal(other.solution.updates, net.solution.updates)
    there = net.hidden_states(net.input(x), mode="sequential").detach()
    known = build(kind, 100, "tanh", torch.float64, device, guess=lambda z0, xs: there, **options)
    assert relative_error(known(x), expected) < 1e-9
    assert known.solution.iterations.max() < cold


def test_ordinary_habits(device, tmp_path):
    net = build("mlp", 40, "tanh", torch.float32, device, mode="parallel")
    x = torch.randn(6, 5, device=device)
    expected = net(x)
    torch.save(net, tmp_path / "net.pt")
    assert torch.equal(torch.load(tmp_path / "net.pt", weights_only=False)(x), expected)
    assert torch.equal(copy.deepcopy(net)(x), expected)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other = build("mlp", 40, "tanh", torch.float32, device, mode="sequential")
    other.load_state_dict(torch.load(buffer))
    assert relative_error(other(x), expected) < 1e-4
    assert relative_error(net.double()(x.double()), expected.double()) < 1e-4
    net.float()
    compiled = torch.compile(net, backend="aot_eager")
    assert relative_error(compiled(x), expected) < 1e-5
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = net(x)
        out.sum().backward()
    assert relative_error(out.float(), expected) < 0.05
    assert net.weight.grad.dtype == torch.float32
    assert net(torch.randn(2, 3, 5, device=device)).shape == (2, 3, 3)
    assert net(torch.randn(5, device=device)).shape == (3,)
    assert "depth=40, width=8, activation=tanh, mode=parallel" in repr(net)
    assert "depth=8, skip=4, width=8" in repr(build("resnet", 8, "relu", torch.float32, device, skip=4))


def test_the_mode_is_chosen_by_size(device):
    small = build("mlp", 8, "relu", torch.float32, device)
    x = torch.randn(2, 5, device=device)
    small(x)
    assert small.solution.result is Result.LOOP
    assert small.solution.exact_steps.tolist() == [8, 8]
    assert any("loop wins" in note or "one layer after the other" in note for note in small.solution.plan.notes)
    deep = build("mlp", 4096, "relu", torch.float32, device)
    deep(x)
    assert deep.solution.result is not Result.LOOP
    assert any("loop wins" in note or "one layer after the other" in note for note in deep.solution.plan.notes)


def test_bad_settings_are_named():
    for call, message in (
        (lambda: MLP(5, 8, 0, 3), "depth: at least 1, got 0"),
        (lambda: ResNet(5, 8, 0, 3), "depth: at least 1, got 0"),
        (lambda: ResNet(5, 8, 4, 3, skip=0), "skip: at least 1, got 0"),
        (lambda: MLP(0, 8, 2, 3), "in_features"),
        (lambda: MLP(5, 8, 2, 3, "rely"), "activation: expected one of relu"),
        (lambda: MLP(5, 8, 2, 3, mode="fast"), "mode: expected one of"),
        (lambda: ResNet(5, 8, 6, 3, skip=4), "depth: expected a multiple of skip = 4, got 6"),
        (lambda: MLP(5, 8, 2, 3)(torch.ones(2, 5), mode="fast"), "mode"),
        (lambda: Sequential(mode="fast"), "mode"),
        (lambda: MLP(5, 8, 2, 3)(torch.ones(2, 4)), r"x: expected \[\*batch, 5\], got \[2, 4\]; images are flattened"),
        (lambda: ResNet(5, 8, 4, 3, skip=2)(torch.tensor(1.0)), r"x: expected \[\*batch, 5\], got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_settings_of_another_type_are_named():
    with pytest.raises(TypeError, match=r"^x: expected a tensor \[\*batch, in_features\], got NoneType$"):
        MLP(5, 8, 2, 3)(None)
    sizes = {"in_features": 5, "width": 8, "depth": 4, "out_features": 3}
    for network, names in ((MLP, sizes), (ResNet, {**sizes, "skip": 2})):
        for name in names:
            for bad in (True, 2.0, "4"):
                with pytest.raises(TypeError, match=f"^{name}: expected an int, got {bad!r}$"):
                    network(**{**names, name: bad})
        for bad in ("x", Loop()):
            with pytest.raises(TypeError, match=r"^newton: expected Newton"):
                network(**names, newton=bad)
    with pytest.raises(TypeError, match=r"^newton: expected Newton\(\.\.\.\) or None, got 'x'"):
        Sequential(newton="x")
    with pytest.raises(TypeError, match=r"^layers: expected a torch\.nn\.Sequential, got Linear$"):
        Sequential.from_torch(nn.Linear(4, 4))


def test_a_checkpoint_loads_with_or_without_a_warm_start(device):
    options = {"mode": "parallel", "warm_start": True}
    with_it = build("resnet", 64, "tanh", torch.float32, device, save_warm_start=True, **options)
    without = build("resnet", 64, "tanh", torch.float32, device, **options)
    x = torch.randn(4, 5, device=device)
    expected = with_it(x)
    assert "activations" in with_it.state_dict()
    without.load_state_dict(with_it.state_dict())
    assert torch.count_nonzero(without.activations) == 0
    assert relative_error(without(x), expected) < 1e-5
    kept = with_it.activations.clone()
    nn.ModuleList([with_it]).load_state_dict(nn.ModuleList([without]).state_dict())
    assert torch.equal(with_it.activations, kept)
    with pytest.raises(RuntimeError, match="wrong"):
        without.load_state_dict({**with_it.state_dict(), "wrong": kept})


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_an_input_of_another_dtype_than_the_weights_is_named(mode, device):
    net = MLP(5, 6, 8, 3, mode=mode, device=device)
    with pytest.raises(TypeError, match=r"x: expected torch\.float32, the dtype of the weights, got torch\.float64"):
        net(torch.randn(4, 5, dtype=torch.float64, device=device))


def networks(device, dtype=torch.float64, mode="parallel"):
    """One of each kind, that takes [B, 5]; in float64 on the general path whatever the device."""
    torch.manual_seed(0)
    options = {"mode": mode, "dtype": dtype, "device": device}
    layers = (nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(20))
    return [
        MLP(5, 8, 40, 3, "tanh", **options),
        ResNet(5, 8, 64, 3, activation="tanh", **options),
        Sequential(*layers, mode=mode).to(device, dtype),
    ]


@pytest.mark.parametrize("mode", ["parallel", "sequential", "auto"])
def test_a_batch_of_no_rows(mode, device):
    for net in networks(device, torch.float32, mode):
        for batch in ((0,), (2, 0)):
            x = torch.randn(*batch, 5, device=device, requires_grad=True)
            out = net(x)
            assert out.shape == (*batch, net(torch.ones(1, 5, device=device)).shape[-1])
            gradients = torch.autograd.grad(out.sum(), [x, *net.parameters()])
            assert all(torch.count_nonzero(g) == 0 for g in gradients)
        if isinstance(net, (MLP, ResNet)):
            assert net.activations.isfinite().all()


def test_a_row_that_is_not_finite_leaves_the_others_right(device):
    for net in networks(device):
        good = torch.randn(4, 5, dtype=torch.float64, device=device)
        bad = good.clone()
        bad[1, 2] = float("nan")
        bad.requires_grad_()
        with pytest.warns(ConvergenceWarning, match=r"input: row 1 holds values that are not finite.*\(1 of 4 rows\)"):
            out = net(bad)
        assert net.solution.results == (Result.CONVERGED, Result.NON_FINITE, Result.CONVERGED, Result.CONVERGED)
        expected = net(bad, mode="sequential")
        assert out[1].isnan().all()
        assert torch.allclose(out, expected, atol=1e-8, equal_nan=True)
        ours = torch.autograd.grad(out.sum(), [bad, *net.parameters()])
        theirs = torch.autograd.grad(expected.sum(), [bad, *net.parameters()])
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-8, equal_nan=True)
        for whole in (bad[1:2], bad[1]):
            with pytest.warns(ConvergenceWarning, match=r"row 0 .*\(1 of 1 rows\)"):
                assert net(whole).isnan().all()
            assert net.solution.result is Result.NON_FINITE


def test_loss_scaling_skips_a_step_whose_gradients_overflow(device):
    for net in networks(device, torch.float32):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**120)
        before = copy.deepcopy(net.state_dict())
        scaler.scale(net(torch.ones(2, 5, device=device)).sum() * 1e30).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < 2.0**120
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_second_derivatives_are_for_the_sequential_mode(device):
    for net in networks(device):
        x = torch.randn(2, 5, dtype=torch.float64, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match=r'mode="sequential" of a module of deeppcr\.nn'):
            torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope,) = torch.autograd.grad(net(x, mode="sequential").sum(), x, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["mlp", "resnet", "sequential"])
def test_the_solution_is_of_the_last_call(kind, device):
    torch.manual_seed(0)
    if kind == "sequential":
        net = Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))).to(device)
        x = torch.randn(3, 6, device=device)
    else:
        net = build(kind, 8, "relu", torch.float32, device)
        x = torch.randn(3, 5, device=device)
    assert net.solution is None
    calls = (
        (x, "sequential", 'mode="sequential"'),
        (x, "auto", "loop wins"),
        (x, "parallel", None),
        (x[:0], "parallel", "an empty batch"),
        (x, "parallel", None),
        (x[:2], "sequential", 'mode="sequential"'),
    )
    for given, mode, why in calls:
        for autocast in (False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                net(given, mode=mode)
            solution = net.solution
            assert solution.iterations.shape == solution.residual.shape == (len(given),)
            assert solution.message.startswith("computed one step after the other: ") is (why is not None)
            if why is not None:
                assert solution.result is Result.LOOP
                assert solution.exact_steps.tolist() == [8] * len(given)
                expected = ("loop wins", "one layer after the other") if why == "loop wins" else (why,)
                assert any(each in solution.plan.notes[0] for each in expected)
                assert solution.plan.notes[0] in solution.message


def test_data_parallel_training(tmp_path):
    """One process is enough to see that DistributedDataParallel finds every parameter's gradient."""
    with one_rank(tmp_path):
        net = build("mlp", 30, "tanh", torch.float32, "cpu", mode="parallel")
        parallel = nn.parallel.DistributedDataParallel(net)
        parallel(torch.randn(4, 5)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_another_layer_in_the_place_of_the_first(device):
    net = MLP(4, 4, 3, 2, device=device)
    net.input = nn.Sequential(nn.Flatten(1), nn.Linear(8, 4)).to(device)
    assert net(torch.zeros(5, 2, 4, device=device)).shape == (5, 2)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), torch.relu_, lambda z: z.tanh_()])
@pytest.mark.parametrize("kind", ["mlp", "resnet"])
def test_an_activation_in_place_is_refused(kind, activation):
    """The loop would add, and return, what it has overwritten."""
    with pytest.raises(ValueError, match="activation: it changes its argument in place"):
        build(kind, 4, activation, torch.float32, "cpu")


def test_activations_that_are_none_or_choosy():
    with pytest.raises(TypeError, match="activation: expected one of relu"):
        build("mlp", 4, None, torch.float32, "cpu")

    def rows_only(z):
        if z.ndim != 2:
            raise RuntimeError("rows only")
        return z.tanh()

    state = torch.get_rng_state()
    build("mlp", 4, rows_only, torch.float32, "cpu")(torch.randn(2, 5))
    torch.set_rng_state(state)
    noisy = build("mlp", 4, lambda z: z * torch.rand(()), torch.float32, "cpu")
    assert torch.equal(noisy.weight, build("mlp", 4, "tanh", torch.float32, "cpu").weight), "no numbers are drawn"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "resnet"])
def test_a_network_is_exported_without_a_trace(kind, strict):
    """How the last pass went is no part of the program, and not of the module after it."""
    net = build(kind, 3, "tanh", torch.float32, "cpu", mode="sequential").eval()
    x = torch.randn(2, 5)
    expected = net(x)
    net._looped = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = torch.export.export(net, (x,), strict=strict)
    assert net.solution is None
    torch.testing.assert_close(program.module()(x), expected)
