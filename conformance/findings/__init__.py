"""Defects found in published libraries: one script per root cause, which needs only torch and that library.

Each script prints ``defect: expected …, seen …`` and exits with 1 if the installed version has the defect;
otherwise it prints ``fixed`` and exits with 0. The docstring of a script names the affected versions if not
all versions have the defect. ``keyedopt findings`` runs all scripts.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from keyedopt.conformance.expectations import build
from keyedopt.conformance.run.forked_script import run_forked

FOLDER = Path(__file__).parent
#: The modules of libraries whose names differ from it.
MODULES = {
    "fbgemm": "fbgemm_gpu",
    "pytorchoptimizer": "pytorch_optimizer",
    "torchoptimizer": "torch_optimizer",
}


@dataclass(frozen=True)
class Finding:
    """A defect of a library.

    Args:
        path: The reproducer, a script.
        library: The library that has the defect.
        summary: The defect in one line.
        clauses: The clauses that the defect violates.
        versions: The affected versions of the library; empty for all versions.
        cpu_build: Whether only builds of torch for the CPU are affected.
    """

    path: Path
    library: str
    summary: str
    clauses: tuple[str, ...]
    versions: SpecifierSet
    cpu_build: bool = False

    @property
    def installed(self) -> bool:
        """Whether the library is installed, so that the reproducer can run."""
        return importlib.util.find_spec(MODULES.get(self.library, self.library)) is not None

    @property
    def there(self) -> bool:
        """Whether the installed version is one of the affected versions."""
        if self.cpu_build and build(importlib.import_module("torch").__version__) != "cpu":
            return False
        if not self.versions:
            return True
        return self.versions.contains(importlib.metadata.version(self.library), prereleases=True)


@functools.cache
def findings() -> tuple[Finding, ...]:
    """Return every finding, sorted by file name, which begins with the name of the library."""
    found = []
    for path in sorted(FOLDER.glob("[a-z]*_*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        summary = " ".join(text.split("\n\n")[0].split())
        clauses = tuple(re.findall(r"\b[A-Z]+-\d{3}\b", text))
        versions = SpecifierSet("".join(re.findall(r"Seen in: ([<>=,\d.]+\d)", text)))
        cpu_build = "Seen in builds for the CPU" in text
        found.append(Finding(path, path.stem.partition("_")[0], summary, clauses, versions, cpu_build))
    return tuple(found)


def run(chosen: Sequence[Finding]) -> Iterator[tuple[Finding, int, str]]:
    """Run reproducers, each in a forked process, and yield their exit status and output.

    The libraries, and the modules that a step of torch's optimizers imports, are imported once, before the
    forks, because these imports take longer than a reproducer.
    """
    importlib.import_module("torch._dynamo")
    for library in dict.fromkeys(finding.library for finding in chosen):
        importlib.import_module("torchrec.optim" if library == "torchrec" else MODULES.get(library, library))
    for finding in chosen:
        yield finding, *run_forked(str(finding.path))
