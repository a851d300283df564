"""Text of strangers, made fit to show; and looking into plain data that may be anything.

Names, messages and records come from the implementations that were checked. They may hold control
characters, markup, formulas of spreadsheets or megabytes.
"""

from typing import Any

#: Longer texts are cut.
LIMIT = 2000


class Refused(Exception):  # noqa: N818 - it is the answer to a file, not a fault of ours
    """A file that is not taken as a result; the message says why."""


def clean(text: str, limit: int = LIMIT) -> str:
    r"""Show what cannot be printed as an escape, keep line ends, and cut what is too long.

    >>> clean("red\x1b[31m")
    'red\\x1b[31m'
    """
    kept = text[: limit + 1]
    shown = kept if kept.isprintable() else "".join(map(_shown, kept))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def _shown(character: str) -> str:
    return character if character.isprintable() or character == "\n" else ascii(character)[1:-1]


def one_line(text: str, limit: int = LIMIT) -> str:
    """Put text on one line, with control characters shown and not obeyed."""
    return clean(" ".join(text.split()), limit)


def code(text: str, limit: int = 300) -> str:
    r"""Write text as code in a cell of a Markdown table: markup in it is shown and not obeyed.

    >>> code("<b>|`x`")
    "`<b>\\|'x'`"
    """
    safe = one_line(text, limit).replace("`", "'").replace("|", "\\|")
    return f"`{safe}`" if safe else ""


def get(plain: Any, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return a member of a mapping if it has the right type.

    Raises:
        Refused: there is no mapping, or its member is missing, and has no default, or of another type.
    """
    if not isinstance(plain, dict):
        raise Refused(f"where {name!r} should be, there is no mapping")
    value = plain.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(each.__name__ for each in kinds)
        raise Refused(f"{name!r} is not a {wanted}" if name in plain else f"{name!r} is missing")
    return value


def text(plain: Any, name: str, default: Any = ...) -> Any:
    """Return a text member, on one line; see `get`."""
    found = get(plain, name, str, default)
    return one_line(found) if isinstance(found, str) else found


def number(plain: Any, name: str, default: Any = ...) -> Any:
    """Return a number; see `get`."""
    return get(plain, name, (int, float), default)
