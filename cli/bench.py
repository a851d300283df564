"""``keyedopt bench``: measure, show ratios, write JSON."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from keyedopt.benchmarks.compare import (
    Comparison,
    Report,
    RequestError,
    chosen,
    compare,
    implementations,
)
from keyedopt.benchmarks.environment import versions
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.timing import Budget, clock_of
from keyedopt.benchmarks.workloads import WORKLOADS, Dense, Lookups
from keyedopt.conformance import result as results
from keyedopt.conformance.implementation import TargetError
from keyedopt.conformance.text import error_text, one_line
from keyedopt.conformance.verdict import judge

#: Tables are as wide as they have to be; a narrow terminal wraps them.
WIDTH = 170
#: What is not a measurement: exit code 2, and one line that says what to do.
PROBLEMS = (RequestError, TargetError, results.ResultError, OSError)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=WIDTH)


def show_list() -> None:
    """Print the workloads and the tasks."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "kind", "size", "about"):
        table.add_column(column)
    for work in WORKLOADS.values():
        if isinstance(work, Dense):
            size = f"{work.numbers():,} numbers in {work.repeat * len(work.shapes):,} tensors"
        else:
            size = f"{work.tables} x {work.rows:,} x {work.dim}"
            bags = f"{work.batch} x {work.pooling}" if isinstance(work, Lookups) else f"{work.lookups:,}"
            size += f", {bags} {work.indices} lookups"
        table.add_row(work.name, work.kind, size, work.about)
    table.add_section()
    table.add_row("task", "kind", "", "what is timed", style="bold")
    for task in TASKS.values():
        table.add_row(task.name, task.kind, "", task.about)
    console.print(table)


def bench(
    workloads: list[str],
    names: list[str],
    implementation: str,
    against: list[str] | None,
    device: str,
    output: Path | None,
    conformance: Path | None,
    seconds: float,
    threads: int | None,
) -> int:
    """Measure; return 0, or 2 on bad input."""
    try:
        pairs = chosen(workloads, names)
        _check_device(device)
        if output is not None:
            results.refuse_unwritable(output)
        if threads is not None:
            torch.set_num_threads(threads)
        found = list(implementations(implementation, against))
        proof = _proof(conformance, found[0][0].name)
        budget = Budget(seconds=seconds, warmup=min(0.3, seconds))
        report = _measure(found, pairs, device, budget)
        report = replace(report, conformance=proof)
        if output is not None:
            results.write_atomically(output, json.dumps(report.to_dict(), indent=1) + "\n")
    except PROBLEMS as error:
        sys.stderr.write(f"keyedopt: {one_line(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("keyedopt: interrupted; nothing was written\n")
        return 2
    show(report)
    return 0


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise RequestError(f"{device!r} is not a device: give cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise RequestError(f"there is no clock for {kind!r}: give cpu or cuda")
    if kind == "cuda":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise RequestError(f"{device!r} cannot be used: {error_text(error)}") from error


def _proof(path: Path | None, implementation: str) -> dict[str, Any] | None:
    """Return what a result file says of the implementation, or nothing without a file.

    A run of some areas or clauses proves nothing: a must that was not looked at counts as not held.

    Raises:
        RequestError: the file is of another implementation, or another build of it.
    """
    if path is None:
        return None
    result = results.read(path)
    about = result.implementation
    if about["name"] != implementation:
        raise RequestError(f"{path} is a result of {about['name']}, not of {implementation}")
    then = {**about.get("versions", {}), "torch": result.environment["torch"]}
    now = versions(then) | {"torch": torch.__version__}
    for name, version in then.items():
        if now.get(name) != version:
            raise RequestError(
                f"{path} was made with {name} {version}, here is {now.get(name)}: "
                f"run `keyedopt check {implementation} --output` again"
            )
    everything = replace(result, options={**result.options, "areas": [], "clauses": []})
    return {"file": str(path), "conformant": judge(everything).conformant, "suite": result.suite["hash"]}


def _measure(found: Any, pairs: Any, device: str, budget: Budget) -> Report:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("starting", total=None)
        return compare(
            found, pairs, device, budget, clock_of(device), lambda text: bar.update(line, description=text)
        )


def status(report: Report, row: Comparison) -> str:
    """Say whether a ratio may be published, and if not, why."""
    if not row.matches:
        return f"unverified: {row.peer}'s results differ"
    if report.environment["load"][0] > report.environment["cores"]:
        return "unverified: busy machine"
    if report.conformance is None:
        return "unverified: no --conformance"
    return "publishable" if report.conformance["conformant"] else "unverified: not conformant"


def show(report: Report) -> None:
    """Print the table of ratios."""
    console = _console()
    where = report.environment
    console.print(
        f"{report.implementation} on {where['device']} ({where['cpu']}, {where['threads']} threads, "
        f"load {where['load'][0]:.1f}); copy bandwidth {report.bandwidth / 1e9:.1f} GB/s"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task", "against"):
        table.add_column(column)
    for column in ("ms", "theirs", "ratio", "95 %", "noise", "MB", "of bound"):
        table.add_column(column, justify="right")
    table.add_column("status")
    for row in report.rows:
        mine = row.seconds["median"]
        table.add_row(
            row.workload,
            row.task,
            row.peer,
            f"{mine * 1e3:.3f}",
            f"{row.peer_seconds['median'] * 1e3:.3f}",
            f"{row.ratio:.2f}",
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.noise:.1%}",
            f"{row.bytes / 1e6:.1f}",
            f"{mine / row.bound:.1f} x",
            status(report, row),
        )
    console.print(table)
    console.print(
        "ratio: how many times as long the other takes; noise: the same code against itself; "
        "of bound: times the bytes that must move at copy bandwidth"
    )
    broken = [item for item in report.skipped if not item["why"].startswith(("no ", "tables only"))]
    for item in broken:
        console.print(
            one_line(f"not measured: {item['workload']} {item['task']} {item['who']}: {item['why']}")
        )
    if not report.rows:
        console.print("nothing was compared: no peer does these tasks (the JSON says why)")
    console.print(f"{len(report.rows)} comparisons in {report.seconds:.0f} s")
