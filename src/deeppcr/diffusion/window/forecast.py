"""How long the ways to sample will take: from what rows of a network cost, and how often steps were evaluated.

Shapes: L steps, B samples, W steps in a window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: windows that slide are as long as one of these
SIZES = (4, 8, 16, 32, 64)
#: Evaluations of a step in a window that slides: so many, and so many more times the window's share of all steps. That is what a UNet
#: of 36 million parameters took, trained on CIFAR-10, in DDPM and DDIM of 50 to 1,000 steps; what is seen of a network scales it.
_LEAST, _MORE = 2.2, 4.5
#: Iterations of a window that holds all steps.
_ITERATIONS = 20
#: A network of which a short window takes less than this is small: most of its time goes with launches.
_SMALL = 1.5e-3
#: rows that keep a device half busy
_MIDDLING = 128
#: A way that was not tried yet must be expected to take this part of the others' time.
_PAYS = 0.9


@dataclass
class Forecast:
    """What is known of one kind of run; times are in seconds.

    Attributes:
        length, samples: L, B
        step: of a step of the loop in a CUDA graph
        iterations: by W, of an iteration
        evaluations: by W, of each step in the last run
        all_at_once: of a run with a window that fills the device; None: not measured
        largest: no window that slides is longer: for twice as many rows there was no memory
    """

    length: int
    samples: int
    step: float = 0.0
    iterations: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    all_at_once: float | None = None
    largest: int = SIZES[-1]

    @property
    def loop(self) -> float:
        """Of the loop in a CUDA graph."""
        return self.length * self.step

    def iteration(self, size: int) -> float:
        """Of an iteration on so many steps: as measured, or along the line through a step of the loop and the nearest that was."""
        if size in self.iterations:
            return self.iterations[size]
        if not self.iterations:
            return self.step
        nearest = min(self.iterations, key=lambda known: abs(known - size))
        each = max(self.iterations[nearest] - self.step, 0.0) / (nearest - 1)
        return self.iterations[nearest] + (size - nearest) * each

    def evaluations_in(self, size: int) -> float:
        """Of each step, in a window of this size."""
        expected = _expected(size / self.length)
        if not self.evaluations:
            return expected
        nearest = min(self.evaluations, key=lambda known: max(known, size) / min(known, size))
        return max(1.0, self.evaluations[nearest] * expected / _expected(nearest / self.length))

    def window(self, size: int) -> float:
        """Of a run with a window of this size."""
        return self.length * self.evaluations_in(size) / size * self.iteration(size)

    @property
    def sizes(self) -> list[int]:
        """That a window which slides may have: half of all steps at most."""
        return [size for size in SIZES if size <= min(self.largest, self.length // 2)]

    @property
    def probe(self) -> int | None:
        """The size to try first: of a middling number of rows, which tells what they cost."""
        return max(
            (size for size in self.sizes[:-1] if size * self.samples <= _MIDDLING),
            default=min(self.sizes, default=None),
        )

    def best(self) -> int | None:
        """The size of the window that is expected to be fastest; None where the loop is."""
        size = min(self.sizes, key=self.window, default=None)
        if size is None:
            return None
        tried = size in self.iterations and size in self.evaluations
        return size if self.window(size) < self.loop * (1.0 if tried else _PAYS) else None

    def is_best_all_at_once(self, size: int) -> bool:
        """Whether one window of so many steps beats the others: as measured, or by far as expected."""
        others = min([self.loop, *map(self.window, self.sizes)])
        if self.all_at_once is not None:
            return self.all_at_once < others
        if not self.iterations:
            return False
        # Of a network as small as this its rows do not tell what many of them cost: that is tried, unless few would be too dear.
        least = min(self.iterations.values())
        iteration, others = (least, self.loop) if least < _SMALL else (self.iteration(size), others)
        return _ITERATIONS * -(-self.length // size) * iteration < _PAYS * others

    def in_words(self) -> str:
        ways = [f"the loop in a CUDA graph {_written(self.loop)}"]
        size = min(self.sizes, key=self.window, default=None)
        if size is not None and self.iterations:
            ways.append(f"a window of {size} steps {_written(self.window(size))}")
        if self.all_at_once is not None:
            ways.append(f"all steps at once {_written(self.all_at_once)}")
        return "expected: " + ", ".join(ways)


def _expected(share: float) -> float:
    """Evaluations of each step in a window of this share of all steps, of a network that is not known."""
    return _LEAST + _MORE * share


def _written(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
