"""The result of a run, and the files that it is written to and read from.

``result.schema.json`` describes the format. A file is written whole or not at all. During a run a journal
stands beside the output (``FILE.journal``, one JSON object a line: a head, then the records), so that the
cases of a run that is killed can be recovered.
"""

import contextlib
import errno
import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import ResultError as ResultError
from keyedopt.conformance.results.files import parse_json, read_text
from keyedopt.conformance.results.untrusted import one_line

#: The version of the format.
SCHEMA = 1
AGAIN = "run `keyedopt check … --output` again"


@dataclass(frozen=True)
class Case:
    """The outcome of one case of the suite.

    Args:
        case: the name of the case, ``test_keyed_load::test_shapes[2]``.
        clauses: the clauses that the case tests.
        outcome: ``pass``, ``fail``, ``error`` (crash, timeout), ``unsupported``, ``known``,
            ``unexpected-pass``, or ``observed`` for a case that has no verdict.
        device, dtype, inputs: what the case ran with.
        backend: the names of the backends of the implementation that ran, if it has several.
        expected, seen: for a failure, what was expected and what was seen, one line each.
        observed: what an observing case recorded; for other cases the measured errors, if there are any.
        seconds: the duration of the case.
        trace: for a failure, the traceback.
        known: for an expected failure, its reason and link.
        cause: for a failure that follows from an error of each first step, the class and that error.
        runs: how often the case was run: twice, the second time alone, if it reached the time limit.
        built: the dimensions of its situation that were really built, with ``+`` between them.
    """

    case: str
    clauses: tuple[str, ...]
    outcome: str
    device: str | None = None
    dtype: str | None = None
    backend: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    expected: str = ""
    seen: str = ""
    observed: Any = None
    seconds: float = 0.0
    trace: str = ""
    known: dict[str, str] = field(default_factory=dict)
    cause: dict[str, str] = field(default_factory=dict)
    runs: int = 1
    built: str = ""


@dataclass(frozen=True)
class Result:
    """A run of the suite on one implementation.

    Args:
        implementation: name, target, versions, claimed areas, dtypes, variants.
        environment: Python, torch, machine, device.
        suite: version and hash of the suite.
        options: level, suite version, areas, dtypes, time limit and seed of the run.
        started: start of the run, in ISO 8601 with time zone.
        seconds: the duration of the run.
        complete: False if the run was interrupted.
        cases: every case that ran.
        expectations: the file of known failures that was applied, and the problems of that file.
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
        """Return the result as the JSON data that the schema describes."""
        plain: dict[str, Any] = json.loads(json.dumps(self.shallow(), default=repr))
        return plain

    def shallow(self) -> dict[str, Any]:
        """Return the members of the result and of its cases, not copied."""
        return {**vars(self), "cases": [vars(case) for case in self.cases]}  # asdict takes seconds


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of a result file."""
    text = Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@functools.cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(schema())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, texts as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(path.parent, path)
    try:
        with _naming(path), scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name a file in the error of a write, such as that of a full disk, which names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _scratch(folder: Path, path: Path) -> Path:
    """Return the scratch file of this process in a folder for an output."""
    return folder / f".{path.name}.{os.getpid()}"


def write_report(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a report as JSON: a line for each entry, and for each item of a list of mappings."""
    dumps = functools.partial(json.dumps, default=repr)

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "[\n  {}\n ]".format(",\n  ".join(map(dumps, value)))
        return dumps(value)

    entries = [f"{dumps(name)}: {text(value)}" for name, value in plain.items()]
    write_atomically(path, "{{\n {}\n}}\n".format(",\n ".join(entries)))


def refuse_unwritable(path: Path) -> None:
    """Raise before a run if its output cannot be written. Leaves no file behind.

    Raises:
        ResultError: the file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # writing would replace a device by a file
            raise FileExistsError(errno.EEXIST, "it is not a regular file")
        folder = path.parent  # or the nearest folder above it that exists
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "File exists")
        scratch = _scratch(folder, path)
        try:
            scratch.touch()
        finally:  # also after a signal
            scratch.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ResultError(f"{path} cannot be written ({why}): name another file") from error


def journal_path(output: Path) -> Path:
    """Return the path of the journal that stands beside an output until the output is written."""
    return output.with_name(f"{output.name}.journal")


def write(result: Result, path: Path) -> None:
    """Write a result as JSON, a case in each line: indenting would take longer than all else."""
    write_report(path, result.shallow())


def read(path: Path, *, partial: bool = False) -> Result:
    """Read a result file; with ``partial`` also the file of an interrupted run, or a journal.

    Raises:
        ResultError: the file is missing, truncated, of another format or version, or partial.
    """
    try:
        text = read_text(path)
        plain = _journal(text) if partial and path.suffix == ".journal" else parse_json(text)
    except ResultError as error:
        raise ResultError(f"{path} {str(error).removeprefix('it ')}") from error
    except ValueError as error:
        raise ResultError(f"{path} is not a result file, or is truncated ({error}); {AGAIN}") from error
    try:
        return parse(plain, partial=partial)
    except ResultError as error:
        raise ResultError(f"{path}: {error}") from error


def parse(plain: Any, *, partial: bool = False) -> Result:
    """Return the result that JSON data holds.

    Args:
        plain: the data, which may be anything.
        partial: whether the result of an interrupted run is accepted.

    Raises:
        ResultError: the data is of another version, is not as the schema says, names a case twice, or is of
            an interrupted run.
    """
    if isinstance(plain, dict) and plain.get("schema", SCHEMA) != SCHEMA:
        version = one_line(repr(plain["schema"]), 40)
        raise ResultError(f"it has format version {version}; this keyedopt reads version {SCHEMA}")
    if isinstance(plain, dict) and plain.get("complete") is False and not partial:
        raise ResultError(f"it is of an interrupted run; {AGAIN}")
    error = next(_validator().iter_errors(plain), None)
    if error is not None:
        raise ResultError(f"it is not a result file: {error.json_path}: {one_line(error.message, 200)}")
    twice = [name for name, count in Counter(case["case"] for case in plain["cases"]).items() if count > 1]
    if twice:
        raise ResultError(f"it has the case {one_line(twice[0], 200)} twice")
    return Result(**{**plain, "cases": tuple(case_from(record) for record in plain["cases"])})


def case_from(record: dict[str, Any]) -> Case:
    """Make a `Case` of a record; members that the record lacks get their defaults."""
    names = {item.name for item in fields(Case)}
    known = {key: value for key, value in record.items() if key in names}
    return Case(**{**known, "clauses": tuple(known.get("clauses", ()))})


def _journal(text: str) -> dict[str, Any]:
    """Return the data of the result of a run that was killed, without a last line that was cut short."""
    lines: list[Any] = []
    for line in text.splitlines():
        try:
            lines.append(parse_json(line))
        except ValueError:
            break
    if not lines or not isinstance(lines[0], dict):
        raise ResultError("it holds no journal; there is nothing to recover")
    head, *records = lines
    return {**head, "complete": False, "cases": records}


class Journal:
    """The file beside an output that keeps the cases of a run until the output is written."""

    def __init__(self, output: Path, head: Result) -> None:
        self._path = journal_path(output)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        self._append(head.to_dict())

    def _append(self, plain: dict[str, Any]) -> None:
        try:
            with _naming(self._path):
                self._file.write(json.dumps(plain) + "\n")
                self._file.flush()
        except OSError:
            self._path.unlink(missing_ok=True)  # what it has may not be whole, and takes the space
            raise

    def add(self, case: Case) -> None:
        """Append a case."""
        self._append(vars(case))

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said
            self._file.close()
