"""A figure before and after it is written down: what matplotlib holds, and an SVG element that stands in a page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure as Canvas

from .style import INK

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
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
        own = self.svg.replace("<svg ", f'<svg style="color:{INK};background:#ffffff" ', 1)
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
        """The element: matplotlib's, without what belongs to a file of its own, and with names that are the figure's."""
        buffer = io.BytesIO()
        self.canvas.savefig(buffer, format="svg")
        root = ElementTree.fromstring(buffer.getvalue())
        _, _, width, height = root.attrib["viewBox"].split()
        for parent in root.iter():
            for child in list(parent):
                # The style sheet would hold for the whole page.
                if child.tag.rpartition("}")[2] in ("metadata", "style"):
                    parent.remove(child)
        self._rename(root)
        root.attrib.clear()
        root.attrib |= {
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-label": f"{self.title}. {self.caption}",
            "font-family": _FONTS,
            "stroke-linejoin": "round",
            "stroke-linecap": "butt",
        }
        for element in root.iter():
            _shorten(element)
        _flatten(root)
        ElementTree.register_namespace("", _SVG)
        return ElementTree.tostring(root, encoding="unicode")

    def _rename(self, root: ElementTree.Element) -> None:
        """Many figures stand in one page: names begin with the figure's, those that nothing refers to go.

        They are counted, as matplotlib draws them at random.
        """
        link = f"{{{_XLINK}}}href"
        used: dict[str, str] = {}

        def new(old: str) -> str:
            return used.setdefault(old, f"{self.name}-{len(used)}")

        for element in root.iter():
            if link in element.attrib:
                where = element.attrib.pop(link)
                # Pixels stand in the link itself; all else is a link to a part of the figure.
                element.attrib["href"] = where if where.startswith("data:") else "#" + new(where[1:])
            for key, value in element.attrib.items():
                element.attrib[key] = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{new(match[1])})", value)
        for element in root.iter():
            name = element.attrib.pop("id", None)
            if name in used:
                element.attrib["id"] = used[name]


def _shorten(element: ElementTree.Element) -> None:
    """Hundredths of a point suffice; the ink is that of the text around; the font stands at the root."""
    for key in ("d", "x", "y", "transform"):
        if key in element.attrib:
            element.attrib[key] = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(element.attrib[key].split()))
    if "d" in element.attrib:
        element.attrib["d"] = re.sub(r" ?([A-Za-z]) ?", r"\1", element.attrib["d"])
    if element.attrib.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if "style" in element.attrib:
        text = element.attrib["style"].replace(INK, "currentColor")
        element.attrib["style"] = re.sub(r"font: ([\d.]+px) [^;]+", r"font-size: \1", text).replace(": ", ":")
    if element.text is not None and not element.text.strip():
        element.text = None
    element.tail = None


def _flatten(element: ElementTree.Element) -> None:
    """Nothing is said twice; groups without attributes and paths that paint nothing say nothing."""
    styles = {child.attrib.get("style") for child in element}
    if len(element) > 1 and None not in styles and len(styles) == 1 and element.tag == f"{{{_SVG}}}g":
        element.attrib["style"] = styles.pop() or ""  # that of many equal markers, once
        for child in element:
            del child.attrib["style"]
    for child in list(element):
        _flatten(child)
        if child.attrib.get("style") == "fill:none" or (child.tag == f"{{{_SVG}}}defs" and not len(child)):
            element.remove(child)
        elif child.tag == f"{{{_SVG}}}g" and not child.attrib:
            at = list(element).index(child)
            element[at : at + 1] = list(child)
