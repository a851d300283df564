"""Plant mutants: compile the reference with a fault in it, and import the result under a name of its own.

Nothing is written to disk. A process that checks a mutant has the sound reference too, under its own name.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from keyedopt.conformance.mutants import Change, Mutant, MutantError, fragments
from keyedopt.conformance.targets.implementation import find

#: The implementation that faults are planted in.
SOUND = "reference"
#: The name under which the package of a mutant is imported.
PACKAGE = "keyedopt_mutant"


@dataclass(frozen=True)
class Source:
    """A file of the sound package, with the package's name replaced by that of a mutant."""

    path: Path
    module: str
    text: str

    def compiled(self, code: str | ast.Module) -> CodeType:
        """Compile this file, or a changed version of it."""
        return compile(code, self.path, "exec", dont_inherit=True)


@functools.cache
def sources() -> Mapping[str, Source]:
    """Return the files of the sound package by path in the package."""
    root = find(SOUND).root
    location = importlib.util.find_spec(root)
    assert location is not None
    assert location.submodule_search_locations
    folder = Path(location.submodule_search_locations[0])
    found = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        module = ".".join((PACKAGE, *file.with_suffix("").parts)).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8").replace(root, PACKAGE)
        found[file.as_posix()] = Source(path, module, text)
    return found


@functools.cache
def sound_code() -> Mapping[str, tuple[Source, CodeType]]:
    """Return each file of the sound package, compiled, by the name of its module."""
    return {source.module: (source, source.compiled(source.text)) for source in sources().values()}


def plant(mutant: Mutant) -> dict[str, CodeType]:
    """Return the compiled code of the modules that a mutant changes, by the names of the modules.

    Raises:
        MutantError: the mutant does not fit the reference; the message names mutant, file and function.
    """
    planted: dict[str, CodeType] = {}
    for file in dict.fromkeys(change.file for change in mutant.changes):
        changes = [_renamed(change) for change in mutant.changes if change.file == file]
        try:
            if file not in sources():
                raise MutantError(f"the package of {SOUND} has no such file")
            planted[sources()[file].module] = _changed(sources()[file], changes)
        except MutantError as error:
            functions = " and ".join(dict.fromkeys(change.function or "text" for change in changes))
            raise MutantError(f"mutant {mutant.name}, {file}, {functions}: {error}") from error
    return planted


def _renamed(change: Change) -> Change:
    root = find(SOUND).root
    old, new = (code.replace(root, PACKAGE) for code in (change.old, change.new))
    return dataclasses.replace(change, old=old, new=new)


def _changed(source: Source, changes: Sequence[Change]) -> CodeType:
    """Compile a file with changes; those of text come first."""
    text = source.text
    for change in changes:
        if change.function is None:
            count = text.count(change.old)
            if count != 1:
                raise MutantError(f"the text `old` occurs {count} times, not once.\n{change.old}")
            text = text.replace(change.old, change.new)
    try:
        tree = ast.parse(text)
        if text != source.text and ast.dump(tree) == ast.dump(ast.parse(source.text)):
            raise MutantError("`old` and `new` are the same code: a mutant must change something")
        for change in changes:
            if change.function is not None:
                fragments.replace(tree, change)
        return source.compiled(tree)
    except SyntaxError as error:
        raise MutantError(f"the changed code is not valid Python: {error}") from error


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the package of a mutant: code that was planted, and the code of the sound package elsewhere."""

    def __init__(self, planted: Mapping[str, CodeType]) -> None:
        self._planted = planted

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the package, and None for other modules."""
        if name not in sound_code():
            return None
        file = sound_code()[name][0].path
        found = importlib.machinery.ModuleSpec(
            name, self, origin=str(file), is_package=file.stem == "__init__"
        )
        found.has_location = True
        if found.submodule_search_locations is not None:  # so that pkgutil lists the modules of the package
            found.submodule_search_locations.append(str(file.parent))
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        name = module.__name__
        exec(self._planted.get(name) or sound_code()[name][1], module.__dict__)
