"""The run: each task of each workload, an implementation beside its peers; results first, then times."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks import cost, tasks, timing
from keyedopt.benchmarks.environment import environment, free_memory
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, Task
from keyedopt.benchmarks.timing import Budget, Clock, Job
from keyedopt.benchmarks.workloads import STATE, WORKLOADS, Lookups, Workload
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.implementation import Implementation, TargetError, find

#: The version of the format of a report.
SCHEMA = 1
#: Results match if they are closer than this, in proportion to what the runs have changed.
TOLERANCE = 1e-3
#: Runs of each job before its results are compared; the first one makes state.
RUNS = 2
#: The status of a ratio that may be published; any other one says why not.
PUBLISHABLE = "publishable"
#: Peers that are shown where they are installed.
PEERS = ("torch", "fbgemm", "torchrec", "reference")
#: What is measured if nothing is asked for: what fits into two minutes on two cores.
DEFAULT = (
    ("8x200k-zipf", ("train-rowwise_adagrad", "train-sgd", "train-adagrad", "train-adam")),
    ("8x200k-uniform", ("train-rowwise_adagrad",)),
    ("small-step", ("train-rowwise_adagrad",)),
    ("sparse-zipf", ("sparse-adam",)),
    ("tower-24m", ("clip-adam",)),
    ("10k-parameters", ("state",)),
)


class RequestError(Exception):
    """Something that cannot be measured was asked for; the message says what can be."""


@dataclass(frozen=True)
class Comparison:
    """An implementation and a peer on one task of one workload.

    Args:
        workload, task, implementation, peer: what was done by whom.
        seconds, peer_seconds: median, and what a tenth and nine tenths of the runs are below.
        ratio, low, high: how many times as long the peer takes; the interval holds it at 95 %.
        noise: how far from 1 the interval of the implementation against itself reaches.
        pairs: how many pairs of runs.
        first, peer_first: seconds of the very first run.
        bytes: what must move.
        bound: seconds that this takes at the memory bandwidth that was measured beside it.
        copy_bound: and at that of a copy, see `timing.memory_bandwidth`.
        error: how far the results are apart, see `timing.relative_error`.
        matches: whether that is within the tolerance.
        samples, peer_samples: the seconds of each run.
        memory, peer_memory: bytes that a run needs at its peak besides what there is before it.
        launches, peer_launches: kernels that a run starts on a GPU.
    """

    workload: str
    task: str
    implementation: str
    peer: str
    seconds: dict[str, float]
    peer_seconds: dict[str, float]
    ratio: float
    low: float
    high: float
    noise: float
    pairs: int
    first: float
    peer_first: float
    bytes: int
    bound: float
    copy_bound: float
    error: float | None
    matches: bool
    samples: list[float]
    peer_samples: list[float]
    memory: int | None = None
    peer_memory: int | None = None
    launches: int | None = None
    peer_launches: int | None = None


@dataclass(frozen=True)
class Report:
    """What a run of the benchmarks found, or had so far; `to_dict` is what is written as JSON.

    `bandwidth` is the highest memory bandwidth that was measured on the way, in bytes a second.
    """

    implementation: str
    environment: dict[str, Any]
    bandwidth: float
    started: str
    seconds: float = 0.0
    conformance: dict[str, Any] | None = None
    rows: list[Comparison] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    schema: int = SCHEMA
    kind: str = "keyedopt-bench"
    complete: bool = True

    def status(self, row: Comparison) -> str:
        """Say whether a ratio may be published, and if not, why."""
        if not row.matches:
            return f"unverified: {row.peer}'s results differ"
        if self.environment["load"][0] > self.environment["cores"]:
            return "unverified: busy machine"
        if self.conformance is None:
            return "unverified: no --conformance"
        return PUBLISHABLE if self.conformance["conformant"] else "unverified: not conformant"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the status of each row."""
        rows = [{**asdict(row), "status": self.status(row)} for row in self.rows]
        return {**asdict(self), "rows": rows}


