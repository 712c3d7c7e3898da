"""How every figure looks: colours, letters, axes, legends. Made to be read on a phone: two panels side by side at most."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

#: Of text and axes; becomes the colour of the text around the figure.
INK = "#1b1f24"
WIDTH = 5.8  # inches, for 10 pt letters
STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
PANEL = 2.05  # inches, the height of a row of panels

#: One colour for a method in all figures, told apart by all kinds of colour vision (Okabe and Ito).
METHODS: dict[str, str] = {
    "loop": "#d55e00",
    "graph": "#e69f00",
    "fused": "#cc79a7",
    "printed": "#0072b2",
    "auto": "#009e73",
    "sequential": "#d55e00",
    "parallel": "#0072b2",
}
LABELS: dict[str, str] = {
    "loop": "eager loop",
    "graph": "loop in a CUDA graph",
    "fused": "fused loop",
    "printed": "DeepPCR as printed",
    "auto": "DeepPCR, defaults",
    "sequential": "sequential",
    "parallel": "DeepPCR",
}
#: Scales for ordered quantities: light enough for dark pages, dark enough for light ones, and lighter from left to right.
WARM = ("#3f5fd0", "#8450c8", "#b9479c", "#d95757", "#e8952a")
COLD = ("#5b50c8", "#2a7fb8", "#169b83", "#6cae36", "#c2a21a")
#: Columns of mlp-timing that go layer by layer, and those that do not.
SEQUENTIAL = ("loop", "graph", "fused")
PARALLEL = ("printed", "auto")

_OWN: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": (0.5, 0.5, 0.5, 0.06),
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 10,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.5,
    "lines.markersize": 3,
    "svg.fonttype": "none",  # letters stay letters: they scale, can be searched and read aloud
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
}


@contextmanager
def context() -> Iterator[None]:
    """matplotlib's settings while figures are drawn and written: its own defaults, whatever the user has, and ours."""
    kept = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(("backend", "interactive"))}
    with matplotlib.rc_context({**kept, **_OWN}):  # pyright: ignore[reportArgumentType]
        yield


def canvas(rows: int, columns: int = 2, *, extra: float = 0.6) -> tuple[Canvas, list[list[Axes]]]:
    """A figure with a grid of panels; ``extra`` inches are for what stands above and below."""
    figure = Canvas(figsize=(WIDTH, rows * PANEL + extra), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06, w_pad=0.04, hspace=0.03, wspace=0.03)  # pyright: ignore
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in grid]


def ordered(values: Iterable[Any], shades: Sequence[str] = WARM) -> dict[Any, str]:
    """Colours for depths or widths, from small to large."""
    found, scale = sorted(set(values)), LinearSegmentedColormap.from_list("ordered", shades)
    last = max(len(found) - 1, 1)
    return {value: to_hex(scale(number / last)) for number, value in enumerate(found)}


def activation(name: str) -> str:
    return "ReLU" if name == "relu" else name


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def power(value: float) -> str:
    """2 to the k as such, other numbers as they are.

    >>> power(1024), power(100)
    ('2¹⁰', '100')
    """
    exponent = math.log2(value) if value > 0 else 0.5
    return f"2{superscript(round(exponent))}" if exponent == round(exponent) else f"{value:g}"


def plain(value: float) -> str:
    """Three digits at most, no exponent between a thousandth and ten thousand.

    >>> plain(0.00042), plain(-0.5)
    ('4.2·10⁻⁴', '−0.5')
    """
    if value < 0:
        return f"−{plain(-value)}"
    if value == 0 or 1e-3 <= value < 1e4:
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    exponent = math.floor(math.log10(value))
    lead = value / 10**exponent
    lead_text = "" if f"{lead:.2g}" == "1" else f"{lead:.2g}·"
    return f"{lead_text}10{superscript(exponent)}"


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


def decade(value: float) -> str:
    """A power of ten as such.

    >>> decade(0.001), decade(1.0)
    ('10⁻³', '1')
    """
    exponent = round(math.log10(value))
    return f"10{superscript(exponent)}" if exponent not in (0, 1) else f"{value:g}"


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


