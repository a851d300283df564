"""The result of a run: what is written to ``results/*.json``, and how it is read back.

The format is described by ``result.schema.json``; a file is written whole or not at all. While a run
goes on, a journal stands beside its output (``FILE.journal``, one JSON object a line: a head, then
the records as they come), so that a run that is killed keeps what it had.
"""

import errno
import functools
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import one_line

#: The version of the format.
SCHEMA = 1


class ResultError(KeyedoptError):
    """A result file that cannot be read or written; the message says why and what to do."""


@dataclass(frozen=True)
class Case:
    """What one case of the suite gave.

    Args:
        case: its name, ``test_keyed_load::test_shapes[2]``.
        clauses: the clauses it tests.
        outcome: ``pass``, ``fail``, ``error`` (crash, timeout), ``unsupported``, ``known``,
            ``unexpected-pass``, or ``observed`` for a case that has no verdict.
        device, dtype, inputs: what it ran with.
        expected, seen: for a failure, what was expected and what was seen, one line each.
        observed: what an observing case recorded; a measured error for others, where there is one.
        seconds: how long it took.
        trace: where it failed.
        known: for an expected failure, the reason and link given.
    """

    case: str
    clauses: tuple[str, ...]
    outcome: str
    device: str | None = None
    dtype: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    expected: str = ""
    seen: str = ""
    observed: Any = None
    seconds: float = 0.0
    trace: str = ""
    known: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A run of the suite on one implementation.

    Args:
        implementation: name, target, versions, claimed areas, dtypes, variants.
        environment: Python, torch, machine, device.
        suite: version and hash of the suite.
        options: what was asked for: level, suite version, areas, dtypes, time limit, seed.
        started: when, in ISO 8601 with time zone.
        seconds: how long the run took.
        complete: False when it was interrupted.
        cases: every case that ran, by name.
        expectations: the file of known failures that was applied, and what is wrong with it.
    """

    implementation: dict[str, Any]
    environment: dict[str, Any]
    suite: dict[str, str]
    options: dict[str, Any]
    started: str
    seconds: float
    complete: bool
    cases: tuple[Case, ...]
    expectations: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as the schema describes it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=repr))
        return plain


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of a result file."""
    text = Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, texts as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Find out early that a file cannot be written; leaves nothing behind.

    Raises:
        ResultError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # a file that takes the place of a device would be its end
            raise FileExistsError(errno.EEXIST, "it is no plain file")
        folder = path.parent  # or else, of the folders above it, the first that there is
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "File exists")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ResultError(f"{path} cannot be written ({why}): name another file") from error


def journal_path(output: Path) -> Path:
    """Return where the journal of a run stands while its output is not written."""
    return output.with_name(f"{output.name}.journal")


def write(result: Result, path: Path) -> None:
    """Write a result as JSON."""
    write_atomically(path, json.dumps(result.to_dict(), indent=1) + "\n")


def read(path: Path, *, partial: bool = False) -> Result:
    """Read a result file, or with ``partial`` also one of an interrupted run, or a journal.

    Raises:
        ResultError: it is missing, truncated, of another format or version, or partial.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    if partial and path.suffix == ".journal":
        return _from_journal(path, text)
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} is not a result file, or is truncated ({error}); run `keyedopt check … --output` again"
        ) from error
    result = _validated(path, plain)
    if not result.complete and not partial:
        raise ResultError(f"{path} is of an interrupted run; run `keyedopt check … --output` again")
    return result


def _validated(path: Path, plain: Any) -> Result:
    import jsonschema

    if isinstance(plain, dict) and plain.get("schema", SCHEMA) != SCHEMA:
        version = one_line(repr(plain["schema"]), 40)
        raise ResultError(f"{path} has format version {version}; this keyedopt reads version {SCHEMA}")
    try:
        jsonschema.validate(plain, schema())
    except jsonschema.ValidationError as error:
        raise ResultError(
            f"{path} is not a result file: {error.json_path}: {one_line(error.message, 200)}"
        ) from error
    cases = tuple(case_from(record) for record in plain["cases"])
    return Result(**{**plain, "cases": cases})


def case_from(record: dict[str, Any]) -> Case:
    """Make a `Case` of a record; what a record may lack has a default."""
    names = {item.name for item in fields(Case)}
    known = {key: value for key, value in record.items() if key in names}
    return Case(**{**known, "clauses": tuple(known.get("clauses", ()))})


def _from_journal(path: Path, text: str) -> Result:
    """Rebuild what a killed run had; a last line cut short is dropped."""
    lines: list[Any] = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    if not lines or not isinstance(lines[0], dict):
        raise ResultError(f"{path} holds no journal; there is nothing to recover")
    head, *records = lines
    return _validated(path, {**head, "complete": False, "cases": records})


class Journal:
    """The file beside an output that keeps what a run has so far, until the output is written."""

    def __init__(self, output: Path, head: Result) -> None:
        self._path = journal_path(output)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        self._append(head.to_dict())

    def _append(self, plain: dict[str, Any]) -> None:
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()

    def add(self, case: Case) -> None:
        """Append a case that has just ended."""
        self._append(asdict(case))

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
