"""Plant mutants: compile the files of a base with a fault in them.

A mutant of the reference is imported under a name of its own, beside the sound reference. Other bases are
already imported, and other libraries refer to them; so their functions get the code of the mutant, in place.
Nothing is written to disk.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from keyedopt.conformance.mutants import PACKAGES, SOUND, Change, Mutant, MutantError, fragments
from keyedopt.conformance.targets.find import find

#: The name under which the package of a mutant is imported.
PACKAGE = "keyedopt_mutant"


@dataclass(frozen=True)
class Source:
    """A file of a base; for the reference, with the package's name replaced by that of a mutant."""

    path: Path
    module: str
    text: str

    def compiled(self, code: str | ast.Module) -> CodeType:
        """Compile this file, or a changed version of it."""
        return compile(code, self.path, "exec", dont_inherit=True)


@functools.cache
def _root() -> str:
    """Return the name of the sound package; to find it reads the metadata of every installed package."""
    root: str = find(SOUND).root
    return root


@functools.cache
def sources() -> Mapping[str, Source]:
    """Return the files of the sound package by path in the package."""
    location = importlib.util.find_spec(_root())
    assert location is not None
    assert location.submodule_search_locations
    folder = Path(location.submodule_search_locations[0])
    found = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        module = ".".join((PACKAGE, *file.with_suffix("").parts)).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8").replace(_root(), PACKAGE)
        found[file.as_posix()] = Source(path, module, text)
    return found


@functools.cache
def sound_code() -> Mapping[str, tuple[Source, CodeType]]:
    """Return each file of the sound package, compiled, by the name of its module."""
    return {source.module: (source, source.compiled(source.text)) for source in sources().values()}


def _source(base: str, file: str) -> Source:
    """Return a file of a base.

    Raises:
        MutantError: the base has no such file.
    """
    if base == SOUND:
        if file not in sources():
            raise MutantError(f"the package of {SOUND} has no such file")
        return sources()[file]
    found = importlib.util.find_spec(PACKAGES[base])
    if found is None or found.origin is None:
        raise MutantError(f"{base} is not installed")
    path = Path(found.origin).parent / file
    if not path.exists():
        raise MutantError(f"the package {PACKAGES[base]} has no such file")
    module = ".".join((PACKAGES[base], *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    return Source(path, module, path.read_text(encoding="utf-8"))


def plant(mutant: Mutant) -> dict[str, CodeType]:
    """Return the compiled code of the modules that a mutant changes, by the names of the modules.

    Raises:
        MutantError: the mutant does not fit its base; the message names mutant, file and function.
    """
    planted: dict[str, CodeType] = {}
    for file in dict.fromkeys(change.file for change in mutant.changes):
        changes = [change for change in mutant.changes if change.file == file]
        try:
            source = _source(mutant.base, file)
            named = [_renamed(change) for change in changes] if mutant.base == SOUND else changes
            planted[source.module] = _changed(source, named)
            if mutant.base != SOUND:
                _check_grafts(source.compiled(source.text), planted[source.module], changes)
        except MutantError as error:
            functions = " and ".join(dict.fromkeys(change.function or "text" for change in changes))
            raise MutantError(f"mutant {mutant.name}, {file}, {functions}: {error}") from error
    return planted


def _check_grafts(sound: CodeType, planted: CodeType, changes: Sequence[Change]) -> None:
    """Raise MutantError unless the changes are inside functions whose code can be exchanged."""
    for name in {_outer(sound, change) for change in changes}:
        pairs = list(zip(codes(sound, name), codes(planted, name), strict=True))
        if all(one == other for one, other in pairs):
            raise MutantError("only the body of a function can be changed")
        if any(one.co_freevars != other.co_freevars for one, other in pairs):
            raise MutantError(f"keep the outer variables of {name} in use, such as that of `super`")


def _outer(module: CodeType, change: Change) -> str:
    """Return the qualified name of the function that contains a change, and is in no other function."""
    name = str(change.function)
    while "." in name and not codes(module, name):
        name = name.rpartition(".")[0]
    return name


def codes(module: CodeType, function: str) -> list[CodeType]:
    """Return the code of the functions with a qualified name: several for a property with a setter."""
    found = []
    for part in (part for part in module.co_consts if isinstance(part, CodeType)):
        found += [part] if part.co_qualname == function else codes(part, function)
    return found


def graft(mutant: Mutant, planted: Mapping[str, CodeType]) -> None:
    """Give the functions of the modules of a base the code of a mutant.

    Raises:
        MutantError: a function cannot be found in its module.
    """
    for change in mutant.changes:
        source = _source(mutant.base, change.file)
        sound = source.compiled(source.text)
        name = _outer(sound, change)
        live = list(functions(importlib.import_module(source.module), name))
        new = {code.co_firstlineno: code for code in codes(planted[source.module], name)}
        for old in codes(sound, name):
            known = [each for each in live if each.__code__.co_firstlineno == old.co_firstlineno]
            if not known:
                raise MutantError(f"mutant {mutant.name}: there is no function {name} in {source.module}")
            for each in known:
                each.__code__ = new[old.co_firstlineno]


def functions(module: ModuleType, name: str) -> Iterator[FunctionType]:
    """Yield the functions behind a qualified name, without their decorators."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType):
            yield each
        inner = ("fget", "fset", "fdel", "__func__", "__wrapped__")
        waiting += [part for part in (getattr(each, attribute, None) for attribute in inner) if part]


def _renamed(change: Change) -> Change:
    old, new = (code.replace(_root(), PACKAGE) for code in (change.old, change.new))
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
