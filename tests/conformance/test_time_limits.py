"""Time limits count what a process uses, also on a busy machine; a case that reaches its limit runs again."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from making import TARGETS, module, plain_cases

from keyedopt.conformance.run import runner
from keyedopt.conformance.run.processes import ProcessError
from keyedopt.conformance.run.runner import Options
from keyedopt.conformance.suite.support import clock, ranks, replica_groups, torchrun
from keyedopt.conformance.suite.support.assertions import Late
from keyedopt.conformance.suite.support.clock import BACKSTOP, STEP, Clock

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)


@pytest.fixture
def machine(monkeypatch):
    """Return what lets time pass for a clock: seconds, the CPU time used then, whether all threads sleep."""
    now, used, asleep = [0.0], [0.0], [True]
    monkeypatch.setattr(clock, "families", lambda pids: pids)
    monkeypatch.setattr(clock, "_use_and_sleep", lambda pid: (used[0], asleep[0]))
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    watched = Clock([1])

    def passes(seconds, spent, sleeps):
        now[0] += seconds
        used[0] += spent
        asleep[0] = sleeps
        watched.reached(1e9)
        return watched

    passes(1.0, 0.0, True)  # the first look
    return passes


def test_a_process_that_gets_no_processor_uses_no_time(machine):
    for _ in range(100):
        watched = machine(1.0, 0.01, False)
    assert watched.seconds == pytest.approx(1.0)
    assert not watched.reached(10.0)


def test_a_process_that_sleeps_uses_the_time_that_passes(machine):
    for _ in range(10):
        watched = machine(1.0, 0.0, True)
    assert watched.seconds == 10.0
    assert watched.reached(10.0)


def test_several_processes_use_no_more_time_than_passes(machine):
    for _ in range(10):
        watched = machine(1.0, 3.0, False)
    assert watched.seconds == 10.0


def test_what_is_never_given_a_processor_is_ended_at_last(machine):
    for _ in range(int(2 * BACKSTOP)):
        watched = machine(1.0, 0.0, False)
    assert watched.reached(2.0)
    assert not watched.reached(4.0)


def test_a_machine_that_stood_still_uses_no_time(machine):
    assert machine(1000.0, 0.0, True).seconds == STEP


def test_the_kernel_says_what_a_process_and_its_children_do():
    pids = []
    for work in (signal.pause, lambda: [None for _ in iter(int, 1)]):
        pids.append(os.fork())
        if not pids[-1]:
            work()
    try:
        sleeping, busy = pids
        while not clock._use_and_sleep(sleeping)[1]:
            time.sleep(0.01)
        while clock._use_and_sleep(busy)[0] < 0.1:
            time.sleep(0.01)
        assert not clock._use_and_sleep(busy)[1]
        assert set(pids) <= set(clock.families([os.getpid()]))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert clock._use_and_sleep(busy) == (0.0, True)


def test_the_time_limit_reaches_the_smoke_stage_torchrun_and_replica_groups(monkeypatch):
    waits = {}

    class NoProcesses:
        def start(self, module, arguments, channel):
            channel.close()
            waits["smoke"] = json.loads(arguments[0])["seconds"]
            raise ProcessError("enough")

    with pytest.raises(runner.RunError):
        runner._examine("acme", Options(), 2000.0, NoProcesses())
    monkeypatch.setattr(torchrun, "meet", lambda place, seconds, said="": waits.update({place: seconds}))
    monkeypatch.setattr(torchrun, "store", lambda seconds: waits)
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert runner._meet("acme", 2000.0) == 2000.0
    with pytest.raises(ValueError, match="empty"):
        torchrun.largest_code(0, 2000.0)
    monkeypatch.setattr(replica_groups, "wait_for", lambda groups, limit: waits.update(groups=limit))
    monkeypatch.setattr(ranks, "_LIMIT", [2000.0])
    replica_groups.Groups(None, None).answers([])
    assert waits.keys() == {"smoke", "check acme", "end", "groups"}
    assert min(waits.values()) >= 2000.0


def test_a_replica_group_that_reaches_the_limit_names_the_option(monkeypatch):
    late = SimpleNamespace(number=3, running=True, late=True, where=lambda: "a line")
    monkeypatch.setattr(replica_groups, "wait_for", lambda groups, limit: None)
    with pytest.raises(Late, match=r"group 3 reached the time limit \(--time-limit\) in a line"):
        replica_groups.Groups(None, None).answers([late])


#: An implementation that takes too long, once.
SLOW_ONCE = """\
import os, sys, time
from keyedopt.reference import *
from keyedopt import reference
def once():
    if "smoke" in sys.argv[0]:
        return
    try:
        os.mkdir({folder!r})
    except FileExistsError:
        {later}
    while {work}:
        pass
class KeyedOptimizerWrapper(reference.KeyedOptimizerWrapper):
    def __init__(self, *given, **named):
        once()
        super().__init__(*given, **named)
def apply_optimizer_in_backward(*given, **named):
    once()
    return reference.apply_optimizer_in_backward(*given, **named)
"""


@slow
@pytest.mark.parametrize(
    ("clause", "work"),
    [(None, "not time.sleep(1)"), (None, "True"), ("SHARD-020", "True")],
    ids=["sleeps", "computes", "computes in ranks"],
)
def test_a_case_that_reaches_its_limit_is_run_once_more_alone(clause, work, tmp_path):
    module(tmp_path, "tardy", SLOW_ONCE.format(folder=str(tmp_path / "once"), work=work, later="return"))
    clauses = (clause,) if clause else tuple(case.clauses[0] for case in plain_cases()[:3])
    found = runner.run("tardy", Options(clauses=clauses, limit=3, workers=2), path=[str(tmp_path), TARGETS])
    assert {case.outcome for case in found.cases} == {"pass"}
    assert sorted(case.runs for case in found.cases)[-2:] == ([1, 2] if len(found.cases) > 1 else [2])


@slow
def test_a_target_that_reaches_its_limit_often_is_not_run_again(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "MOST_AGAIN", 1)
    source = SLOW_ONCE.format(folder=str(tmp_path / "once"), work="True", later="pass")
    module(tmp_path, "tardy", source)
    clauses = tuple(case.clauses[0] for case in plain_cases()[:2])
    found = runner.run("tardy", Options(clauses=clauses, limit=1, workers=1), path=[str(tmp_path), TARGETS])
    assert {case.outcome for case in found.cases} == {"error"}
    once, twice = ([case for case in found.cases if case.runs == runs] for runs in (1, 2))
    assert len(twice) == 1
    assert len(once) == len(found.cases) - 1 > 0
