"""Print the list of workloads and tasks, and the table of ratios."""

import sys

from rich.console import Console
from rich.table import Table

from keyedopt.benchmarks import grid
from keyedopt.benchmarks.compare import Report
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import WORKLOADS, Dense, Lookups
from keyedopt.conformance.results.untrusted import one_line

#: The width of tables; a narrow terminal wraps them.
WIDTH = 200


def console() -> Console:
    """Return the console for tables of numbers, which are not wrapped."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=WIDTH)


def show_list() -> None:
    """Print the workloads and the tasks, wrapped to the width of the terminal."""
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "kind", "size", "about"):
        table.add_column(column)
    for work in WORKLOADS.values():
        if isinstance(work, Dense):
            size = f"{work.numbers():,} numbers in {work.repeat * len(work.shapes):,} tensors"
        elif isinstance(work, Lookups):
            rows = (
                f"{work.rows:,}" if isinstance(work.rows, int) else f"{min(work.rows):,}-{max(work.rows):,}"
            )
            pooling = f"{sum(work.lengths) / work.tables:.3g}"
            size = f"{work.tables} x {rows} x {work.dim}, {work.batch} x {pooling} {work.indices} lookups"
        else:
            size = f"{work.tables} x {work.rows:,} x {work.dim}, {work.lookups:,} {work.indices} lookups"
        table.add_row(work.name, work.kind, size, work.about)
    table.add_section()
    table.add_row("task", "kind", "", "what is timed", style="bold")
    for task in TASKS.values():
        table.add_row(task.name, task.kind, "", task.about)
    out.print(table)


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
