"""``keyedopt bench --compare-commits A B``: build both, measure them in turn, show ratios."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from keyedopt.benchmarks import commits
from keyedopt.benchmarks.commits import Ratio
from keyedopt.benchmarks.compare import TOLERANCE
from keyedopt.benchmarks.tasks import Task
from keyedopt.benchmarks.workloads import Workload
from keyedopt.cli.bench import progress_bar
from keyedopt.cli.bench_options import Asked
from keyedopt.cli.bench_table import console
from keyedopt.conformance.results import model as results

#: Rounds of fresh processes where nothing else is asked for, and threads.
ROUNDS, THREADS = 4, 1


def compare_commits(asked: Asked, pairs: Sequence[tuple[Workload, Task]]) -> int:
    """Measure both commits; return 0."""
    assert asked.commits is not None
    root, names = commits.resolved(asked.commits, Path.cwd())
    wanted = [(work.name, task.name) for work, task in pairs]
    number, threads = asked.rounds or ROUNDS, asked.threads or THREADS
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress_bar())
        trees = []
        for done, name in enumerate(names):
            step(f"building {name[:10]}", done, 2)
            trees.append(stack.enter_context(commits.built(root, name)))
        found = commits.measure(
            (trees[0], trees[1]), asked.implementation, wanted, asked.device, threads, number, step
        )
    if asked.output is not None:
        report = {
            "kind": "keyedopt-commits",
            "schema": 1,
            "implementation": asked.implementation,
            "commits": names,
            "rounds": number,
            "threads": threads,
            "rows": [asdict(row) for row in found],
        }
        results.write_atomically(asked.output, json.dumps(report, indent=1) + "\n")
    show(found, asked.commits)
    return 0


def show(found: Sequence[Ratio], names: tuple[str, str]) -> None:
    """Print the table of ratios."""
    out = console()
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task"):
        table.add_column(column)
    for column in (f"ms {names[0][:16]}", f"ms {names[1][:16]}", "ratio", "95 %"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in found:
        if row.seconds is None:
            table.add_row(row.workload, row.task, "-", "-", "-", "-", f"not measured: {row.why}")
            continue
        same = row.error is not None and row.error <= TOLERANCE
        table.add_row(
            row.workload,
            row.task,
            *(f"{seconds * 1e3:.3f}" for seconds in row.seconds),
            f"{row.value:.3f}",
            f"{row.low:.3f}-{row.high:.3f}",
            "" if same else "unverified: results differ",
        )
    out.print(table)
    out.print("ratio: how many times as long the second commit takes")
