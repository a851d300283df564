"""What the error that ended a case says of its outcome.

What decides is bound as a default of an argument, before a target is imported that could replace it here.
"""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from keyedopt.conformance.results.untrusted import clean, error_text, plain
from keyedopt.conformance.results.verdict import level_of
from keyedopt.conformance.run.device_seen import of_suite
from keyedopt.conformance.run.protocol import Head
from keyedopt.conformance.suite.support.assertions import Late, Mismatch
from keyedopt.conformance.suite.support.measured import MEASURED

#: What is known of a case, in the stash of its item.
HEAD = pytest.StashKey[Head]()


class Escaped(Exception):  # noqa: N818 - a carrier of another exception
    """Carries an exit, a skip or an interrupt that a case raised, so that pytest reports a failure."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(error_text(original))
        self.original = original


def original(error: BaseException) -> BaseException:
    """Return the error that a case raised."""
    return error.original if isinstance(error, Escaped) else error


def error_of(call: Callable[[], None]) -> BaseException | None:
    """Call a function, and return the error that it raises: no context manager around it can swallow it."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def _failure(
    item: pytest.Item, error: BaseException, clean: Any = clean, error_text: Any = error_text
) -> dict[str, Any]:
    """Return the part of a record that describes the failure."""
    error = original(error)
    if isinstance(error, Mismatch):
        expected, seen = clean(error.expected), clean(error.seen)
    else:
        docstring = getattr(item, "obj", item).__doc__ or "no error"
        expected, seen = " ".join(docstring.split()), error_text(error)
    start = error.__traceback__
    while start is not None and not of_suite(start.tb_frame):
        start = start.tb_next
    lines = traceback.format_exception(type(error), error, start or error.__traceback__, limit=-30)
    record: dict[str, Any] = {"outcome": "fail", "expected": expected, "seen": seen}
    record |= {"trace": clean("".join(lines), 8000), "late": isinstance(error, Late)}
    with contextlib.suppress(Exception):  # untrusted: reading an attribute of the error may raise
        record["observed"] = plain(vars(error)[MEASURED])
    return record


def _from_target(
    error: BaseException,
    walk: Any = traceback.walk_tb,
    of_suite: Any = of_suite,
    ours: Any = (Escaped, Mismatch),
) -> bool:
    """Return whether code outside the suite raised an error."""
    frames = list(walk(error.__traceback__))
    return not isinstance(error, ours) and bool(frames) and not of_suite(frames[-1][0])


def found_in(
    item: pytest.Item,
    error: BaseException | None,
    level_of: Any = level_of,
    clean: Any = clean,
    failure: Any = _failure,
    from_target: Any = _from_target,
) -> dict[str, Any]:
    """Return the outcome of a case that raised an error or none."""
    observed = {level_of(clause) for clause in item.stash[HEAD]["clauses"]} == {"recorded"}
    if error is None:
        return {"outcome": "observed" if observed else "pass"}
    if isinstance(error, pytest.skip.Exception):  # a skip by the case itself has escaped
        return {"outcome": "unsupported", "seen": clean(str(error))}
    if observed and from_target(error):  # a clause without a verdict records what the target does
        return {"outcome": "observed", "observed": clean(f"raises {type(error).__name__}")}
    described: dict[str, Any] = failure(item, error)
    return described
