"""Find the implementation that a name on the command line means."""

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.implementation import Implementation, NotFoundError, TargetError, load

#: The entry points under which vendors register an `Implementation`.
GROUP = "keyedopt.implementations"
#: The areas whose classes do not need each other.
APART = ("algorithms", "accumulate")


def registered() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of registered implementations; keyedopt's own names take precedence.

    Raises:
        TargetError: the metadata of a package in this environment cannot be read.
    """
    try:
        found = importlib.metadata.entry_points(group=GROUP)
    except Exception as error:  # of any type: it checks nothing that it reads
        why = one_line(error_text(error), 200)
        raise TargetError(f"the metadata of a package in this environment cannot be read: {why}") from error
    points = [point for point in found if point.pattern.match(point.value)]  # else it names no module
    return {point.name: point for point in sorted(points, key=_is_ours)}


def _is_ours(point: importlib.metadata.EntryPoint) -> bool:
    return point.module.startswith("keyedopt.")


def find(target: str, imports: Sequence[str] = ()) -> Implementation:
    """Return the implementation of a target. Imports its adapter, or the target itself.

    Args:
        target: as on the command line. The module of a published library means its description.
        imports: modules to import first.

    Raises:
        TargetError: the target does not exist, or cannot be imported.
    """
    for module in imports:
        load(module)
    known = registered()
    names = ", ".join(sorted(known))
    if target in known:
        found = load(f"{known[target].module}:{known[target].attr}")
        if not isinstance(found, Implementation):
            raise TargetError(
                f"the entry point {target!r} gives a {type(found).__name__}, "
                "not a keyedopt.conformance.targets.implementation.Implementation"
            )
        return found
    shipped: list[Implementation] = [
        load(f"{point.module}:{point.attr}") for point in known.values() if _is_ours(point)
    ]
    for one in shipped:
        if one.root == target:
            return one
    if not all(part.isidentifier() for part in target.replace(":", ".", 1).split(".")):
        raise TargetError(
            f"{target!r} is not a target: give one of {names}, a package.module, or package.module:attribute"
            f"{_spelled_otherwise(target) or did_you_mean(target, known)}"
        )
    try:
        found = load(target)
    except NotFoundError as error:
        _refuse_attribute(target, known)
        near = _spelled_otherwise(target) or ("" if "." in target else did_you_mean(target, known))
        why = str(error).partition("; did you mean")[0] if near else str(error)  # one question is enough
        raise TargetError(f"{why}, or give one of: {names}{near}") from error
    namespace = Implementation(name=target, root=target)
    is_class_or_function = callable(found) and not isinstance(found, ModuleType | Implementation)
    if is_class_or_function and not namespace.surface().claimed():
        return _described_class(target, found, shipped) or _undescribed_class(target)
    return found if isinstance(found, Implementation) else namespace


def _refuse_attribute(target: str, known: Mapping[str, importlib.metadata.EntryPoint]) -> None:
    """Raise TargetError if a target is an attribute of a registered name, such as reference:Adam."""
    name, _, attribute = target.partition(":")
    if name in known and attribute:
        root = load(f"{known[name].module}:{known[name].attr}").root
        why = f"{name!r} is a registered name, which has no attributes"
        if not isinstance(root, str):
            raise TargetError(why)
        load(f"{root}:{attribute}")  # names the nearest attribute if there is none
        raise TargetError(f"{why}; did you mean {root}:{attribute}?")


def _spelled_otherwise(target: str) -> str:
    """Return a hint if a target is a file's name, or an attribute with a dot before it instead of a colon."""
    for other in (target.removesuffix(".py"), ":".join(target.rsplit(".", 1))):
        if other != target:
            with contextlib.suppress(TargetError):
                load(other)
                return f"; did you mean {other}?"
    return ""


def _described_class(target: str, kind: Any, shipped: Sequence[Implementation]) -> Implementation | None:
    """Return what the description of a published library says about one of its classes."""
    library = target.partition(":")[0].partition(".")[0]
    for one in shipped:
        if str(one.root).partition(".")[0] != library:
            continue
        for name, place in one.surface().places().items():
            if load(place) is kind:
                areas = [area for area in spec.areas().values() if name in area.names]
                others = {other for area in areas if area.name in APART for other in area.names} - {name}
                absent = (*one.absent, *sorted(others))
                return replace(one, name=target, areas=tuple(area.name for area in areas), absent=absent)
    return None


def _undescribed_class(target: str) -> Implementation:
    """Return the description that follows from name, bases and signature of a class or a factory function."""
    from keyedopt.conformance.targets.proposal import propose  # imports torch

    found = propose(target)
    if not found.areas and found.notes:
        raise TargetError("; ".join(found.notes))
    return Implementation(
        name=target,
        root=target,
        areas=found.areas or None,
        names=found.names,
        absent=found.absent,
        option_names=found.option_names,
        fixed_options=found.fixed_options,
        defaults=found.defaults,
        variants=found.variants,
    )
