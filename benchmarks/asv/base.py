"""Base classes of the asv suites.

asv takes every class that a module of its benchmark folder names for a suite. The base classes are therefore
outside of the folder, and suites import this module, not its classes.

The timing core takes the times, with CUDA events on a GPU, and asv gets them as samples: a ``track_``
benchmark of unit seconds that returns ``{"samples": [...], "number": 1}`` gets a median, an interval and a
comparison like asv's own times. (asv does not document this; a test holds it.) `number` is 1 because each run
changes state, and `Job.prepare` restores what a run consumes.
"""

import contextlib
import math
from typing import Any, ClassVar

import torch

from keyedopt.benchmarks.asv.history import RATIO
from keyedopt.benchmarks.asv.implementations import job_of, nothing_changed
from keyedopt.benchmarks.resources import extra_memory
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.timing import Budget, Job, clock_of, measure, quantiles, samples, warm_up
from keyedopt.benchmarks.workloads import WORKLOADS, Workload

#: The device of all suites; CUDA_VISIBLE_DEVICES= selects the CPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The budget of one benchmark.
BUDGET = Budget(seconds=0.2, warmup=0.1, least=4, most=100)
#: Pinned libraries, of which the first one that does a task is its peer.
PEERS = ("fbgemm", "torch", "torchrec")


class Suite:
    """Tasks × workloads × implementations; what an implementation does not offer is left out.

    The lists in `params` are the same on every machine, because asv's page has one list for all of them.
    """

    timeout: ClassVar[float] = 300.0
    param_names: ClassVar[tuple[str, ...]] = ("task", "workload", "implementation")
    #: Joined with the first parameter, the name of a task.
    prefix: ClassVar[str] = ""
    device: ClassVar[str] = DEVICE

    def setup(self, task: str, workload: str, implementation: str) -> None:
        """Make the job.

        Raises:
            NotImplementedError: the implementation does not offer the task; asv leaves the combination out.
            RuntimeError: the job changes nothing, so its time means nothing.
        """
        self.asked = implementation, self.prefix + task, WORKLOADS[workload], self.device
        self.moved = TASKS[self.prefix + task].moved(WORKLOADS[workload])
        try:
            self.job = job_of(*self.asked)
        except NotOffered as error:
            raise NotImplementedError(str(error)) from error
        if nothing_changed(self.job):
            raise RuntimeError(f"{task} of {workload} by {implementation} changes nothing")

    def _times(self) -> list[float]:
        return samples(clock_of(self.device), self.job, BUDGET)


class Timed(Suite):
    """A suite that measures the seconds of its jobs, and their ratio to those of a peer."""

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run, as asv's samples."""
        return {"samples": self._times(), "number": 1}

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]

    def track_ratio(self, *_: str) -> Any:
        """Return the time of each run over that of a peer's run in this process, as asv's samples.

        The peer is the first of `PEERS` that does the task. Its version is pinned, and its runs alternate
        with those of the implementation, so a busy machine slows both. Alarms use this ratio, not seconds.

        Returns:
            asv's samples; NaN, which asv shows as n/a, if the implementation is itself a peer, or no peer
            does the task.
        """
        implementation, task, work, device = self.asked
        peer = None if implementation in PEERS else _peer_of(task, work, device)
        if peer is None:
            return math.nan  # asv leaves out a combination for an error of `setup` only
        clock = clock_of(device)
        for job in (self.job, peer):
            warm_up(clock, job, BUDGET.warmup)
        ours, theirs = measure(clock, self.job, peer, BUDGET)
        return {"samples": [own / other for own, other in zip(ours, theirs, strict=True)], "number": 1}

    track_ratio.unit = RATIO  # type: ignore[attr-defined]


def _peer_of(task: str, work: Workload, device: str) -> Job | None:
    for name in PEERS:
        with contextlib.suppress(NotOffered):
            return job_of(name, task, work, device)
    return None


class HostMemory(Suite):
    """A suite that asv measures the peak memory of, on the host; it includes making the job."""

    device: ClassVar[str] = "cpu"

    def peakmem_run(self, *_: str) -> None:
        """Run the job once."""
        self.job.prepare()
        self.job.run()


class DeviceMemory(Suite):
    """A suite that measures the peak memory of a run on a GPU, beyond the memory in use before it."""

    def setup(self, task: str, workload: str, implementation: str) -> None:
        """Make the job.

        Raises:
            NotImplementedError: there is no GPU, or `Suite.setup` leaves the combination out.
        """
        if self.device == "cpu":
            raise NotImplementedError("a GPU is needed; asv measures the peak memory of the host")
        super().setup(task, workload, implementation)

    def track_bytes(self, *_: str) -> int | None:
        """Return the bytes."""
        self.job.prepare()
        return extra_memory(self.job.run, self.device)

    track_bytes.unit = "bytes"  # type: ignore[attr-defined]


def throughput(suite: Suite) -> float:
    """Return the bytes that a job must move over its median time, in GB/s."""
    return suite.moved / quantiles(suite._times())["median"] / 1e9
