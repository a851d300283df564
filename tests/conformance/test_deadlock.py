"""Deadlocks of ranks are recognized, busy or waiting ranks are no deadlock, and one worker starts ranks."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from keyedopt.conformance.run.protocol import Writer, claimed
from keyedopt.conformance.suite.support import deadlock
from keyedopt.conformance.suite.support.rank_processes import RankProcess, wait_for

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)


def sleep(rank):
    rank.channel.recv(1)


def wake_up_often(rank):
    while not select.select([rank.channel], [], [], 0.02)[0]:
        pass


def compute(rank):
    while True:
        sum(range(1000))


def wait_for_a_child(rank):
    subprocess.run(["sleep", "60"], check=True)


def watched(looks, *bodies):
    """Watch forks that run these functions for so many looks; return whether they are in a deadlock."""
    ranks = [RankProcess(number, body) for number, body in enumerate(bodies)]
    watch = deadlock.Watch()
    try:
        for _ in range(looks):
            time.sleep(deadlock.LOOK)
            seen = watch.deadlocked([rank.pid for rank in ranks])
        return seen
    finally:
        for rank in ranks:
            for child in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            rank.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deadlock, "LOOK", 0.1)


@slow
def test_ranks_that_only_sleep_are_in_a_deadlock_after_enough_looks():
    assert watched(deadlock.LOOKS + 2, sleep, sleep)
    assert not watched(deadlock.LOOKS - 1, sleep, sleep)


@slow
@pytest.mark.parametrize("body", [wake_up_often, compute, wait_for_a_child])
def test_one_rank_that_does_something_makes_no_deadlock(body):
    assert not watched(2 * deadlock.LOOKS, sleep, body)


def test_a_process_that_has_ended_makes_no_deadlock():
    assert not deadlock.Watch().deadlocked([2**22 + 1])


@slow
@pytest.mark.parametrize("together", [True, False])
def test_only_ranks_that_wait_for_nobody_else_can_be_in_a_deadlock(together):
    ranks = [RankProcess(number, sleep) for number in range(2)]
    began = time.monotonic()
    wait_for(ranks, 6.0, together=together)
    took = time.monotonic() - began
    assert (took < 6.0) == together
    assert {rank.end()[0] for rank in ranks} == {"hung" if together else "late"}


@pytest.fixture
def workers(tmp_path):
    """Two forks with writers for five cases, of which two start ranks; and the number of taken cases."""
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            mine, theirs = socket.socketpair()
            stack.enter_context(mine)
            if not (pid := os.fork()):
                writer = Writer(tmp_path)
                while theirs.recv(1):
                    theirs.send(bytes([writer.claim(2, 5)]))
                os._exit(0)
            theirs.close()
            stack.callback(os.waitpid, pid, 0)
            stack.callback(os.kill, pid, signal.SIGKILL)
            ends.append((lambda end=mine: (end.send(b"?"), end.recv(1)[0])[1], pid))
        yield ends, lambda: claimed(tmp_path, 5)


def test_the_first_worker_takes_the_cases_with_ranks(workers):
    ((first, _), (second, _)), taken = workers
    assert [first(), second(), first(), second(), first(), first(), second()] == [0, 2, 1, 3, 4, 5, 5]
    assert taken() == 5


def test_another_worker_takes_a_case_with_ranks_that_is_left(workers):
    ((first, _), (second, _)), taken = workers
    assert [first(), second(), second(), second(), second(), second()] == [0, 2, 3, 4, 1, 5]
    assert taken() == 5


@slow
def test_another_worker_helps_the_first_one_that_is_late(workers):
    ((first, _), (second, _)), _ = workers
    assert [first(), second()] == [0, 2]
    time.sleep(3.2)
    assert second() == 1


def test_a_case_is_taken_once_also_if_its_worker_has_ended(workers):
    ((first, pid), (second, _)), _ = workers
    assert [first(), second()] == [0, 2]
    os.kill(pid, signal.SIGKILL)
    assert [second() for _ in range(4)] == [3, 4, 1, 5]
