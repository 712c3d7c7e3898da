"""What modules do under ``torch.compile`` and ``torch.export``: one graph for any number of rows and steps, whichever way they run."""

import platform
import warnings

import pytest
import torch
from torch.export import Dim, export
from torch.nn.utils.rnn import pack_sequence

import deeppcr
from compiling import compiled_and_counted, value_and_gradients
from deeppcr import nn as ours
from deeppcr.nn import operator
from kernel_support import thorough
from recurrent_problems import KINDS, skip_where_pytorch_has_no_half_precision

NETWORKS = {
    "mlp": lambda **settings: ours.MLP(5, 4, 6, 3, **settings),
    "resnet": lambda **settings: ours.ResNet(5, 4, 6, 3, skip=3, **settings),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mlp", "sequential"),
        ("resnet", "auto"),
        ("mlp", "parallel"),
        ("resnet", "parallel"),
        *thorough(("mlp", "auto"), ("resnet", "sequential")),
    ],
)
def test_networks_in_one_graph_for_any_number_of_rows(kind, mode):
    net = NETWORKS[kind](mode=mode).double()
    compiled, graphs = compiled_and_counted(net)
    for rows in (65, 2, 3, 64):
        x = torch.randn(rows, 5, dtype=torch.float64)
        found = value_and_gradients(compiled, x, changing=1)
        torch.testing.assert_close(found, value_and_gradients(net, x))
    assert len(graphs) == 1


@pytest.mark.parametrize("mode", ["auto", "parallel"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_are_exported_for_any_number_of_rows(kind, mode):
    net = NETWORKS[kind](mode=mode)
    run = export(net, (torch.randn(7, 5),), dynamic_shapes=({0: Dim("rows", min=2)},)).module()
    for rows in (2, 65):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), net(x))