def chosen(
    works: Sequence[str], names: Sequence[str], known_works: Mapping[str, Workload] | None = None
) -> list[tuple[Workload, Task]]:
    """Return the tasks of the workloads that are asked for, or the default set if nothing is.

    Args:
        works: names of workloads.
        names: names of tasks.
        known_works: those that there are; by default `WORKLOADS`.

    Raises:
        RequestError: a name that is not known, or a workload and a task that do not go together.
    """
    all_works = WORKLOADS if known_works is None else known_works
    for asked, known, what in ((works, all_works, "workload"), (names, TASKS, "task")):
        for name in asked:
            if name not in known:
                raise RequestError(
                    f"there is no {what} {name!r}; `keyedopt bench --list` shows what there is"
                )
    usual = [(work, task) for work, some in DEFAULT for task in some]
    if not works and not names:
        pairs = usual
    elif not names:
        pairs = [(work, task) for work in works for task in _usual_tasks(all_works[work].kind, usual)]
    else:
        pairs = [(work, task) for work in works or [work for work, _ in DEFAULT] for task in names]
    fitting = [(all_works[w], TASKS[t]) for w, t in pairs if all_works[w].kind == TASKS[t].kind]
    if not fitting:
        raise RequestError("none of the workloads goes with a task that was asked for; see --list")
    return fitting


