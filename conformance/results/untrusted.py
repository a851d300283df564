"""Text and data of strangers, made fit to print and to store.

An implementation under test chooses the messages of its errors and the values that it returns: they may
hold control characters, halves of characters, markup or megabytes, or fail when they are looked at.
"""

import ast
import math
from typing import Any

#: Longer texts are cut.
LIMIT = 2000


def clean(text: str, limit: int = LIMIT) -> str:
    """Show what cannot be printed as an escape, keep line ends, and cut what is too long."""
    kept = str.__str__(text[: limit + 1])  # of a subclass of str, only its characters
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in kept)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def one_line(text: str, limit: int = LIMIT) -> str:
    """Put text on one line, with control characters shown and not obeyed."""
    return clean(" ".join(str.__str__(text).split()), limit)


def error_text(error: BaseException) -> str:
    """Return the kind and the message of an error, also of one that cannot say what it is."""
    kind = type(error).__name__
    try:
        message = clean(str(error))
    except BaseException as other:
        message = f"its message cannot be read: {type(other).__name__}"
    return f"{kind}: {message}" if message else kind


def repr_text(value: object) -> str:
    """Return the repr of a value, also of one that has none."""
    try:
        return clean(repr(value))
    except BaseException as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def plain(value: Any, depth: int = 12) -> Any:
    """Turn a value into JSON: what JSON has stays as it is, anything else becomes ``{"python": repr}``."""
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
    """Return Python source of what `plain` made: a literal, in which ``nan`` and ``inf`` may occur.

    Raises:
        ValueError: it is no literal.
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
    """Allow literals alone: a result file that was tampered with must not put code into a script."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{one_line(text, 100)} is no literal") from error
    for node in nodes:
        named = isinstance(node, ast.Name) and node.id not in ("nan", "inf")
        if named or not isinstance(node, _LITERAL):
            raise ValueError(f"{one_line(text, 100)} is no literal")
