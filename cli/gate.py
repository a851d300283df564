"""``keyedopt bench --gate`` and ``--write-baseline``: ratios of today against stored ones."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks.baseline import Baseline, BaselineError, Key
from keyedopt.benchmarks.compare import RequestError
from keyedopt.benchmarks.gate import LIMITS, Change, Limits, judge
from keyedopt.benchmarks.rounds import Request, in_a_process
from keyedopt.benchmarks.tasks import TASKS, Task
from keyedopt.benchmarks.workloads import Workload
from keyedopt.cli.bench import Asked, progress_bar
from keyedopt.cli.bench_table import console
from keyedopt.conformance import result as results
from keyedopt.conformance.implementation import find

#: Threads of a round where nothing else is asked for: see `keyedopt.benchmarks.rounds`.
THREADS = 1
#: Rounds of a baseline where nothing else is asked for.
ROUNDS = 16


def _request(asked: Asked, wanted: Sequence[Key]) -> Request:
    find(asked.implementation)  # which says on one line what is wrong with it, before processes are started
    made = Request(asked.implementation, tuple(wanted), asked.device, asked.threads or THREADS)
    return made if asked.against is None else Request(**{**vars(made), "peers": asked.against})


def write_baseline(asked: Asked, pairs: Sequence[tuple[Workload, Task]]) -> int:
    """Measure some rounds, and keep their slowdowns; return 0."""
    assert asked.write_baseline is not None
    for name in asked.against or ():
        find(name)
    wanted = [(work.name, task.name, "") for work, task in pairs]
    request = _request(asked, wanted)
    rounds: list[dict[Key, tuple[float, float]]] = []
    count = ROUNDS if asked.rounds is None else asked.rounds
    if count < 2:
        raise RequestError("a baseline takes at least two --rounds")
    with progress_bar() as step:
        for number in range(count):
            step("rounds", number, count)
            rounds.append({item.key: (item.slowdown, item.noise) for item in in_a_process(request)})
    made = baselines.made_of(rounds, asked.device, request.threads, asked.implementation)
    if not made.rows:
        raise RequestError("nothing was compared: no peer does these tasks")
    results.write_atomically(asked.write_baseline, made.to_text())
    console().print(f"{len(made.rows)} comparisons of {count} rounds in {asked.write_baseline}")
    return 0


def run_gate(asked: Asked, pairs: Sequence[tuple[Workload, Task]]) -> int:
    """Compare with a baseline; return 1 if something is worse, or could not be measured any more."""
    assert asked.gate is not None
    baseline = baselines.read(asked.gate)
    if asked.workloads or asked.tasks:
        baseline = _part(baseline, pairs)
    threads = asked.threads or THREADS
    baselines.refuse_other(
        baseline, baselines.machine(asked.device, threads), baselines.fingerprints(baseline.work)
    )
    unknown = [row["task"] for row in baseline.rows if row["task"] not in TASKS]
    if unknown:
        raise BaselineError(f"the baseline has a task that there is none of here: {unknown[0]!r}")
    _request(asked, ())

    with progress_bar() as step:

        def measure(wanted: Sequence[Key]) -> Mapping[Key, float]:
            return {item.key: item.slowdown for item in in_a_process(_request(asked, wanted))}

        step("first round", 0, len(baseline.rows))
        found = judge(
            baseline,
            measure,
            progress=lambda rounds, left: step(
                f"rounds: {rounds}, undecided: {left}", len(baseline.rows) - left, len(baseline.rows)
            ),
        )
    show(found)
    return int(any(change.verdict in ("worse", "missing") for change in found.values()))


def _part(baseline: Baseline, pairs: Sequence[tuple[Workload, Task]]) -> Baseline:
    names = {(work.name, task.name) for work, task in pairs}
    rows = [row for row in baseline.rows if (row["workload"], row["task"]) in names]
    if not rows:
        raise BaselineError("the baseline has none of the workloads and tasks that are asked for")
    return Baseline(**{**vars(baseline), "rows": rows})


def show(found: Mapping[Key, Change], limits: Limits = LIMITS) -> None:
    """Print what became of each comparison, and what got worse."""
    out = console()
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "task", "against"):
        table.add_column(column)
    for column in ("change", "holds at", "chance", "rounds"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for key, change in found.items():
        cells = (f"{change.value:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}", f"{change.chance:.1g}")
        table.add_row(*key, *(cells if change.rounds else "---"), str(change.rounds), change.verdict)
    out.print(table)
    for (work, task, peer), change in found.items():
        if change.verdict == "worse":
            out.print(
                f"worse: {work} {task} takes {change.value:.0%} longer than in the baseline, against {peer}; "
                f"by chance alone in {change.chance:.2g} of runs"
            )
        elif change.verdict == "missing":
            out.print(
                f"missing: {work} {task} against {peer} is in the baseline and cannot be measured any more"
            )
    alarms = sum(change.verdict in ("worse", "missing") for change in found.values())
    unclear = sum(change.verdict == "unclear" for change in found.values())
    out.print(
        f"{len(found)} comparisons, {alarms} worse or missing, {unclear} unclear; changes below "
        f"{limits.tolerance:.0%} are no alarm; the level is {limits.risk:.0%} for all, at the baseline's load"
    )
