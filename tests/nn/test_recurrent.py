"""Recurrent modules in parallel over their steps agree with those of PyTorch: options, shapes, gradients, and words."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from deeppcr import ConvergenceWarning, Result
from deeppcr import nn as ours
from kernel_support import pairwise
from recurrent_problems import (
    KINDS,
    LEAST,
    Configuration,
    drawn,
    error,
    leaves_of,
    skip_where_pytorch_has_no_half_precision,
)

pytestmark = pytest.mark.usefixtures("whole_float32")

FEW, ALL = 24, 200
#: A GPU's kernels, whose sums have another order, are held to the tolerance of a solve.
CLOSE = {"cpu": 1e-6, "cuda": 1e-5}


@pairwise(
    kind=[*KINDS, "RELU", "PROJECTED"],
    layers=[1, 2],
    bidirectional=[False, True],
    bias=[True, False],
    batch_first=[False, True],
    form=["batch", "single", "packed"],
    start=[False, True],
)
def test_every_option_is_that_of_pytorch(kind, layers, bidirectional, bias, batch_first, form, start, device):
    options = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}
    options |= {"RELU": {"nonlinearity": "relu"}, "PROJECTED": {"proj_size": 2}}.get(kind, {})
    kind = {"RELU": "RNN", "PROJECTED": "LSTM"}.get(kind, kind)
    case = Configuration(kind, 19, 3, 2, 4, form, start, device=device, **options)
    for found, _ in case.errors(torch.float64):
        assert found < 1e-10


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(FEW, ALL))]
)
def test_random_configurations_are_as_exact_as_pytorch(seed, device):
    for found, theirs in drawn(seed, device).errors(torch.float32, jointly=True):
        assert found <= 3 * max(theirs, LEAST[torch.float32])


@pytest.mark.gpu
def test_initial_states_that_nobody_gave_are_made_once(device):
    """And belong to who made them: a stream, a graph of the caller, a module."""
    if device.type != "cuda":
        pytest.skip("on a CPU they are made anew")
    module, x = ours.LSTM(3, 4, mode="parallel", device=device), torch.randn(9, 2, 3, device=device)
    with torch.inference_mode():  # a backward pass may keep them all the same
        module(x)
    starts = lambda rows, x=x: [start for (start,) in module._starts(None, rows, x)]  # noqa: E731
    first = starts(2)
    assert all(one is other and not one.any() for one, other in zip(first, starts(2), strict=True))
    module(x)[0].sum().backward()
    assert starts(3)[0].shape == (3, 4)
    assert starts(2, x.double())[0].dtype == torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        assert starts(2)[0] is not first[0]
    assert starts(2**16)[0] is not starts(2**16)[0]  # large ones are not kept
    assert "_zeros" not in copy.deepcopy(module).__dict__
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert module._starts(None, 2, x)[0] is not first[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 63, 65])
def test_solves_converge(kind, steps, device):
    module = getattr(ours, kind)(3, 5, mode="parallel", device=device)
    module(torch.randn(steps, 2, 3, device=device))
    (solution,) = module.solutions
    assert solution.result is Result.CONVERGED
    assert solution.states is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_dies_out_is_told(kind, device):
    """Without inputs and biases a state forgets itself."""
    module = getattr(ours, kind)(3, 5, mode="parallel", device=device)
    start = torch.randn(1, 2, 5, device=device)
    with torch.no_grad():
        for name, each in module.named_parameters():
            each.mul_(0.0 if "bias" in name else 0.3)
        module(torch.zeros(200, 2, 3, device=device), (start, start) if "LSTM" in kind else start)
    (solution,) = module.solutions
    assert solution.result is Result.CONVERGED
    # On a GPU other numbers are drawn; of a row that is looked at closer all states are known.
    assert (solution.known_steps.min() if device.type == "cuda" else solution.known_steps.max()) < 100
    assert f"after step {int(solution.known_steps.min())} states are so far below" in solution.message


def segments(reset):
    """From [T], where the pieces of a row begin and end."""
    begins = sorted({0, *reset.nonzero().flatten().tolist()})
    return list(zip(begins, [*begins[1:], len(reset)], strict=True))


def by_pieces(module, x, hx, reset):
    """One row [T, F] by PyTorch, piece by piece: outputs and last states."""
    directions, outputs, lasts = 2 if module.bidirectional else 1, [], []
    pieces = segments(reset)
    for number, (begin, end) in enumerate(pieces):
        start = [torch.zeros_like(leaf) for leaf in hx]
        for zero, leaf in zip(start, hx, strict=True):
            if number == 0 and not reset[0]:
                zero[0::directions] = leaf[0::directions]
            if number == len(pieces) - 1 and directions == 2:
                zero[1::2] = leaf[1::2]
        output, last = module(x[begin:end], tuple(start) if len(start) == 2 else start[0])
        outputs.append(output)
        lasts.append(leaves_of(last))
    ends = [leaf.clone() for leaf in lasts[-1]]
    if directions == 2:
        for end, first in zip(ends, lasts[0], strict=True):
            end[1::2] = first[1::2]
    return torch.cat(outputs), ends


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize(("kind", "form"), [("GRU", "batch"), ("LSTM", "batch_first"), ("RNN", "single")])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_reset_begins_anew_from_zero(kind, form, bidirectional, mode, device):
    # Of one layer: pieces of several would have to be run layer by layer.
    options = {"bidirectional": bidirectional, "dtype": torch.float64, "device": device}
    module = getattr(ours, kind)(3, 4, batch_first=form == "batch_first", **options)
    plain = getattr(nn, kind)(3, 4, **options)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(23, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    reset = torch.rand(23, 3, device=device) < 0.2
    reset[0] = torch.tensor([False, True, False])
    reset[:, 2] = False
    count = 2 if bidirectional else 1
    hx = [
        torch.randn(count, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
        for _ in range(2 if kind == "LSTM" else 1)
    ]
    rows = [by_pieces(plain, x[:, row], [leaf[:, row] for leaf in hx], reset[:, row]) for row in range(3)]
    right = [
        torch.stack([output for output, _ in rows], 1),
        *map(torch.stack, zip(*(last for _, last in rows), strict=True)),
    ]
    right[1:] = [leaf.transpose(0, 1) for leaf in right[1:]]
    given, start, marks = x, hx, reset
    if form == "single":
        given, start, marks = x[:, 0], [leaf[:, 0] for leaf in hx], reset[:, 0]
        right = [leaf[:, 0] for leaf in right]
    elif form == "batch_first":
        given, marks, right[0] = x.transpose(0, 1), reset.T, right[0].transpose(0, 1)
    output, last = module(given, tuple(start) if kind == "LSTM" else start[0], reset=marks, mode=mode)
    found = leaves_of((output, last))
    assert all(error(one, other) < 1e-10 for one, other in zip(found, right, strict=True))
    seeds = [torch.randn_like(leaf) for leaf in right]
    gradients = torch.autograd.grad(found, [x, *hx, *module.parameters()], seeds)
    expected = torch.autograd.grad(right, [x, *hx, *plain.parameters()], seeds)
    assert all(error(one, other) < 1e-10 for one, other in zip(gradients, expected, strict=True))


def test_resets_of_several_layers_are_the_same_in_both_modes(device):
    module = ours.LSTM(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, device=device)
    x, reset = torch.randn(31, 2, 3, dtype=torch.float64, device=device), torch.rand(31, 2, device=device) < 0.2
    found = leaves_of(module(x, reset=reset, mode="parallel"))
    expected = leaves_of(module(x, reset=reset, mode="sequential"))
    assert all(error(one, other) < 1e-10 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_one_after_the_other(kind, mode, device):
    module = getattr(ours, kind)(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, device=device)
    x = torch.randn(65, 3, dtype=torch.float64, device=device, requires_grad=True)
    bounds = [0, 2, 3, 30, 33, 65]
    hx = [torch.randn(4, 5, 4, dtype=torch.float64, device=device) for _ in range(2 if kind == "LSTM" else 1)]
    start = tuple(hx) if kind == "LSTM" else hx[0]
    output, last = module(x, start, cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device), mode=mode)
    plain = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, device=device)
    plain.load_state_dict(module.state_dict())
    pieces = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = [leaf[:, number].contiguous() for leaf in hx]
        pieces.append(leaves_of(plain(x[begin:end], tuple(own) if kind == "LSTM" else own[0])))
    right = [torch.cat([piece[0] for piece in pieces])]
    right += [torch.stack(each, 1) for each in zip(*(piece[1:] for piece in pieces), strict=True)]
    found = leaves_of((output, last))
    assert all(error(one, other) < 1e-10 for one, other in zip(found, right, strict=True))
    seed = torch.randn_like(right[0])
    gradients = torch.autograd.grad(output, [x, *module.parameters()], seed)
    expected = torch.autograd.grad(right[0], [x, *plain.parameters()], seed)
    assert all(error(one, other) < 1e-10 for one, other in zip(gradients, expected, strict=True))


def test_padding_is_never_looked_at(device):
    """A ReLU network that grows without bound stays finite as far as a short row goes."""
    module = ours.RNN(1, 1, nonlinearity="relu", bias=False, mode="parallel", device=device)
    with torch.no_grad():
        module.weight_hh_l0.fill_(30.0)
        module.weight_ih_l0.fill_(1.0)
    rows = [torch.ones(3, 1, device=device), torch.zeros(60, 1, device=device)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, last = module(pack_sequence(rows, enforce_sorted=False))
    assert torch.allclose(last[0, 0], torch.tensor(931.0, device=device))


# Bad input: PyTorch's own words where it has them.


def said(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever PyTorch raises
        call()
    return type(caught.value), str(caught.value)


BAD = {
    "features": lambda kind: (torch.randn(5, 2, 4),),
    "dimensions": lambda kind: (torch.randn(5, 2, 2, 3),),
    "dtype": lambda kind: (torch.randn(5, 2, 3, dtype=torch.float64),),
    "no steps": lambda kind: (torch.randn(0, 2, 3),),
    "batch of hx": lambda kind: (torch.randn(5, 2, 3), state(kind, 1, 3, 4)),
    "layers of hx": lambda kind: (torch.randn(5, 2, 3), state(kind, 2, 2, 4)),
    "hx for a batch": lambda kind: (torch.randn(5, 3), state(kind, 1, 1, 4)),
    "hx without batch": lambda kind: (torch.randn(5, 2, 3), state(kind, 1, 4)),
    "dtype of hx": lambda kind: (torch.randn(5, 2, 3), state(kind, 1, 2, 4, dtype=torch.float64)),
    "packed features": lambda kind: (pack_sequence([torch.randn(5, 4)]),),
    "unsorted": lambda kind: (PackedSequence(torch.randn(5, 3), torch.tensor([1, 2, 2])),),
    "packed batch of hx": lambda kind: (pack_sequence([torch.randn(5, 3)]), state(kind, 1, 2, 4)),
}


def state(kind, *shape, dtype=torch.float32):
    found = torch.randn(*shape, dtype=dtype)
    return (found, found) if kind == "LSTM" else found


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_named_as_pytorch_names_it(kind, bad):
    arguments = BAD[bad](kind)
    module, plain = getattr(ours, kind)(3, 4, mode="parallel"), getattr(nn, kind)(3, 4)
    if kind == "LSTM" and bad.startswith("packed"):
        # Of these PyTorch looks at nothing, and computes something; what it says where it does look:
        packed, *rest = arguments
        expected = (
            said(lambda: nn.GRU(3, 4)(packed)) if not rest else said(lambda: plain(packed.data.unsqueeze(1), *rest))
        )
    else:
        expected = said(lambda: plain(*arguments))
    assert said(lambda: module(*arguments)) == expected


def test_bad_options_are_named_as_pytorch_names_them():
    assert said(lambda: ours.GRU(3, 4, proj_size=2)) == said(lambda: nn.GRU(3, 4, proj_size=2))
    assert said(lambda: ours.RNN(3, 4, nonlinearity="sin")) == said(lambda: nn.RNN(3, 4, nonlinearity="sin"))
    assert said(lambda: ours.LSTM(3, 0)) == said(lambda: nn.LSTM(3, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"mode": "fast"}, "mode: expected one of"),
        ({"reset": torch.zeros(5, 2)}, "reset: expected a tensor of booleans, got torch.float32"),
        (
            {"reset": torch.zeros(2, 5, dtype=torch.bool)},
            r"reset: expected one for each step and row, \[5, 2\], got \[2, 5\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, "input: with cu_seqlens, expected all steps one after the other"),
        ({"reset": torch.zeros(5, 2, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 5])}, "give one of the two"),
    ],
)
def test_our_own_arguments_are_checked(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ours.GRU(3, 4)(torch.randn(5, 2, 3), **call)


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 3, 3, 5], [0, 4, 3, 5], [5]])
def test_bounds_of_sequences_are_checked(bounds):
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        ours.GRU(3, 4)(torch.randn(5, 3), cu_seqlens=torch.tensor(bounds))
    with pytest.raises(TypeError, match="cu_seqlens: expected a tensor of integers, got list"):
        ours.GRU(3, 4)(torch.randn(5, 3), cu_seqlens=bounds)


def test_a_reset_is_never_ignored():
    """Not even where PyTorch alone would take the arguments, or there is a PackedSequence, which has none."""
    gru, reset = ours.GRU(3, 4), torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="PackedSequence"):
        gru(pack_sequence([torch.randn(5, 3)]), reset=reset)
    output, last = gru(torch.randn(5, 0, 3), reset=torch.zeros(5, 0, dtype=torch.bool), mode="parallel")
    assert output.shape == (5, 0, 4)
    assert last.shape == (1, 0, 4)


# As a module.


def test_auto_is_pytorch_on_a_cpu():
    gru = ours.GRU(3, 4)
    x = torch.randn(9, 2, 3)
    plain = nn.GRU(3, 4)
    plain.load_state_dict(gru.state_dict())
    assert torch.equal(gru(x)[0], plain(x)[0])
    (solution,) = gru.solutions
    assert solution.result is Result.LOOP
    assert "PyTorch" in solution.message
    assert gru.mode == "GRU"  # PyTorch's own


def test_states_and_copies_go_both_ways(device):
    gru, x = ours.GRU(3, 4, num_layers=2, mode="parallel", device=device), torch.randn(9, 2, 3, device=device)
    plain = nn.GRU(3, 4, num_layers=2, device=device)
    plain.load_state_dict(gru.state_dict())
    assert list(plain.state_dict()) == list(gru.state_dict())
    gru.load_state_dict(plain.state_dict())
    expected = gru(x)[0]
    for twin in (copy.deepcopy(gru), pickle.loads(pickle.dumps(gru))):
        assert twin.run_mode == "parallel"
        assert twin.solutions == ()
        found = twin(x)[0]  # by kernels, where a cell has some by then
        assert torch.equal(found, expected) if device.type == "cpu" else torch.allclose(found, expected, atol=1e-6)


def test_weights_may_be_replaced(device):
    """What a module remembers of its cells is known by its weights."""
    gru, x = ours.GRU(3, 4, mode="parallel", device=device), torch.randn(9, 2, 3, device=device)
    gru(x)
    kept = gru._cells[0, False][1]
    gru(x)
    assert gru._cells[0, False][1] is kept
    doubled = {name: 2 * each for name, each in gru.state_dict().items()}
    found = torch.func.functional_call(gru, doubled, (x,))[0]
    plain = nn.GRU(3, 4, device=device)
    plain.load_state_dict(doubled)
    assert torch.allclose(found, plain(x)[0], atol=CLOSE[device.type])
    gru.weight_hh_l0 = nn.Parameter(gru.weight_hh_l0.detach() + 1)
    assert torch.allclose(gru(x)[0], gru(x, mode="sequential")[0], atol=CLOSE[device.type])


def test_weights_in_half_precision_may_change_in_place(device):
    """Their copies in float32 are of one call."""
    gru, x = ours.GRU(3, 4, mode="parallel", device=device).bfloat16(), torch.randn(9, 2, 3, device=device).bfloat16()
    with torch.no_grad():
        before = gru(x)[0]
        gru.weight_hh_l0 += 1
        assert not torch.allclose(gru(x)[0], before, atol=0.01)
        assert torch.allclose(gru(x)[0], gru(x, mode="sequential")[0], atol=0.02)


def test_dropout_between_layers_is_pytorchs(device):
    """With the same seed the same numbers are dropped, on a CPU; and in evaluation none."""
    gru = ours.GRU(3, 4, num_layers=3, dropout=0.5, device=device)
    x = torch.randn(9, 2, 3, device=device)
    found = []
    for mode in ("parallel", "sequential", "parallel"):
        torch.manual_seed(len(found) // 2)
        found.append(gru(x, mode=mode)[0])
    if device.type == "cpu":
        assert torch.allclose(found[0], found[1], atol=1e-6)
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    gru.eval()
    assert torch.allclose(gru(x, mode="parallel")[0], gru(x, mode="sequential")[0], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(kind, autocast, device):
    """No further from float64 than PyTorch's, and of the same dtype."""
    if autocast:
        skip_where_pytorch_has_no_half_precision(kind, device)
    module = getattr(ours, kind)(3, 8, num_layers=2, device=device)
    exact = getattr(nn, kind)(3, 8, num_layers=2, device=device, dtype=torch.float64)
    x = torch.randn(33, 2, 3, device=device).bfloat16()
    if not autocast:
        module = module.bfloat16()
    exact.load_state_dict(module.state_dict())
    right = exact(x.double())[0]
    given = x.float() if autocast else x
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        found, theirs = (leaves_of(module(given, mode=mode)) for mode in ("parallel", "sequential"))
    assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in theirs]
    assert error(found[0], right) <= 3 * error(theirs[0], right)
    found[0].float().sum().backward()
    assert module.weight_hh_l0.grad.dtype == module.weight_hh_l0.dtype


