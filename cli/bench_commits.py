"""``keyedopt bench commits A B``: build both, measure them alternately, show ratios."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from keyedopt.benchmarks import commit_builds, commits
from keyedopt.benchmarks.commits import Ratio
from keyedopt.benchmarks.compare import TOLERANCE
from keyedopt.cli.bench_builds import Asked, built_pair
from keyedopt.cli.bench_table import console
from keyedopt.conformance.results import model as results


def compare_commits(names: tuple[str, str], asked: Asked) -> int:
    """Measure both commits, print the table, and return 0.

    Raises:
        KeyedoptError: an option is wrong, or a commit cannot be found or built.
    """
    keys = asked.keys()
    root = commit_builds.repository_root(Path.cwd())
    hashes = [commit_builds.resolve(name, root) for name in names]
    commit_builds.refuse_changes(root)
    with built_pair(root, hashes, asked) as (request, step):
        found = commits.measure(request, keys, asked.rounds, step)
    if asked.output is not None:
        report = {
            "kind": "keyedopt-commits",
            "schema": 1,
            "implementation": asked.implementation,
            "commits": hashes,
            "rounds": asked.rounds,
            "threads": asked.threads,
            "rows": [asdict(row) for row in found],
        }
        results.write_report(asked.output, report)
    show(found, names)
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
