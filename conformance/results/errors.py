"""The base class of keyedopt's own errors, and the error of result files."""

import difflib
from collections.abc import Iterable


class KeyedoptError(Exception):
    """An input, a target or the harness is wrong; the message says what to do. Exit code 2."""


class ResultError(KeyedoptError):
    """A result file cannot be read or written; the message says why and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question about the names that are like an unknown one, to append to a message.

    >>> did_you_mean("keyd", ["keyed", "wrapper"])
    '; did you mean keyed?'
    >>> did_you_mean("x", ["keyed", "wrapper"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
