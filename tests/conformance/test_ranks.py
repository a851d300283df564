"""The ranks of a case: results, failures by rank, a time limit, and no process left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import Mismatch, expect_equal
from keyedopt.conformance.suite.support.ranks import on_ranks

SECONDS = 10.0


def number():
    return torch.distributed.get_rank()


def wait_for_others():
    torch.distributed.all_reduce(torch.ones(1))


def total():
    value = torch.ones(2) * number()
    torch.distributed.all_reduce(value)
    return number(), value.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_come_in_the_order_of_the_ranks(ranks):
    wanted = [(one, [sum(range(ranks))] * 2) for one in range(ranks)]
    assert on_ranks(total, ranks=ranks) == wanted


def hang():
    if number() == 0:
        wait_for_others()
    time.sleep(60)


def refuse():
    if number() == 1:
        raise ValueError("no such row")
    wait_for_others()


def die():
    if number() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_others()


def leave():
    if number() == 1:
        os._exit(3)
    wait_for_others()


def differ():
    expect_equal(number(), 0, "number")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (hang, ["rank 0 of 2 hung in", "in wait_for_others", "rank 1 of 2 hung in", "in hang"]),
        (refuse, ["rank 1 of 2 raised ValueError: no such row"]),
        (die, ["rank 1 of 2 ended: killed by signal 9"]),
        (leave, ["rank 1 of 2 ended: exit status 3"]),
        (differ, ["rank 1 of 2 saw 1"]),
    ],
)
def test_a_failure_names_the_rank_and_how_it_failed(body, words):
    began = time.monotonic()
    with pytest.raises(Mismatch) as found:
        on_ranks(body, limit=SECONDS)
    for word in words:
        assert word in str(found.value)
    assert time.monotonic() - began < SECONDS + 5


SLEEPERS = """
import os, time, torch
from keyedopt.conformance.suite.support.ranks import on_ranks
def body():
    print(os.getpid(), flush=True)
    time.sleep(60)
on_ranks(body, limit=60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(how):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(how)
        process.wait(timeout=10)
    end = time.monotonic() + 10
    while any(_runs(rank) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(rank) for rank in ranks)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