def test_rows_that_are_not_finite():
    """As eagerly: they are told of, and the others are right, gradients included."""
    net = NETWORKS["mlp"](mode="parallel")
    compiled, _ = compiled_and_counted(net)
    x = torch.randn(3, 5)
    x[1, 0] = torch.nan
    with pytest.warns(deeppcr.ConvergenceWarning, match="row 1 holds values that are not finite"):
        found = value_and_gradients(compiled, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(found, value_and_gradients(net, x), equal_nan=True)


def test_all_states_in_one_graph():
    net = NETWORKS["resnet"](mode="parallel").double()
    compiled, _ = compiled_and_counted(net.hidden_states)
    hidden = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(value_and_gradients(compiled, hidden), value_and_gradients(net.hidden_states, hidden))


@pytest.fixture
def allow_rnn():
    """PyTorch refuses to look at what is derived from its recurrent modules, unless it is told to."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def value_and_all_gradients(module, x, *others, **options):
    """The gradients of weights, too."""
    torch._dynamo.mark_dynamic(x, (0, 1))
    outputs, ends = module(x, *others, **options)
    ends = (ends,) if isinstance(ends, torch.Tensor) else ends
    loss = outputs.sin().sum() + sum(i * leaf.cos().sum() for i, leaf in enumerate(ends, 1))
    leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
    return outputs, *ends, *torch.autograd.grad(loss, leaves)


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, "parallel") for kind in ("GRU", "LSTM", "DiagonalGRU")),
        *(("GRU", "sequential"), ("LSTM", "auto"), ("DiagonalLSTM", "sequential")),
        *thorough(("RNN", "parallel"), ("DiagonalLSTM", "parallel")),  # of which options are compiled below
    ],
)
def test_recurrent_modules_in_one_graph_for_any_number_of_rows_and_steps(kind, mode):
    module = getattr(ours, kind)(3, 4, dtype=torch.float64, mode=mode)
    compiled, graphs = compiled_and_counted(module)
    for steps, rows in ((9, 4), (5, 2), (30, 3)):
        x = torch.randn(steps, rows, 3, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(value_and_all_gradients(compiled, x), value_and_all_gradients(module, x))
    assert len(graphs) == 1


OPTIONS = {
    "deep": ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}, {}),
    "projected": ("LSTM", {"proj_size": 2, "bias": False, "num_layers": 2}, {}),
    "relu": ("RNN", {"nonlinearity": "relu", "bidirectional": True}, {}),
    "diagonal": ("DiagonalLSTM", {"num_layers": 2, "bias": False, "bidirectional": True}, {}),
    "settings": ("GRU", {"newton": deeppcr.Newton(rtol=1e-12, chunk=4, linear=deeppcr.PCR())}, {}),
}


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize("mode", ["parallel", *thorough("sequential", "auto")])
@pytest.mark.parametrize(
    ("name", "started"),
    [
        *(("deep", True), ("projected", True), ("relu", True), ("settings", True), ("diagonal", False)),
        *thorough(("deep", False), ("projected", False), ("relu", False), ("settings", False), ("diagonal", True)),
    ],
)
def test_options_of_recurrent_modules(name, started, mode):
    """With initial states and resets, and without."""
    kind, options, call = OPTIONS[name]
    module = getattr(ours, kind)(3, 4, dtype=torch.float64, mode=mode, **options)
    compiled, graphs = compiled_and_counted(module)
    x = torch.randn(7, 3, 3, dtype=torch.float64, requires_grad=True)
    hx = None
    if started:
        count, rows = len(module._all_weights), x.shape[0 if module.batch_first else 1]
        hx = tuple(torch.randn(count, rows, width, dtype=torch.float64) for width in module._widths())
        for leaf in hx:
            torch._dynamo.mark_dynamic(leaf, 1)
        hx = hx[0] if len(hx) == 1 else hx
        call = {"reset": torch.rand(7, 3) < 0.3}
        torch._dynamo.mark_dynamic(call["reset"], (0, 1))
    torch.testing.assert_close(
        value_and_all_gradients(compiled, x, hx, **call), value_and_all_gradients(module, x, hx, **call)
    )
    assert len(graphs) == 1


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize("kind", ["LSTM", *thorough("RNN", "GRU", "DiagonalGRU")])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_autocast_is_that_of_the_call(kind, mode, device):
    if mode == "sequential" and kind in KINDS:
        skip_where_pytorch_has_no_half_precision(kind, device)
    module = getattr(ours, kind)(3, 4, mode=mode, device=device)
    compiled, _ = compiled_and_counted(module)
    x = torch.randn(6, 2, 3, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found, right = compiled(x)[0], module(x)[0]
    assert found.dtype is right.dtype
    # PyTorch's own: on ARM processors its GRU stays as it is, and on a GPU it is float16 whichever was asked for.
    theirs = torch.float16 if kind in KINDS and device.type == "cuda" else torch.bfloat16
    assert right.dtype is theirs or (kind == "GRU" and platform.machine() != "x86_64")
    of_found, of_right = (torch.autograd.grad(each.float().sum(), [x, *module.parameters()]) for each in (found, right))
    torch.testing.assert_close((found, of_found), (right, of_right))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", *thorough("RNN", "DiagonalGRU", "DiagonalLSTM")])
@pytest.mark.parametrize("mode", ["auto", "parallel"])
def test_recurrent_modules_are_exported_for_any_number_of_rows_and_steps(kind, mode, tmp_path):
    module = getattr(ours, kind)(3, 4, mode=mode)
    free = {0: Dim("steps", min=2), 1: Dim("rows", min=2)}
    torch.export.save(export(module, (torch.randn(7, 5, 3),), dynamic_shapes=(free,)), tmp_path / "module.pt2")
    run = torch.export.load(tmp_path / "module.pt2").module()
    for steps, rows in ((2, 9), (30, 2)):
        x = torch.randn(steps, rows, 3)
        torch.testing.assert_close(run(x), module(x))


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("kind", ["LSTM", *thorough("RNN", "GRU", "DiagonalGRU", "DiagonalLSTM")])
def test_the_operator_of_recurrent_layers_is_sound(kind, mode):
    module = getattr(ours, kind)(3, 4, mode=mode, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    words, tensors = module._in_words(3, mode), [x, *module.parameters()]
    torch.library.opcheck(operator.run, (words, tensors, "", False, True))
    found = operator.run(words, tensors, "", False, True)
    given = ([found[0].detach()], [0], [0, 2], "", False)
    detached = [[each.detach() for each in every] for every in (tensors, found)]
    torch.library.opcheck(operator.run_backward, (words, *detached, *given))


@pytest.mark.parametrize(
    ("kind", "last"), [("mlp", False), ("resnet", True), *thorough(("mlp", True), ("resnet", False))]
)
def test_the_operator_of_networks_is_sound(kind, last):
    net = NETWORKS[kind](mode="parallel").double()
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(operator.run, (net._in_words("parallel"), [hidden, net.weight, net.bias], "", last, True))
    with torch.no_grad():
        torch.library.opcheck(
            operator.run, (net._in_words("parallel"), [hidden, net.weight, net.bias], "", last, False)
        )


def test_second_derivatives_are_refused_by_name():
    net, hidden = NETWORKS["mlp"](mode="parallel"), torch.randn(3, 4, requires_grad=True)
    (found,) = operator.run_in_graph(net._in_words("parallel"), [hidden, net.weight, net.bias])
    with pytest.raises(RuntimeError, match=r"second derivatives through deeppcr\.solve"):
        torch.autograd.grad(found.sum(), hidden, create_graph=True)


@pytest.mark.parametrize(
    "settings",
    [
        deeppcr.Newton(),
        deeppcr.Newton(rtol=1e-300, stop=deeppcr.PaperTest(1e-3), linear=deeppcr.Hierarchical(chunk=8), chunk=2),
        deeppcr.Newton(jacobian=deeppcr.ScalarJacobian(0.5), scale="local", capture=False),
        deeppcr.Zeros(),
    ],
)
def test_settings_in_words(settings):
    words = operator.in_words(settings)
    assert words == repr(settings) == repr(operator.made_of(words))


def test_settings_that_there_are_no_words_for():
    class Patient(deeppcr.UpdateTest):
        pass

    assert operator.in_words(deeppcr.Newton(stop=Patient())) is None
    assert operator.in_words(deeppcr.Newton(jacobian=deeppcr.GivenJacobian(lambda z: z))) is None
    assert operator.in_words(deeppcr.Newton(rtol=type("Number", (float,), {})(1e-3))) is None
    assert operator.in_words(torch.zeros(2)) is None


@pytest.mark.usefixtures("allow_rnn")
@pytest.mark.parametrize(
    ("module", "call", "reason"),
    [
        (ours.MLP(5, 4, 6, 3, mode="parallel", warm_start=True), lambda net: net(torch.ones(2, 5)), "warm start"),
        (
            ours.MLP(5, 4, 6, 3, torch.tanh, mode="parallel"),
            lambda net: net(torch.ones(2, 5)),
            "activation of your own",
        ),
        (ours.GRU(3, 4), lambda gru: gru(pack_sequence([torch.ones(5, 3)])), "depends on values"),
        (ours.GRU(3, 4), lambda gru: gru(torch.ones(5, 3), cu_seqlens=torch.tensor([0, 2, 5])), "depends on values"),
        (ours.GRU(3, 4), lambda gru: gru(torch.ones(5, 2, 4)), "said outside of a graph"),
        (ours.Sequential(torch.nn.Tanh(), mode="parallel"), lambda net: net(torch.ones(2, 5)), "layers of your own"),
        (torch.nn.Tanh(), lambda step: deeppcr.solve(step, torch.ones(2), length=9).states, "looks at values"),
    ],
    ids=["warm", "activation", "packed", "documents", "wrong", "sequential", "solve"],
)
def test_what_ends_a_graph_says_why(module, call, reason):
    compiled, _ = compiled_and_counted(call, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        compiled(module)


@pytest.mark.usefixtures("allow_rnn")
def test_a_graph_that_may_end_goes_on_behind_a_module():
    """Without ``fullgraph=True``, and in PyTorch's own words where an argument is wrong."""
    torch.compiler.reset()
    gru = ours.GRU(3, 4, mode="parallel")
    compiled = torch.compile(lambda x: gru(x)[1] + 1, backend="eager")
    packed = pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    torch.testing.assert_close(compiled(packed), gru(packed)[1] + 1)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        compiled(torch.randn(5, 2, 4))


def test_a_compiled_pass_tells_nothing():
    net, x = NETWORKS["mlp"](mode="parallel"), torch.randn(2, 5)
    compiled, _ = compiled_and_counted(net)
    with torch.inference_mode():
        found = compiled(x)
        assert net.solution is None
        torch.testing.assert_close(found, net(x))
    assert net.solution.result is deeppcr.Result.CONVERGED


def test_settings_may_change_between_calls():
    net, x = NETWORKS["mlp"](mode="parallel"), torch.randn(2, 5)
    compiled, graphs = compiled_and_counted(net)
    compiled(x)
    net.newton = deeppcr.Newton(stop=deeppcr.FixedIterations(1), chunk=1)
    torch.testing.assert_close(compiled(x), net(x))
    assert len(graphs) == 2
