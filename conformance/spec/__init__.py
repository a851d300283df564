"""The specification: clauses as data, one TOML file an area, and the matrix they were found with."""

import functools
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyedopt.conformance.spec import sentences

FOLDER = Path(__file__).parent
LEVELS = ("must", "should", "recorded")
#: The dimensions that documents describe: several groups, parameters, tables and features, in any order. A
#: case that fails in them fails its own clause. In others it fails the clause of its area about situations.
STRUCTURE = frozenset(("group", "parameter", "table", "feature", "order", "last", "backend"))

#: The version of the suite. A clause says since which version it holds.
SUITE_VERSION = "0.1"


@dataclass(frozen=True)
class Clause:
    """One promise, its level, the rules and reasons behind it, and the cells of the matrix it fills.

    ``sentences.by_clause`` has the sentences of the documents that the clause tests. If ``accelerator`` is
    set, the clause is not asked of a run on the CPU, which cannot show it. Its cases rely on the clauses in
    ``follows``: a class that fails one of these may fail it for no reason of its own. It must hold in the
    `dimensions` in ``varies``; if it names none, ``plain_only`` is one of the `reasons_plain_only`. If
    ``situations`` is set, its cases are those of the other clauses of its area, in the dimensions that are
    not in `STRUCTURE`.
    """

    id: str
    area: str
    level: str
    since: str
    statement: str
    covers: tuple[str, ...]
    rules: tuple[int, ...] = ()
    rationale: str = ""
    accelerator: bool = False
    follows: tuple[str, ...] = ()
    varies: tuple[str, ...] = ()
    plain_only: str = ""
    situations: bool = False

    @property
    def grounds(self) -> list[str]:
        """The sentences and rules that the clause rests on, each as a text with its address."""
        return sentences.grounds(self.id, self.rules)


@dataclass(frozen=True)
class Nothing:
    """Cells of the matrix without a clause, and why."""

    methods: tuple[str, ...]
    situations: tuple[str, ...]
    reason: str

    def holds(self, method: str, situation: str) -> bool:
        """Whether the cell is one of these; ``*`` stands for every method or situation."""
        return bool({method, "*"} & set(self.methods)) and bool({situation, "*"} & set(self.situations))


@dataclass(frozen=True)
class Area:
    """A part of the surface: its public names, its methods, its clauses.

    Of the names, ``companions`` are types of arguments. No library has a name in ``described``: a target
    claims it by an entry in the `names` of its description.
    """

    name: str
    title: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    companions: tuple[str, ...]
    described: tuple[str, ...]
    prefix: str
    methods: tuple[str, ...]
    clauses: tuple[Clause, ...]
    nothing: tuple[Nothing, ...]


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


@functools.cache
def situations() -> Mapping[str, str]:
    """Return the situations of the matrix, with their titles."""
    return dict(_table("matrix")["situations"])


@functools.cache
def dimensions() -> Mapping[str, str]:
    """Return the dimensions in which clauses vary, each in words."""
    return _table("dimensions")


@functools.cache
def reasons_plain_only() -> Mapping[str, str]:
    """Return the reasons why cases run only plainly, in no situation, each in words."""
    return _table("plain_only")


@functools.cache
def areas() -> Mapping[str, Area]:
    """Return every area by name, in the order of ``areas.toml``."""
    found = {}
    for name, entry in _table("areas").items():
        body = _table(name)
        found[name] = Area(
            name=name,
            prefix=body["prefix"],
            methods=tuple(body.get("methods", ())),
            clauses=tuple(Clause(area=name, **_tuples(item)) for item in body.get("clause", ())),
            nothing=tuple(Nothing(**_tuples(item)) for item in body.get("nothing", ())),
            **{"companions": (), "described": (), **_tuples(entry)},
        )
    return found


@functools.cache
def clauses() -> Mapping[str, Clause]:
    """Return every clause by id."""
    return {clause.id: clause for area in areas().values() for clause in area.clauses}


@functools.cache
def clause_of_situations(area: str) -> str:
    """Return the id of the clause of an area that is about situations; empty if there is none."""
    return next((clause.id for clause in areas()[area].clauses if clause.situations), "")


def version_key(version: str) -> tuple[int, ...]:
    """Order suite versions: ``0.10`` comes after ``0.9``."""
    return tuple(int(part) for part in version.split("."))


@functools.cache
def suite_hash() -> str:
    """Return a digest of the clauses and cases, so that two results can be known to be comparable."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.toml"), *(FOLDER.parent / "suite").rglob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