def test_what_is_not_finite_stays_in_its_row(device):
    gru = ours.GRU(3, 4, mode="parallel", device=device)
    x = torch.randn(9, 3, 3, device=device)
    x[4, 1, 0] = float("nan")
    with pytest.warns(ConvergenceWarning, match="not finite"):
        found = gru(x)[0]
    assert torch.allclose(found, gru(x, mode="sequential")[0], atol=CLOSE[device.type], equal_nan=True)
    hx = torch.full((1, 3, 4), float("inf"), device=device)
    assert torch.equal(gru(x[:3], hx)[0].isnan(), gru(x[:3], hx, mode="sequential")[0].isnan())


def test_second_derivatives_are_refused_in_parallel(device):
    gru = ours.GRU(3, 4, device=device)
    x = torch.randn(9, 2, 3, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad(gru(x, mode="parallel")[0].sum(), x, create_graph=False)
    assert slope.shape == x.shape
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(gru(x, mode="parallel")[0].sum(), x, create_graph=True)


def test_a_pass_holds_no_states(device):
    """How it went is kept; what could be differentiated by it is not."""
    gru = ours.GRU(3, 4, mode="parallel", device=device)
    gru(torch.randn(9, 2, 3, device=device))
    for solution in gru.solutions:
        assert solution.states is None
        assert solution.z0 is None
        assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in vars(solution).values())


