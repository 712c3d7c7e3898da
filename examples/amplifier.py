"""A model of an amplifier: an LSTM of 16 units learns what a clipping stage makes of a guitar, 32,768 samples at a time.

    python examples/amplifier.py [--data-dir DIR] [--epochs N] [--minutes M] [--help]

The stage is a coupling capacitor, a resistor, and diodes to ground, one in one direction and two in the other, beside a small capacitor
and the load. The coupling capacitor charges through the diodes and discharges through the load, over hundreds of samples: loud notes
change how later ones sound, and short pieces do not show it.

It is trained by ``torch.nn`` and after ``deeppcr.nn.convert(model, mode="parallel")``, from the same seeds; see ``training.py``.

Shapes: N sequences, T samples, B rows of a batch.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from deeppcr_paper.store import write_bytes
from training import Task, options, train

UNITS = 16
#: Samples a second.
RATE = 44_100
#: Ohm and farad: in series with the input, and what lies between the output and ground.
SERIES, COUPLING, LOAD, SMALL = 2_200.0, 220e-9, 47_000.0, 10e-9
#: A 1N4148: ampere, and volt for a factor of e.
SATURATION, THERMAL = 2.52e-9, 0.0453
#: Steps of the simulation for a sample.
FINE = 2
#: Volt: updates of Newton's method below this end it, and none is larger than this, where exponentials grow too fast.
EXACT, LONGEST = 1e-12, 0.1


class Amplifier(nn.Module):
    """From the input [T, B, 1] to the output [B, T], both in volt."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, UNITS), nn.Linear(UNITS, 1)

    def forward(self, volts: Tensor) -> Tensor:
        return self.head(self.lstm(volts)[0]).squeeze(-1).T


def simulate(volts: np.ndarray, fine: int = FINE) -> np.ndarray:
    """What the stage gives, [N, T], for an input [N, T] that is linear between samples, from rest, in float64.

    With u the voltage of the coupling capacitor and v the output, i = (e - u - v) / SERIES flows in, and

        COUPLING u' = i,    SMALL v' = i - v / LOAD - diodes(v)

    by the second backward difference formula, which damps what is stiff. Its equation for u is linear; that for v is solved by Newton's.
    """
    if not np.isfinite(volts).all():
        raise ValueError("volts: expected finite values")
    h = 2 / (3 * RATE * fine)
    charge, rise = h / (SERIES * COUPLING), h / SMALL
    through = rise / (SERIES * (1 + charge))  # what v gets of the input, once u is eliminated
    linear, diode = 1 + through + rise / LOAD, rise * SATURATION
    before = now = np.zeros((2, len(volts)))
    last, outputs = np.zeros(len(volts)), np.empty(volts.shape)
    for t, sample in enumerate(volts.T):
        for part in range(1, fine + 1):
            e = last + (sample - last) * (part / fine)
            u, v = (4 * now - before) / 3
            known, v = v + through * (e - u), 2 * now[1] - before[1]
            for _ in range(100):
                ahead, back = np.exp(v / THERMAL), np.exp(-v / (2 * THERMAL))
                wrong = linear * v - known + diode * (ahead - back)
                update = wrong / (linear + diode / THERMAL * (ahead + back / 2))
                update = np.minimum(np.maximum(update, -LONGEST), LONGEST)
                v = v - update
                if np.abs(update).max() < EXACT:
                    break
            else:
                raise ArithmeticError(f"sample {t}: Newton's method did not find the output; is the input in volt?")
            before, now = now, np.stack([(u + charge * (e - v)) / (1 + charge), v])
        last, outputs[:, t] = sample, now[1]
    return outputs


def plucks(count: int, samples: int, seed: int) -> np.ndarray:
    """Strings plucked at random times, three in 32,768 samples or one at least, [N, T], in volt: harmonics that die out, high ones first."""
    draw = np.random.default_rng(seed)
    notes, harmonics = max(1, round(3 * samples / 32_768)), np.arange(1, 13)[:, None]
    time, volts = np.arange(samples) / RATE, np.zeros((count, samples))
    for row in volts:
        for onset in draw.uniform(0, 0.8, notes) * (samples / RATE) * (np.arange(notes) > 0):  # the first at once
            frequency, place, loud = 82.4 * 2 ** draw.uniform(0, 3), draw.uniform(0.1, 0.4), draw.uniform(0.5, 4)
            since = np.maximum(time - onset, 0)
            waves = np.sin(2 * math.pi * frequency * harmonics * since) * np.exp(-(2 + harmonics) * since)
            row += loud * (np.sin(math.pi * place * harmonics) / harmonics**2 * waves).sum(0)
    return volts


def error_to_signal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each row, [B]: the energy of the error over that of the signal."""
    return (outputs - targets).square().sum(-1) / targets.square().sum(-1)


def sequences(count: int, samples: int, seed: int, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what the stage gives for them, [N, T] each: kept in a folder, where one is given, since it takes a minute to simulate them."""
    path = None if folder is None else folder / f"amplifier-{count}-{samples}-{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as kept:
            return kept["inputs"], kept["outputs"]
    inputs = plucks(count, samples, seed)
    outputs = simulate(inputs)
    if path is not None:
        content = io.BytesIO()
        np.savez(content, inputs=inputs, outputs=outputs)
        write_bytes(path, content.getvalue())
    return inputs, outputs


def task_of(count: int, tested: int, samples: int, seed: int, folder: Path | None = None) -> Task:
    inputs, outputs = map(torch.from_numpy, sequences(count + tested, samples, seed, folder))
    return Task(
        model=Amplifier,
        loss=lambda found, wanted: error_to_signal(found, wanted).mean(),
        measure="error-to-signal ratio",
        score=error_to_signal,
        train=(inputs[:count], outputs[:count]),
        test=(inputs[count:], outputs[count:]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("An amplifier by an LSTM.", "amplifier", epochs=30, batch=4, rate=5e-3)
    parser.add_argument("--data-dir", type=Path, help="folder in which simulated sequences are kept")
    parser.add_argument("--samples", type=int, default=32_768, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=128, help="to train with")
    parser.add_argument("--tested", type=int, default=8, help="sequences to test with")
    given = parser.parse_args(arguments)
    train(task_of(given.sequences, given.tested, given.samples, given.seed, given.data_dir), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
