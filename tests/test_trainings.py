"""The two trainings: both sides see the same losses, going on is as if nothing had happened, and what they report is right."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import deeppcr
from deeppcr_paper.data import Images
from scripts import ROOT, scripts

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def examples():
    """Modules of the folder by name."""
    with scripts("examples") as load:
        yield load


@pytest.fixture
def images():
    """Bright above or bright below: two digits that can be told apart in few steps."""
    labels = torch.arange(24) % 2
    pixels = 0.3 * torch.randn(24, 2, 392)
    pixels[range(24), labels] += 1
    pixels = pixels.flatten(1)
    return Images(pixels[:18], labels[:18], pixels[18:], labels[18:])


@pytest.fixture
def run(examples, images, device, tmp_path, monkeypatch):
    """A training by its command, on tiny data: its exit code, and what it wrote."""
    mnist, amplifier = examples("sequential_mnist"), examples("amplifier")
    monkeypatch.setattr(mnist, "mnist", lambda folder: images)
    monkeypatch.setattr(mnist, "WIDTH", 5)
    monkeypatch.setattr(amplifier, "UNITS", 3)

    def run(name, *arguments, out="out.json"):
        path = tmp_path / out
        tiny = ["--side", "7"] if name == "mnist" else ["--samples", "65", "--sequences", "6", "--tested", "3"]
        main = mnist.main if name == "mnist" else amplifier.main
        batch = ["--batch", "5" if name == "mnist" else "2"]
        code = main([*tiny, *batch, "--device", device.type, "--every", "2", "--out", str(path), *arguments])
        return code, json.loads(path.read_text())

    cudnn = torch.backends.cudnn
    kept = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision  # in the new way: others may have set one alone
    yield run
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = kept


def apart(record):
    """The largest relative distance of losses."""
    torch_, ours = (np.array(record["sides"][name]["losses"]) for name in ("torch", "deeppcr"))
    assert len(torch_) == len(ours) == record["done"] > 0
    return (abs(torch_ - ours) / torch_).max()


@pytest.mark.parametrize("name", ["mnist", "amplifier"])
@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-8), ("float32", 2e-5)])
def test_losses_agree(run, name, dtype, most):
    _, record = run(name, "--epochs", "2", "--dtype", dtype)
    assert record["done"] == record["steps"] == 6
    assert apart(record) < most
    ours = record["sides"]["deeppcr"]
    assert sum(ours["solves"].values()) == 6  # in parallel at every step, and no loop had to help
    assert set(ours["solves"]) <= {"CONVERGED", "PRECISION_FLOOR"}
    assert record["sides"]["torch"]["solves"] == {}
    assert all(len(side["milliseconds"]) == 6 and min(side["milliseconds"]) > 0 for side in record["sides"].values())


@pytest.mark.parametrize("name", ["mnist", "amplifier"])
def test_going_on_is_as_if_it_had_never_stopped(run, examples, name, monkeypatch, capsys):
    whole = run(name, "--epochs", "2", out="whole.json")[1]
    training = examples("training")
    step, taken = training.Side.step, []

    def killed(side, *arguments):
        """In the fifth step, between two of three sides; checkpoints are written after every step."""
        taken.append(side.name)
        if len(taken) == 14:
            raise KeyboardInterrupt
        step(side, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training.Side, "step", killed)
        patch.setattr(training, "CHECKPOINT", -1.0)
        with pytest.raises(KeyboardInterrupt):
            run(name, "--epochs", "2")
    torch.manual_seed(99)  # nothing may hang on the state of the global generator
    code, resumed = run(name, "--epochs", "2", "--minutes", "0")
    assert (code, resumed["done"]) == (0, 4)
    resumed = run(name, "--epochs", "2")[1]
    for side in ("torch", "deeppcr", "reordered"):
        assert resumed["sides"][side]["losses"] == whole["sides"][side]["losses"]
    assert resumed["scores"] == whole["scores"]
    assert [each["versions"]["deeppcr"] for each in resumed["sessions"]] == [deeppcr.__version__] * 3
    printed = capsys.readouterr().out
    assert "4 of 6 steps" in printed
    assert printed.split()[:5] == ["step", "loss", "torch", "loss", "deeppcr"]


def test_another_order_is_what_losses_differ_by_anyway(run, examples, capsys):
    """The same weights, other batches; and what two trainings differ by is told beside it."""
    _, record = run("amplifier", "--epochs", "2")
    torch_, ours, reordered = (np.array(record["sides"][name]["losses"]) for name in ("torch", "deeppcr", "reordered"))
    assert len(reordered) == 6
    assert (abs(reordered - torch_) > 1e-3 * torch_).any()
    training = examples("training")
    assert 0 < training.apart(ours, torch_) < 1e-2 * training.apart(reordered, torch_)
    printed = capsys.readouterr().out
    assert "those of torch in another order" in printed
    assert "loss reordered" in printed
    _, record = run("amplifier", "--epochs", "1", "--no-spread", out="two.json")
    assert list(record["sides"]) == ["torch", "deeppcr"]
    assert "another order" not in capsys.readouterr().out


def test_losses_are_compared_by_parts(examples):
    training = examples("training")
    losses = [float(number) for number in range(1, 26)]
    assert training.parts_of(losses) == [1.5, 4, 6.5, 9, 11.5, 14, 16.5, 19, 21.5, 24]
    assert training.parts_of(losses[:3]) == [1, 2, 3]
    assert training.apart([2 * loss for loss in losses], losses) == pytest.approx(np.log(2))
    assert training.apart(losses, [2 * loss for loss in losses]) == pytest.approx(np.log(2))


def test_every_side_is_the_first_as_often(examples):
    sides = dict.fromkeys("abc")
    turns = ["".join(name for name, _ in examples("training").in_turn(sides, step)) for step in range(4)]
    assert turns == ["abc", "bca", "cab", "abc"]


def test_a_checkpoint_of_other_settings_is_refused(run):
    run("amplifier", "--epochs", "2", "--minutes", "0")
    with pytest.raises(ValueError, match=r"out\.partial: of other settings \(epochs, rate\)"):
        run("amplifier", "--epochs", "3", "--rate", "1")


def test_a_batch_larger_than_all_there_is_is_refused(run):
    with pytest.raises(ValueError, match="--batch: expected at most the 6 sequences there are, got 7"):
        run("amplifier", "--batch", "7")


def test_a_loss_that_is_not_finite_ends_it(run):
    with pytest.raises(FloatingPointError, match=r"loss of \w+ is nan at step 2"):
        run("amplifier", "--rate", "nan")


def test_accuracy_and_exit_code(run, examples, capsys):
    """It learns what can be told apart; and without a chance to, it says so."""
    code, record = run("mnist", "--epochs", "5", "--batch", "9", "--rate", "0.1")
    last = record["scores"][-1]
    assert (last["step"], last["torch"], last["deeppcr"], code) == (10, 1.0, 1.0, 0)
    assert len(record["scores"]) == 5
    code, record = run("mnist", "--epochs", "1", "--rate", "0", out="none.json")
    assert code == 1
    assert record["scores"][-1]["torch"] <= 0.5
    assert "below 90%: torch, deeppcr" in capsys.readouterr().out
    found = examples("sequential_mnist").is_right(torch.eye(10)[:4], torch.tensor([0, 1, 5, 3]))
    assert found.tolist() == [1, 1, 0, 1]


def test_the_score_is_a_mean_over_rows_not_batches(examples, device):
    training = examples("training")
    task = training.Task(
        model=torch.nn.Identity,
        loss=torch.nn.functional.mse_loss,
        measure="first",
        score=lambda outputs, targets: outputs[0, :, 0] - targets,
        train=(torch.zeros(1, 1), torch.zeros(1)),
        test=(torch.zeros(1, 1), torch.zeros(1)),
    )
    side = object.__new__(training.Side)
    side.task, side.model = task, task.model()
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], device=device)
    assert side.test(values, torch.zeros(5, device=device), 2) == pytest.approx(22)


def test_batches_cover_an_epoch_and_differ_between_epochs(examples):
    rows_of = examples("training").rows_of
    epochs = [torch.cat([rows_of(3 * epoch + at, 10, 3, seed=1) for at in range(3)]) for epoch in range(2)]
    assert all(len(set(rows.tolist())) == 9 for rows in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert rows_of(0, 10, 3, seed=1).tolist() != rows_of(0, 10, 3, seed=2).tolist()


def test_the_gru_remembers_at_the_start(examples):
    reader = examples("sequential_mnist").Reader(784).double()
    state = torch.ones(1, 1, 32, dtype=torch.float64)
    kept = reader.gru(torch.zeros(200, 1, 1, dtype=torch.float64), state)[0]
    plain = torch.nn.GRU(1, 32).double()
    forgotten = plain(torch.zeros(200, 1, 1, dtype=torch.float64), state)[0]
    assert (kept[-1] - kept[-100]).abs().max() > 1e-2  # on its way still
    assert (forgotten[-1] - forgotten[-100]).abs().max() < 1e-6


# The amplifier.


def test_the_simulation_is_the_circuit(examples):
    """Against another method's, and of second order in its steps."""
    amplifier, integrate = examples("amplifier"), pytest.importorskip("scipy.integrate")
    volts = 3 * np.sin(np.arange(63) / 10)[None]
    times, values = np.arange(-1, 63) / amplifier.RATE, np.concatenate([[0], volts[0]])

    def circuit(t, state):
        u, v = state
        current = (np.interp(t, times, values) - u - v) / amplifier.SERIES
        diodes = amplifier.SATURATION * (np.exp(v / amplifier.THERMAL) - np.exp(-v / (2 * amplifier.THERMAL)))
        return [current / amplifier.COUPLING, (current - v / amplifier.LOAD - diodes) / amplifier.SMALL]

    exact = integrate.solve_ivp(
        circuit,
        times[[0, -1]],
        [0, 0],
        method="Radau",
        t_eval=times[1:],
        rtol=1e-8,
        atol=1e-11,
        max_step=1 / amplifier.RATE,
    ).y[1]
    errors = [abs(amplifier.simulate(volts, fine)[0] - exact).max() for fine in (4, 8, 16)]
    assert exact.max() > 0.4  # the diodes conduct, one
    assert exact.min() < -0.8  # way and the other
    assert errors[0] < 5e-3, errors
    assert all(3 < one / other < 5 for one, other in pairwise(errors)), errors
    used = amplifier.simulate(volts)[0]
    assert ((used - exact) ** 2).sum() / (exact**2).sum() < 1e-5