def _usual_tasks(kind: str, usual: Sequence[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(task for _, task in usual if TASKS[task].kind == kind))


def implementations(target: str, against: Sequence[str] | None) -> Iterator[tuple[Implementation, Any]]:
    """Yield the implementation, then its peers, each with its names; usual peers only where installed.

    Raises:
        TargetError: one that was asked for cannot be had.
    """
    ours = find(target)
    yield ours, ours.surface()
    for name in PEERS if against is None else against:
        install = ""
        try:
            peer = find(name)
            install = f"; {peer.install}" if peer.install else ""
            if peer.name != ours.name or against is not None:
                yield peer, peer.surface()
        except TargetError as error:
            if against is not None:
                raise TargetError(f"{error}{install}") from error


@dataclass
class Contestant:
    """A job that has run a few times, with what it has changed by then, and what else it costs."""

    job: Job
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    first: float
    memory: int | None = None
    launches: int | None = None


def start(make: Callable[[], Job], clock: Clock, warmup: float) -> Contestant:
    """Make a job, run it a few times, and then until it is warm."""
    job = make()
    before = job.results()
    times = []
    for _ in range(RUNS):
        times.append(timing.once(clock, job))
    made = Contestant(job, before, job.results(), times[0])
    timing.warm_up(clock, job, warmup - sum(times))
    return made


def error_between(ours: Contestant, theirs: Contestant) -> float:
    """Return how far two jobs are apart; infinity if they did not even begin alike."""
    alike = ours.before.keys() == theirs.before.keys() and all(
        torch.equal(value, theirs.before[name]) for name, value in ours.before.items()
    )
    return timing.relative_error(ours.before, ours.after, theirs.after) if alike else float("inf")


def compare(
    found: Sequence[tuple[Implementation, Any]],
    pairs: Sequence[tuple[Workload, Task]],
    device: str,
    budget: Budget,
    clock: Clock,
    progress: Callable[[str, int, int], object] = lambda text, done, total: None,
    cold: bool = False,
    keep: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Measure an implementation, the first one, against its peers.

    Args:
        found: implementations with their names.
        pairs: what is done with what.
        device: where.
        budget: how long.
        clock: by which times are taken.
        progress: called with what comes next, how many comparisons were tried, and how many there are.
        cold: whether caches are emptied before each run.
        keep: called after each comparison with what there is so far, which is not complete.
    """
    (ours, surface), *peers = found
    report = Report(
        implementation=ours.name,
        environment=environment(device),
        bandwidth=timing.memory_bandwidth(clock, device).best,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    begin = clock.now()
    done, total, highest = 0, len(pairs) * len(peers), report.bandwidth
    for work, task in pairs:

        def skip(who: str, why: str, work: Workload = work, task: Task = task) -> None:
            report.skipped.append({"workload": work.name, "task": task.name, "who": who, "why": why})

        progress(f"{work.name} {task.name}", done, total)
        mine = _attempt(ours, surface, task, work, device, clock, budget, skip, cold)
        beside: tuple[float, timing.Bandwidth] | None = None
        for peer, names in peers:
            progress(f"{work.name} {task.name}: {peer.name}", done, total)
            done += 1
            if mine is None:
                continue
            theirs = _attempt(peer, names, task, work, device, clock, budget, skip, cold)
            if theirs is None:
                continue
            if beside is None:
                half = replace(budget, seconds=budget.seconds / 2)
                noise = timing.ratio(*timing.measure(clock, mine.job, mine.job, half)).uncertainty
                beside = noise, timing.memory_bandwidth(clock, device)  # which changes where others work, too
            noise, here = beside
            highest = max(highest, here.best)
            head = (work.name, task.name, ours.name, peer.name)
            times = timing.measure(clock, mine.job, theirs.job, budget)
            report.rows.append(_row(head, mine, theirs, times, noise, task.moved(work), here))
            keep(replace(report, seconds=clock.now() - begin, bandwidth=highest, complete=False))
            del theirs
            gc.collect()
        del mine
        gc.collect()
    return replace(report, seconds=clock.now() - begin, bandwidth=highest)


def _attempt(
    about: Implementation,
    surface: Any,
    task: Task,
    work: Workload,
    device: str,
    clock: Clock,
    budget: Budget,
    skip: Callable[[str, str], None],
    cold: bool,
) -> Contestant | None:
    """Start a job, or note why there is none: a peer that breaks costs its own row, not the run."""
    maker = OWN_WAY.get(about.name, tasks.make)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about themselves
            _refuse_too_large(task, work, device)
            made = start(lambda: maker(surface, task, work, device), clock, budget.warmup)
            made.job.prepare()
            made.memory = cost.extra_memory(made.job.run, device)
            if torch.device(device).type == "cuda":
                made.job.prepare()
                made.launches = cost.launches(made.job.run, device)
            if cold:
                made.job = timing.after(cost.flush(device), made.job)
            return made
    except NotOffered as error:
        skip(about.name, str(error))
    except Exception as error:
        skip(about.name, one_line(error_text(error), 300))
    return None


def _refuse_too_large(task: Task, work: Workload, device: str) -> None:
    """Refuse tables that do not fit into the memory that is free.

    Raises:
        NotOffered: says what is needed and what there is.
    """
    if not isinstance(work, Lookups):
        return
    factor, _ = STATE.get(task.optimizer, (0, 0))
    needed, free = work.table_bytes() * (1 + factor), free_memory(device)
    if needed > free:
        raise NotOffered(f"too large: its tables need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def _row(
    head: tuple[str, str, str, str],
    mine: Contestant,
    theirs: Contestant,
    times: tuple[list[float], list[float]],
    noise: float,
    moved: int,
    bandwidth: timing.Bandwidth,
) -> Comparison:
    error = error_between(mine, theirs)
    ratio = timing.ratio(*times)
    return Comparison(
        *head,
        seconds=timing.quantiles(times[0]),
        peer_seconds=timing.quantiles(times[1]),
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        noise=noise,
        pairs=len(times[0]),
        first=mine.first,
        peer_first=theirs.first,
        bytes=moved,
        bound=moved / bandwidth.best,
        copy_bound=moved / bandwidth.copy,
        error=error if error < float("inf") else None,
        matches=error <= TOLERANCE,
        samples=[round(value, 7) for value in times[0]],
        peer_samples=[round(value, 7) for value in times[1]],
        memory=mine.memory,
        peer_memory=theirs.memory,
        launches=mine.launches,
        peer_launches=theirs.launches,
    )
