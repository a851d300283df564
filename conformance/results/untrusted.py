"""Untrusted text and data, made fit to print and to store.

An implementation under test chooses the messages of its errors and the values that it returns, and a result
file may come from anywhere: both may hold control characters, surrogates, markup, formulas of spreadsheets or
megabytes, or raise when they are read.
"""

import ast
import math
import re
from typing import Any

from keyedopt.conformance.results.errors import ResultError

#: Longer texts are cut.
LIMIT = 2000


def clean(text: str, limit: int = LIMIT) -> str:
    r"""Write unprintable characters as escapes, keep line ends, and cut a text that is too long.

    Addresses of objects, which differ in every run, are left out.

    >>> clean("red\x1b[31m")
    'red\\x1b[31m'
    >>> clean("<object at 0x7f027400b8d0>")
    '<object at 0x…>'
    """
    kept = str.__str__(text[: limit + 1])  # drops what a subclass of str adds
    whole = len(kept) <= limit
    if " at 0x" in kept:
        kept = re.sub(r" at 0x[0-9a-f]+", " at 0x…", kept)
    shown = kept if kept.isprintable() else "".join(map(_shown, kept))
    return shown if whole and len(shown) <= limit else f"{shown[: limit - 1]}…"


def _shown(character: str) -> str:
    return character if character.isprintable() or character == "\n" else ascii(character)[1:-1]


def one_line(text: str, limit: int = LIMIT) -> str:
    """Put text on one line, with control characters as escapes."""
    return clean(" ".join(str.__str__(text).split()), limit)


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error, also if reading the message raises."""
    kind = type(error).__name__
    try:
        message = clean(str(error))
    except BaseException as other:
        message = f"its message cannot be read: {type(other).__name__}"
    return f"{kind}: {message}" if message else kind


def repr_text(value: object) -> str:
    """Return the repr of a value, also if the repr raises."""
    try:
        return clean(repr(value))
    except BaseException as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def plain(value: Any, depth: int = 12) -> Any:
    """Turn a value into JSON data: values that JSON lacks become ``{"python": repr}``."""
    try:
        if value is None or isinstance(value, bool):
            return value
        if type(value) is str and value == clean(value):
            return value
        if type(value) is int and abs(value) < 2**63:
            return value
        if type(value) is float and math.isfinite(value):
            return value
        if depth and type(value) is list:
            return [plain(item, depth - 1) for item in value]
        if depth and type(value) is dict and all(type(key) is str for key in value) and "python" not in value:
            return {clean(key): plain(item, depth - 1) for key, item in value.items()}
    except BaseException as error:
        return {"python": f"<{type(value).__name__} that raises {type(error).__name__}>"}
    return {"python": repr_text(value)}


def source(value: Any) -> str:
    """Return Python source of data that `plain` made: a literal, which may contain ``nan`` and ``inf``.

    Raises:
        ValueError: the data holds source that is not a literal.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(source, value))}]"
    if isinstance(value, dict) and set(value) == {"python"} and isinstance(value["python"], str):
        _refuse_code(value["python"])
        return value["python"]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {source(item)}' for key, item in value.items())}}}"
    return repr(value)


_LITERAL = (
    *(ast.Expression, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Name, ast.Load),
    *(ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub),
)


def _refuse_code(text: str) -> None:
    """Raise unless the text is a literal: a forged result file must not put code into a script."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{one_line(text, 100)} is not a literal") from error
    for node in nodes:
        named = isinstance(node, ast.Name) and node.id not in ("nan", "inf")
        if named or not isinstance(node, _LITERAL):
            raise ValueError(f"{one_line(text, 100)} is not a literal")


def get(plain: Any, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return a member of a mapping if it has the right type.

    Raises:
        ResultError: the data is not a mapping, or its member has another type or is missing without a
        default.
    """
    if not isinstance(plain, dict):
        raise ResultError(f"the data that should have {name!r} is not a mapping")
    value = plain.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(each.__name__ for each in kinds)
        raise ResultError(f"{name!r} is not a {wanted}" if name in plain else f"{name!r} is missing")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ResultError(f"{name!r} is too large a number")
    return value


def text(plain: Any, name: str, default: Any = ...) -> Any:
    """Return a text member, on one line; see `get`."""
    found = get(plain, name, str, default)
    return one_line(found) if isinstance(found, str) else found


def number(plain: Any, name: str, default: Any = ...) -> Any:
    """Return a number; see `get`."""
    return get(plain, name, (int, float), default)
