"""The page: one HTML file that needs nothing else, made from results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deeppcr

from ..figures import Figure, draw
from ..figures.style import LABELS
from ..mlp_summary import MEANINGS
from .claims import Row, rows
from .collect import QUICK, Finished
from .speedup_map import map_data


def make_page(results: Sequence[Finished], drawn: Mapping[Path, Sequence[Figure]] = MappingProxyType({})) -> str:
    """The whole page, of results in the order in which they are shown; the same results give the same bytes.

    Args:
        drawn: figures that are there already, by the path of their result
    """
    maps = map_data(results)
    by_name = [(name, list(group)) for name, group in groupby(results, key=lambda result: result.name)]
    links = [
        ("summary", "Summary"),
        *([("map-section", "Map")] if maps else []),
        *((name, name) for name, _ in by_name),
    ]
    body = [
        _header(results),
        "<nav aria-label='Contents'><ul>",
        *(f"<li><a href='#{_slug(target)}'>{escape(text)}</a></li>" for target, text in links),
        "</ul></nav><main>",
        _summary(rows(results)),
        _map(maps, results) if maps else "",
        *(_experiment(name, group, drawn) for name, group in by_name),
        "</main>",
        _footer(results),
    ]
    script = f"<script>\n{_asset('map.js')}</script>" if maps else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>DeepPCR: the paper's claims and our figures</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
{"".join(body)}
{script}
</body>
</html>
"""


def embedded(data: Any) -> str:
    """JSON for a script element: nothing in it ends the element or begins a comment.

    >>> embedded("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def own_names(svg: str, prefix: str) -> str:
    """The figure with its names made its own: the same figure of another machine stands in the same page."""
    return re.sub(r'((?:\bid="|url\(#|\bhref="#))', rf"\g<1>{prefix}-", svg)


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _header(results: Sequence[Finished]) -> str:
    machines = ", ".join(dict.fromkeys(result.hardware for result in results))
    quick = [result.name for result in results if result.quick]
    note = ""
    if quick:
        which = "every result here" if len(quick) == len(results) else ", ".join(dict.fromkeys(quick))
        note = (
            f"<p class='note'><strong>{QUICK.capitalize()}.</strong> That holds for {escape(which)}. Without "
            "<code>--quick</code> the sizes are the paper's, and take longer.</p>"
        )
    return f"""<header>
<h1>DeepPCR: the paper's claims and our figures</h1>
<p class="lead">A loop of L dependent steps, solved in parallel over its steps by Newton's method and parallel cyclic
reduction, measured again: <cite>DeepPCR: Parallelizing Sequential Operations in Neural Networks</cite> (Danieli, Sarabia,
Suau, Rodríguez, Zappella, NeurIPS 2023).</p>
<p class="quiet">Measured on {escape(machines)}, last on {max(result.date for result in results)[:10]}. Made by deeppcr
{escape(deeppcr.__version__)}; every number on this page is computed from the result files listed at its end.</p>
{note}
</header>"""


def _summary(table: Sequence[Row]) -> str:
    heads = "".join(f"<th scope='col'>{head}</th>" for head in ("Claim", "Paper", "Ours", "Machine"))
    words = "".join(
        f"<li><strong>{escape(LABELS[column])}</strong>: {escape(meaning)}.</li>"
        for column, meaning in MEANINGS.items()
    )
    return f"""<section id="summary">
<h2>The paper's claims and our figures</h2>
<p>The paper ran on a V100 against the plain loop in eager PyTorch. Where stronger loops were measured (in a CUDA graph, in
one fused kernel), ours are given against each of them. <em>L</em> is the number of layers, <em>w</em> their width; in diffusion
the number of denoising steps, and the size of a latent.</p>
<ul class="quiet">{words}<li>In diffusion: <strong>as printed</strong> takes the dense Jacobian of every step and starts from the mean of
the training set; <strong>defaults</strong> takes that of an ideal denoiser of Gaussian data, which costs nothing, and a window over the
steps that are not finished. The paper's times there assume Jacobians computed at no loss in parallel; ours are wall-clock.</li></ul>
<table class="summary"><thead><tr>{heads}</tr></thead><tbody>
{"".join(_row(row) for row in table)}
</tbody></table>
</section>"""


def _row(row: Row) -> str:
    claim, result = row.claim, row.result
    paper = f"<strong>{escape(claim.paper)}</strong> <span class='quiet'>{_text(claim.source)}</span>"
    if result is None:
        ours = f"<span class='quiet'>not measured yet: <code>{escape(_command(claim.experiment))}</code></span>"
        where = "<span class='quiet'>–</span>"
    else:
        items = (
            f"<li><strong>{escape(each.value)}</strong> <span>{_text(each.where)}</span></li>" for each in row.ours
        )
        ours = (
            f"<ul class='ours'>{''.join(items)}</ul>" if row.ours else "<span class='quiet'>not in these results</span>"
        )
        short = "; ".join(filter(None, ["quick run" if result.quick else "", result.changed_in_words]))
        tag = f" <span class='tag'>{escape(short)}</span>" if short else ""
        where = f"<a href='#{_slug(result.name)}'>{escape(result.hardware)}</a>{tag}"
    return (
        f"<tr><th scope='row'>{escape(claim.what)}</th><td data-label='Paper'>{paper}</td>"
        f"<td data-label='Ours'>{ours}</td><td data-label='Machine'>{where}</td></tr>\n"
    )


def _command(experiment: str) -> str:
    """What measures it; a comparison of machines needs their results."""
    return f"deeppcr-paper reproduce {experiment}" + (" FILE1 FILE2" if experiment == "hardware" else "")


def _map(maps: list[dict[str, Any]], results: Sequence[Finished]) -> str:
    names = {
        "map": "machine",
        "activation": "activation",
        "direction": "pass",
        "method": "parallel",
        "baseline": "compared with",
    }
    selects = "".join(
        f"<label>{label}<select id='map-{name}' autocomplete='off'></select></label>" for name, label in names.items()
    )
    made = "".join(_made(result) for result in results if result.name == "mlp-timing")
    return f"""<section id="map-section">
