"""By which rule a claim of the paper holds for us: the one table of them, which the pages print.

A verdict is made by the paper's method as printed only. What the library's defaults reach stands beside it and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

YES, NO, OPEN = "yes", "no", "open"
#: Times that a host launches differ by a third from run to run: the same commit trained 5.6 and 7.4 times as fast as the eager loop.
NOISE = 4 / 3
#: Mean iterations of a few samples that are this close are not told apart.
FEW_SAMPLES = 1.05

#: Layers from which on laws in L are read off, and the error that counts as machine precision: some roundings of states about 1.
DEEP, SMALL_ERROR = 64, 1e-6
#: The paper reads off when the error of a sample has fallen below this.
SMALL = 0.1
#: Losses up to so many times that with the paper's test are as good.
CLOSE = 1.1


@dataclass(frozen=True)
class Rule:
    """How a number of ours is held against the paper's.

    Attributes:
        words: when it holds, with every threshold
        test: our number, and the paper's where it has one, to whether it holds
        noise: a number that is this many times larger or smaller may be the same: where the test's answer would be another, it is open
        at_any_size: whether it must hold for small networks and short trainings, too: then a quick run can refute it
    """

    words: str
    test: Callable[..., bool]
    noise: float = 1.0
    at_any_size: bool = False


RULES: dict[str, Rule] = {
    "speed-up": Rule("at least 0.9 of the paper's", lambda ours, paper: ours >= 0.9 * paper, NOISE),
    "break-even": Rule(
        "at the median width (of two the earlier) it stays ahead from at most √2 times the paper's depth on (never: ∞; “nearer to 64” is 64)",
        lambda ours, paper: ours <= math.sqrt(2) * paper,
        NOISE,
    ),
    "linear": Rule("at the narrowest width, from L=64 on, the time grows 0.5 to 2 times as L does", lambda ours: 0.5 <= ours <= 2, NOISE),
    "logarithmic": Rule("there, the time (eager) grows less than √L (16×)", lambda ours: ours <= 1, NOISE),
    "isoline": Rule(
        "w²L from which on a pass takes over twice as long as at the narrowest width varies at most 16 times over the depths",
        lambda ours: ours <= 16,
    ),
    "steady": Rule(
        "last quarter's median at most 1.5 times the second's",
        lambda ours: ours <= 1.5,
        NOISE,
    ),
    "gains more": Rule("a greater speed-up on the clock at every size, also times 0.56 or 1.78", lambda ours: ours > 1, NOISE**2),
    "newer gains": Rule("beyond the logarithmic regime, the smaller median ratio", lambda ours: ours < 1),
    "negligible": Rule("at most 0.1 of the whole", lambda ours: ours <= 0.1),
    "memory": Rule("median ratio 0.5 to 0.7", lambda ours: 0.5 <= ours <= 0.7),
    "at most 6": Rule("in every cell", lambda ours: ours <= 6, at_any_size=True),
    "6 at every point": Rule("at most, over all of the curve", lambda ours: ours <= 6),
    "converged": Rule("every solve does", lambda ours: ours == 0, at_any_size=True),
    "flat": Rule("from L=64 on, over widths run at every depth, mean iterations vary by at most 1", lambda ours: ours <= 1),
    "ReLU more": Rule("more iterations on average, over the same sizes from L=64 on", lambda ours: ours > 1),
    "machine precision": Rule(
        "0.9 of the outputs within 10⁻⁶ (2-norm) of the loop's", lambda ours: ours >= 0.9, at_any_size=True
    ),
    "comparable": Rule("mean iterations differ by at most 1", lambda ours: ours <= 1),
    "same loss": Rule("final losses differ by at most 2%", lambda ours: ours <= 0.02, at_any_size=True),
    "accuracy": Rule("both within 1 point of 94%", lambda ours: ours <= 1),
    "same accuracy": Rule("at most 1 point apart, every seed", lambda ours: ours <= 1, at_any_size=True),
    "seeds": Rule("all seeds within 2 points", lambda ours: ours <= 2),
    "bounded": Rule("below 1 at the end", lambda ours: ours < 1, at_any_size=True),
    "trains as well": Rule("final loss at most 1.1 times that by the paper's test", lambda ours: ours),
    "suffice": Rule("so few iterations train as well", lambda ours, paper: ours is not None and ours <= paper),
    "needed": Rule("no number of iterations up to the paper's trains as well", lambda ours, paper: ours is None or ours > paper),
    "iterations": Rule("at most 1.3 times the paper's", lambda ours, paper: ours <= 1.3 * paper),
    "error": Rule("at most the paper's", lambda ours, paper: ours <= paper),
    "same distance": Rule(
        "they differ by less than half the 95% interval of one",
        lambda ours: ours <= 1,
        at_any_size=True,
    ),
    "not visible": Rule("no entry differs by more than 0.01", lambda ours: ours <= 0.01, at_any_size=True),
    "below 0.1": Rule(
        "in fewer iterations than the paper's, the worst sample of every size",
        lambda ours, paper: ours is not None and ours < paper,
    ),
    "stalls": Rule("final error above 0.01", lambda ours: ours >= SMALL / 10),
    "fewer": Rule("fewer iterations on average from a class's mean than from all", lambda ours: ours < 1, FEW_SAMPLES),
}  # fmt: skip


def judge(rule: str, ours: Any, *paper: Any) -> str:
    """Whether it holds, or ``OPEN`` where it would not for a number that noise could have made of the same.

    Args:
        rule: its name in the table
        ours: our number, or a function from a factor, on which noise puts a ratio of times, to the number that comes of it
        paper: the paper's number

    >>> judge("speed-up", 64, 30), judge("speed-up", 5.6, 7), judge("speed-up", 4.4, 11.2)
    ('yes', 'open', 'no')
    """
    known = RULES[rule]
    number = ours if callable(ours) else lambda factor: ours * factor if known.noise > 1 and ours is not None else ours
    answers = {bool(known.test(number(factor), *paper)) for factor in (1 / known.noise, 1.0, known.noise)}
    return OPEN if len(answers) == 2 else YES if answers == {True} else NO


def judge_all(rule: str, pairs: list[tuple[Any, ...]]) -> tuple[str, int]:
    """Of several rows, each with our number and the paper's: whether all hold, and how many do as measured.

    >>> judge_all("speed-up", [(20, 11), (8, 8.4), (4, 11)])
    ('no', 2)
    """
    known = RULES[rule]
    answers = {judge(rule, *pair) for pair in pairs}
    worst = NO if NO in answers else OPEN if OPEN in answers else YES
    return worst, sum(bool(known.test(*pair)) for pair in pairs)
