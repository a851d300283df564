"""``keyedopt diff``: what is different between two results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keyedopt.cli.report import clauses
from keyedopt.reports import changes
from keyedopt.reports.diff import CannotCompare, Difference, difference
from keyedopt.reports.read import read
from keyedopt.reports.tables import Tables, rows


def diff(before: Path, after: Path, form: str, fail: Callable[[str], NoReturn]) -> int:
    """Show what changed; return 1 if something got worse, or else 0."""
    try:
        found = difference(_single(before, fail), _single(after, fail))
    except CannotCompare as why:
        fail(str(why))
    print(shown(found, form), end="")
    return 1 if found.worse else 0


def shown(found: Difference, form: str) -> str:
    """Return a difference in a format."""
    if form == "json":
        return json.dumps(found.to_dict(), indent=1) + "\n"
    return changes.markdown(found) if form == "markdown" else changes.text(found)


def _single(path: Path, fail: Callable[[str], NoReturn]) -> Tables:
    if path.is_dir():
        fail(f"{path} is a folder: name two result files")
    tables = read([path], clauses())
    for row in rows(tables.problems):
        fail(f"{row['file']} cannot be compared: {row['reason']}")
    return tables
