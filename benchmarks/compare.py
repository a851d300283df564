"""Measure an implementation beside its peers: first compare their results, then their times."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks import resources, tasks, timing
from keyedopt.benchmarks.environment import environment, free_memory
from keyedopt.benchmarks.peers import ONE_THREAD, OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, Task
from keyedopt.benchmarks.timing import Budget, Clock, Job
from keyedopt.benchmarks.workloads import STATE, WORKLOADS, Lookups, Workload
from keyedopt.conformance.results.errors import KeyedoptError, did_you_mean
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import Implementation, TargetError

#: The version of the format of a report.
SCHEMA = 1
#: A ratio is withheld if the ends of its interval are further apart than by this factor.
WIDEST = 2.0
#: Results match if `timing.relative_error` is at most this.
TOLERANCE = 1e-3
#: Runs of each job before its results are compared; the first one creates state.
RUNS = 2
#: The status of a ratio that may be published; any other status says why not.
PUBLISHABLE = "publishable"
#: The default peers; those that are not installed are left out.
PEERS = ("torch", "fbgemm", "torchrec", "reference")
#: The default set, which takes three minutes on two cores. Tables are in the form of torchrec's models, and
#: once with an input, an output and a gradient for each feature.
DEFAULT = (
    (
        "8x200k-zipf",
        (
            *(
                "train_joined-rowwise_adagrad",
                "train_joined-sgd",
                "train_joined-adagrad",
                "train_joined-adam",
            ),
            "train-rowwise_adagrad",
        ),
    ),
    ("8x200k-uniform", ("train_joined-rowwise_adagrad",)),
    ("26-tables", ("train_joined-rowwise_adagrad",)),
    ("100-tables", ("train_joined-rowwise_adagrad",)),
    ("small-step", ("train_joined-rowwise_adagrad",)),
    ("sparse-zipf", ("sparse-adam",)),
    ("tower-24m", ("clip-adam",)),
    ("10k-parameters", ("state",)),
)


class RequestError(KeyedoptError):
    """A request cannot be measured; the message says what can be."""


@dataclass(frozen=True)
class Comparison:
    """An implementation and a peer on one task of one workload.

    Args:
        workload, task, implementation, peer: their names.
        seconds, peer_seconds: the median, the 10th and the 90th percentile.
        ratio, low, high: how many times as long the peer takes, with its 95 % confidence interval.
        noise: the noise floor: the largest distance from 1 of the implementation against itself.
        first, peer_first: the seconds of the first run, which may compile.
        bytes: the bytes that must move.
        bound: the seconds for these bytes at the memory bandwidth that was measured in the same run.
        copy_bound: the same at the bandwidth of a copy, see `timing.memory_bandwidth`.
        error: the difference of the results, see `timing.relative_error`.
        matches: whether the error is within `TOLERANCE`.
        pairs, samples, peer_samples: the number of pairs of runs, and the seconds of each run.
        memory, peer_memory: the peak memory of a run beyond the memory in use before it, in bytes.
        launches, peer_launches: the number of kernels that a run starts on a GPU.
        threads, peer_threads: of the CPU.
        backend, peer_backend: the backends that ran, if the implementation can name them.
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
    threads: int | None = None
    peer_threads: int | None = None
    backend: str | None = None
    peer_backend: str | None = None

    @property
    def withheld(self) -> bool:
        """Whether the interval is so wide that the ratio says nothing."""
        return not self.high <= WIDEST * self.low


@dataclass(frozen=True)
class Report:
    """The result of `compare`; `to_dict` returns its JSON.

    `bandwidth` is the highest memory bandwidth that was measured during the run, in bytes per second.
    `complete` is false in the report of an interrupted run.
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
        """Return `PUBLISHABLE`, or why a ratio may not be published."""
        if not row.matches:
            return f"unverified: {row.peer}'s results differ"
        if row.withheld:
            return "withheld: wide interval"
        if self.environment["load"][0] > self.environment["cores"]:
            return "unverified: busy machine"
        if self.conformance is None:
            return "unverified: no --conformance"
        if self.conformance["conformant"]:
            return PUBLISHABLE
        return f"unverified: {self.conformance.get('verdict', 'not conformant')}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the status of each row."""
        rows = [{**asdict(row), "status": self.status(row)} for row in self.rows]
        return {**asdict(self), "rows": rows}


