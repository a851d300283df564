"""Print the list of workloads and tasks, and the table of ratios."""

import itertools
import sys

from rich.console import Console
from rich.table import Table

from keyedopt.benchmarks import grid
from keyedopt.benchmarks.compare import Report
from keyedopt.benchmarks.tasks import TASKS, Task
from keyedopt.benchmarks.workloads import WORKLOADS, Dense, Lookups, Workload
from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.untrusted import one_line

#: The width of tables; a narrow terminal wraps them.
WIDTH = 200


def console() -> Console:
    """Return the console for tables of numbers, which are not wrapped."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=WIDTH)


def show_list(begins: str = "", everything: bool = False) -> str:
    """Print the workloads and the tasks, wrapped to the width of the terminal; return what is wrong.

    Args:
        begins: only those whose name begins so, each task on a line of its own.
        everything: each task on a line of its own.
    """
    works = [work for work in WORKLOADS.values() if work.name.startswith(begins)]
    tasks = [task for task in TASKS.values() if task.name.startswith(begins)]
    if not works and not tasks:
        near = did_you_mean(begins, [*WORKLOADS, *TASKS, *(_family(task)[0] for task in TASKS.values())])
        return f"no workload or task begins with {begins!r}: `keyedopt bench list` shows them{near}"
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    if works:
        table = _table("workload", "kind", "size", "about")
        for work in works:
            table.add_row(work.name, work.kind, _size(work), work.about)
        out.print(table)
    if works and tasks:
        out.print()
    if everything or begins:
        table = _table("task", "kind", "what is timed")
        for task in tasks:
            table.add_row(task.name, task.kind, task.about)
    else:
        table = _table("tasks", "number", "kind", "what the first one times")
        for (family, kind), members in itertools.groupby(sorted(tasks, key=_family), _family):
            group = list(members)
            name = f"{family}-*" if len(group) > 1 else group[0].name
            table.add_row(name, str(len(group)), kind, group[0].about)
    out.print(table)
    if not everything and not begins:
        out.print("`keyedopt bench list NAME` shows the tasks that begin with a name, and --all each of them")
    return ""


def _table(*columns: str) -> Table:
    """Return a table whose names, in the first column, are not broken."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def _family(task: Task) -> tuple[str, str]:
    """Return the name of a task without its optimizer or class, and the kind of its workloads."""
    return task.name.rpartition("-")[0] or task.name, task.kind


def _size(work: Workload) -> str:
    if isinstance(work, Dense):
        return f"{work.numbers():,} numbers in {work.repeat * len(work.shapes):,} tensors"
    if isinstance(work, Lookups):
        rows = f"{work.rows:,}" if isinstance(work.rows, int) else f"{min(work.rows):,}-{max(work.rows):,}"
        pooling = f"{sum(work.lengths) / work.tables:.3g}"
        return f"{work.tables} x {rows} x {work.dim}, {work.batch} x {pooling} {work.indices} lookups"
    return f"{work.tables} x {work.rows:,} x {work.dim}, {work.lookups:,} {work.indices} lookups"


def show_grid(report: Report) -> None:
    """Print the ratios of a grid, the worst first, and a summary for each peer."""
    out = console()
    where = report.environment
    out.print(f"{report.implementation} on {where['device']} ({where['cpu']}, {where['threads']} threads)")
    table = Table(box=None, pad_edge=False)
    for column in ("tables x rows x dim, batch x pooling", "task", "against"):
        table.add_column(column)
    for column in ("ratio", "95 %", "noise", "ms", "theirs"):
        table.add_column(column, justify="right")
    table.add_column("status")
    for row in grid.worst_first(report.rows):
        table.add_row(
            *(row.workload, row.task, row.peer),
            "-" if row.withheld else f"{row.ratio:.2f}",
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.noise:.1%}",
            f"{row.seconds['median'] * 1e3:.3f}",
            f"{row.peer_seconds['median'] * 1e3:.3f}",
            report.status(row),
        )
    out.print(table)
    for line in grid.summary(report.rows):
        out.print(line)
    out.print("ratio: how many times as long the peer takes")
    out.print(f"{len(report.rows)} comparisons in {report.seconds:.0f} s")


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def show(report: Report) -> None:
    """Print the table of ratios."""
    out = console()
    where = report.environment
    out.print(
        f"{report.implementation} on {where['device']} ({where['cpu']}, {where['threads']} threads, "
        f"load {where['load'][0]:.1f}); memory bandwidth {report.bandwidth / 1e9:.1f} GB/s"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task", "backend", "against", "threads"):
        table.add_column(column)
    counted = any(row.launches is not None for row in report.rows)
    numbers = ("ms", "theirs", "ratio", "95 %", "noise", "MB", "of bound", "of copy", "extra MB", "theirs")
    for column in numbers:
        table.add_column(column, justify="right")
    if counted:
        table.add_column("launches", justify="right")
    table.add_column("status")
    for row in report.rows:
        mine = row.seconds["median"]
        table.add_row(
            row.workload,
            row.task,
            row.backend or "-",
            f"{row.peer} ({row.peer_backend})" if row.peer_backend else row.peer,
            f"{row.threads} / {row.peer_threads}",
            f"{mine * 1e3:.3f}",
            f"{row.peer_seconds['median'] * 1e3:.3f}",
            "-" if row.withheld else f"{row.ratio:.2f}",
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.noise:.1%}",
            f"{row.bytes / 1e6:.1f}",
            f"{mine / row.bound:.1f} x",
            f"{mine / row.copy_bound:.1f} x",
            _megabytes(row.memory),
            _megabytes(row.peer_memory),
            *([f"{row.launches} / {row.peer_launches}"] if counted else []),
            report.status(row),
        )
    out.print(table)
    out.print(
        "threads: ours / the peer's; ratio: how many times as long the peer takes; "
        "noise: the implementation against itself; "
        "of bound: time over that of the bytes that must move, at the best memory bandwidth; "
        "of copy: the same at the bandwidth of a copy; extra MB: peak memory of a run"
    )
    broken = [item for item in report.skipped if not item["why"].startswith(("no ", "tables only"))]
    for item in broken:
        out.print(one_line(f"not measured: {item['workload']} {item['task']} {item['who']}: {item['why']}"))
    out.print(f"{len(report.rows)} comparisons in {report.seconds:.0f} s")
