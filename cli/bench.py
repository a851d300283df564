"""``keyedopt bench``: measure, show ratios, write JSON; or hand on to the gate, or to commits."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keyedopt.benchmarks import traces
from keyedopt.benchmarks.baseline import BaselineError
from keyedopt.benchmarks.builds import BuildError
from keyedopt.benchmarks.commits import CommitError
from keyedopt.benchmarks.compare import Report, RequestError, chosen, compare, implementations
from keyedopt.benchmarks.sides import SideError
from keyedopt.benchmarks.tasks import Task
from keyedopt.benchmarks.timing import Budget, clock_of
from keyedopt.benchmarks.traces import TraceError
from keyedopt.benchmarks.workloads import WORKLOADS, Workload
from keyedopt.cli import proof
from keyedopt.cli.bench_options import DIM, SECONDS, Asked, check_device, refuse_together
from keyedopt.cli.bench_table import show
from keyedopt.cli.interrupts import interruptible
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.targets.implementation import TargetError


class CutShortError(Exception):
    """A run was cut short; the message says what there is of it."""


#: What is not a measurement: exit code 2, and one line that says what to do.
PROBLEMS = (
    *(RequestError, TargetError, TraceError, BaselineError, BuildError, CommitError, SideError),
    *(results.ResultError, CutShortError, OSError),
)


def bench(asked: Asked) -> int:
    """Measure; return 0, or 1 if the gate found something worse, or 2 on bad input."""
    with interruptible():
        return _bench(asked)


def _bench(asked: Asked) -> int:
    try:
        refuse_together(asked)
        pairs = _pairs(asked)
        check_device(asked.device)
        for path in (asked.output, asked.write_baseline):
            if path is not None:
                results.refuse_unwritable(path)
        if asked.harness:
            from keyedopt.cli.harness import time_harness

            return time_harness(asked)
        if asked.commits is not None:
            from keyedopt.cli.commits import compare_commits

            return compare_commits(asked, pairs)
        if asked.gate is not None or asked.write_baseline is not None:
            from keyedopt.cli.gate import run_gate, write_baseline

            return run_gate(asked, pairs) if asked.gate is not None else write_baseline(asked, pairs)
        return _measure(asked, pairs)
    except PROBLEMS as error:
        sys.stderr.write(f"keyedopt: {one_line(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("keyedopt: interrupted; nothing was written\n")
        return 2


def _pairs(asked: Asked) -> list[tuple[Workload, Task]]:
    if asked.trace is None:
        return chosen(asked.workloads, asked.tasks)
    trace = traces.read(asked.trace, asked.dim or DIM)
    return chosen((trace.name, *asked.workloads), asked.tasks, {**WORKLOADS, trace.name: trace})


def _measure(asked: Asked, pairs: list[tuple[Workload, Task]]) -> int:
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    found = list(implementations(asked.implementation, asked.against))
    proven: dict[str, Any] | None = None
    if asked.conformance is not None:
        proven = proof.from_file(asked.conformance, asked.implementation, asked.device)
    with progress_bar() as step:
        if asked.check:
            step("conformance", 0, 1)
            proven = proof.on_the_spot(asked.implementation, asked.device)
        budget = Budget(seconds=asked.seconds or SECONDS, warmup=min(0.3, asked.seconds or SECONDS))
        kept = _Kept(asked.output, proven)
        try:
            report = compare(
                found, pairs, asked.device, budget, clock_of(asked.device), step, asked.cold, kept.add
            )
            report = replace(report, conformance=proven)
            if not report.rows:
                raise RequestError(f"nothing was compared: {_why_nothing(report)}")
            kept.finish(report)
        except KeyboardInterrupt as error:
            raise CutShortError(f"interrupted; {kept.said()}") from error
    show(report)
    return 0


class _Kept:
    """What a run has so far, beside its output (``x.partial.json``) until that is written.

    Args:
        output: where the report is to go; None if it is not written.
        proven: what is known of conformance.
    """

    def __init__(self, output: Path | None, proven: dict[str, Any] | None) -> None:
        self._output, self._proven = output, proven
        self._partial = output and output.with_name(f"{output.stem}.partial{output.suffix}")
        self._there = "nothing was written"

    def add(self, report: Report) -> None:
        """Write what there is; a process that is killed leaves it."""
        if self._partial is not None:
            self._write(self._partial, replace(report, conformance=self._proven))
            self._there = f"{len(report.rows)} comparisons are in {self._partial}"

    def finish(self, report: Report) -> None:
        """Write the report in the place of it."""
        if self._output is not None and self._partial is not None:
            self._write(self._output, report)
            self._there = f"the report is in {self._output}"
            self._partial.unlink(missing_ok=True)

    def said(self) -> str:
        """Return what is where."""
        return self._there

    def _write(self, path: Path, report: Report) -> None:
        results.write_atomically(path, json.dumps(report.to_dict(), indent=1) + "\n")


def _why_nothing(report: Report) -> str:
    """Return why a run has no comparison: first what the implementation itself lacks."""
    reasons = sorted(report.skipped, key=lambda item: item["who"] != report.implementation)
    if not reasons:
        return "there is no peer; name one with --against"
    first = reasons[0]
    return f"{first['workload']} {first['task']} by {first['who']}: {first['why']}"


@contextmanager
def progress_bar() -> Iterator[Any]:
    """Give a function that shows what comes next, how much is done, and of how much; only on a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("starting", total=None)

        def step(text: str, done: int, total: int) -> None:
            bar.update(line, description=text, completed=done, total=total)

        yield step
