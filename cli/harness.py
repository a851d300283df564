"""``keyedopt bench --harness``: how long imports and commands of keyedopt take."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from keyedopt.benchmarks import harness
from keyedopt.benchmarks.compare import RequestError
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.harness import Took
from keyedopt.benchmarks.timing import Budget, CpuClock
from keyedopt.cli.bench import progress_bar
from keyedopt.cli.bench_options import SECONDS, Asked
from keyedopt.cli.bench_table import console
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.untrusted import one_line

#: Pairs of processes at least; they take seconds each.
PAIRS = 3


def time_harness(asked: Asked) -> int:
    """Measure the harness; return 0."""
    where = environment("cpu")
    try:
        with progress_bar() as step:
            found = harness.measure(CpuClock(), Budget(seconds=asked.seconds or SECONDS, least=PAIRS), step)
    except RuntimeError as error:
        raise RequestError(one_line(str(error), 300)) from error
    if asked.output is not None:
        rows = [asdict(row) for row in found]
        report = {"kind": "keyedopt-harness", "schema": 1, "environment": where, "rows": rows}
        results.write_atomically(asked.output, json.dumps(report, indent=1) + "\n")
    show(found)
    return 0


def show(found: Sequence[Took]) -> None:
    """Print a line for each."""
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
