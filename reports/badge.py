"""A badge for a README: an SVG, made here, that asks nobody for anything."""

from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from keyedopt.reports.plain import one_line
from keyedopt.reports.summary import held
from keyedopt.reports.tables import Tables

#: Background of the right half; white text on each has a contrast of at least 4.5.
COLOURS = {"conformant": "#1a7a3c", "partly": "#8a5a00", "not conformant": "#b42318", "no verdict": "#57606a"}
#: Width of a character of the font, which is monospaced so that no table of widths is needed.
CHARACTER = 6.7


def badge(tables: Tables, run: str) -> str:
    """Return the badge of a run: its name, passed over total of must and should, and a colour.

    Green: conformant, and every should held. Amber: conformant, but some should did not hold. Red: a must
    did not hold. Grey: there is no verdict. The words say it too, for those who do not see the colour.
    """
    about = tables.runs[tables.runs["run"] == run].iloc[0]
    mine = tables.clauses[tables.clauses["run"] == run]
    must, should = held(mine, "must"), held(mine, "should")
    if pd.isna(about["conformant"]):
        state = "no verdict"
    elif not about["conformant"]:
        state = "not conformant"
    else:
        state = "conformant" if should[0] == should[1] else "partly"
    counts = [f"{passed}/{total} {level}" for level, (passed, total) in (("must", must), ("should", should))]
    said = "conformant" if state == "partly" else state
    return svg(f"keyedopt: {run}", f"{said} | {', '.join(counts)}", COLOURS[state])


def svg(left: str, right: str, colour: str) -> str:
    """Return two boxes of text as SVG; whatever the texts hold is shown and not obeyed."""
    texts = [one_line(text, 80) for text in (left, right)]
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
