"""A badge for a README: an SVG without links to anything outside it."""

from xml.sax.saxutils import escape, quoteattr

from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import (
    CONFORMANT,
    NO_VERDICT,
    NOT_CONFORMANT,
    PARTLY,
    UNJUDGED,
    headline,
)
from keyedopt.reports.tables import Tables, checked, held, rows

#: Backgrounds of the right half; white text on each has a contrast of at least 4.5.
GREEN, AMBER, RED, GREY = "#1a7a3c", "#8a5a00", "#b42318", "#57606a"
COLOURS = {CONFORMANT: GREEN, PARTLY: AMBER, NOT_CONFORMANT: RED, UNJUDGED: RED, NO_VERDICT: GREY}
#: Width of a character of the font, which is monospaced.
CHARACTER = 6.7


def badge(tables: Tables, run: str) -> str:
    """Return the badge of a run: its name, verdict, and counts of clauses that held and that were checked.

    Green: conformant, and every should held. Amber: partly checked, or conformant with a should that did not
    hold. Red: not conformant, or could not be judged. Grey: no verdict, or a run of a part of the suite
    without a failed must. The words repeat the verdict for readers who do not see the colour.
    """
    about = rows(tables.runs[tables.runs["run"] == run])[0]
    mine = tables.clauses[tables.clauses["run"] == run]
    must, should = (held(mine[mine["level"] == level]) for level in ("must", "should"))
    colour = COLOURS[about["verdict"]]
    if about["scope"] and colour != RED:
        colour = GREY
    elif colour == GREEN and should[0] < should[1]:
        colour = AMBER
    said = headline(about["verdict"], about["scope"])
    counts = f"{must[0]}/{must[1]} must, {should[0]}/{should[1]} should held"
    return svg(f"keyedopt: {run}", f"{said} | {checked(about)} | {counts}", colour)


def svg(left: str, right: str, colour: str) -> str:
    """Return two boxes of text as SVG, with markup in the texts escaped."""
    texts = [one_line(left, 80), one_line(right, 200)]
    widths = [round(len(text) * CHARACTER) + 14 for text in texts]
    label = quoteattr(": ".join(texts))
    spans = []
    for text, start, width in zip(texts, (0, widths[0]), widths, strict=True):
        spans.append(f'<text x="{start + width / 2:g}" y="14">{escape(text)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" '
        f"aria-label={label}><title>{escape(': '.join(texts))}</title>"
        f'<rect width="{widths[0]}" height="20" fill="#333"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/>'
        '<g fill="#fff" text-anchor="middle" font-size="11" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">'
        f"{''.join(spans)}</g></svg>\n"
    )
