"""``keyedopt bench gate BASE``: compare the checkout with a base commit, and name what takes longer."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from keyedopt.benchmarks import commit_builds, gate
from keyedopt.benchmarks.ab_round import Key
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.gate import LIMITS, Change
from keyedopt.cli.bench_builds import Asked, built_pair
from keyedopt.cli.bench_table import console
from keyedopt.conformance.results import model as results

#: The verdicts that make the gate fail.
ALARMS = ("worse", "missing")


def run_gate(base: str, asked: Asked) -> int:
    """Measure both builds; return 1 if a comparison is worse or missing, else 0.

    Raises:
        KeyedoptError: an option is wrong, a commit cannot be found or built, or nothing can be measured.
    """
    keys = asked.keys()
    root = commit_builds.repository_root(Path.cwd())
    commits = [commit_builds.resolve(base, root), commit_builds.commit_of_checkout(root)]
    with built_pair(root, commits, asked) as (request, step):
        noise, left_out = gate.noise_floor(request, keys, asked.rounds, step)
        found = gate.run(request, noise, progress=step)
    if asked.output is not None:
        report = {
            "kind": "keyedopt-gate",
            "schema": 2,
            "implementation": asked.implementation,
            "environment": environment(asked.device),
            "base": {"ref": base, "commit": commits[0]},
            "checkout": commits[1],
            "threads": asked.threads,
            "limits": asdict(LIMITS),
            "rows": [_row(key, change, noise[key]) for key, change in found.items()],
            "left_out": [_named(key) | {"why": why} for key, why in left_out.items()],
        }
        results.write_report(asked.output, report)
    show(found, left_out, f"{asked.implementation} of {commits[1][:10]} against {base} ({commits[0][:10]})")
    return int(any(change.verdict in ALARMS for change in found.values()))


def _named(key: Key) -> dict[str, Any]:
    return dict(zip(("workload", "task"), key, strict=True))


def _row(key: Key, change: Change, noise: list[float]) -> dict[str, Any]:
    """Return a verdict as plain data; numbers that were not measured are null."""
    numbers = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in asdict(change).items()
    }
    return {**_named(key), **numbers, "noise": noise}


def show(found: Mapping[Key, Change], left_out: Mapping[Key, str], title: str) -> None:
    """Print the verdicts, then a line for each alarm."""
    out = console()
    out.print(title)
    for key, why in left_out.items():
        out.print(f"left out: {' '.join(key)}: {why}")
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task"):
        table.add_column(column)
    for column in ("slowdown", "bounds", "chance", "rounds"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for key, change in found.items():
        cells = (f"{change.value:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}", f"{change.chance:.1g}")
        table.add_row(*key, *(cells if change.rounds else "---"), str(change.rounds), change.verdict)
    out.print(table)
    for key, change in found.items():
        name = " ".join(key)
        if change.verdict == "worse":
            out.print(
                f"worse: {name} takes {change.value:.0%} longer than in the base; without a change, "
                f"{change.chance:.2g} of runs show as much"
            )
        elif change.verdict == "missing":
            out.print(f"missing: {name} can be measured in the base, but not in the checkout: {change.why}")
    alarms = sum(change.verdict in ALARMS for change in found.values())
    unclear = sum(change.verdict == "unclear" for change in found.values())
    out.print(
        f"{len(found)} comparisons, {alarms} worse or missing, {unclear} unclear; slowdowns below "
        f"{LIMITS.tolerance:.0%} raise no alarm; a run without a change raises one with {LIMITS.risk:.0%}"
    )
