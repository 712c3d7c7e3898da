"""A figure before and after it is written down: what matplotlib holds, and an SVG element that stands in a page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure as Canvas

from . import style

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
#: Letters are laid out in DejaVu Sans, which is wider than any of these: nothing grows into its neighbour.
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Figure:
    """What a page embeds.

    Attributes:
        name: unique, as in file names and links
        title: a few words
        paper: the figure of the paper that it reproduces
        caption: what is seen, with numbers from the data; plain text
        svg: an ``<svg>`` element that takes the width it is given
    """

    name: str
    title: str
    paper: str
    caption: str
    svg: str

    def file(self) -> str:
        """The content of an SVG file: as an image it inherits nothing from a page, so it brings its own paper and ink.

        It names the version that drew it: another one may put things elsewhere by a hair.
        """
        own = self.svg.replace("<svg ", f'<svg style="color:{style.INK};background:#ffffff" ', 1)
        return f"{own}\n<!-- drawn by matplotlib {matplotlib.__version__} -->\n"


@dataclass(frozen=True)
class Drawing:
    """A figure with its axes and lines still in the hands of matplotlib."""

    name: str
    title: str
    paper: str
    caption: str
    canvas: Canvas

    def figure(self) -> Figure:
        return Figure(self.name, self.title, self.paper, self.caption, self._svg())

    def _svg(self) -> str:
        """The element: matplotlib's, without what belongs to a file of its own.

        Many figures stand in one page: names are made from the figure's, and those that nothing refers to go. (Matplotlib's own come from
        every digit of what they name, of which the last is another one on another processor.)
        """
        buffer = io.StringIO()
        with style.context():
            self.canvas.savefig(buffer, format="svg")
        root = ElementTree.fromstring(buffer.getvalue())
        _, _, width, height = root.attrib["viewBox"].split()
        root.attrib.clear()
        root.attrib |= {
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-label": f"{self.title}. {self.caption}",
            "font-family": _FONTS,
            "stroke-linejoin": "round",
            "stroke-linecap": "butt",
        }
        used = set(re.findall(r'(?:url\(|href=")#([^")]+)', buffer.getvalue()))
        for element in reversed([*root.iter()]):  # children before their parents
            _shorten(element, used)
        ElementTree.register_namespace("", _SVG.strip("{}"))
        numbers: dict[str, int] = {}
        return re.sub(
            r'(\bid="|\bhref="#|url\(#)([^")]+)',
            lambda found: f"{found[1]}{self.name}-{numbers.setdefault(found[2], len(numbers))}",
            ElementTree.tostring(root, encoding="unicode"),
        )


def _shorten(element: ElementTree.Element, used: set[str]) -> None:
    """Hundredths of a point suffice; the ink is that of the text around; the font stands at the root."""
    own = element.attrib
    for key in own.keys() & {"d", "x", "y", "transform"}:
        own[key] = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(own[key].split()))
    if "d" in own:
        own["d"] = re.sub(r" ?([A-Za-z]) ?", r"\1", own["d"])
    if own.get("transform", "").startswith("rotate(-0 "):
        del own["transform"]
    if "style" in own:
        text = own["style"].replace(style.INK, "currentColor")
        own["style"] = re.sub(r"font: ([\d.]+px) [^;]+", r"font-size: \1", text).replace(": ", ":")
    if _HREF in own:
        own["href"] = own.pop(_HREF)
    if own.get("id") not in used:
        own.pop("id", None)
    if not (element.text or "").strip():
        element.text = None
    element.tail = None
    for child in [*element]:
        if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):  # a style sheet would hold for the whole page
            element.remove(child)
    looks = {child.attrib.get("style") for child in element}
    if element.tag == f"{_SVG}g" and len(element) > 1 and len(looks) == 1 and None not in looks:
        own["style"] = element[0].attrib["style"]  # that of many equal markers, once
        for child in element:
            del child.attrib["style"]
