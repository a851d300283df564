"""``keyedopt report``: tables, a page, a summary or badges, made of result files."""

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import UNSUPPORTED
from keyedopt.reports import badge, export, summary
from keyedopt.reports.load import load
from keyedopt.reports.tables import Clause, Tables, rows


def clauses() -> dict[str, Clause]:
    """Return the texts of the clauses of the suite, by id."""
    known = findings()
    return {
        clause.id: Clause(
            id=clause.id,
            area=clause.area,
            level=clause.level,
            statement=clause.statement,
            source=" ".join(clause.grounds),
            rationale=clause.rationale,
            since=clause.since,
            reproducers=tuple(
                (one.library, one.path.stem, one.path.read_text(encoding="utf-8"))
                for one in known
                if clause.id in one.clauses
            ),
        )
        for clause in spec.clauses().values()
    }


def report(
    results: Sequence[Path],
    output: Path,
    formats: Sequence[str],
    plots: bool,
    commit_url: str,
    fail: Callable[[str], NoReturn],
) -> int:
    """Write a report; return 0, or 1 if some files were left out. Exit with 2 if no file could be read."""
    if plots and "html" not in formats:
        fail("--plots are the pictures of the page: ask for --format html too")
    tables = load(results, clauses())
    for row in rows(tables.problems):
        sys.stderr.write(one_line(f"keyedopt: {row['file']} is left out: {row['reason']}") + "\n")
    if tables.runs.empty:
        fail("there is nothing to report: no result could be read")
    with _whole(output, fail) as folder:
        for name in formats:
            if name == "html":
                _write_page(tables, folder, plots, commit_url, fail)
            else:
                _write(name, tables, folder)
    cases = tables.cases.drop_duplicates(["run", "case"])  # a case has a row for each of its clauses
    cases = cases[~cases["outcome"].isin(UNSUPPORTED)]  # those that ran, as a check counts them
    parts = {"run": tables.runs, "case": cases, "speed": tables.speeds}
    counts = [f"{len(frame)} {name}{'s' if len(frame) != 1 else ''}" for name, frame in parts.items()]
    print(f"written: {output} ({', '.join(counts)})")
    return 1 if len(tables.problems) else 0


def _write(name: str, tables: Tables, folder: Path) -> None:
    if name == "markdown":
        (folder / "report.md").write_text(summary.markdown(tables, clauses()), encoding="utf-8")
    elif name == "badge":
        for run in tables.runs[tables.runs["kind"] == "conformance"]["run"]:
            path = folder / f"{re.sub('[^a-zA-Z0-9.]+', '-', run).strip('-.') or 'run'}.svg"
            path.write_text(badge.badge(tables, run), encoding="utf-8")
    else:
        {"csv": export.csv, "parquet": export.parquet, "json": export.json}[name](tables, folder)


def _write_page(
    tables: Tables, folder: Path, plots: bool, commit_url: str, fail: Callable[[str], NoReturn]
) -> None:
    from keyedopt.reports import page  # here, as importing matplotlib takes a second

    try:
        page.write(tables, clauses(), folder, plots=plots, commit_url=commit_url)
    except ValueError as error:
        fail(str(error))


@contextlib.contextmanager
def _whole(output: Path, fail: Callable[[str], NoReturn]) -> Iterator[Path]:
    """Yield a folder to write into; its files are moved to the output when all of them are complete."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".keyedopt-", dir=output))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        fail(f"{output} cannot be written ({why}): name another folder")
    try:
        yield scratch
        for path in sorted(scratch.rglob("*")):
            target = output / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)
    except OSError as error:
        fail(f"{output} cannot be written: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
