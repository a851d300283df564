"""The ranks of a case: results, failures by rank, a time limit, and no process left behind."""

import json
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
    time.sleep(120)


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
    on_ranks(number)  # imports what the ranks need
    began = time.monotonic()
    with pytest.raises(Mismatch) as found:
        on_ranks(body, limit=SECONDS)
    for word in words:
        assert word in str(found.value)
    assert time.monotonic() - began < 60, "ranks were not ended: they sleep longer, and a machine may be busy"


SLEEPERS = """
import os, time, torch
from keyedopt.conformance.suite.support.ranks import on_ranks
def body():
    os.write(1, b"%d\\n" % os.getpid())  # both ranks write to one pipe
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


def test_under_torchrun_one_rank_writes_and_all_exit_alike(tmp_path):
    """torch's optimizers in the backward pass fail cases of this area."""
    (tmp_path / "only_one_name.py").write_text(
        "from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward\n",
        encoding="utf-8",
    )
    check = (
        "keyedopt check only_one_name --area sharded --output result.json > $RANK.txt; echo $? > $RANK.code"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    subprocess.run(
        [*launcher, "bash", "-c", check],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=180,
        check=True,
    )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    outcomes = {case["case"].rpartition("::")[2]: case["outcome"] for case in result["cases"]}
    assert outcomes["test_in_backward_with_fsdp"] == "fail"
    assert [(tmp_path / f"{rank}.code").read_text(encoding="utf-8").strip() for rank in (0, 1)] == ["1"] * 2
    assert "SHARD-020" in (tmp_path / "0.txt").read_text(encoding="utf-8")
    assert not (tmp_path / "1.txt").read_text(encoding="utf-8")


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