<h2>Where it pays: the speed-up over depth and width</h2>
<p>Every cell is one network of <em>L</em> layers (depth) of width <em>w</em>, and the number in it the speed-up. Choose a
cell, by click, touch or arrow keys, for its times.</p>
<div id="map">
<div class="map-choices">{selects}</div>
<div class="map-both">
<div>
<div class="map-grid" role="grid" aria-label="Speed-up over depth L and width w"></div>
<div class="map-legend" aria-hidden="true">
<div class="map-scale"></div><div class="map-ticks"></div>
<div class="map-ends"><span>← loop faster</span><span>speed-up: time of the loop over time in parallel</span><span>parallel faster →</span></div>
<div class="map-signs"><span><i class="sign-line"></i><span id="map-even"></span></span><span><i class="sign-untimed"></i>not timed: choose it for the reason</span></div>
</div>
</div>
<div id="map-readout" aria-live="polite"></div>
</div>
<noscript><p class="note">The map needs JavaScript; the figures below do not.</p></noscript>
</div>
{made}
<script type="application/json" id="map-data">{embedded(maps)}</script>
</section>"""


def _experiment(name: str, results: Sequence[Finished], drawn: Mapping[Path, Sequence[Figure]]) -> str:
    about = results[0].experiment
    heading = about.what[:1].upper() + about.what[1:] if about else name
    reproduces = f" · paper: {about.paper}" if about else ""
    parts = [f"<section id='{_slug(name)}'><p class='kicker'>{escape(name + reproduces)}</p><h2>{escape(heading)}</h2>"]
    for result in results:
        with result.blamed():
            figures = drawn[result.path] if result.path in drawn else draw(result.content)
            summary = result.experiment.lines(result.summary) if result.experiment and not figures else []
        if len(results) > 1:
            parts.append(f"<h3 class='machine'>{escape(result.hardware)}</h3>")
        # One experiment on several machines has figures of the same names.
        prefix = _slug(f"{result.path.stem}")
        parts.append("<div class='figures'>")
        parts += [_figure(figure, result, prefix) for figure in figures]
        parts.append("</div>")
        if summary:
            parts.append(f"<pre>{escape(chr(10).join(summary))}</pre>{_made(result)}")
    return "\n".join([*parts, "</section>"])


def _figure(figure: Figure, result: Finished, prefix: str) -> str:
    return f"""<figure id="{prefix}-{_slug(figure.name)}" data-figure="{escape(figure.name)}">
<h3>{escape(figure.title)} <span class="quiet">paper: {_text(figure.paper)}</span>{_tag(result)}</h3>
<div class="plot">{own_names(figure.svg, prefix)}</div>
<figcaption>{_text(figure.caption)}{_made(result)}</figcaption>
</figure>"""


def _made(result: Finished) -> str:
    """The command, and what it ran on."""
    # Words that stay whole: a line does not end inside --device.
    command = " ".join(f"<b>{escape(word)}</b>" for word in result.command.split(" "))
    data = [f"images: {result.images}"] if result.images else []
    where = "".join(f"<span>{escape(each)}</span>" for each in (*data, *result.conditions))
    return f"<div class='made'><code>{command}</code>{where}</div>"


def _tag(result: Finished) -> str:
    return f" <span class='tag'>{escape(result.remark)}</span>" if result.remark else ""


def _footer(results: Sequence[Finished]) -> str:
    files = "".join(f"<li><code>{escape(result.path.name)}</code>{_tag(result)}</li>" for result in results)
    return f"""<footer>
<h2>What this page was made from</h2>
<ul>{files}</ul>
<p class="quiet">Of each experiment on each machine the newest result with the paper's settings, else the newest with others; quick ones
only where there are no others.
<code>deeppcr-paper report</code> makes the page anew.</p>
</footer>"""


def _text(text: str) -> str:
    """Escaped, with lines that do not end inside "L = 256", "fig. 3" or "5 ms"."""
    return re.sub(
        r"\b(?:L|w|C|w²L) [=≈] (?=\d)|\b(?:figs?\.|table|app\.|chunk) (?=\w)|(?<=\d) (?:[µm]?s|min|h|×)\b|(?<=\d) × (?=\d)",
        lambda found: found[0].replace(" ", "\u00a0"),
        escape(text),
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-")