def test_it_compiles_where_pytorch_ends_its_graph_at_recurrent_modules():
    """The library itself is not compiled then: that took half a minute, and dozens of graphs."""
    gru, x = ours.GRU(3, 4, mode="parallel"), torch.randn(9, 2, 3)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(gru, backend=backend)
    assert torch.allclose(compiled(x)[0], gru(x, mode="sequential")[0], atol=1e-6)
    assert len(graphs) <= 2


def test_a_module_may_change_its_precision_after_a_pass():
    module, x = ours.GRU(3, 4, mode="parallel"), torch.randn(7, 2, 3)
    module(x)
    module.bfloat16()
    assert module(x.bfloat16())[0].dtype is torch.bfloat16


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_outputs_lie_in_order(mode):
    """As PyTorch's do, whatever the state is made of."""
    x, reset = torch.randn(7, 2, 3), torch.zeros(7, 2, dtype=torch.bool)
    output, last = ours.LSTM(3, 4, mode=mode)(x)
    assert all(each.is_contiguous() for each in (output, *last))  # as what calls last[0].view(2, -1) expects
    assert ours.GRU(3, 4, mode=mode)(x, reset=reset)[0].is_contiguous()


@pytest.mark.parametrize("ragged", [False, True])
def test_steps_of_the_reversed_direction_are_told_in_the_numbers_of_the_caller(ragged):
    gru, x = ours.GRU(3, 4, bidirectional=True, mode="parallel"), torch.randn(40, 2, 3)
    x[6, 1] = torch.nan
    given = nn.utils.rnn.pack_padded_sequence(x, [40, 30]) if ragged else x
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gru(given)
    told = [str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning)]
    assert len(told) == 2
    assert all(each.startswith("step 7 produced") and "row 1" in each for each in told), told
    assert "from its last step to its first" in told[1]


def test_a_batch_without_rows_and_solutions_without_states():
    for module in (ours.DiagonalGRU(3, 4), ours.DiagonalLSTM(3, 4, batch_first=True)):
        x = torch.ones(0, 5, 3) if module.batch_first else torch.ones(5, 0, 3)
        assert module(x)[0].shape == (*x.shape[:2], 4)
    gru = ours.GRU(3, 4, mode="parallel")
    gru(torch.randn(20, 2, 3))
    assert gru.solutions[0].final is None


def test_weights_of_several_dtypes_may_change_between_calls():
    module, x = ours.GRU(4, 4, mode="parallel"), torch.randn(12, 2, 4)
    module.weight_hh_l0.data = module.weight_hh_l0.data.bfloat16()
    with torch.no_grad():
        module(x)
        module.weight_hh_l0.mul_(-3)
        right = nn.GRU(4, 4)
        right.load_state_dict({name: each.float() for name, each in module.state_dict().items()})
        assert error(module(x)[0], right(x)[0]) < 1e-5
