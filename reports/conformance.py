"""Results of `keyedopt check` as rows of tables."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from keyedopt.reports.found import Found, moment
from keyedopt.reports.plain import Refused, clean, get, number, one_line, text
from keyedopt.reports.tables import FAILED, HELD, SEVERITY, Clause

#: The version of the format that is read.
SCHEMA = 1
#: Inputs that a case runs an algorithm by.
SUBJECTS = ("algorithm", "optimizer", "name", "kind")


def recognised(plain: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a result of the suite."""
    return "suite" in plain and ("cases" in plain or "complete" in plain)


def rows(file: str, plain: Mapping[str, Any], clauses: Mapping[str, Clause]) -> Found:
    """Return the rows of a result.

    Raises:
        Refused: it is of another version, partial, or not as its schema says.
    """
    if plain.get("schema") != SCHEMA:
        version = one_line(repr(plain.get("schema")), 40)
        raise Refused(f"it has format version {version}; this keyedopt reads version {SCHEMA}")
    if not get(plain, "complete", bool):
        raise Refused("it is of an interrupted run; run `keyedopt check … --output` again")
    about, where = get(plain, "implementation", dict), get(plain, "environment", dict)
    suite, options = get(plain, "suite", dict), get(plain, "options", dict)
    listed = get(plain, "cases", list)
    found = Found(name=text(about, "name"), version=text(about, "version"))
    found.run = {
        "kind": "conformance",
        "file": file,
        "implementation": found.name,
        "version": found.version,
        "suite_version": text(suite, "version"),
        "suite_hash": text(suite, "hash"),
        "started": moment(text(plain, "started")),
        "seconds": number(plain, "seconds"),
        "machine": _machine(where),
        "processor": f"{where['processors']} cores" if isinstance(where.get("processors"), int) else None,
        "device": text(where, "device"),
        "gpu": text(where, "gpu", None),
        "python": text(where, "python"),
        "torch": text(where, "torch"),
        "commit": text(where, "commit", None),
        "complete": True,
        "expectations": _problems(get(plain, "expectations", dict, {})),
    }
    tally: dict[str, list[str]] = {}
    names = set()
    for case in listed:
        name, outcome = text(case, "case"), text(case, "outcome")
        if outcome not in SEVERITY:
            raise Refused(f"the case {name} has the outcome {one_line(outcome, 40)}, which does not exist")
        if name in names:
            raise Refused(f"it has the case {name} twice")
        names.add(name)
        ids = [one_line(str(clause), 40) for clause in get(case, "clauses", list)]
        for clause in ids:
            tally.setdefault(clause, []).append(outcome)
        _case(found, file, case, ids)
    for clause, outcomes in tally.items():
        found.rows["clauses"].append(_clause(clause, outcomes, clauses.get(clause)))
    areas = get(about, "areas", list)
    part = any(options.get(name) for name in ("areas", "clauses", "dtypes"))
    found.run["conformant"] = _conformant(tally, areas, text(suite, "version"), clauses, part)
    return found


def _problems(expectations: Mapping[str, Any]) -> str:
    return "\n".join(one_line(str(problem), 400) for problem in get(expectations, "problems", list, []))


def _machine(where: Mapping[str, Any]) -> str:
    system = text(where, "platform", "").partition("-")[0]
    return f"{system} {text(where, 'machine', '')}".strip()


def worst(outcomes: list[str]) -> str:
    """Return the most serious outcome."""
    return min(outcomes, key=SEVERITY.index)


def _clause(clause: str, outcomes: list[str], about: Clause | None) -> tuple[Any, ...]:
    counts = [
        sum(outcome in kinds for outcome in outcomes)
        for kinds in (HELD, (*FAILED, "unexpected-pass"), ("known",))
    ]
    area, level = (about.area, about.level) if about else (None, None)
    return clause, area, level, worst(outcomes), len(outcomes), *counts


