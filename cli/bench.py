"""``keyedopt bench``: measure, show ratios, write JSON; or hand on to the gate, or to commits."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from keyedopt.cli.bench_table import show
from keyedopt.conformance import result as results
from keyedopt.conformance.implementation import TargetError
from keyedopt.conformance.text import error_text, one_line

#: What is not a measurement: exit code 2, and one line that says what to do.
PROBLEMS = (
    *(RequestError, TargetError, TraceError, BaselineError, BuildError, CommitError, SideError),
    *(results.ResultError, OSError),
)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see the help of the options."""

    workloads: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    implementation: str = "fused"
    against: tuple[str, ...] | None = None
    device: str = "cpu"
    output: Path | None = None
    conformance: Path | None = None
    check: bool = False
    seconds: float = 1.0
    threads: int | None = None
    cold: bool = False
    trace: Path | None = None
    dim: int = 64
    gate: Path | None = None
    write_baseline: Path | None = None
    rounds: int | None = None
    commits: tuple[str, str] | None = None
    harness: bool = False


def bench(asked: Asked) -> int:
    """Measure; return 0, or 1 if the gate found something worse, or 2 on bad input."""
    try:
        _refuse_together(asked)
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
    trace = traces.read(asked.trace, asked.dim)
    return chosen((trace.name, *asked.workloads), asked.tasks, {**WORKLOADS, trace.name: trace})


def _refuse_together(asked: Asked) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        RequestError: names them.
    """
    modes = {
        "--gate": asked.gate is not None,
        "--write-baseline": asked.write_baseline is not None,
        "--compare-commits": asked.commits is not None,
        "--harness": asked.harness,
    }
    alone = {
        "--conformance": asked.conformance is not None,
        "--check": asked.check,
        "--cold": asked.cold,
        "--trace": asked.trace is not None,
    }
    if asked.harness:
        alone |= {"--workload": bool(asked.workloads), "--task": bool(asked.tasks)}
        alone |= {"--against": asked.against is not None, "--device": asked.device != "cpu"}
    given = [name for name, there in modes.items() if there]
    if given:
        given += [name for name, there in alone.items() if there]
    elif asked.conformance is not None and asked.check:
        given = ["--conformance", "--check"]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} do not go together")


def check_device(device: str) -> None:
    """Refuse a device that cannot be measured on.

    Raises:
        RequestError: says why.
    """
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
        budget = Budget(seconds=asked.seconds, warmup=min(0.3, asked.seconds))
        report = compare(found, pairs, asked.device, budget, clock_of(asked.device), step, asked.cold)
    report = replace(report, conformance=proven)
    if not report.rows:
        raise RequestError(f"nothing was compared: {_why_nothing(report)}")
    if asked.output is not None:
        results.write_atomically(asked.output, json.dumps(report.to_dict(), indent=1) + "\n")
    show(report)
    return 0


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
