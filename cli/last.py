"""The result of the user's last check, which `replay` and `explain --failed` read if no file is named."""

import contextlib
import os
from pathlib import Path

from keyedopt.conformance.results import model
from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.model import Result


def path() -> Path:
    """Return the file, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keyedopt" / "last.json"


def remember(result: Result) -> None:
    """Keep a result as that of the last check, unless the cache cannot be written."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        model.write(result, path())


def remembered() -> Path:
    """Return the file of the last check. It is read like any result, as untrusted input.

    Raises:
        ResultError: no check is remembered.
    """
    with contextlib.suppress(RuntimeError):
        if path().exists():
            return path()
    raise ResultError("no check is remembered here: name a result file, or run keyedopt check TARGET")
