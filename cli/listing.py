"""``keyedopt list``: list the targets, the clauses, the areas or the devices."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from keyedopt.cli import machine
from keyedopt.conformance import spec

#: The column at which the text of a target begins, and continues on a terminal.
INDENT = 18


def listing(what: str, imports: Sequence[str] = (), as_json: bool = False) -> None:
    """Import modules, then print one line for each target, clause, area or device, or all of them as JSON."""
    from keyedopt.conformance.targets.implementation import load

    for module in imports:
        load(module)
    rows, line = {
        "targets": (_targets, _target_line),
        "clauses": (lambda: map(machine.clause, spec.clauses().values()), _clause_line),
        "areas": (lambda: map(machine.area, spec.areas().values()), _area_line),
        "devices": (_devices, _device_line),
    }[what]
    if as_json:
        machine.print_json(**{what: list(rows())})
        return
    for row in rows():
        print(_fitted(line(row)))


def _fitted(text: str) -> str:
    """Wrap lines to the width of a terminal; a pipe gets one line for each item."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    indent = " " * (INDENT if width > 3 * INDENT else 2)
    lines = (textwrap.fill(each, width, subsequent_indent=indent) for each in text.splitlines())
    return "\n".join(lines)


def _targets() -> Iterator[dict[str, Any]]:
    from importlib import metadata, util

    from keyedopt.conformance.targets.find import find, registered
    from keyedopt.conformance.targets.implementation import TargetError

    for name in sorted(registered()):
        try:
            implementation = find(name)
        except TargetError as error:
            yield {"name": name, "problem": f"broken: {error}"}
            continue
        root = implementation.root
        package = root.partition(":")[0].partition(".")[0] if isinstance(root, str) else None
        if package and util.find_spec(package) is None:
            how = implementation.install or "".join(
                f"pip install {d}" for d in implementation.distributions[:1]
            )
            yield {"name": name, "problem": f"not installed{'; install it with: ' if how else ''}{how}"}
            continue
        try:
            version = metadata.version(implementation.distributions[0])
        except (IndexError, metadata.PackageNotFoundError):
            version = "unknown version"
        row = {"name": name, "version": version, "areas": list(implementation.areas or ())}
        yield row | ({"backends": _backends()} if root == "keyedopt.fused" else {})


def _backends() -> dict[str, str]:
    from keyedopt.fused.backends import available

    return {name: f"missing: {why}" if why else "available" for name, why in available().items()}


def _devices() -> list[dict[str, Any]]:
    from keyedopt.conformance.targets.devices import devices

    return [{"name": one.name, "about": one.about, "dtypes": list(one.dtypes)} for one in devices()]


def _target_line(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"{row['name']:17} {row['problem']}"
    first = f"{row['name']:17} {row['version']}; areas: {', '.join(row['areas']) or 'as found'}"
    return "\n".join([first, *(f"  backend {name:8} {how}" for name, how in row.get("backends", {}).items())])


def _clause_line(row: dict[str, Any]) -> str:
    return f"{row['id']:10} {row['level']:8} {row['statement']}"


def _area_line(row: dict[str, Any]) -> str:
    return f"{row['name']:10} {len(row['clauses']):3} clauses  {row['title']}: {', '.join(row['names'])}"


def _device_line(row: dict[str, Any]) -> str:
    return f"{row['name']:10} {row['about']}; dtypes: {', '.join(row['dtypes']) or 'none'}"
