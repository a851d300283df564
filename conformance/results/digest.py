"""The digest of an implementation's build, which says whether a result is of the files that are installed."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

#: Files that belong to a build: sources and compiled extensions.
KINDS = (".py", ".so", ".pyd", ".cu", ".cpp", ".h")
#: The package whose classes keyedopt's own implementations use.
SHARED = "keyedopt.reference"


def digest(root: object) -> str:
    """Return a digest of the package that has an implementation's names, compiled extensions included.

    Args:
        root: `Implementation.root`. The digest is empty if it is an object, or a module without a file.
    """
    if not isinstance(root, str):
        return ""
    module = root.partition(":")[0]
    modules = (module, SHARED) if module.startswith("keyedopt.") else (module,)
    made = hashlib.sha256()
    for name in dict.fromkeys(modules):
        files = list(_files(name))
        if not files:
            return ""
        for shown, path in files:
            made.update(f"{name} {shown} ".encode())
            made.update(hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()[:16]


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, or the file of a module, each with its relative name, in order."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*")):
            if path.suffix in KINDS and "__pycache__" not in path.parts:
                yield path.relative_to(folder).as_posix(), path
    if not spec.submodule_search_locations and spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin).name, Path(spec.origin)
