"""``keyedopt bench harness``: how long imports and commands of keyedopt take."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from keyedopt.benchmarks import harness
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.harness import Took
from keyedopt.benchmarks.timing import Budget, CpuClock
from keyedopt.cli.bench_table import console
from keyedopt.cli.progress import progress
from keyedopt.conformance.results import model as results

#: The least number of pairs; each takes seconds.
PAIRS = 3


def time_harness(seconds: float, output: Path | None) -> int:
    """Measure the harness, print the table, and return 0.

    Raises:
        HarnessError: an import or a command failed.
    """
    if output is not None:
        results.refuse_unwritable(output)
    where = environment("cpu")
    with progress("starting") as step:
        found = harness.measure(CpuClock(), Budget(seconds=seconds, least=PAIRS), step)
    if output is not None:
        rows = [asdict(row) for row in found]
        report = {"kind": "keyedopt-harness", "schema": 1, "environment": where, "rows": rows}
        results.write_report(output, report)
    show(found)
    return 0


def show(found: Sequence[Took]) -> None:
    """Print the table of times and ratios."""
    out = console()
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    for column in ("seconds", "ratio", "95 %", "pairs"):
        table.add_column(column, justify="right")
    for row in found:
        cells = (f"{row.seconds['median']:.3f}", f"{row.ratio:.2f}", f"{row.low:.2f}-{row.high:.2f}")
        table.add_row(row.name, *cells, str(len(row.samples)))
    out.print(table)
    out.print("ratio: how many times as long as `import torch` in a process of its own")
