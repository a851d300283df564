"""A benchmark on a device refuses a task whose tensors are elsewhere."""

import pytest
from clocks import UnitClock

import keyedopt.conformance.pretend  # noqa: F401 - registers npu
from keyedopt.benchmarks import compare
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.workloads import Dense
from keyedopt.conformance.targets.implementation import find


def test_a_task_whose_tensors_are_elsewhere_is_refused():
    surface, task = find("fused").surface(), TASKS["clip-adam"]
    work = Dense("few", "for tests", ((4, 3), (3,)), 2)
    assert compare.start(lambda: make(surface, task, work, "npu"), UnitClock(), 0.0, "npu").first == 1.0
    with pytest.raises(NotOffered, match="its tensors are on cpu, not on npu"):
        compare.start(lambda: make(surface, task, work, "cpu"), UnitClock(), 0.0, "npu")
