"""The data that the page's script works on: clauses, verdicts, failing cases, records, errors and speeds.

The data is JSON in a script element of a type that browsers do not run. Every ``<`` and every character
outside ASCII is written as an escape, so that no text can end the element.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from keyedopt.conformance.results.untrusted import clean, one_line
from keyedopt.conformance.results.verdict import FAILING, SHOWN
from keyedopt.conformance.spec import LEVELS
from keyedopt.reports.changes import WORDS, Run, verdict_changes
from keyedopt.reports.diff import GROWN_TIMES, GROWN_ULP, only
from keyedopt.reports.page.figures import Look
from keyedopt.reports.page.precision import subjects
from keyedopt.reports.tables import Clause, Frame, Tables

#: Limits for failing cases, from generous to scarce: cases of a clause, characters of a text.
DETAIL = ((6, 600), (4, 300), (2, 200), (1, 160), (1, 60))
#: The largest number of characters of the records of a run for a clause.
RECORD = 700
#: The largest number of characters of JSON for all failing cases.
ROOM = 1_300_000
#: Outcomes of the cases that are listed with what they saw.
LISTED = (*FAILING, "unexpected-pass", "known")


def embedded(tables: Tables, clauses: Mapping[str, Clause], looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the data for the script."""
    runs = list(looks)
    asked = dict.fromkeys(tables.clauses["clause"])
    ids = [one for one in clauses if one in asked] + [one for one in asked if one not in clauses]
    ids.sort(key=_failures_first(tables))
    places = {clause: place for place, clause in enumerate(ids)}
    about = [_clause(one, clauses.get(one)) for one in ids]
    areas = list(dict.fromkeys(one["area"] for one in about))
    numbers = {run: index for index, run in enumerate(runs)}
    rows = tables.runs.set_index("run")
    return {
        "runs": [
            {
                "name": one_line(run, 120),
                "implementation": _text(rows.at[run, "implementation"]),
                "version": _text(rows.at[run, "version"]),
                "file": _text(rows.at[run, "file"]),
            }
            for run in runs
        ],
        "outcomes": SHOWN,
        "changes": _changes(tables, runs),
        "grown": [GROWN_ULP, GROWN_TIMES],
        "areas": areas,
        "clauses": [
            [one["id"], areas.index(one["area"]), *(one[key] for key in ("level", "statement"))]
            + [one[key] for key in ("source", "rationale", "since")]
            for one in about
        ],
        "cells": _cells(tables, runs, places),
        "records": _records(tables, numbers, places),
        "failures": _failures(tables, numbers, places),
        "errors": _errors(tables, numbers),
        "speeds": _speeds(tables),
        "reproducers": _reproducers(tables, clauses, places),
    }


def _failures_first(tables: Tables) -> Callable[[str], tuple[int, int]]:
    """Return the key by which clauses that fail come first: musts, then shoulds, new before known."""
    frame: Frame = tables.clauses[tables.clauses["outcome"].isin(LISTED)]
    ranks: dict[str, tuple[int, int]] = {}
    for clause, level, outcome in frame[["clause", "level", "outcome"]].fillna("").itertuples(index=False):
        rank = LEVELS.index(level) if level in LEVELS else len(LEVELS), LISTED.index(outcome)
        ranks[clause] = min(rank, ranks.get(clause, rank))
    return lambda clause: ranks.get(clause, (len(LEVELS) + 1, 0))


def _changes(tables: Tables, runs: list[str]) -> list[list[list[list[str]]]]:
    """Return, from each run to each other, the word for each clause or area whose verdict changed."""
    each = [Run.of(only(tables, run)) for run in runs]
    return [
        [
            [
                [change.what, WORDS[change.worse], change.before, change.after]
                for change in verdict_changes(one, other, [name for name in other.cases if name in one.cases])
            ]
            for other in each
        ]
        for one in each
    ]


