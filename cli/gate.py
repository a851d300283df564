"""``keyedopt bench --gate`` and ``--write-baseline``: today's implementation against that of a baseline."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import builds, guard
from keyedopt.benchmarks.baseline import Baseline, BaselineError
from keyedopt.benchmarks.compare import RequestError
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.gate import LIMITS, Change, Limits
from keyedopt.benchmarks.rounds import Key, Request
from keyedopt.benchmarks.tasks import TASKS, Task
from keyedopt.benchmarks.workloads import Workload
from keyedopt.cli.bench import progress_bar
from keyedopt.cli.bench_options import Asked
from keyedopt.cli.bench_table import console
from keyedopt.conformance.results import model as results
from keyedopt.conformance.targets.implementation import find

#: Threads of a round where nothing else is asked for: see `keyedopt.benchmarks.sides`.
THREADS = 1


def _request(asked: Asked) -> Request:
    for name in (asked.implementation, *(asked.against or ())):
        find(name)  # which says on one line what is wrong with it, before processes are started
    made = Request(asked.implementation, asked.device, asked.threads or THREADS)
    return made if asked.against is None else replace(made, peers=asked.against)


def write_baseline(asked: Asked, pairs: Sequence[tuple[Workload, Task]]) -> int:
    """Measure some rounds, and keep what they gave, with the build if it is ours; return 0."""
    path, count = asked.write_baseline, guard.ROUNDS if asked.rounds is None else asked.rounds
    assert path is not None
    if count < 2:
        raise RequestError("a baseline takes at least two --rounds")
    request = _request(asked)
    results.refuse_unwritable(builds.beside(path, "0" * 64))
    with progress_bar() as step:
        names = [(work.name, task.name) for work, task in pairs]
        made, left_out = guard.write(path, request, names, count, step)
    out = console()
    for (work, task, _), why in left_out.items():
        out.print(f"left out: {work} {task}: {why}", markup=False)
    kept = f"its build is in {path.parent / made.build['file']}: keep both" if made.build else NO_BUILD
    out.print(f"{len(made.rows)} comparisons of {count} rounds in {path}; {kept}", markup=False)
    return 0


#: What is said where ratios to a peer decide.
NO_BUILD = (
    "the implementation is not ours, so ratios to peers decide, which shift with the load of the machine"
)


def run_gate(asked: Asked, pairs: Sequence[tuple[Workload, Task]]) -> int:
    """Compare with a baseline; return 1 if something is worse, or could not be measured any more."""
    assert asked.gate is not None
    baseline = baselines.read(asked.gate)
    if asked.workloads or asked.tasks:
        baseline = _part(baseline, pairs)
    request = _request(asked)
    baselines.refuse_other(
        baseline,
        baselines.machine(asked.device, request.threads),
        baselines.fingerprints(baseline.work),
    )
    unknown = [row["task"] for row in baseline.rows if row["task"] not in TASKS]
    if unknown:
        raise BaselineError(f"the baseline has a task that there is none of here: {unknown[0]!r}")
    with progress_bar() as step:
        found, ratios = guard.hold(baseline, asked.gate.parent, request, progress=step)
    if asked.output is not None:
        report = _report(baseline, found, ratios, asked)
        results.write_atomically(asked.output, json.dumps(report, indent=1) + "\n")
    show(baseline, found, ratios, asked.implementation)
    return int(any(change.verdict in ("worse", "missing") for change in found.values()))


def _part(baseline: Baseline, pairs: Sequence[tuple[Workload, Task]]) -> Baseline:
    names = {(work.name, task.name) for work, task in pairs}
    rows = [row for row in baseline.rows if (row["workload"], row["task"]) in names]
    if not rows:
        raise BaselineError("the baseline has none of the workloads and tasks that are asked for")
    return replace(baseline, rows=rows)


def _report(
    baseline: Baseline, found: Mapping[Key, Change], ratios: Mapping[Key, float], asked: Asked
) -> dict[str, Any]:
    """Return what became of each comparison as plain data; what was not measured is null."""
    before = baseline.ratios()
    rows = []
    for key, change in found.items():
        plain = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(change).items()
        }
        names = dict(zip(("workload", "task", "peer"), key, strict=True))
        rows.append({**names, **plain, "ratio_then": before.get(key), "ratio_now": ratios.get(key)})
    return {
        "kind": "keyedopt-gate",
        "schema": 1,
        "implementation": asked.implementation,
        "environment": environment(asked.device),
        "baseline": {"file": str(asked.gate), "implementation": baseline.implementation, **baseline.about},
        "limits": asdict(LIMITS),
        "rows": rows,
    }


def show(
    baseline: Baseline,
    found: Mapping[Key, Change],
    ratios: Mapping[Key, float],
    implementation: str,
    limits: Limits = LIMITS,
) -> None:
    """Print what became of each comparison, and what got worse."""
    out = console()
    about = (
        f"{baseline.implementation} of {baseline.about.get('written')}, commit {baseline.about.get('commit')}"
    )
    out.print(f"{implementation} against {about}" + ("" if baseline.build else f"; {NO_BUILD}"), markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task"):
        table.add_column(column)
    for column in ("change", "holds at", "chance", "rounds"):
        table.add_column(column, justify="right")
    for column in ("verdict", "peer"):
        table.add_column(column)
    for column in ("ratio then", "now"):
        table.add_column(column, justify="right")
    before = baseline.ratios()
    for key, change in found.items():
        cells = (f"{change.value:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}", f"{change.chance:.1g}")
        shown = (f"{each[key]:.2f}" if key in each else "-" for each in (before, ratios))
        table.add_row(
            *key[:2],
            *(cells if change.rounds else "---"),
            str(change.rounds),
            change.verdict,
            key[2] or "-",
            *shown,
        )
    out.print(table)
    for key, change in found.items():
        name = " ".join(key[:2])
        if change.verdict == "worse":
            out.print(
                f"worse: {name} takes {change.value:.0%} longer than in the baseline, by chance alone in "
                f"{change.chance:.2g} of runs{_beside(key, before, ratios)}",
                markup=False,
            )
        elif change.verdict == "missing":
            out.print(
                f"missing: {name} is in the baseline and cannot be measured any more: {change.why}",
                markup=False,
            )
    alarms = sum(change.verdict in ("worse", "missing") for change in found.values())
    unclear = sum(change.verdict == "unclear" for change in found.values())
    out.print(
        f"{len(found)} comparisons, {alarms} worse or missing, {unclear} unclear; changes below "
        f"{limits.tolerance:.0%} are no alarm; the level is {limits.risk:.0%} for all"
    )


def _beside(key: Key, before: Mapping[Key, float], now: Mapping[Key, float]) -> str:
    """Return a sentence on the ratio to the peer."""
    if key not in before or key not in now:
        return ""
    return f"; {key[2]} took {before[key]:.2f} times as long then, {now[key]:.2f} now"
