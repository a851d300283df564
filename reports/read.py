"""Result files of all kinds in, tables out: `read`.

A file that is no result, or not one that can be trusted (truncated, partial, of another version, a
second copy), is refused: its name and the reason go into the table ``problems``, and the rest goes on.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyedopt.reports import bench, conformance, history
from keyedopt.reports.found import Found
from keyedopt.reports.plain import Refused, one_line
from keyedopt.reports.tables import COLUMNS, Clause, Tables, tables_of

#: What tells apart runs of the same implementation and version, in this order.
QUALIFIERS = ("torch", "device", "gpu", "machine", "processor", "suite_version", "commit", "started", "file")
#: Files of ours that may lie among results and have no place in these tables: what a gate compares with and
#: found, differences, builds of two commits, what the harness itself takes, what is checked on a GPU alone.
OURS = (
    *("keyedopt-baseline", "keyedopt-gate", "keyedopt-diff", "keyedopt-commits"),
    *("keyedopt-harness", "keyedopt-gpu", "keyedopt-gpu-checks"),
)
#: What a run is called after its name and version, where it is no verdict.
KINDS = {"conformance": "", "bench": " bench", "asv": "", "pytest-benchmark": ""}


def read(paths: Iterable[Path | str], clauses: Mapping[str, Clause] | None = None) -> Tables:
    """Read result files, and folders of them, into tables.

    Args:
        paths: files (``.json``), or folders, which are searched for such files.
        clauses: what is known of the clauses, by id; without it areas, levels and verdicts are missing.
    """
    found: list[Found] = []
    problems: list[tuple[str, str]] = []
    seen: dict[str, str] = {}
    done: set[Path] = set()
    for path in paths:
        for file in _files(Path(path), problems):
            try:
                one = _read(file, clauses or {}, seen, done)
            except Refused as why:
                problems.append((one_line(str(file)), one_line(str(why), 400)))
            except RecursionError:
                problems.append((one_line(str(file)), "it is nested too deeply to be a result"))
            else:
                found += [one] if one else []
    return _together(found, problems)


def _together(found: list[Found], problems: list[tuple[str, str]]) -> Tables:
    """Give each run its label, and put the rows of all together."""
    rows: dict[str, list[Sequence[Any]]] = {name: [] for name in COLUMNS}
    for label, one in zip(labels(found), found, strict=True):
        rows["runs"].append([label, *(one.run.get(name) for name in list(COLUMNS["runs"])[1:])])
        for name, some in one.rows.items():
            rows[name] += some if name == "history" else [(label, *row) for row in some]
        one.rows.clear()
    rows["problems"] = list(problems)
    return tables_of(rows)


def from_result(plain: Mapping[str, Any], clauses: Mapping[str, Clause]) -> Tables:
    """Return the tables of a result of `keyedopt check` that is at hand, not in a file.

    Raises:
        Refused: it is partial, or not as its schema says.
    """
    return _together([conformance.rows("", plain, clauses)], [])


def _files(path: Path, problems: list[tuple[str, str]]) -> list[Path]:
    """Return the files that a path stands for, in a fixed order."""
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.rglob("*.json") if item.is_file())
    if not files:
        problems.append((one_line(str(path)), "it is a folder without results (*.json)"))
    return files


def _read(path: Path, clauses: Mapping[str, Clause], seen: dict[str, str], done: set[Path]) -> Found | None:
    """Read one file; return nothing for one that belongs to another.

    Raises:
        Refused: it is no result, or none that can be trusted.
    """
    file = one_line(str(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror or error}") from error
    try:
        plain = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refused("it is not text: no result file") from error
    except ValueError as error:
        what = "it is empty" if not data.strip() else f"it is truncated, or no JSON ({error})"
        raise Refused(f"{what}; make it again") from error
    if not isinstance(plain, dict):
        raise Refused(f"it is JSON, but no result: a {type(plain).__name__}")
    if history.is_beside(path, plain) or plain.get("kind") in OURS:
        return None
    first = seen.setdefault(hashlib.sha256(data).hexdigest(), file)
    if first != file:
        raise Refused(f"it is a copy of {first}, which is read already")
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
    raise Refused(f"it is JSON, but no result of check, bench, asv or pytest-benchmark: it holds {keys}")


def labels(found: Sequence[Found]) -> list[str]:
    """Return a label for each run, as short as is possible for no two to be the same."""
    names = [f"{one.name} {one.version}{KINDS[one.run['kind']]}" for one in found]
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