def as_json(data: Any) -> str:
    r"""Write JSON that is safe in a script element.

    >>> as_json({"a": "</script>"})
    '{"a":"\\u003c/script>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _text(value: Any) -> str:
    return "" if pd.isna(value) else clean(str(value), 400)


def _clause(name: str, clause: Clause | None) -> dict[str, str]:
    if clause is None:
        return {"id": name, "area": "unknown", "level": ""} | dict.fromkeys(
            ("statement", "source", "rationale", "since"), ""
        )
    return {key: str(getattr(clause, key)) for key in Clause.__dataclass_fields__ if key != "reproducers"}


def _reproducers(
    tables: Tables, clauses: Mapping[str, Clause], places: Mapping[str, int]
) -> dict[int, list[list[str]]]:
    """Return, by clause, the scripts of the known defects of the implementations that fail it."""
    frame: Frame = tables.clauses[tables.clauses["outcome"].isin(LISTED)]
    names = dict(zip(tables.runs["run"], tables.runs["implementation"], strict=True))
    failing: dict[str, set[str]] = {}
    for run, clause in zip(frame["run"], frame["clause"], strict=True):
        failing.setdefault(clause, set()).add(str(names.get(run)))
    return {
        places[clause]: scripts
        for clause, who in failing.items()
        if clause in clauses
        and (
            scripts := [[name, text] for library, name, text in clauses[clause].reproducers if library in who]
        )
    }


def _cells(tables: Tables, runs: list[str], places: Mapping[str, int]) -> list[list[Any]]:
    """Return for each run, by clause, its outcome, cases and bad cases; 0 if the run lacks the clause."""
    cells: dict[str, list[Any]] = {run: [0] * len(places) for run in runs}
    frame: Frame = tables.clauses
    for row in frame.itertuples():
        bad = int(row.failed) + int(row.known)
        if row.run in cells:
            cells[row.run][places[row.clause]] = [SHOWN.index(row.outcome), int(row.cases), bad]
    return [cells[run] for run in runs]


def _records(tables: Tables, numbers: Mapping[str, int], places: Mapping[str, int]) -> list[dict[str, str]]:
    """Return for each run the records, by observing clause."""
    levels: Frame = tables.clauses.drop_duplicates("clause").set_index("clause")["level"].fillna("")
    observing = {clause for clause, level in levels.items() if level == "recorded"}
    frame: Frame = tables.records
    frame = frame[frame["clause"].isin(observing)][["run", "case", "clause", "name", "text"]].fillna("")
    found: list[dict[str, str]] = [{} for _ in numbers]
    for (run, clause), rows in frame.groupby(["run", "clause"], sort=False):
        if run in numbers:
            lines = [
                f"{row.case.partition('::')[2] or row.case}{' ' + row.name if row.name else ''}: {row.text}"
                for row in rows.itertuples()
            ]
            found[numbers[run]][str(places[clause])] = _record("\n".join(sorted(lines)))
    return found


def _record(text: str) -> str:
    """Cut a record; a digest shows differences beyond the cut."""
    if len(text) <= RECORD:
        return clean(text, RECORD)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean(text, RECORD)}\n({len(text):,} characters, digest {digest})"


def _failures(tables: Tables, numbers: Mapping[str, int], places: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the failing cases of each run, by clause, within the first limits that fit `ROOM`."""
    frame: Frame = tables.cases
    frame = frame[frame["outcome"].isin(LISTED) & frame["run"].isin(numbers)].fillna(
        dict.fromkeys(("expected", "seen", "reason", "link", "dtype", "device"), "")
    )
    groups = [
        (numbers[run], str(places[clause]), rows)
        for (run, clause), rows in frame.groupby(["run", "clause"], sort=False)
        if clause in places
    ]
    found: list[dict[str, Any]] = []
    for count, length in DETAIL:
        found = [{} for _ in numbers]
        size = 0
        for number, place, rows in groups:
            shown = [
                [
                    one_line(row.case, 200),
                    SHOWN.index(row.outcome),
                    clean(row.expected, length),
                    clean(row.seen, length),
                    clean(row.reason, length),
                    one_line(row.link, 300),
                ]
                for row in rows.head(count).itertuples()
            ]
            found[number][place] = shown
            size += len(json.dumps(shown))
        if size <= ROOM:
            break
    return found


def _errors(tables: Tables, numbers: Mapping[str, int]) -> list[dict[str, float | None]]:
    """Return for each run the worst error, by subject, tensor, dtype and unit."""
    found: list[dict[str, float | None]] = [{} for _ in numbers]
    keys = ["run", "subject", "quantity", "dtype", "unit"]
    worst = subjects(tables).groupby(keys, dropna=False)["error"].max()
    for (run, subject, quantity, dtype, unit), error in worst.items():
        if run in numbers:
            key = one_line(f"{subject}, {quantity}, {dtype}, {unit}", 120)
            found[numbers[run]][key] = None if pd.isna(error) or error == float("inf") else float(error)
    return found


def _finite(value: Any) -> float | None:
    return float(f"{value:.4g}") if not pd.isna(value) and math.isfinite(value) else None


def _speeds(tables: Tables) -> list[list[Any]]:
    """Return the ratios, each with its implementation and version."""
    about: Frame = tables.runs.set_index("run")[["implementation", "version"]]
    frame: Frame = tables.speeds
    return [
        [
            *(_text(value) for value in about.loc[row.run]),
            one_line(f"{row.task}, {row.workload}, against {row.peer}, {row.machine} ({row.device})", 200),
            *(_finite(row.ratio), _finite(row.low * (1 - row.noise)), _finite(row.high * (1 + row.noise))),
        ]
        for row in frame.itertuples()
        if row.run in about.index
    ]
