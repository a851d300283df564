"""Plots as small SVG for the page, and as PNG and SVG files for papers and slides.

A run has the same colour, marker and line style in every plot, so that no plot depends on colour only. The
colours are those of Okabe and Ito, darkened for contrast with white. On the page each colour is a CSS
variable, so that the dark scheme has lighter ones, and text has the colour of the text around it.
"""

import functools
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Path2D
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter

from keyedopt.conformance.results.untrusted import clean

#: Colours of runs; further runs have the same colours with other markers and line styles.
SERIES = ("#0063a6", "#b8480a", "#00745a", "#9a3d74", "#8a6a00", "#2a7fb8", "#5b4bb0", "#4d5661")
INK, MUTED, GRID, BAND = "#1b1e23", "#5a616b", "#d9dce1", "#e6e9ee"
MARKERS = "osD^vPX*<>"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))
#: The CSS values on the page of colours in files.
VARIABLES = {
    **{colour: f"var(--s{index})" for index, colour in enumerate(SERIES)},
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    BAND: "var(--band)",
    "#ffffff": "var(--surface)",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "keyedopt",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "text.parse_math": False,  # untrusted names are not formulas
    "axes.formatter.useoffset": False,
}
#: Parts of a style that are dropped: `page.css` sets them, or they are the defaults of SVG.
DEFAULTS = (("stroke-linejoin", "round"), ("stroke-linejoin", "miter"), ("opacity", "1"), ("stroke", "none"))
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Look:
    """The colour, the marker and the line style of a run."""

    colour: str
    marker: str
    dash: Any


@dataclass(frozen=True)
class Picture:
    """A plot on the page."""

    name: str
    title: str
    about: str
    svg: Markup