def powers_of_two(axes: Axes, values: Iterable[float], *, which: str = "x", most: int = 6) -> None:
    """A log axis with a tick at 2 to the k; as many with numbers as there is room for."""
    found = [math.log2(value) for value in values]
    low, high = math.floor(min(found)), math.ceil(max(found))
    every = math.ceil((high - low + 1) / most)
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if which == "x" else (axes.set_yscale, axes.set_ylim)
    set_scale("log", base=2)
    room = 0.04 * (high - low) + (0.3 if high > low else 1.0)
    set_limits(2 ** (min(found) - room), 2 ** (max(found) + room))
    axis.set_major_locator(FixedLocator([2**k for k in range(low, high + 1, every)]))
    axis.set_minor_locator(FixedLocator([2**k for k in range(low, high + 1)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axis.set_minor_formatter(NullFormatter())


def decades(axes: Axes, values: Iterable[float], *, also: Sequence[float] = ()) -> None:
    """A log y-axis with ticks at powers of ten, or at 1, 2, 5 where there are few of them; it shows ``also`` too."""
    found, form = [value for value in [*values, *also] if value > 0] or [1.0], plain
    low, high = min(found), max(found)
    room = max((high / low) ** 0.06, 1.15)
    low, high = low / room, high * room
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    span = math.log10(high / low)
    if span > 2.2:
        ticks = [10.0**k for k in range(first, last + 1) if k % math.ceil(span / 5) == 0]
        form = decade if low < 1e-3 or high > 1e4 else plain
    elif span > 0.7:
        ticks = [lead * 10.0**k for k in range(first, last + 1) for lead in (1, 2, 5)]
    else:
        ticks = [float(tick) for tick in MaxNLocator(4, steps=STEPS).tick_values(low, high)]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def panel_title(axes: Axes, text: str, method: str | None = None) -> None:
    """What a panel shows; a bar above it in the method's colour."""
    axes.set_title(text, loc="left", pad=6)
    if method is not None:
        axes.spines["top"].set(color=METHODS[method], linewidth=3)


def guide_label(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Where a line to compare with is named."""
    at = (2 * len(x)) // 3
    return x[at], y[at]


def guide(axes: Axes, x: Sequence[float], y: Sequence[float], text: str = "") -> None:
    """A dotted line to compare with, and what it is, to the right of and below its middle."""
    axes.plot(x, y, linestyle=":", color=INK, linewidth=1.2, gid="guide", zorder=1.5)
    if text:
        place = {"textcoords": "offset points", "va": "top", "ha": "left", "fontsize": 9}
        axes.annotate(text, guide_label(x, y), xytext=(3, -3), **place)


def lines(
    axes: Axes,
    records: Iterable[dict[str, Any]],
    x: str,
    group: str,
    colours: dict[Any, str],
    value: Callable[[dict[str, Any]], float | None],
    **options: Any,
) -> None:
    """A line for each value of ``group`` over ``x``; it is broken where there is no number."""
    found: dict[Any, dict[float, float | None]] = {key: {} for key in colours}
    for record in records:
        found[record[group]][record[x]] = value(record)
    for key, points in found.items():
        where = sorted(points)
        heights = [math.nan if (y := points[x]) is None else y for x in where]
        axes.plot(where, heights, color=colours[key], marker="o", gid=f"{group}={key}", **options)


def clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def remark(axes: Axes, text: str) -> None:
    """What a panel without data says."""
    axes.text(0.5, 0.5, textwrap.fill(text, 26), transform=axes.transAxes, ha="center", va="center", fontsize=9)


def legend(figure: Canvas, colours: dict[Any, str], title: str, *, place: Axes | None = None, most: int = 6) -> None:
    """Colours and what they stand for: above the panels, or in a place of the grid that is free."""
    handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in colours.values()]
    # As they stand in the text and on the command line; powers of two are for the ticks of an axis.
    labels = [f"{value:,}" if isinstance(value, (int, float)) else str(value) for value in colours]
    if place is not None:
        place.set_axis_off()
        columns = 2 if len(labels) > 5 else 1
        place.legend(handles, labels, title=title, ncols=columns, loc="center", borderaxespad=0)
        return
    rows = math.ceil(len(labels) / most)
    figure.legend(handles, labels, title=title, ncols=math.ceil(len(labels) / rows), loc="outside upper center")


def free(axes: Axes, values: Iterable[float], *, also: Sequence[float] = ()) -> None:
    """A linear y-axis around the values, with few ticks."""
    found = [value for value in [*values, *also] if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    room = 0.06 * (high - low) or max(abs(high) / 10, 1e-3)
    axes.set_ylim(low - room, high + room)
    ticks = [float(tick) for tick in MaxNLocator(5, steps=STEPS).tick_values(low - room, high + room)]
    step = ticks[1] - ticks[0]
    digits = next((count for count in range(7) if math.isclose(step * 10**count, round(step * 10**count))), 7)
    small = max(map(abs, ticks)) < 1e-3
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low - room <= tick <= high + room]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: plain(round(value / step) * step) if small else f"{value:.{digits}f}".replace("-", "−")
        )
    )


def number(value: Any) -> float:
    """As it stands in a result file; NaN for what is not there or not finite, which files give by name."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def band(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
