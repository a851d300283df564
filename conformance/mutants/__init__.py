"""Implementations that are wrong on purpose, each by one small realistic fault.

The suite must reject every one of them. A mutant is a replacement of text in the source of a sound
implementation: a copy of its package is written to a folder, changed, and checked like any target.
"""

import compileall
import functools
import importlib.util
import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

from keyedopt.conformance import spec
from keyedopt.conformance.targets.implementation import find

#: The implementation that faults are planted in.
SOUND = "reference"
#: The name under which the package of a mutant is imported, in a process of its own.
PACKAGE = "keyedopt_mutant"


@dataclass(frozen=True)
class Mutant:
    """One fault: which text of which file becomes what, and which clauses have to notice.

    A fault in two places has the second in `also`; `dtypes` are those in which the cases are run.
    """

    name: str
    area: str
    rejected_by: tuple[str, ...]
    file: str
    old: str
    new: str
    also: Mapping[str, str] | None = None
    dtypes: tuple[str, ...] = ("float32",)


class MutantError(Exception):
    """A mutant that cannot be made: the text that it replaces is not there, or not unique."""


@functools.cache
def mutants() -> Mapping[str, Mutant]:
    """Return every mutant by name."""
    found: dict[str, Mutant] = {}
    for area in spec.areas():
        path = Path(__file__).with_name(f"{area}.toml")
        entries = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for entry in entries.get("mutant", ()):
            lists = {name: tuple(entry[name]) for name in ("rejected_by", "dtypes") if name in entry}
            mutant = Mutant(**{**entry, "area": area, **lists})
            if mutant.name in found:
                raise MutantError(f"two mutants are called {mutant.name!r}")
            found[mutant.name] = mutant
    return found


@functools.cache
def _copy_of_sound() -> "tempfile.TemporaryDirectory[str]":
    """Copy the sound package under the name of a mutant, with its bytecode, which the mutants share.

    The bytecode of a file holds as long as the hash of its source does.
    """
    root = find(SOUND).root
    location = importlib.util.find_spec(root)
    assert location is not None
    assert location.submodule_search_locations
    folder = tempfile.TemporaryDirectory(prefix="keyedopt-", ignore_cleanup_errors=True)
    package = Path(folder.name) / PACKAGE
    source = location.submodule_search_locations[0]
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace(root, PACKAGE), encoding="utf-8")
    compileall.compile_dir(package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one that has no links
        shutil.copyfile(source, target)


def plant(mutant: Mutant, folder: Path) -> str:
    """Write the package of a mutant into ``folder``; return its name.

    Raises:
        MutantError: the text to replace does not occur exactly once.
    """
    root = find(SOUND).root
    package = folder / PACKAGE
    shutil.copytree(Path(_copy_of_sound().name) / PACKAGE, package, copy_function=_link)
    first = {"file": mutant.file, "old": mutant.old, "new": mutant.new}
    for change in (first, mutant.also):
        if change is not None:
            parts = (change[part].replace(root, PACKAGE) for part in ("file", "old", "new"))
            _replace(mutant, package, *parts)
    return PACKAGE


def _replace(mutant: Mutant, package: Path, file: str, old: str, new: str) -> None:
    changed = package / file
    text = changed.read_text(encoding="utf-8") if changed.exists() else ""
    if text.count(old) != 1:
        raise MutantError(
            f"mutant {mutant.name}: its text occurs {text.count(old)} times in {file}, not once"
        )
    changed.unlink()  # it is a link to the sound one
    changed.write_text(text.replace(old, new), encoding="utf-8")
