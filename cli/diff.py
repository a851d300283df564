"""``keyedopt diff``: the differences between two results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keyedopt.cli.report import clauses
from keyedopt.reports.diff import CompareError, difference
from keyedopt.reports.load import load
from keyedopt.reports.tables import Tables, rows


def diff(before: Path, after: Path, form: str, fail: Callable[[str], NoReturn]) -> int:
    """Print the differences; return 1 if something got worse, and 0 otherwise."""
    try:
        found = difference(_single(before, fail), _single(after, fail))
    except CompareError as error:
        fail(str(error))
    forms = {"text": found.text, "markdown": found.markdown}
    print(json.dumps(found.to_dict(), indent=1) + "\n" if form == "json" else forms[form](), end="")
    return 1 if found.worse else 0


def _single(path: Path, fail: Callable[[str], NoReturn]) -> Tables:
    if path.is_dir():
        fail(f"{path} is a folder: name two result files")
    tables = load([path], clauses())
    for row in rows(tables.problems):
        fail(f"{row['file']} cannot be compared: {row['reason']}")
    return tables