@pytest.mark.parametrize("samples", [1, 2, 3, 63, 65])
def test_plucks_and_rows(examples, samples):
    """Rows are independent, and the same seed gives the same ones."""
    amplifier = examples("amplifier")
    volts = amplifier.plucks(3, samples, seed=0)
    assert volts.shape == (3, samples)
    assert (volts == amplifier.plucks(3, samples, seed=0)).all()
    together = amplifier.simulate(volts)
    assert np.allclose(together[1:2], amplifier.simulate(volts[1:2]), rtol=0, atol=1e-11)


def test_sequences_are_simulated_once(examples, tmp_path, monkeypatch):
    amplifier, folder = examples("amplifier"), tmp_path / "kept"
    made = amplifier.sequences(3, 40, 1, folder)
    monkeypatch.setattr(amplifier, "simulate", lambda volts: pytest.fail("it is known"))
    again = amplifier.sequences(3, 40, 1, folder)
    assert all((one == other).all() for one, other in zip(made, again, strict=True))
    monkeypatch.undo()
    assert amplifier.sequences(3, 40, 2, folder)[0].tolist() != made[0].tolist()
    assert len(list(folder.iterdir())) == 2


def test_values_that_cannot_be_simulated_are_refused(examples):
    with pytest.raises(ValueError, match="volts: expected finite values"):
        examples("amplifier").simulate(np.array([[0.0, np.nan]]))
    with pytest.raises(ArithmeticError, match=r"sample 0: .*; is the input in volt"):
        examples("amplifier").simulate(np.array([[1e300]]))


def test_error_to_signal_ratio(examples):
    targets = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = examples("amplifier").error_to_signal(targets + torch.tensor([[1.0, 2.0], [0.0, 0.0]]), targets)
    assert torch.allclose(found, torch.tensor([0.2, 0.0]))