def _conformant(
    tally: Mapping[str, list[str]],
    areas: list[Any],
    version: str,
    clauses: Mapping[str, Clause],
    part: bool,
) -> bool | None:
    """Whether every must of the claimed areas held; a must that was not looked at did not."""
    musts = [
        clause.id
        for clause in clauses.values()
        if clause.level == "must" and clause.area in areas and _not_newer(clause.since, version)
    ]
    outcomes = [worst(tally[clause]) if clause in tally else None for clause in musts]
    bad = (*FAILED, "known")
    if any(outcome in bad for outcome in outcomes):
        return False
    if part or not musts:
        return None
    return all(outcome is not None for outcome in outcomes) and any(o != "unsupported" for o in outcomes)


def _not_newer(since: str, version: str) -> bool:
    try:
        keys = [tuple(int(part) for part in text.split(".")) for text in (since or "0", version)]
    except ValueError:
        return True
    return keys[0] <= keys[1]


def _case(found: Found, file: str, case: Mapping[str, Any], ids: list[str]) -> None:
    name = text(case, "case")
    inputs = get(case, "inputs", dict, {})
    known = get(case, "known", dict, {})
    observed = case.get("observed")
    parts = (
        text(case, "outcome"),
        text(case, "device", None),
        text(case, "dtype", None),
        clean(get(case, "expected", str, "")),
        clean(get(case, "seen", str, "")),
        _json(inputs) if inputs else "",
        text(known, "reason", ""),
        text(known, "link", ""),
        number(case, "seconds", 0.0),
        f"keyedopt replay {shlex.quote(file)} {shlex.quote(name)} --run",
    )
    measured = observed if isinstance(observed, dict) else {}
    made = inputs.get("made")
    places = (
        *(inputs.get(key) for key in SUBJECTS),
        made.get("algorithm") if isinstance(made, dict) else None,
    )
    subject = next((place for place in places if isinstance(place, str)), "")
    errors, rates = measured.get("errors"), measured.get("rates")
    for clause in ids:
        head = (name, clause)
        found.rows["cases"].append((*head, *parts))
        if isinstance(errors, list):
            found.rows["errors"] += [(*head, one_line(subject), *_error(item, case)) for item in errors]
        elif isinstance(rates, list):
            found.rows["schedules"] += [(*head, *row) for row in _rates(inputs, rates)]
        elif observed is not None:
            found.rows["records"] += [(*head, *leaf) for leaf in leaves(observed)]


def _json(inputs: Mapping[str, Any]) -> str:
    """Return inputs as JSON, in which everything that cannot be printed is an escape."""
    written = json.dumps(inputs, ensure_ascii=False)
    return written if written.isprintable() else json.dumps(inputs).replace("\x7f", "\\u007f")


def _error(item: Any, case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return one measured error, as the suite's ``measured`` makes it."""
    return (
        text(item, "quantity"),
        text(item, "dtype", text(case, "dtype", None)),
        number(item, "error", float("inf")),
        number(item, "budget", None),
        text(item, "unit"),
        get(item, "steps", int, None),
        get(item, "rows", int, None),
    )


def _rates(inputs: Mapping[str, Any], rates: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what was specified and what was measured at each iteration of a schedule."""
    curve = get(inputs, "curve", dict)
    stages = [text(stage, "policy", "NONE") for stage in get(curve, "stages", list)]
    points = {point[0]: point[2] for point in get(curve, "points", list)}
    for pair in rates:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in points:
            raise Refused("a schedule has rates at iterations that its curve does not have")
        measured = pair[1] if isinstance(pair[1], int | float) else None
        yield ", ".join(stages), pair[0], points[pair[0]], measured


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
            yield from leaves(item, f"{path}/{one_line(str(key), 200)}".lstrip("/"))
    elif isinstance(value, str):
        yield path, None, clean(value), None
    elif isinstance(value, bool | int | float):
        yield path, float(value), json.dumps(value), None
    else:
        yield path, None, json.dumps(value), None
