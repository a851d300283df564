"""Load result files of all kinds into tables.

A file that is not a result, or is truncated, partial, of another version or a copy of another file, is left
out: its name and the reason go into the table ``problems``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.files import parse_json, read_text
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.reports import bench, conformance, history
from keyedopt.reports.parsed import Parsed
from keyedopt.reports.tables import COLUMNS, Clause, Tables, tables_of

#: Columns that tell apart runs of the same implementation and version, in this order.
QUALIFIERS = ("torch", "device", "gpu", "machine", "processor", "suite_version", "commit", "started", "file")
#: Kinds of files that may lie among results and have no place in these tables: baselines, results and
#: noise of a gate, differences, comparisons of commits, measurements of the harness itself, checks on a GPU.
OURS = (
    *("keyedopt-baseline", "keyedopt-gate", "keyedopt-noise", "keyedopt-diff", "keyedopt-commits"),
    *("keyedopt-harness", "keyedopt-gpu", "keyedopt-gpu-checks"),
    *("keyedopt-first-light", "keyedopt-first-light-outcomes"),
)
#: Errors of a reader that meets a value of another type than its format says.
DAMAGE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
#: What the label of a run has after its name and version.
SUFFIXES = {"conformance": "", "bench": " bench", "asv": "", "pytest-benchmark": ""}


def load(paths: Iterable[Path | str], clauses: Mapping[str, Clause] | None = None) -> Tables:
    """Load result files, and folders of them, into tables.

    Args:
        paths: files (``.json``), or folders, which are searched for such files.
        clauses: the texts of the clauses, by id; without them areas and levels of clauses are missing.
    """
    found: list[Parsed] = []
    problems: list[tuple[str, str]] = []
    seen: dict[str, str] = {}
    done: set[Path] = set()
    for path in paths:
        for file in _files(Path(path), problems):
            try:
                one = _parsed(file, clauses or {}, seen, done)
            except ResultError as why:
                problems.append((one_line(str(file)), one_line(str(why), 400)))
            except DAMAGE as why:  # found by a reader that does not check each value
                text = one_line(error_text(why), 200)
                problems.append((one_line(str(file)), f"it is not as its format says ({text})"))
            else:
                found += [one] if one else []
    return _together(found, problems)


def _together(found: list[Parsed], problems: list[tuple[str, str]]) -> Tables:
    """Give each run its label, and join the rows of all runs."""
    rows: dict[str, list[Sequence[Any]]] = {name: [] for name in COLUMNS}
    for label, one in zip(labels(found), found, strict=True):
        rows["runs"].append([label, *(one.run.get(name) for name in list(COLUMNS["runs"])[1:])])
        for name, some in one.rows.items():
            rows[name] += some if name == "history" else [(label, *row) for row in some]
        one.rows.clear()
    rows["problems"] = list(problems)
    return tables_of(rows)


def from_result(result: Result, clauses: Mapping[str, Clause]) -> Tables:
    """Return the tables of a result of `keyedopt check` that is in memory.

    Raises:
        ResultError: the result is partial.
    """
    return _together([conformance.rows("", result.to_dict(), clauses)], [])


def _files(path: Path, problems: list[tuple[str, str]]) -> list[Path]:
    """Return the file, or the result files of a folder in a fixed order."""
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.rglob("*.json") if item.is_file())
    if not files:
        problems.append((one_line(str(path)), "it is a folder without results (*.json)"))
    return files


def _parsed(
    path: Path, clauses: Mapping[str, Clause], seen: dict[str, str], done: set[Path]
) -> Parsed | None:
    """Parse one file; return None for a file that belongs to another one, or was parsed before.

    Raises:
        ResultError: the file is not a result, or cannot be read.
    """
    file = one_line(str(path))
    try:
        data = read_text(path)
        plain = parse_json(data)
    except ValueError as error:
        what = "it is empty" if not data.strip() else f"it is truncated, or not JSON ({error})"
        raise ResultError(f"{what}; make it again") from error
    if not isinstance(plain, dict):
        raise ResultError(f"it is JSON, but not a result: a {type(plain).__name__}")
    if history.is_beside(path, plain) or plain.get("kind") in OURS:
        return None
    first = seen.setdefault(hashlib.sha256(data.encode()).hexdigest(), file)
    if first != file:
        raise ResultError(f"it is a copy of {first}, which is in the report already")
    if path.resolve() in done:
        return None
    done.add(path.resolve())
    if conformance.recognised(plain):
        return conformance.rows(file, plain, clauses)
    if bench.recognised(plain):
        return bench.rows(file, plain)
    if history.is_asv(plain):
        return history.asv(file, path, plain)
    if history.is_pytest_benchmark(plain):
        return history.pytest_benchmark(file, plain)
    keys = one_line(", ".join(map(str, plain)), 100) or "nothing"
    raise ResultError(
        f"it is JSON, but not a result of check, bench, asv or pytest-benchmark: it holds {keys}"
    )


def labels(found: Sequence[Parsed]) -> list[str]:
    """Return labels that are unique among the runs, and as short as possible."""
    names = [f"{one.name} {one.version}{SUFFIXES[one.run['kind']]}" for one in found]
    for qualifier in QUALIFIERS:
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(name, []).append(index)
        for members in groups.values():
            values = [found[index].run.get(qualifier) or "none" for index in members]
            if len(set(values)) > 1:
                for index, value in zip(members, values, strict=True):
                    names[index] += f", torch {value}" if qualifier == "torch" else f", {value}"
    return names
