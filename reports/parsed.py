"""The contents of one file, before the runs of all files have got their labels."""

import datetime
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.untrusted import one_line

#: The years that are read; pandas holds times from 1677 to 2262.
YEARS = (1970, 2200)


@dataclass
class Parsed:
    """A run, or points of history, of one file.

    Args:
        name, version: the implementation; the label of the run begins with them.
        run: the row of the table `runs`, by column, without the label.
        rows: rows of other tables; rows of runs without the label.
    """

    name: str
    version: str
    run: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))


def moment(text: str) -> str:
    """Return a time in ISO 8601.

    Raises:
        ResultError: the text is not such a time, or not of the years that a table can hold.
    """
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ResultError(f"{one_line(text, 40)!r} is not a time in ISO 8601") from error
    if not YEARS[0] <= found.year <= YEARS[1]:
        raise ResultError(f"{one_line(text, 40)!r} is not a time of the years {YEARS[0]} to {YEARS[1]}")
    return found.isoformat()
