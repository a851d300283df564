"""The page: one self-contained HTML file that needs no network.

`write` makes the page of the tables. The file has most views as HTML and SVG. A small script (``page.js``)
makes the matrix, the details of clauses and the differences from data in the file. A content security policy
allows only this script and this style sheet, by their digests: the page sends no requests, and untrusted text
cannot run.
"""

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from keyedopt.conformance.results import DEFINITIONS
from keyedopt.conformance.results.untrusted import clean
from keyedopt.conformance.results.verdict import SHOWN
from keyedopt.conformance.spec import LEVELS
from keyedopt.reports.page import history, overview, precision, schedules, speed, traffic
from keyedopt.reports.page.embedded import as_json, embedded
from keyedopt.reports.page.figures import looks, sample
from keyedopt.reports.tables import Clause, Frame, Tables

FOLDER = Path(__file__).parent
VIEWS = ("Overview", "Matrix", "Schedules", "Precision", "Speed", "Traffic", "History", "Differences")


def write(
    tables: Tables,
    clauses: Mapping[str, Clause],
    folder: Path,
    plots: bool = False,
    commit_url: str = "",
) -> Path:
    """Write ``index.html`` into a folder, which is created if it is missing, and return the path of the file.

    Args:
        tables: the results, from `keyedopt.reports.load.load`.
        clauses: the texts of the clauses, by id.
        folder: the folder of the page.
        plots: whether to write every plot as PNG and SVG too, into the subfolder ``plots``.
        commit_url: the address to which the history links commits, with ``{commit}`` in it.

    Raises:
        ValueError: ``commit_url`` does not begin with https:// or lacks ``{commit}``.
    """
    if commit_url and not (_link(commit_url) and "{commit}" in commit_url):
        raise ValueError(
            f"{commit_url!r} is not an address that has {{commit}} in it and begins with https://"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    text = render(tables, clauses, folder / "plots" if plots else None, commit_url)
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
    return path


def render(
    tables: Tables, clauses: Mapping[str, Clause], plots: Path | None = None, commit_url: str = ""
) -> str:
    """Return the page; see `write`."""
    checked: Frame = tables.runs[tables.runs["kind"] == "conformance"]
    looked = looks(checked["run"])
    style, script = (_source(f"page.{kind}") for kind in ("css", "js"))
    seen = overview.view(tables, clauses, looked)
    data = as_json(embedded(tables, clauses, looked))
    text: str = _template().render(
        views=VIEWS,
        policy=_policy(script, style),
        style=Markup(style),
        script=Markup(script),
        data=Markup(data),
        runs=list(looked),
        key={run: sample(look) for run, look in looked.items()},
        about=_about(tables, checked),
        definitions=DEFINITIONS,
        filters=_filters([row["area"] for row in seen["areas"]]),
        overview=seen,
        schedules=schedules.view(tables, looked, plots),
        precision=precision.view(tables, looked, plots),
        speed=speed.view(tables, plots),
        traffic=traffic.view(tables, looked, plots),
        history=history.view(tables, commit_url, plots),
        problems=tables.problems.to_dict("records"),
    )
    return text


def _source(name: str) -> str:
    """Return a source file without comments and empty lines."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return re.sub(r"^\s*(//.*)?\n", "", re.sub(r"/\*.*?\*/", "", text, flags=re.S), flags=re.M)


def _policy(script: str, style: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _template() -> Any:
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    made.filters |= {"finite": lambda value: not _missing(value) and math.isfinite(value)}
    made.filters |= {"time": _time, "size": _size, "digits": _digits, "link": _link, "share": _share}
    made.filters |= {"measured": _measured, "breakable": _breakable}
    made.tests["missing"] = _missing
    return made.get_template("page.html")


def _about(tables: Tables, checked: Frame) -> dict[str, Any]:
    started: Frame = tables.runs["started"].dropna()
    return {
        "runs": len(checked),
        "clauses": tables.clauses["clause"].nunique(),
        "suites": sorted(set(checked["suite_version"].dropna())),
        "hashes": sorted(set(checked["suite_hash"].dropna())),
        "last": started.max().strftime("%d %B %Y, %H:%M UTC") if len(started) else "",
        "files": len(tables.runs),
    }


def _filters(areas: list[str]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the filters of the matrix: their names, the words for no filter, values with their texts."""
    named = [("bad", "does not hold"), ("differs", "differs")]
    return [
        ("area", "all", [(area, area) for area in areas]),
        ("level", "all", [(level, level) for level in LEVELS]),
        ("outcome", "all", [*named, *((outcome, outcome.replace("-", " ")) for outcome in SHOWN)]),
    ]


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or bool(value != value)


def _digits(value: Any, count: int = 3) -> str:
    """Write a number with this many significant digits."""
    if _missing(value):
        return "–"
    if math.isinf(value):
        return "not finite"
    plain = 10**count <= abs(value) < 1e9
    return f"{value:,.0f}" if plain else f"{value:.{count}g}"


def _time(seconds: Any) -> str:
    """Write a time in s, ms, µs or ns."""
    if _missing(seconds):
        return "–"
    for unit, factor in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def _size(count: Any) -> str:
    """Write a number of bytes in GB, MB, kB or B."""
    if _missing(count):
        return "–"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def _measured(value: Any, unit: Any) -> str:
    """Write a measurement in its unit; see `_time` and `_size`."""
    if unit in ("s", "B"):
        return _time(value) if unit == "s" else _size(value)
    return f"{_digits(value)} {'' if _missing(unit) else unit}".strip()


def _share(value: Any) -> str:
    """Write a share in percent, or as a factor if it is large."""
    if _missing(value):
        return "–"
    return f"{value:.0%}" if value < 10 else f"{_digits(value)} times"


def _breakable(name: Any) -> Markup:
    """Let a browser break a long name behind its underscores, instead of inside a word."""
    return Markup("_<wbr>").join(clean(str(name)).split("_"))


def _link(value: Any) -> str:
    """Return an address that a page may link to; of other text an empty string."""
    return str(value) if re.match(r"https?://[^\s]+$", str(value)) else ""
