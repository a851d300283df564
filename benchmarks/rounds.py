"""A round: comparisons measured in a process of its own, on one thread, by processor time.

On a CPU the machine's other work is kept out as far as it can be: threads that wait for each other make wall
times meaningless where there are more of them than processors, so a round takes one thread and counts the
processor time of the process. What only waits is not seen by it; `keyedopt bench` sees that. On a GPU, events
are the clock. Of each job the lower quartile is kept: interruptions make times longer, never shorter.

Rounds ask for huge pages (glibc's malloc does so if told to). With small ones, where the pages of a table
happen to lie makes ratios of random accesses differ by a tenth from process to process.
"""

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from keyedopt.benchmarks import tasks, timing
from keyedopt.benchmarks.baseline import Key
from keyedopt.benchmarks.compare import start
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.timing import Budget, Clock, CudaClock, Job, ProcessorClock
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.implementation import Implementation, Surface, TargetError, find

#: What ours is compared with: the first of these that is installed and does the task.
PEERS = ("fbgemm", "torch", "torchrec", "reference")
#: Seconds of the clock for each comparison.
BUDGET = Budget(seconds=0.4, warmup=0.1, least=9, most=300)
#: Seconds after which a round has hung.
PATIENCE = 1800.0
#: What is put into the environment of a round.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
#: The part of the runs that were faster than what is kept of them.
QUARTILE = 0.25


class RoundError(Exception):
    """A round that broke down; the message says how."""


@dataclass(frozen=True)
class Request:
    """What a round measures.

    Args:
        implementation: the target that is measured.
        wanted: workload, task and peer of each comparison; without a peer, the first of `peers` that has it.
        device, threads: where, and on how many threads.
        peers: targets that ours may be compared with.
        seconds: of the clock for each comparison.
    """

    implementation: str
    wanted: tuple[tuple[str, str, str], ...]
    device: str = "cpu"
    threads: int = 1
    peers: tuple[str, ...] = PEERS
    seconds: float = BUDGET.seconds


@dataclass(frozen=True)
class Measured:
    """What a round says of one comparison.

    Args:
        workload, task, peer: what was compared.
        slowdown: log(ours / peer).
        noise: log of ours against itself, half of the runs against the others.
        seconds, peer_seconds: lower quartiles.
        pairs: how many.
    """

    workload: str
    task: str
    peer: str
    slowdown: float
    noise: float
    seconds: float
    peer_seconds: float
    pairs: int

    @property
    def key(self) -> Key:
        """What was compared."""
        return self.workload, self.task, self.peer


def clock_of(device: str) -> Clock:
    """Return the clock of rounds on a device."""
    return CudaClock() if torch.device(device).type == "cuda" else ProcessorClock()


def measured(key: Key, ours: Sequence[float], theirs: Sequence[float]) -> Measured:
    """Return what the times of a round say.

    >>> round(measured(("w", "t", "p"), [2.0] * 4, [1.0] * 4).slowdown, 3)
    0.693
    """
    kept, other = (float(np.quantile(times, QUARTILE)) for times in (ours, theirs))
    # Who comes first alternates, so that both halves have as many runs after the peer's as before them.
    parts = [[time for index, time in enumerate(ours) if index // 2 % 2 == part] for part in (0, 1)]
    halves = [float(np.quantile(part or ours, QUARTILE)) for part in parts]
    noise = float(np.log(halves[0] / halves[1]))
    return Measured(*key, float(np.log(kept / other)), noise, kept, other, len(ours))


def measure(request: Request, clock: Clock) -> Iterator[Measured]:
    """Measure in this process; what an implementation does not offer is left out."""
    found: dict[str, tuple[Implementation, Surface]] = {}

    def had(name: str) -> tuple[Implementation, Surface]:
        if name not in found:
            about = find(name)
            found[name] = about, about.surface()
        return found[name]

    def job_of(target: str, work_name: str, task_name: str) -> Job:
        about, surface = had(target)
        maker = OWN_WAY.get(about.name, tasks.make)
        work, task = WORKLOADS[work_name], TASKS[task_name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about themselves
            return start(lambda: maker(surface, task, work, request.device), clock, BUDGET.warmup).job

    budget = replace(BUDGET, seconds=request.seconds)
    for work_name, task_name, peer in request.wanted:
        ours = theirs = None
        try:
            ours = job_of(request.implementation, work_name, task_name)
            for name in (peer,) if peer else request.peers:
                try:
                    theirs = job_of(name, work_name, task_name)
                except (NotOffered, TargetError):
                    if peer:
                        raise
                    continue
                times = timing.measure(clock, ours, theirs, budget)
                yield measured((work_name, task_name, name), *times)
                break
        except NotOffered:
            pass
        del ours, theirs
        gc.collect()


def in_a_process(request: Request) -> list[Measured]:
    """Measure in a fresh process.

    Raises:
        RoundError: it broke down.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "keyedopt.benchmarks.rounds", json.dumps(asdict(request))],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            env={**os.environ, **HUGE_PAGES},
        )
    except subprocess.TimeoutExpired as error:
        raise RoundError(f"a round was not over after {PATIENCE:g} s") from error
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        raise RoundError(f"a round broke down: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return [
        Measured(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"workload"')
    ]


def main() -> None:
    """Measure what the argument requests, and print each comparison as a line of JSON."""
    plain: dict[str, Any] = json.loads(sys.argv[1])
    plain["wanted"] = tuple(map(tuple, plain["wanted"]))
    request = Request(**{**plain, "peers": tuple(plain["peers"])})
    torch.set_num_threads(request.threads)
    for item in measure(request, clock_of(request.device)):
        print(json.dumps(asdict(item)), flush=True)


if __name__ == "__main__":
    main()
