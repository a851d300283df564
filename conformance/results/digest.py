"""Which build of an implementation is here: a digest of the files that its package consists of."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from keyedopt.conformance.targets.implementation import Implementation

#: What is part of a build: sources, and what was compiled of them.
KINDS = (".py", ".so", ".pyd", ".cu", ".cpp", ".h")
#: Packages that ours share types with.
SHARED = "keyedopt.reference"


def digest(implementation: Implementation) -> str:
    """Return a digest of the package in which the public names live, compiled parts included.

    Empty if nothing can be said: the names are of an object, or its module has no file.
    """
    if not isinstance(implementation.root, str):
        return ""
    module = implementation.root.partition(":")[0]
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
    """Yield the files of a package, or of a module alone, each with its name within it, in order."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*")):
            if path.suffix in KINDS and "__pycache__" not in path.parts:
                yield path.relative_to(folder).as_posix(), path
    if not spec.submodule_search_locations and spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin).name, Path(spec.origin)
