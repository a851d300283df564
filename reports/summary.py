"""Results of several runs in Markdown, for a comment on a pull request."""

from collections import defaultdict
from collections.abc import Mapping

import pandas as pd

from keyedopt.conformance.results.markdown import code, table
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, SHOWN, headline
from keyedopt.conformance.spec import LEVELS
from keyedopt.reports.tables import Clause, Tables, checked, held, rows

#: The largest number of failing clauses that are listed; the length of a comment is limited.
ROWS = 50
NEW = (*FAILING, "unexpected-pass")


def markdown(tables: Tables, clauses: Mapping[str, Clause]) -> str:
    """Return a summary of all runs: verdicts, new failures, speeds, and files that were left out."""
    lines = ["## keyedopt"]
    lines += _verdicts(tables)
    lines += _failures(tables, clauses)
    lines += _speeds(tables.speeds)
    if len(tables.history):
        points = tables.history
        lines += ["", f"History: {len(points)} measurements of {points['commit'].nunique()} commits."]
    if len(tables.problems):
        lines += ["", "Files that were left out:", ""]
        lines += [f"- {code(row['file'])}: {code(row['reason'])}" for row in rows(tables.problems)]
    return "\n".join(lines) + "\n"


def _verdicts(tables: Tables) -> list[str]:
    cells = []
    for run in rows(tables.runs[tables.runs["kind"] == "conformance"]):
        mine = tables.clauses[tables.clauses["run"] == run["run"]]
        counts = (held(mine[mine["level"] == level]) for level in LEVELS)
        cells.append(
            [
                code(run["run"]),
                headline(run["verdict"], run["scope"]),
                run["gate"],
                checked(run),
                *(f"{passed}/{total}" if total else "" for passed, total in counts),
                int(mine["outcome"].isin(NEW).sum()),
                int((mine["outcome"] == "known").sum()),
                code(one_line(f"torch {run['torch']}, {run['device']}")),
            ]
        )
    numbers = [*LEVELS, "new failures", "known"]
    return table(["implementation", "verdict", "gate", "checked", *numbers, "ran on"], cells, right=numbers)


def _failures(tables: Tables, clauses: Mapping[str, Clause]) -> list[str]:
    """Return the table of new failures, the most serious first."""
    bad = tables.clauses[tables.clauses["outcome"].isin(NEW)]
    listed = bad.assign(
        first=bad["level"].map({level: index for index, level in enumerate(LEVELS)}).fillna(len(LEVELS)),
        second=bad["outcome"].map(SHOWN.index),
    ).sort_values(["run", "first", "second", "clause"])
    cases = defaultdict(list)
    for row in rows(tables.cases[tables.cases["outcome"].isin(NEW)]):
        cases[row["run"], row["clause"]].append(row)
    cells = []
    for row in rows(listed.head(ROWS)):
        case = next(each for each in cases[row["run"], row["clause"]] if each["outcome"] == row["outcome"])
        about = clauses.get(row["clause"])
        texts = (code(about.statement) if about else "", code(case["expected"]), code(case["seen"]))
        cells.append([code(row["run"]), code(row["clause"]), row["level"] or "", row["outcome"], *texts])
    head = ["implementation", "clause", "level", "outcome", "statement", "expected", "seen"]
    more = ["", f"and {len(listed) - ROWS} more"] if len(listed) > ROWS else []
    return [*table(head, cells), *more]


def _speeds(speeds: pd.DataFrame) -> list[str]:
    cells = [
        [
            *(code(row[name]) for name in ("machine", "workload", "task", "peer")),
            f"{row['ratio']:.2f} x",
            f"{row['low']:.2f}-{row['high']:.2f}",
            f"{row['of_bound']:.1f} x",
            "publishable" if row["publishable"] is True else "unverified",
        ]
        for row in rows(speeds)
    ]
    head = ["measured on", "workload", "task", "against", "ratio", "95 %", "of bound", "status"]
    lines = table(head, cells, right=["ratio", "of bound"])
    return [*lines, "", "ratio: the time of the other over the time of the implementation."] if lines else []