def looks(runs: Iterable[str]) -> dict[str, Look]:
    """Return the look of every run, which depends on its place.

    >>> looks(["a", "b"])["b"].marker
    's'
    """
    return {
        run: Look(
            SERIES[index % len(SERIES)],
            MARKERS[index % len(MARKERS)],
            DASHES[(index // 2) % len(DASHES)],
        )
        for index, run in enumerate(runs)
    }


@functools.cache
def sample(look: Look) -> Markup:
    """Return a line with a marker as SVG, without ids, as the page contains it many times."""
    marker = MarkerStyle(look.marker)
    path = marker.get_path().transformed(marker.get_transform())
    letters = {Path2D.MOVETO: "M", Path2D.LINETO: "L", Path2D.CURVE3: "Q", Path2D.CURVE4: "C"}
    parts = []
    for points, code in path.iter_segments():
        xy = zip(16 + 8 * points[::2], 6 - 8 * points[1::2], strict=True)
        numbers = " ".join(f"{x:.1f} {y:.1f}" for x, y in xy)
        parts.append("Z" if code == Path2D.CLOSEPOLY else f"{letters[code]}{numbers}")
    colour = VARIABLES[look.colour]
    dash = "" if look.dash == "-" else f' stroke-dasharray="{" ".join(str(part) for part in look.dash[1])}"'
    return Markup(
        f'<svg class="key" viewBox="0 0 32 12" width="32" height="12" aria-hidden="true">'
        f'<path d="M0 6H32" stroke="{colour}" stroke-width="1.4"{dash}/>'
        f'<path d="{"".join(parts)}" fill="{colour}" stroke="{colour}"/></svg>'
    )


def picture(
    name: str,
    title: str,
    about: str,
    draw: Callable[[Axes], None],
    size: tuple[float, float] = (3.3, 2.1),
    margins: tuple[float, float, float, float] = (0.5, 0.42, 0.08, 0.24),
    folder: Path | None = None,
    key: Sequence[tuple[str, Look]] = (),
) -> Picture:
    """Draw a plot.

    Args:
        name: the id of the plot in the page, and the stem of its files.
        title: the title.
        about: a description, for readers who cannot see the plot.
        draw: a function that draws into the axes.
        size: width and height in inches.
        margins: room for labels in inches: left, bottom, right, top.
        folder: a folder to write the plot to as PNG and SVG, with a legend; None for none.
        key: the runs in that legend.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        FigureCanvasSVG(figure)
        (width, height), (left, bottom, right, top) = size, margins
        inside = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        axes = figure.add_axes(inside)
        axes.locator_params(nbins=5)
        draw(axes)
        axes.minorticks_off()
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        text = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ ")  # a browser takes another font
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        if folder is not None:
            _save(figure, folder / name, title, key)
    return Picture(name, title, about, _for_page(text.getvalue(), name, title, about))


def _save(figure: Figure, path: Path, title: str, key: Sequence[tuple[str, Look]]) -> None:
    """Write a plot with its title and its legend on a white background."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.suptitle(_plain(title), y=1.04, fontsize=9)
    if key:
        handles = [
            Line2D([], [], color=look.colour, marker=look.marker, ls=look.dash, label=_plain(run))
            for run, look in key
        ]
        figure.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False, fontsize=7
        )
    _drawable(figure)
    figure.patch.set(visible=True, facecolor="white")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")
    FigureCanvasAgg(figure)
    figure.savefig(path.with_suffix(".png"), dpi=200, bbox_inches="tight")


def _plain(text: str) -> str:
    """Return a label that matplotlib shows; matplotlib hides labels with a leading underscore."""
    return f" {text}" if text.startswith("_") else text


def _drawable(figure: Figure) -> None:
    """Write characters that the font of plots lacks as escapes; a browser would use another font."""
    known = get_font(findfont("DejaVu Sans")).get_charmap()

    def escaped(text: str) -> str:
        return "".join(one if ord(one) in known or one == "\n" else ascii(one)[1:-1] for one in text)

    for text in figure.findobj(Text):
        text.set_text(escaped(text.get_text()))
    for axes in figure.axes:
        labels = axes.yaxis.get_major_formatter()
        if isinstance(labels, FixedFormatter):
            labels.seq = [escaped(label) for label in labels.seq]


def _for_page(text: str, name: str, title: str, about: str) -> Markup:
    """Rewrite an SVG for the page: no styles, few digits, unique ids, colours as variables, a description."""
    root = ElementTree.fromstring(text[text.index("<svg") :])
    for child in list(root):
        if child.tag == f"{_SVG}metadata" or any(part.tag == f"{_SVG}style" for part in child):
            root.remove(child)
    used = set(re.findall(r"#([\w.-]+)", text))
    for element in root.iter():
        _attributes(element, name, used)
    _, _, width, height = root.attrib["viewBox"].split()
    body = "".join(_text(child) for child in root)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    names = f"{name}-title", f"{name}-about"
    said = escape(clean(title)), escape(clean(about))
    described = f'<title id="{names[0]}">{said[0]}</title><desc id="{names[1]}">{said[1]}</desc>'
    label = f'role="img" aria-labelledby="{" ".join(names)}"'
    return Markup(f'<svg class="plot" {size} {label}>{described}{body}</svg>')


def _attributes(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Replace the style of an element by attributes, which the content security policy allows."""
    found = dict(element.attrib)
    element.attrib.clear()
    for part in found.pop("style", "").split(";"):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key == "font":
            found["font-size"] = value.split()[0].removesuffix("px")
        elif key == "font-size":
            found[key] = value.removesuffix("px")
        elif key and (key, value) not in DEFAULTS and key not in ("font-family", "stroke-linecap"):
            found[key] = value
    for key, value in found.items():
        if key == "id":
            if value in used:
                element.attrib["id"] = f"{name}-{value}"
        elif key == _LINK:
            element.attrib["href"] = f"#{name}-{value[1:]}"
        elif key in ("clip-path", "fill", "stroke") and value.startswith("url("):
            element.attrib[key] = value.replace("#", f"#{name}-")
        elif key in ("fill", "stroke"):
            element.attrib[key] = VARIABLES.get(value, value)
        elif key == "transform" and value.startswith("rotate(-0 "):
            continue
        else:
            element.attrib[key] = " ".join(re.sub(r"-?\d+\.\d+", _short, value).split())


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".removesuffix(".0")


def _text(element: ElementTree.Element) -> str:
    """Return the SVG of an element without namespaces and without empty groups."""
    tag = element.tag.removeprefix(_SVG)
    inner = "".join(_text(child) for child in element)
    text = escape(clean((element.text or "").strip())) if tag == "text" or tag == "tspan" else ""
    if tag in ("g", "defs") and not inner:
        return ""
    if tag == "g" and not element.attrib:
        return inner
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in element.items())
    return f"<{tag}{attributes}>{text}{inner}</{tag}>"


def above(axes: Axes, text: str) -> None:
    """Put the title of the vertical axis above the axis, where it takes no width."""
    axes.set_title(text, loc="left", fontsize=8, color=MUTED, x=-0.1)


def line(axes: Axes, x: Any, y: Any, look: Look, inside: int = 0) -> None:
    """Draw the line of a run, with markers at a dozen of its points at most.

    Args:
        axes: where to draw.
        x: the places of the points.
        y: their values.
        look: of the run.
        inside: how many of the lines drawn after this one coincide with it: they show inside of it.
    """
    every = max(1, -(-len(x) // 12))
    axes.plot(
        *(x, y),
        color=look.colour,
        ls=look.dash if not inside else "-",
        lw=1.4 + 2.6 * inside,
        marker=look.marker,
        ms=3.5 + 4 * inside,
        markevery=every,
        zorder=4,
    )


def peaks(points: Sequence[tuple[Any, float]], most: int = 100) -> list[tuple[Any, float]]:
    """Return at most this many points: the highest of each group of neighbours.

    >>> peaks([(1, 5.0), (2, 9.0), (3, 1.0), (4, 2.0)], 2)
    [(2, 9.0), (4, 2.0)]
    """
    size = max(1, -(-len(points) // most))
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [max(part, key=lambda point: point[1]) for part in parts]


def thin(points: Sequence[Any], most: int = 400) -> list[Any]:
    """Return at most this many points, evenly spaced, including the first and the last.

    >>> thin(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def numbered(prefix: str) -> Callable[[], str]:
    """Return a function that returns ``prefix-1``, ``prefix-2``, … in turn."""
    count = itertools.count(1)
    return lambda: f"{prefix}-{next(count)}"
