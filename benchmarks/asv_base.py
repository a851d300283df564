"""What the classes that asv finds in `asv_suites` share.

Times are taken by our own clock, CUDA events on a GPU, and given to asv as samples: a ``track_`` benchmark of
unit seconds that returns ``{"samples": [...], "number": 1}`` gets a median, an interval and a comparison as
asv's own times do. (asv's documents do not say so; a test does.) Each run changes state, so that ``number``
is 1, and what a run uses up is restored before the next.
"""

from typing import Any, ClassVar

import torch

from keyedopt.benchmarks.subjects import job_of, nothing_changed, samples
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.timing import Budget, quantiles
from keyedopt.benchmarks.workloads import WORKLOADS

#: Where everything runs: the machine's name tells which it was; CUDA_VISIBLE_DEVICES= asks for the CPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: How long one benchmark measures.
BUDGET = Budget(seconds=0.2, warmup=0.1, least=4, most=100)


class Suite:
    """A task of each workload, by each implementation; what one does not offer is left out.

    ``params`` are lists of tasks (or optimizers), workloads and implementations, the same on every machine:
    asv's page knows one list.
    """

    timeout: ClassVar[float] = 300.0
    param_names: ClassVar[tuple[str, ...]] = ("task", "workload", "implementation")
    #: What comes before a parameter to make it the name of a task.
    prefix: ClassVar[str] = ""
    device: ClassVar[str] = DEVICE

    def setup(self, task: str, workload: str, implementation: str) -> None:
        """Make the job.

        Raises:
            NotImplementedError: which asv takes for "left out".
        """
        self.moved = TASKS[self.prefix + task].moved(WORKLOADS[workload])
        try:
            self.job = job_of(implementation, self.prefix + task, WORKLOADS[workload], self.device)
        except NotOffered as error:
            raise NotImplementedError(str(error)) from error
        if nothing_changed(self.job):
            raise RuntimeError(f"{task} of {workload} by {implementation} does nothing")

    def _samples(self) -> dict[str, Any]:
        return {"samples": samples(self.job, self.device, BUDGET), "number": 1}

    def _throughput(self) -> float:
        """Return the bytes that must move over the median time, in GB/s: to look at, never for a gate."""
        return self.moved / quantiles(samples(self.job, self.device, BUDGET))["median"] / 1e9


class OnHost(Suite):
    """A suite that asv measures the host's memory of."""

    device: ClassVar[str] = "cpu"


class OnDevice(Suite):
    """A suite that there is on a GPU alone."""

    def setup(self, task: str, workload: str, implementation: str) -> None:
        """Make the job.

        Raises:
            NotImplementedError: there is no GPU, or what `Suite` leaves out.
        """
        if self.device == "cpu":
            raise NotImplementedError("of the host, asv measures the peak itself")
        super().setup(task, workload, implementation)

    def _device_memory(self) -> int:
        """Return the bytes that a run takes on the device beside what is there already, at its peak."""
        self.job.prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.job.run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
