"""What the API pages show for a public name: its docstring, completed from those to which it refers.

A class of `keyedopt.fused` replaces code of the reference, not its documentation: arguments, errors, state
and example are those of the base class, and its own docstring says only what differs.
"""

import dataclasses
import importlib
import inspect
import re
from typing import Any

from sphinx.util.inspect import signature, stringify_signature

#: An entry in ``Args:``: its names, its text, and the lines below that continue the text.
ENTRY = re.compile(r"^    (?P<names>\*{0,2}\w+(?:, \w+)*): (?P<text>.*\n(?:        .*\n)*)", re.M)
#: The text of an entry that is in another docstring.
ELSEWHERE = re.compile(r"as in `(\w+)`\.\s*")


def shown(found: Any, package: str) -> str:
    """Return the text that the page of a package shows for a class or function.

    Args:
        found: the class or function.
        package: ``keyedopt.reference`` or ``keyedopt.fused``, from which the examples import.

    Returns:
        The docstring. Arguments or an example that a class leaves to its base classes are added from these,
        down to the class with the constructor. The text of an argument that is "as in" another class is that
        of the other class.
    """
    text = inspect.cleandoc(found.__doc__ or "")
    if isinstance(found, type):
        for base in found.__mro__:
            own = inspect.cleandoc(base.__doc__ or "")
            if any(part in own and part not in text for part in ("Args:", ">>>")):
                _, _, below_summary = own.partition("\n\n")
                text = f"{text}\n\n{below_summary}"
            if "__init__" in vars(base) or "__new__" in vars(base):
                break
    text = text.replace(">>> from keyedopt.reference import", f">>> from {package} import")
    before, head, after = text.partition("Args:\n")
    listed, blank, rest = after.partition("\n\n")
    listed = ENTRY.sub(lambda entry: _resolved(entry, package), f"{listed}\n").removesuffix("\n")
    return "".join((before, head, listed, blank, rest))


def arguments(text: str) -> dict[str, str]:
    """Return the text of each argument in a docstring."""
    listed = text.partition("Args:\n")[2].partition("\n\n")[0] + "\n"
    return {name: entry["text"] for entry in ENTRY.finditer(listed) for name in entry["names"].split(", ")}


def complete(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring by those that are shown; called by Sphinx for each docstring."""
    if what in ("class", "function"):
        lines[:] = [*shown(found, ".".join(name.split(".")[:2])).splitlines(), ""]


def constructor(
    app: Any, what: str, name: str, found: Any, options: Any, shown: str | None, returned: str | None
) -> tuple[str, None] | None:
    """Return the arguments of a class, or None where Sphinx shows them; called by Sphinx for each signature.

    Sphinx prefers a ``__new__`` that passes everything on to ``__init__``, and shows the default of a field
    that is a new list as ``<factory>``.
    """
    if what != "class" or shown is None or not (shown.startswith("(*args") or "<factory>" in shown):
        return None
    called = signature(found.__init__, bound_method=True)
    parameters = dict(called.parameters)
    for field in dataclasses.fields(found) if dataclasses.is_dataclass(found) else ():
        if field.default_factory is not dataclasses.MISSING:
            parameters[field.name] = parameters[field.name].replace(default=field.default_factory())
    whole = called.replace(parameters=list(parameters.values()))
    return stringify_signature(whole, show_return_annotation=False, unqualified_typehints=True), None


def _resolved(entry: re.Match[str], package: str) -> str:
    """Return an entry as it is, or the entries of the class to which the text refers."""
    other = ELSEWHERE.fullmatch(entry["text"])
    if other is None:
        return entry[0]
    known = arguments(shown(getattr(importlib.import_module(package), other[1]), package))
    return "".join(f"    {name}: {known[name]}" for name in entry["names"].split(", "))
