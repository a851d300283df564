"""The contents of one file, before the runs of all files have got their labels."""

import datetime
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.untrusted import one_line


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
        ResultError: the text is not such a time.
    """
    try:
        return datetime.datetime.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ResultError(f"{one_line(text, 40)!r} is not a time in ISO 8601") from error
