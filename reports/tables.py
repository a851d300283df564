"""The tables of results: their columns, dtypes and units.

`COLUMNS` documents every column. A test compares it with the frames, and the tables in ``README.md`` are
made from it (``python -m keyedopt.reports.tables``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from keyedopt.conformance.results import markdown
from keyedopt.conformance.results.verdict import RECORDED, SHOWN, UNSUPPORTED, WORDS, Checked

#: A table whose columns `COLUMNS` documents. pandas' stubs make a cell a union of every type that a cell may
#: have.
Frame = Any

#: Outcomes of clauses that held.
HELD = ("pass", RECORDED)
TEXT, WHOLE, NUMBER, FLAG, TIME = "string", "Int64", "float64", "boolean", "datetime64[ns, UTC]"


@dataclass(frozen=True)
class Column:
    """A column: its dtype, meaning and unit."""

    dtype: str
    about: str
    unit: str = ""


@dataclass(frozen=True)
class Clause:
    """The text of a clause, which results do not contain.

    Args:
        reproducers: of each known defect the library, the name of its script, and the script.
    """

    id: str
    area: str
    level: str
    statement: str
    source: str
    rationale: str = ""
    since: str = ""
    reproducers: tuple[tuple[str, str, str], ...] = ()


_RUN = Column(TEXT, "label of the run, unique among those that were read")
_CASE = Column(TEXT, "name of the case")
_CLAUSE = Column(TEXT, "id of the clause; a case of several clauses has a row for each")

COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "runs": {
        "run": _RUN,
        "kind": Column(TEXT, "conformance, bench, pytest-benchmark or asv"),
        "file": Column(TEXT, "path of the file"),
        "implementation": Column(TEXT, "name of the implementation"),
        "version": Column(TEXT, "version of the implementation"),
        "suite_version": Column(TEXT, "version of the conformance suite"),
        "suite_hash": Column(TEXT, "digest of its clauses and cases"),
        "started": Column(TIME, "start of the run"),
        "seconds": Column(NUMBER, "duration of the run", "s"),
        "machine": Column(TEXT, "system and architecture, or the name that asv gives the machine"),
        "processor": Column(TEXT, "name of the CPU, if it is known, number of cores and vector instructions"),
        "device": Column(TEXT, "device: cpu, cuda, …"),
        "gpu": Column(TEXT, "name of the GPU, if one was used"),
        "python": Column(TEXT, "version of Python"),
        "torch": Column(TEXT, "version of torch"),
        "commit": Column(TEXT, "commit of keyedopt, if it ran from a checkout"),
        "complete": Column(FLAG, "false when the run was interrupted"),
        "expectations": Column(
            TEXT, "problems of the list of known failures: expired, stale, …; a line each"
        ),
        "verdict": Column(TEXT, f"{', '.join(WORDS)}; of a benchmark: conformant if that was shown"),
        "scope": Column(
            TEXT, "the part of the suite that was run: areas, clauses, dtypes; empty if all of it"
        ),
        "gate": Column(TEXT, "green or red"),
        "restrictions": Column(TEXT, "what its description says that optimizers do not take; a line each"),
        "causes": Column(
            TEXT, "errors of each first step, and how many clauses fail for no other reason; a line each"
        ),
        "clauses_checked": Column(WHOLE, "clauses of the claimed areas that were checked"),
        "clauses_claimed": Column(WHOLE, "clauses of the claimed areas"),
        "musts_checked": Column(WHOLE, "must clauses of the claimed areas that were checked"),
        "musts_claimed": Column(WHOLE, "must clauses of the claimed areas"),
    },
    "clauses": {
        "run": _RUN,
        "clause": Column(TEXT, "id of the clause"),
        "area": Column(TEXT, "area of the surface, if the text of the clause is known"),
        "level": Column(TEXT, "must, should or recorded, if the text of the clause is known"),
        "outcome": Column(TEXT, f"the most serious outcome of its cases: {', '.join(SHOWN)}"),
        "cases": Column(WHOLE, "number of cases that were run"),
        "passed": Column(WHOLE, "cases that passed, or recorded what they saw"),
        "failed": Column(WHOLE, "cases that failed, crashed or passed unexpectedly"),
        "known": Column(WHOLE, "cases that failed as expected"),
    },
    "cases": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "outcome": Column(TEXT, "outcome of the case"),
        "device": Column(TEXT, "device, if the case asks for one"),
        "dtype": Column(TEXT, "dtype, if the case asks for one"),
        "backend": Column(TEXT, "the backends that ran, if the implementation has several"),
        "expected": Column(TEXT, "of a failure: what was expected"),
        "seen": Column(TEXT, "of a failure: what was seen instead"),
        "inputs": Column(TEXT, "literal inputs, as JSON"),
        "reason": Column(TEXT, "of a known failure: the reason"),
        "link": Column(TEXT, "of a known failure: where to read more"),
        "seconds": Column(NUMBER, "duration of the case", "s"),
        "replay": Column(TEXT, "the command that repeats it"),
    },
    "records": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "name": Column(TEXT, "path of what was recorded within the case; empty if it is one value"),
        "value": Column(NUMBER, "the record, if it is a number or true (1) or false (0)"),
        "text": Column(TEXT, "the record, as text"),
        "unit": Column(TEXT, "unit of the number, if it has one"),
    },
    "errors": {
        "run": _RUN,
        "case": _CASE,
        "clause": _CLAUSE,
        "subject": Column(TEXT, "the algorithm"),
        "quantity": Column(TEXT, "the tensor: weight, sum, exp_avg, …"),
        "dtype": Column(TEXT, "dtype of the tensor"),
        "error": Column(NUMBER, "largest error, against an oracle of higher precision", "column unit"),
        "budget": Column(NUMBER, "largest allowed error; missing if there is no limit", "column unit"),
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
        "measured": Column(NUMBER, "learning rate that the implementation set; missing if it raised"),
    },
    "speeds": {
        "run": _RUN,
        "machine": Column(TEXT, "GPU, or CPU, number of cores and vector instructions"),
        "device": Column(TEXT, "cpu or cuda"),
        "workload": Column(TEXT, "name of the workload, see `keyedopt bench list`"),
        "task": Column(TEXT, "what is timed, see `keyedopt bench list`"),
        "implementation": Column(TEXT, "name of the implementation"),
        "peer": Column(TEXT, "name of the implementation it is compared with"),
        "ratio": Column(NUMBER, "time of the peer over time of the implementation: above 1 is faster"),
        "low": Column(NUMBER, "lower end of the 95 % interval of the ratio"),
        "high": Column(NUMBER, "upper end of the 95 % interval of the ratio"),
        "noise": Column(NUMBER, "how far from 1 the implementation measured against itself reaches"),
        "publishable": Column(
            FLAG, "results match, the machine was idle, and the build was shown to be conformant"
        ),
        "matches": Column(FLAG, "both computed the same result"),
        "seconds_median": Column(NUMBER, "median time of the implementation", "s"),
        "peer_seconds_median": Column(NUMBER, "median time of the peer", "s"),
        "bound_seconds": Column(
            NUMBER, "bytes that must move over the memory bandwidth measured in the same run", "s"
        ),
        "of_bound": Column(NUMBER, "median time over that bound; 1 is as fast as the memory"),
        "bytes": Column(WHOLE, "bytes that must move", "B"),
        "bandwidth": Column(NUMBER, "the highest memory bandwidth measured in the same run", "B/s"),
        "extra_memory": Column(
            NUMBER, "peak memory of a run beyond the memory in use before it, if measured", "B"
        ),
        "first_seconds": Column(NUMBER, "time of the very first step", "s"),
        "backend": Column(TEXT, "the backends of the implementation that ran, if it has several"),
        "peer_backend": Column(TEXT, "those of the peer"),
        "threads": Column(WHOLE, "threads of the CPU that the implementation used"),
        "peer_threads": Column(WHOLE, "those of the peer"),
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
        "low": Column(NUMBER, "lower end of its interval, if it has one", "column unit"),
        "high": Column(NUMBER, "upper end of its interval, if it has one", "column unit"),
    },
    "problems": {
        "file": Column(TEXT, "a file that was left out"),
        "reason": Column(TEXT, "why it was left out"),
    },
}


@dataclass(frozen=True)
class Tables:
    """Results as tidy tables; `COLUMNS` documents their columns. Empty tables have all columns."""

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
    """Make a table of rows, whose values are in the order of its columns; None is a missing value.

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
    """Make every table from its rows."""
    return Tables(**{name: table(name, list(rows.get(name, ()))) for name in COLUMNS})


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries; a missing value is None.

    >>> rows(table("problems", [("a.json", None)]))
    [{'file': 'a.json', 'reason': None}]
    """
    plain = frame.astype(object).where(frame.notna(), None)
    names = [str(column) for column in plain.columns]
    return [dict(zip(names, row, strict=True)) for row in plain.itertuples(index=False, name=None)]


def held(clauses: Frame) -> tuple[int, int]:
    """Return how many of some clauses held, and how many of them were checked."""
    outcomes = clauses["outcome"][~clauses["outcome"].isin(UNSUPPORTED)]
    return int(outcomes.isin(HELD).sum()), len(outcomes)


def checked(run: Mapping[str, Any]) -> Checked:
    """Return how many clauses and musts were checked, of a row of `runs`."""
    names = ("clauses_checked", "clauses_claimed", "musts_checked", "musts_claimed")
    clauses, of_clauses, musts, of_musts = (int(run[name]) for name in names)
    return Checked(clauses, of_clauses, musts, of_musts, device=str(run["device"]))


def described() -> str:
    """Return the documentation of the columns as Markdown."""
    lines = []
    for name, columns in COLUMNS.items():
        cells = [[f"`{key}`", about.dtype, about.unit, about.about] for key, about in columns.items()]
        lines += ["", f"**{name}**", *markdown.table(["column", "dtype", "unit", "what it holds"], cells)]
    return "\n".join(lines[1:]) + "\n"


def update_readme(path: Path) -> str:
    """Return the text of the README with the documentation of the columns between its marks."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition("<!-- columns -->\n")
    _, end, tail = rest.partition("<!-- end of columns -->")
    return f"{head}{begin}\n{described()}\n{end}{tail}"


if __name__ == "__main__":
    README = Path(__file__).with_name("README.md")
    README.write_text(update_readme(README), encoding="utf-8")
