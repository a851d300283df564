"""Results in Markdown, for a comment on a pull request."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from keyedopt.reports.plain import code, one_line
from keyedopt.reports.tables import HELD, SEVERITY, Clause, Tables, rows

LEVELS = ("must", "should", "observe")
#: Rows of a table; a comment has an end.
ROWS = 50


def held(clauses: pd.DataFrame, level: str) -> tuple[int, int]:
    """Return how many clauses of a level held, and how many were looked at; unsupported ones were not."""
    mine = clauses[(clauses["level"] == level) & (clauses["outcome"] != "unsupported")]
    return int(mine["outcome"].isin(HELD).sum()), len(mine)


def markdown(tables: Tables, clauses: Mapping[str, Clause]) -> str:
    """Return a summary of all runs: verdicts, what did not hold, speeds, and files that were refused."""
    lines = ["## keyedopt", ""]
    verdicts = tables.runs[tables.runs["kind"] == "conformance"]
    if len(verdicts):
        lines += _verdicts(verdicts, tables)
    lines += _failures(tables, clauses)
    lines += _speeds(tables.speeds)
    if len(tables.history):
        points = tables.history
        lines += ["", f"History: {len(points)} measurements of {points['commit'].nunique()} commits."]
    if len(tables.problems):
        lines += ["", "Files that were refused:", ""]
        lines += [f"- {code(row['file'])}: {code(row['reason'])}" for row in rows(tables.problems)]
    return "\n".join(lines) + "\n"


def _verdicts(runs: pd.DataFrame, tables: Tables) -> list[str]:
    lines = ["| implementation | verdict | must | should | observe | new failures | known | ran on |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---|")
    for run in rows(runs):
        mine = tables.clauses[tables.clauses["run"] == run["run"]]
        counts = (f"{passed}/{total}" if total else "" for passed, total in (held(mine, x) for x in LEVELS))
        fresh = int(mine["outcome"].isin(["fail", "error", "unexpected-pass"]).sum())
        known = int((mine["outcome"] == "known").sum())
        where = one_line(f"torch {run['torch']}, {run['device']}")
        lines.append(
            f"| {code(run['run'])} | {verdict(run['conformant'])} | {' | '.join(counts)} "
            f"| {fresh} | {known} | {code(where)} |"
        )
    return lines


def verdict(conformant: Any) -> str:
    """Say in words whether a run is conformant.

    >>> verdict(None)
    'no verdict'
    """
    return "no verdict" if pd.isna(conformant) else "conformant" if conformant else "not conformant"


def _failures(tables: Tables, clauses: Mapping[str, Clause]) -> list[str]:
    """List what did not hold and was not known, the most serious first."""
    bad = tables.clauses[tables.clauses["outcome"].isin(["error", "fail", "unexpected-pass"])]
    if bad.empty:
        return []
    order = {level: index for index, level in enumerate(LEVELS)}
    listed = bad.assign(
        first=bad["level"].map(order).fillna(len(order)),
        second=bad["outcome"].map(SEVERITY.index),
    ).sort_values(["run", "first", "second", "clause"])
    lines = ["", "| implementation | clause | level | outcome | statement | expected | seen |"]
    lines.append("|---|---|---|---|---|---|---|")
    cases = defaultdict(list)
    for row in rows(tables.cases[tables.cases["outcome"].isin(["error", "fail", "unexpected-pass"])]):
        cases[row["run"], row["clause"]].append(row)
    for row in rows(listed.head(ROWS)):
        case = next(each for each in cases[row["run"], row["clause"]] if each["outcome"] == row["outcome"])
        about = clauses.get(row["clause"])
        cells = (code(about.statement) if about else "", code(case["expected"]), code(case["seen"]))
        head = f"| {code(row['run'])} | {code(row['clause'])} | {row['level'] or ''} | {row['outcome']}"
        lines.append(f"{head} | {' | '.join(cells)} |")
    return [*lines, "", f"and {len(listed) - ROWS} more"] if len(listed) > ROWS else lines


def _speeds(speeds: pd.DataFrame) -> list[str]:
    if speeds.empty:
        return []
    lines = ["", "| measured on | workload | task | against | ratio | 95 % | of bound | status |"]
    lines.append("|---|---|---|---|---:|---|---:|---|")
    for row in rows(speeds):
        head = (code(row[name]) for name in ("machine", "workload", "task", "peer"))
        status = "publishable" if row["publishable"] is True else "unverified"
        lines.append(
            f"| {' | '.join(head)} | {row['ratio']:.2f} x | {row['low']:.2f}-{row['high']:.2f} "
            f"| {row['of_bound']:.1f} x | {status} |"
        )
    return [*lines, "", "ratio: how many times as long the other takes."]
