"""How figures look, what methods are called in them, and how numbers read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib.style
from matplotlib.colors import LinearSegmentedColormap, to_hex

#: Of text and axes; becomes the colour of the text around the figure.
INK = "#1b1f24"
#: All kinds of colour vision tell these apart (Okabe and Ito).
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, GREY = "#56b4e9", "#d55e00", "#999999"
#: What a method is called and its colour, the same in all figures.
METHODS: dict[str, tuple[str, str]] = {
    "loop": ("eager loop", VERMILION),
    "graph": ("loop in a CUDA graph", ORANGE),
    "fused": ("fused loop", PINK),
    "printed": ("DeepPCR as printed", BLUE),
    "printed graph": ("as printed, in a CUDA graph", SKY),
    "auto": ("DeepPCR, defaults", GREEN),
    "sequential": ("sequential", VERMILION),
}
LABELS = {method: label for method, (label, _) in METHODS.items()}
COLOURS = {method: colour for method, (_, colour) in METHODS.items()}
#: Columns of mlp-timing that go layer by layer, and those that do not.
SEQUENTIAL = ("loop", "graph", "fused")
PARALLEL = ("printed", "auto")
#: Scales for ordered quantities: light enough for dark pages, dark enough for light ones, and lighter from left to right.
WARM = ("#3f5fd0", "#8450c8", "#b9479c", "#d95757", "#e8952a")
COLD = ("#5b50c8", "#2a7fb8", "#169b83", "#6cae36", "#c2a21a")

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "svg.fonttype": "none",  # letters stay letters: they scale, can be searched and read aloud
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9.5),
    **dict.fromkeys(("axes.xmargin", "axes.ymargin"), 0.06),
    "figure.facecolor": "none",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.hspace": 0.03,
    "figure.constrained_layout.wspace": 0.03,
    "axes.facecolor": (0.5, 0.5, 0.5, 0.06),
    "axes.linewidth": 0.7,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "lines.markersize": 3,
}


def context() -> AbstractContextManager[None]:
    """matplotlib's settings while figures are drawn and written: its own defaults, whatever the user has, and ours."""
    return matplotlib.style.context(["default", _SETTINGS])


def ordered(values: Iterable[Any], shades: Sequence[str] = WARM) -> dict[Any, str]:
    """Colours for depths or widths, from small to large."""
    found, scale = sorted(set(values)), LinearSegmentedColormap.from_list("ordered", shades)
    last = max(len(found) - 1, 1)
    return {value: to_hex(scale(number / last)) for number, value in enumerate(found)}


def activation(name: str) -> str:
    return "ReLU" if name == "relu" else name


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def power(value: float, base: int) -> str:
    """A power of the base as such, other numbers as they are.

    >>> power(1024, 2), power(100, 2), power(0.001, 10), power(1, 10)
    ('2¹⁰', '100', '10⁻³', '1')
    """
    exponent = round(math.log(value, base))
    whole = math.isclose(value, float(base) ** exponent) and value not in (1, 10)
    return f"{base}{superscript(exponent)}" if whole else f"{value:g}"


def plain(value: float, digits: int = 3) -> str:
    """So many digits at most, no exponent between a thousandth and ten thousand.

    >>> plain(0.00042), plain(-0.5), plain(9.96e-6)
    ('4.2·10⁻⁴', '−0.5', '10⁻⁵')
    """
    if value < 0:
        return f"−{plain(-value, digits)}"
    if value == 0 or 1e-3 <= value < 1e4:
        return f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"
    lead, exponent = f"{value:.{max(0, digits - 2)}e}".split("e")  # rounded before the exponent is read off
    lead = f"{float(lead):g}"
    return f"{'' if lead == '1' else f'{lead}·'}10{superscript(int(exponent))}"


def signed(value: float) -> str:
    """To two digits behind the point, with a minus that is as wide as the plus.

    >>> signed(0.1), signed(-0.02)
    ('+0.10', '−0.02')
    """
    return f"{value:+.2f}".replace("-", "−")


def span(values: Iterable[float], form: str) -> str:
    """From the least to the most; one number where both read the same.

    >>> span([0.1, 0.25], ".2f"), span([11.93, 11.94], ".1f")
    ('0.10 to 0.25', '11.9')
    """
    found = list(values)
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"


def listed(values: Iterable[Any]) -> str:
    """
    >>> listed([256, 512, 1024]), listed(["one"])
    ('256, 512 and 1,024', 'one')
    """
    *first, last = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return f"{', '.join(first)} and {last}" if first else last


def seconds(value: float) -> str:
    """A time in a caption.

    >>> seconds(0.0123), seconds(4.5e-5)
    ('12.3 ms', '45 µs')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def number(value: Any) -> float:
    """As it stands in a result file; NaN for what is not there or not finite, which files give by name."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def grouped(records: Iterable[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    """The records by what they have under the key, in the order of the records."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record[key], []).append(record)
    return found
