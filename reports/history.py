"""Results of asv and of pytest-benchmark as points of history."""

import ast
import datetime
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.files import parse_json, read_text
from keyedopt.conformance.results.untrusted import get, number, one_line, text
from keyedopt.reports.parsed import Parsed, moment

#: Versions of asv's format (asv 0.6) and of pytest-benchmark's (major) that are read.
ASV, PYTEST_BENCHMARK = 2, "5"
#: Files that asv writes beside its results, without measurements.
BESIDE = ("benchmarks.json", "machine.json")
#: Units that asv spells out.
UNITS = {"seconds": "s", "bytes": "B"}


def is_asv(plain: Mapping[str, Any]) -> bool:
    """Whether a file is a result of asv."""
    return "commit_hash" in plain and "results" in plain


def is_beside(path: Path, plain: Mapping[str, Any]) -> bool:
    """Whether a file is one that asv writes beside its results."""
    return path.name in BESIDE and "version" in plain and not is_asv(plain)


def is_pytest_benchmark(plain: Mapping[str, Any]) -> bool:
    """Whether a file is what ``pytest --benchmark-json`` writes."""
    return "benchmarks" in plain and "machine_info" in plain


def asv(file: str, path: Path, plain: Mapping[str, Any]) -> Parsed:
    """Return the points of one commit on one machine.

    Raises:
        ResultError: the file is of another version, or not as asv 0.6 writes it.
    """
    if plain.get("version") != ASV:
        raise ResultError(f"it has asv's format version {plain.get('version')!r}; {ASV} is read (asv 0.6)")
    about = get(plain, "params", dict)
    machine, commit = text(about, "machine"), text(plain, "commit_hash")
    made = get(plain, "date", (int, float))
    try:
        date = moment(datetime.datetime.fromtimestamp(made / 1000, datetime.UTC).isoformat())
    except (OverflowError, OSError, ValueError) as error:
        raise ResultError(f"{made!r} is not a time in milliseconds") from error
    parsed = Parsed(name="asv", version=commit[:8])
    parsed.run = {
        "kind": "asv",
        "file": file,
        "version": commit[:8],
        "started": date,
        "machine": machine,
        "processor": text(about, "cpu", None),
        "gpu": text(about, "gpu", None) or None,
        "python": text(plain, "python", None),
        "commit": commit,
        "complete": True,
    }
    columns = get(plain, "result_columns", list)
    described = _described(path.parent.parent / "benchmarks.json")
    for name, row in get(plain, "results", dict).items():
        if not isinstance(row, list) or len(row) > len(columns):
            raise ResultError(f"the row of {one_line(name, 100)} does not fit its columns")
        cells = dict(zip(columns, row, strict=False))
        for point in _points(one_line(name), cells, described.get(name, {})):
            benchmark, parameters, value, unit, low, high = point
            parsed.rows["history"].append(
                (benchmark, parameters, machine, commit, date, value, unit, low, high)
            )
    return parsed


@functools.cache
def _described(path: Path) -> dict[str, Any]:
    """Return the units and the names of parameters of asv's benchmarks, from the file beside the results."""
    try:
        plain = parse_json(read_text(path))
    except (ResultError, ValueError):
        return {}
    if not isinstance(plain, dict):
        return {}
    return {key: value for key, value in plain.items() if isinstance(value, dict)}


def _points(name: str, cells: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    results = cells.get("result")
    if results is None:
        return  # every combination of parameters failed
    if not isinstance(results, list):
        raise ResultError(f"the results of {name} are not a list")
    unit = one_line(get(about, "unit", str, _unit(name)), 40)
    names = get(about, "param_names", list, [])
    values = cells.get("params") or []
    if not isinstance(values, list) or not all(isinstance(each, list) for each in values):
        raise ResultError(f"the parameters of {name} are not lists")
    count = math.prod(map(len, values))
    if count != len(results):  # before the combinations are made: a small file may ask for any number
        raise ResultError(f"{name} has {len(results)} results for {count} combinations")
    combinations = itertools.product(*values)
    lows, highs = (cells.get(f"stats_ci_99_{end}") for end in "ab")
    for index, (chosen, value) in enumerate(zip(combinations, results, strict=True)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue  # it failed, or was skipped
        keys = [*map(str, names), *(f"p{n}" for n in range(len(names), len(chosen)))]
        shown = ", ".join(f"{key}={_literal(item)}" for key, item in zip(keys, chosen, strict=False))
        low, high = (
            _finite(ends[index]) if isinstance(ends, list) and index < len(ends) else None
            for ends in (lows, highs)
        )
        yield name, one_line(shown), float(value), UNITS.get(unit, unit), low, high


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _literal(text: Any) -> str:
    """Return a parameter, of which asv stores the repr."""
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return str(text)


def _unit(name: str) -> str:
    last = name.rpartition(".")[2]
    return "seconds" if last.startswith("time_") else "bytes" if last.startswith(("mem_", "peakmem_")) else ""


def pytest_benchmark(file: str, plain: Mapping[str, Any]) -> Parsed:
    """Return one point for each benchmark of a run: the median, and the quartiles as its interval.

    Raises:
        ResultError: the file is of another version, or not as pytest-benchmark writes it.
    """
    version = text(plain, "version", "unknown")
    if version.partition(".")[0] != PYTEST_BENCHMARK:
        raise ResultError(f"it is of pytest-benchmark {one_line(version, 40)}; {PYTEST_BENCHMARK} is read")
    where, source = get(plain, "machine_info", dict), get(plain, "commit_info", dict, {})
    machine, commit = text(where, "node", "unknown"), text(source, "id", "unknown")
    date = moment(text(plain, "datetime"))
    parsed = Parsed(name="pytest-benchmark", version=commit[:8])
    parsed.run = {
        "kind": "pytest-benchmark",
        "file": file,
        "version": commit[:8],
        "started": date,
        "machine": machine,
        "processor": text(get(where, "cpu", dict, {}), "brand_raw", None),
        "python": text(where, "python_version", None),
        "commit": commit,
        "complete": True,
    }
    for row in get(plain, "benchmarks", list):
        stats, chosen = get(row, "stats", dict), get(row, "params", dict, {})
        shown = ", ".join(f"{key}={value}" for key, value in chosen.items())
        head = (text(row, "fullname").partition("[")[0], one_line(shown), machine, commit, date)
        ends = (number(stats, "q1"), number(stats, "q3"))
        parsed.rows["history"].append((*head, number(stats, "median"), "s", *ends))
    return parsed