def chosen(
    works: Sequence[str], names: Sequence[str], known_works: Mapping[str, Workload] | None = None
) -> list[tuple[Workload, Task]]:
    """Return pairs of workloads and tasks; the default set if no names are given.

    Args:
        works: names of workloads.
        names: names of tasks.
        known_works: the workloads by name; by default `WORKLOADS`.

    Raises:
        RequestError: a name is unknown, or no workload is of the kind that a task needs.
    """
    all_works = WORKLOADS if known_works is None else known_works
    for asked, known, what in ((works, all_works, "workload"), (names, TASKS, "task")):
        for name in asked:
            if name not in known:
                near = did_you_mean(name, known)
                raise RequestError(f"no {what} {name!r}: `keyedopt bench list` shows the names{near}")
    usual = [(work, task) for work, some in DEFAULT for task in some]
    if not works and not names:
        pairs = usual
    elif not names:
        some = dict.fromkeys(task for _, task in usual)
        pairs = [(work, t) for work in works for t in some if TASKS[t].kind == all_works[work].kind]
    else:
        pairs = [(work, task) for work in works or [work for work, _ in DEFAULT] for task in names]
    fitting = [(all_works[w], TASKS[t]) for w, t in pairs if all_works[w].kind == TASKS[t].kind]
    if not fitting:
        raise RequestError("no workload is of the kind that a task needs: see `keyedopt bench list`")
    return fitting


def implementations(
    target: str,
    against: Sequence[str] | None,
    leave_out: Callable[[str, str], None] = lambda name, why: None,
) -> Iterator[tuple[Implementation, Any]]:
    """Yield the implementation, then its peers, each with its surface.

    Args:
        target: the implementation.
        against: the peers; None for the default peers that are installed.
        leave_out: called with the name of a default peer that is not installed, and the reason.

    Raises:
        TargetError: a target that was named cannot be loaded.
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
            leave_out(name, f"{error}{install}")


@dataclass
class Contestant:
    """A job after its first runs: its results before and after them, the backends that ran, other costs."""

    job: Job
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    first: float
    memory: int | None = None
    launches: int | None = None
    backend: str | None = None


def start(
    make: Callable[[], Job], clock: Clock, warmup: float, device: str, about: Implementation | None = None
) -> Contestant:
    """Make a job of an implementation, run it `RUNS` times for its results, and warm it up.

    Raises:
        NotOffered: the tensors of the job are not on the device, or another backend ran than was asked for.
    """
    if about is not None:
        about.ran()
    job = make()
    before = job.results()
    places = {tensor.device.type for tensor in before.values()}
    if places and torch.device(device).type not in places:
        raise NotOffered(f"its tensors are on {', '.join(sorted(places))}, not on {device}")
    times = []
    for _ in range(RUNS):
        times.append(timing.once(clock, job))
    made = Contestant(job, before, job.results(), times[0])
    if about is not None:
        ran = about.ran()
        if why := about.another_ran(ran):
            raise NotOffered(why)
        made.backend = ran or None
    timing.warm_up(clock, job, warmup - sum(times))
    return made


def error_between(ours: Contestant, theirs: Contestant) -> float:
    """Return the difference of the results of two jobs, see `timing.result_error`."""
    return timing.result_error((ours.before, ours.after), (theirs.before, theirs.after))


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
    """Compare the first implementation with each of the others.

    Args:
        found: implementations with their surfaces.
        pairs: workloads and tasks.
        device: where they run.
        budget: how long a comparison may take.
        clock: the clock for all times.
        progress: called with the next comparison, the number of tried ones, and their total.
        cold: whether to flush the caches before each run.
        keep: called after each comparison with the incomplete report so far.
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
                beside = noise, timing.memory_bandwidth(clock, device)  # varies with the load of the machine
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
    """Start a job, or record why it cannot start: a peer that fails costs its own row, not the run."""
    maker = OWN_WAY.get(about.name, tasks.make)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn about themselves
            _refuse_too_large(task, work, device)
            made = start(lambda: maker(surface, task, work, device), clock, budget.warmup, device, about)
            made.job.prepare()
            made.memory = resources.extra_memory(made.job.run, device)
            if torch.device(device).type == "cuda":
                made.job.prepare()
                made.launches = resources.launches(made.job.run, device)
            if cold:
                made.job = timing.after(resources.flush(device), made.job)
            return made
    except NotOffered as error:
        skip(about.name, str(error))
    except Exception as error:
        skip(about.name, one_line(error_text(error), 300))
    return None


def _refuse_too_large(task: Task, work: Workload, device: str) -> None:
    """Raise NotOffered if the tables and their state do not fit into free memory."""
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
        threads=torch.get_num_threads(),
        backend=mine.backend,
        peer_backend=theirs.backend,
        peer_threads=1 if head[3] in ONE_THREAD else torch.get_num_threads(),
    )
