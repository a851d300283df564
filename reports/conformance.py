"""Results of `keyedopt check` as rows of tables."""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from keyedopt.conformance.results import model
from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.model import Case
from keyedopt.conformance.results.untrusted import clean, get, number, one_line, text
from keyedopt.conformance.results.verdict import (
    FAILING,
    UNSUPPORTED,
    judge,
    restrictions,
    shown,
    shown_outcomes,
)
from keyedopt.reports.parsed import Parsed, moment
from keyedopt.reports.tables import HELD, Clause

#: The most measurements or records of a case, and the longest path of a record; the suite's have 400 and 60.
MEASUREMENTS, PATH = 10_000, 400
#: Inputs of a case that name the algorithm.
SUBJECTS = ("algorithm", "optimizer", "name", "kind")


def recognised(plain: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a result of the suite."""
    return "suite" in plain and ("cases" in plain or "complete" in plain)


def rows(file: str, plain: Mapping[str, Any], clauses: Mapping[str, Clause]) -> Parsed:
    """Return the rows of a result.

    Raises:
        ResultError: the result is of another version, partial, or not as its schema says.
    """
    result = model.parse(plain)
    verdict = judge(result)
    about, where, suite = result.implementation, result.environment, result.suite
    asked = where.get("backend")
    name = f"{about['name']}:{asked}" if asked else about["name"]  # a name says what ran
    parsed = Parsed(name=one_line(name), version=one_line(about["version"]))
    parsed.run = {
        "kind": "conformance",
        "file": file,
        "implementation": parsed.name,
        "version": parsed.version,
        "suite_version": one_line(suite["version"]),
        "suite_hash": one_line(suite["hash"]),
        "started": moment(result.started),
        "seconds": result.seconds,
        "machine": _machine(where),
        "processor": f"{where['processors']} cores" if where.get("processors") else None,
        **{name: text(where, name, None) for name in ("device", "gpu", "python", "torch", "commit")},
        "complete": True,
        "expectations": "\n".join(one_line(one, 400) for one in result.expectations.get("problems", ())),
        "verdict": verdict.word,
        "scope": verdict.scope,
        "gate": verdict.gate,
        "restrictions": "\n".join(restrictions(result)),
        "causes": "\n".join(one_line(str(cause), 400) for cause in verdict.causes),
        "clauses_checked": verdict.checked.clauses,
        "clauses_claimed": verdict.checked.of_clauses,
        "musts_checked": verdict.checked.musts,
        "musts_claimed": verdict.checked.of_musts,
    }
    outcomes = shown_outcomes(result)
    cases: dict[str, list[str]] = {clause: [] for clause in outcomes}
    for case in result.cases:
        for clause in case.clauses:
            cases[clause].append(shown(case))
        _case(parsed, file, case)
    for clause, outcome in outcomes.items():
        about_it = clauses.get(clause)
        area, level = (about_it.area, about_it.level) if about_it else (None, None)
        counts = (
            sum(each in kinds for each in cases[clause])
            for kinds in (HELD, (*FAILING, "unexpected-pass"), ("known",))
        )
        ran = sum(each not in UNSUPPORTED for each in cases[clause])
        row = (one_line(clause, 40), area, level, outcome, ran, *counts)
        parsed.rows["clauses"].append(row)
    return parsed


def _machine(where: Mapping[str, Any]) -> str:
    system = text(where, "platform", "").partition("-")[0]
    return f"{system} {text(where, 'machine', '')}".strip()


def _case(parsed: Parsed, file: str, case: Case) -> None:
    name, inputs, observed = one_line(case.case), case.inputs, case.observed
    parts = (
        shown(case),
        one_line(case.device) if case.device is not None else None,
        one_line(case.dtype) if case.dtype is not None else None,
        one_line(case.backend) if case.backend is not None else None,
        clean(case.expected),
        clean(case.seen),
        _json(inputs) if inputs else "",
        one_line(case.known.get("reason", "")),
        one_line(case.known.get("link", "")),
        case.seconds,
        f"keyedopt replay {shlex.quote(file)} {shlex.quote(name)} --run",
    )
    measured = observed if isinstance(observed, dict) else {}
    errors, rates = measured.get("errors"), measured.get("rates")
    for each in (errors, rates):
        if isinstance(each, list) and len(each) > MEASUREMENTS:
            raise ResultError(f"{name} has {len(each):,} measurements; at most {MEASUREMENTS:,} are read")
    for clause in case.clauses:
        head = (name, one_line(clause, 40))
        parsed.rows["cases"].append((*head, *parts))
        if isinstance(errors, list):
            subject = one_line(_subject(inputs))
            parsed.rows["errors"] += [(*head, subject, *_error(item, case)) for item in errors]
        elif isinstance(rates, list):
            parsed.rows["schedules"] += [(*head, *row) for row in _rates(inputs, rates)]
        elif observed is not None:
            found = list(itertools.islice(leaves(observed), MEASUREMENTS + 1))
            if len(found) > MEASUREMENTS:
                raise ResultError(f"{name} has more than {MEASUREMENTS:,} records")
            parsed.rows["records"] += [(*head, *leaf) for leaf in found]


def _subject(inputs: Mapping[str, Any]) -> str:
    made = inputs.get("made")
    named = [
        *(inputs.get(key) for key in SUBJECTS),
        made.get("algorithm") if isinstance(made, dict) else None,
    ]
    return next((name for name in named if isinstance(name, str)), "")


def _json(inputs: Mapping[str, Any]) -> str:
    """Return inputs as JSON, with unprintable characters as escapes."""
    written = json.dumps(inputs, ensure_ascii=False)
    return written if written.isprintable() else json.dumps(inputs).replace("\x7f", "\\u007f")


def _error(item: Any, case: Case) -> tuple[Any, ...]:
    """Return one measured error, as the suite's ``measured`` makes it."""
    return (
        text(item, "quantity"),
        text(item, "dtype", case.dtype and one_line(case.dtype)),
        number(item, "error", float("inf")),
        number(item, "budget", None),
        text(item, "unit"),
        get(item, "steps", int, None),
        get(item, "rows", int, None),
    )


def _rates(inputs: Mapping[str, Any], rates: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the specified and the measured learning rate at each iteration of a schedule."""
    curve = get(inputs, "curve", dict)
    stages = [text(stage, "policy", "NONE") for stage in get(curve, "stages", list)]
    try:
        points = {point[0]: point[2] for point in get(curve, "points", list)}
        pairs = [(iteration, points[iteration], measured) for iteration, measured in rates]
    except (TypeError, ValueError, LookupError) as error:
        raise ResultError(
            "a schedule has learning rates at iterations that its curve does not have"
        ) from error
    for iteration, specified, measured in pairs:
        row = {"iteration": iteration, "specified": specified}
        if isinstance(measured, int | float):
            row["measured"] = measured
        numbers = get(row, "iteration", int), number(row, "specified"), number(row, "measured", None)
        yield ", ".join(stages), *numbers


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float | None, str, str | None]]:
    """Yield the leaves of a record: path, number, text, unit.

    >>> list(leaves({"with": [1, "a"]}))
    [('with/0', 1.0, '1', None), ('with/1', None, 'a', None)]
    """
    if isinstance(value, dict) and set(value) == {"python"}:
        yield path, None, clean(str(value["python"])), None
    elif isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, one_line(f"{path}/{key}".lstrip("/"), PATH))
    elif isinstance(value, str):
        yield path, None, clean(value), None
    elif isinstance(value, bool | int | float):
        yield path, float(value) if abs(value) < 2**63 else None, json.dumps(value), None
    else:
        yield path, None, json.dumps(value), None
