"""Tasks of workloads, by several implementations."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.benchmarks.subjects import job_of
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.workloads import WORKLOADS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_task(
    benchmark: Any, pytestconfig: pytest.Config, workload: str, task: str, implementation: str
) -> None:
    """Time a task; what a run uses up is restored before each."""
    work = WORKLOADS[workload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about themselves
        try:
            job = job_of(implementation, task, work, DEVICE)
        except NotOffered as error:
            pytest.skip(str(error))
        before = {name: value.clone() for name, value in job.results().items()}

        def run() -> None:
            job.run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        def prepare() -> None:
            job.prepare()

        rounds = int(pytestconfig.getoption("rounds"))
        benchmark.pedantic(run, setup=prepare, rounds=rounds, iterations=1, warmup_rounds=1)
    benchmark.extra_info["bytes"] = TASKS[task].moved(work)
    after = job.results()
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
