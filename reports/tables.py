"""The tables that results become: their columns, kinds of numbers and units, in one place.

`COLUMNS` is the documentation of every column; a test holds it against the frames, and the table in
``README.md`` is made from it (``python -m keyedopt.reports.tables``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

#: Outcomes of a case from the most to the least serious. A clause has the most serious one of its cases.
SEVERITY = ("error", "fail", "unexpected-pass", "known", "pass", "observed", "unsupported")
#: Outcomes with which a clause held.
HELD = ("pass", "observed")
#: Outcomes with which it did not, and nobody said so before.
FAILED = ("error", "fail")

TEXT, WHOLE, NUMBER, FLAG, TIME = "string", "Int64", "float64", "boolean", "datetime64[ns, UTC]"


@dataclass(frozen=True)
class Column:
    """A column: what it holds, as what, and in which unit."""

    dtype: str
    about: str
    unit: str = ""


@dataclass(frozen=True)
class Clause:
    """What a report says of a clause; given to it, since results name clauses and do not quote them."""

    id: str
    area: str
    level: str
    statement: str
    source: str
    rationale: str = ""
    since: str = ""


_RUN = Column(TEXT, "label of the run, unique among those that were read")
_CASE = Column(TEXT, "name of the case")
_CLAUSE = Column(TEXT, "id of the clause; a case of several clauses has a row for each")

COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "runs": {
        "run": _RUN,
        "kind": Column(TEXT, "conformance, bench, pytest-benchmark or asv"),
        "file": Column(TEXT, "where it was read from"),
        "implementation": Column(TEXT, "what was checked or measured"),
        "version": Column(TEXT, "its version"),
        "suite_version": Column(TEXT, "version of the conformance suite"),
        "suite_hash": Column(TEXT, "digest of its clauses and cases"),
        "started": Column(TIME, "when the run began"),
        "seconds": Column(NUMBER, "how long it took", "s"),
        "machine": Column(TEXT, "system and architecture, or the name that asv gives the machine"),
        "processor": Column(TEXT, "name of the CPU, where known, and number of cores"),
        "device": Column(TEXT, "where it ran: cpu, cuda, …"),
        "gpu": Column(TEXT, "name of the GPU, if one was used"),
        "python": Column(TEXT, "version of Python"),
        "torch": Column(TEXT, "version of torch"),
        "commit": Column(TEXT, "commit of keyedopt, where it ran from a checkout"),
        "complete": Column(FLAG, "false when the run was interrupted"),
        "expectations": Column(
            TEXT, "what is wrong with the list of known failures: expired, stale, …; a line each"
        ),
        "conformant": Column(
            FLAG,
            "every must of the claimed areas held; missing where a run looked at a part only, "
            "where the texts of the clauses are not known, or where nothing was proven",
        ),
    },
    "clauses": {
        "run": _RUN,
        "clause": Column(TEXT, "id of the clause"),
        "area": Column(TEXT, "area of the surface, where the text of the clause is known"),
        "level": Column(TEXT, "must, should or observe, where the text of the clause is known"),
        "outcome": Column(TEXT, f"the most serious outcome of its cases: {', '.join(SEVERITY)}"),
        "cases": Column(WHOLE, "number of cases"),
        "passed": Column(WHOLE, "cases that passed or observed"),
        "failed": Column(WHOLE, "cases that failed or broke, and those that passed unexpectedly"),
        "known": Column(WHOLE, "cases that failed as expected"),
    },
    "cases": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "outcome": Column(TEXT, "outcome of the case"),
        "device": Column(TEXT, "what it ran on, if it asks for one"),
        "dtype": Column(TEXT, "what it ran in, if it asks for one"),
        "expected": Column(TEXT, "of a failure: what was expected"),
        "seen": Column(TEXT, "of a failure: what was seen instead"),
        "inputs": Column(TEXT, "literal inputs, as JSON"),
        "reason": Column(TEXT, "of a known failure: why"),
        "link": Column(TEXT, "of a known failure: where more is said"),
        "seconds": Column(NUMBER, "how long it took", "s"),
        "replay": Column(TEXT, "the command that repeats it"),
    },
    "records": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "name": Column(TEXT, "path of what was recorded within the case; empty if it is one value"),
        "value": Column(NUMBER, "the record, where it is a number or true (1) or false (0)"),
        "text": Column(TEXT, "the record, as text"),
        "unit": Column(TEXT, "unit of the number, where it has one"),
    },
    "errors": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "subject": Column(TEXT, "the algorithm"),
        "quantity": Column(TEXT, "the tensor: weight, sum, exp_avg, …"),
        "dtype": Column(TEXT, "dtype of the tensor"),
        "error": Column(NUMBER, "largest error, against an oracle of higher precision", "column unit"),
        "budget": Column(NUMBER, "what it may be; missing where there is no limit", "column unit"),
        "unit": Column(TEXT, "ULP of the dtype, or relative to the size of the exact result"),
        "steps": Column(WHOLE, "steps taken before it was measured", "steps"),
        "rows": Column(WHOLE, "gradients that were aggregated into one row", "gradients"),
    },
    "schedules": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "policy": Column(TEXT, "the policies of the stages, in order"),
        "iteration": Column(WHOLE, "iteration, from 0", "steps"),
        "specified": Column(NUMBER, "learning rate that the formula gives"),
        "measured": Column(NUMBER, "learning rate that the implementation set; missing where it broke"),
    },
    "speeds": {
        "run": _RUN,
        "machine": Column(TEXT, "GPU, or CPU and number of cores"),
        "device": Column(TEXT, "cpu or cuda"),
        "workload": Column(TEXT, "name of the workload, see `keyedopt bench list`"),
        "task": Column(TEXT, "what is timed, see `keyedopt bench list`"),
        "implementation": Column(TEXT, "what is measured"),
        "peer": Column(TEXT, "what it is compared with"),
        "ratio": Column(NUMBER, "time of the peer over time of the implementation: above 1 is faster"),
        "low": Column(NUMBER, "lower end of the 95 % interval of the ratio"),
        "high": Column(NUMBER, "upper end of the 95 % interval of the ratio"),
        "noise": Column(NUMBER, "how far from 1 the implementation measured against itself reaches"),
        "publishable": Column(FLAG, "results match, machine not busy, and shown to be conformant"),
        "matches": Column(FLAG, "both computed the same"),
        "seconds_median": Column(NUMBER, "median time of the implementation", "s"),
        "peer_seconds_median": Column(NUMBER, "median time of the peer", "s"),
        "bound_seconds": Column(
            NUMBER, "the bytes that must move over the memory bandwidth measured beside", "s"
        ),
        "of_bound": Column(NUMBER, "median time over that bound: 1 is as fast as the memory"),
        "bytes": Column(WHOLE, "bytes that must move", "B"),
        "bandwidth": Column(NUMBER, "the highest memory bandwidth measured in the same run", "B/s"),
        "extra_memory": Column(
            NUMBER, "memory that a run needs at its peak besides what was there before, where measured", "B"
        ),
        "first_seconds": Column(NUMBER, "time of the very first step", "s"),
    },
    "history": {
        "benchmark": Column(TEXT, "name of the benchmark"),
        "parameters": Column(TEXT, "its parameters, as `name=value, …`"),
        "machine": Column(TEXT, "name of the machine"),
        "commit": Column(TEXT, "commit that was measured"),
        "date": Column(TIME, "date of the commit, or of the measurement"),
        "value": Column(
            NUMBER, "the measurement; lower is better, except of a unit that ends with /s", "column unit"
        ),
        "unit": Column(TEXT, "unit of the three numbers"),
        "low": Column(NUMBER, "lower end of its interval, where there is one", "column unit"),
        "high": Column(NUMBER, "upper end of its interval, where there is one", "column unit"),
    },
    "problems": {
        "file": Column(TEXT, "a file that was refused"),
        "reason": Column(TEXT, "why"),
    },
}


@dataclass(frozen=True)
class Tables:
    """Results as tidy tables; `COLUMNS` documents their columns. Empty tables have all columns too."""

    runs: pd.DataFrame
    clauses: pd.DataFrame
    cases: pd.DataFrame
    records: pd.DataFrame
    errors: pd.DataFrame
    schedules: pd.DataFrame
    speeds: pd.DataFrame
    history: pd.DataFrame
    problems: pd.DataFrame

    def by_name(self) -> dict[str, pd.DataFrame]:
        """Return the tables by name, in the order of `COLUMNS`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def table(name: str, rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Make a table of rows in the order of its columns; None is a value that is missing.

    >>> table("problems", [("a.json", "it is truncated")])
         file           reason
    0  a.json  it is truncated
    """
    columns = COLUMNS[name]
    frame = pd.DataFrame(list(rows), columns=list(columns), dtype=object)
    made = {}
    for column, about in columns.items():
        values = frame[column]
        if about.dtype == TIME:
            values = pd.to_datetime(values, utc=True, format="ISO8601")
        made[column] = values.astype(pd.api.types.pandas_dtype(about.dtype))
    return pd.DataFrame(made)


def tables_of(rows: Mapping[str, Iterable[Sequence[Any]]]) -> Tables:
    """Make all tables of the rows of each."""
    return Tables(**{name: table(name, list(rows.get(name, ()))) for name in COLUMNS})


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as plain data; what is missing is None.

    >>> rows(table("problems", [("a.json", None)]))
    [{'file': 'a.json', 'reason': None}]
    """
    plain = frame.astype(object).where(frame.notna(), None)
    names = [str(column) for column in plain.columns]
    return [dict(zip(names, row, strict=True)) for row in plain.itertuples(index=False, name=None)]


def described() -> str:
    """Return the documentation of the columns as Markdown."""
    lines = []
    for name, columns in COLUMNS.items():
        lines += ["", f"**{name}**", "", "| column | dtype | unit | what it holds |", "|---|---|---|---|"]
        lines += [f"| `{key}` | {c.dtype} | {c.unit} | {c.about} |" for key, c in columns.items()]
    return "\n".join(lines[1:]) + "\n"


def update_readme(path: Path) -> str:
    """Return the text of the README with the documentation of the columns put between its marks."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition("<!-- columns -->\n")
    _, end, tail = rest.partition("<!-- end of columns -->")
    return f"{head}{begin}\n{described()}\n{end}{tail}"


if __name__ == "__main__":
    README = Path(__file__).with_name("README.md")
    README.write_text(update_readme(README), encoding="utf-8")
