"""Tasks of workloads, by several implementations."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.benchmarks.asv.implementations import job_of
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.timing import clock_of
from keyedopt.benchmarks.workloads import WORKLOADS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_task(
    benchmark: Any, measure: Any, pytestconfig: pytest.Config, workload: str, task: str, implementation: str
) -> None:
    """Time a task; the task must change something."""
    work = WORKLOADS[workload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about themselves
        try:
            job = job_of(implementation, task, work, DEVICE)
        except NotOffered as error:
            pytest.skip(str(error))
        before = {name: value.clone() for name, value in job.results().items()}
        measure(clock_of(DEVICE), job, int(pytestconfig.getoption("rounds")), 1)
    benchmark.extra_info["bytes"] = TASKS[task].moved(work)
    after = job.results()
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
