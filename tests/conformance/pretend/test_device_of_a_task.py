"""Benchmarks on a device that is not torch's own."""

import pytest
from clocks import UnitClock

import keyedopt.conformance.pretend  # noqa: F401 - registers npu
from keyedopt.benchmarks import compare
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.worker import Worker
from keyedopt.benchmarks.workloads import Dense
from keyedopt.conformance.targets.find import find


def test_a_task_whose_tensors_are_elsewhere_is_refused():
    surface, task = find("fused").surface(), TASKS["clip-adam"]
    work = Dense("few", "for tests", ((4, 3), (3,)), 2)
    assert compare.start(lambda: make(surface, task, work, "npu"), UnitClock(), 0.0, "npu").first == 1.0
    with pytest.raises(NotOffered, match="its tensors are on cpu, not on npu"):
        compare.start(lambda: make(surface, task, work, "cpu"), UnitClock(), 0.0, "npu")


def test_a_process_of_a_gate_measures_on_the_device_of_an_imported_module(monkeypatch):
    monkeypatch.setattr("keyedopt.benchmarks.worker.WARM", 0.0)
    worker, line = Worker(), ("fused", "1k-parameters", "state", "npu", "")
    assert "no module 'no_such_module'" in worker.start(*line, ["no_such_module"])
    assert worker.start(*line, ["keyedopt.conformance.pretend"]) == ""
    assert len(worker.time(0.0)) == 1
