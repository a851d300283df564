"""Read files that may come from anywhere, within bounds of size, number of values and depth."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import ResultError

#: The largest file, in bytes. A result of the whole suite has 7 MB.
SIZE = 64 << 20
#: The largest number of values; an empty list takes three bytes in a file and twenty times as much in memory.
VALUES = 4_000_000
#: The deepest nesting. Records of the suite end at 12.
DEPTH = 64
#: The most digits of an integer.
DIGITS = 40


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        ResultError: the file cannot be read, or is a folder, a pipe or a device, which may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise ResultError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ResultError("it cannot be read: it is not a regular file")
    return descriptor


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ResultError: the file cannot be read, is not UTF-8, or is larger than `SIZE`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(SIZE + 1)
    except OSError as error:
        raise ResultError(f"it cannot be read: {error.strerror or error}") from error
    if len(data) > SIZE:
        raise ResultError(f"it is larger than {SIZE >> 20} MB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ResultError("it cannot be read: it is not text") from error


def parse_json(text: str) -> Any:
    """Return JSON data within the bounds.

    Raises:
        ResultError: the text is beyond a bound.
        ValueError: the text is not JSON.
    """
    if sum(map(text.count, ",[{")) > VALUES:
        raise ResultError(f"it is not a result file: it has more than {VALUES:,} values")
    try:
        plain = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ResultError(TOO_DEEP) from error
    level, depth = [plain], 0
    while level:
        if depth > DEPTH:
            raise ResultError(TOO_DEEP)
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
    return plain


TOO_DEEP = "it is not a result file: it is nested too deeply"


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ResultError(f"it is not a result file: it has an integer of {len(digits)} digits")
    return int(digits)
