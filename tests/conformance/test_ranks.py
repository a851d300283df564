"""The ranks of a case: results, failures by rank, a time limit, and no process left behind."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from keyedopt.conformance.suite.support import ranks
from keyedopt.conformance.suite.support.assertions import Mismatch, expect_equal
from keyedopt.conformance.suite.support.described import CannotRun, MissingName
from keyedopt.conformance.suite.support.device import choose_device, the_device
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.ranks import end_kept_ranks, on_each_rank, on_ranks
from keyedopt.conformance.suite.support.sharded import distributed, gathered

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

SECONDS = 10.0


def number():
    return torch.distributed.get_rank()


def wait_for_others():
    torch.distributed.all_reduce(torch.ones(1))


def total():
    value = torch.ones(2) * number()
    torch.distributed.all_reduce(value)
    return number(), value.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_the_order_of_the_ranks(size):
    wanted = [(one, [sum(range(size))] * 2) for one in range(size)]
    assert on_ranks(total, ranks=size) == wanted


def spread_a_table():
    return gathered(distributed(torch.ones(4, 2), "row")).sum().item()


def test_ranks_begin_after_a_process_group_of_this_process():
    """A rank that inherited a mesh would crash: dropping it joins threads that a fork does not have."""
    for _ in range(2):
        with single_rank():
            assert spread_a_table() == 8.0
    assert on_ranks(spread_a_table) == [8.0, 8.0]


def ask_for_a_missing_name():
    raise MissingName("acme has no WarmupStage", name="WarmupStage")


def test_a_name_that_ranks_miss_is_missing_for_the_case():
    with pytest.raises(MissingName, match="acme has no WarmupStage") as missing:
        on_ranks(ask_for_a_missing_name)
    assert missing.value.name == "WarmupStage"


def need_a_library():
    raise CannotRun("torchrec cannot be imported: no")


def test_a_case_cannot_run_if_a_rank_cannot():
    with pytest.raises(CannotRun, match="torchrec cannot be imported"):
        on_ranks(need_a_library)


def test_no_rank_can_end_before_all_have_joined(monkeypatch):
    def refuse(*given):
        raise ValueError("the barrier")

    on_ranks(number)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_store_based_barrier", refuse)
    with pytest.raises(Mismatch, match=r"rank [01] of 2 raised ValueError: the barrier"):
        on_ranks(number)


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


def crash():
    ctypes.string_at(0)


def differ():
    expect_equal(number(), 0, "number")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (hang, ["rank 0 of 2 hung in", "in wait_for_others", "rank 1 of 2 hung in", "in hang"]),
        (refuse, ["rank 1 of 2 raised ValueError: no such row"]),
        (die, ["rank 1 of 2 ended: killed by signal 9"]),
        (leave, ["rank 1 of 2 ended: exit status 3"]),
        (crash, ["rank 1 of 2 ended: killed by signal 11 in File", "in string_at"]),
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


@on_each_rank
def note_process(impl, how):
    if how == "raise":
        raise ValueError("no such row")
    if how == "end":
        os._exit(0)
    os.pwrite(impl.file, b"%d" % os.getpid(), 16 * number())


@pytest.fixture
def noted(tmp_path):
    """Return an implementation whose cases note the process of each rank."""
    file = os.open(tmp_path / "processes", os.O_RDWR | os.O_CREAT)
    yield SimpleNamespace(file=file)
    end_kept_ranks()  # they hold every open file of this process
    os.close(file)


def processes_of(noted):
    return [int(os.pread(noted.file, 16, 16 * one).rstrip(b"\0")) for one in range(2)]


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "rank 1 of 2 raised ValueError"), ("end", "ended: exit status 0 before its end")],
)
def test_ranks_are_kept_until_a_case_fails(noted, how, words):
    note_process(noted, how="")
    first = processes_of(noted)
    note_process(noted, how="")
    assert processes_of(noted) == first
    with pytest.raises(Mismatch, match=words):
        note_process(noted, how=how)  # the outcome of the earlier case is not taken for its own
    assert not any(_runs(rank) for rank in first)
    note_process(noted, how="")
    assert not {*processes_of(noted)} & {*first}


@on_each_rank
def first_case_of_its_process(impl):
    os.environ["CASES"] = os.environ.get("CASES", "") + "1"
    expect_equal(os.environ["CASES"], "1", "cases that have run here")


def test_what_fails_on_kept_ranks_is_tried_on_new_ones(noted):
    first_case_of_its_process(noted)
    first_case_of_its_process(noted)  # an earlier case has left something


def test_ranks_are_not_kept_for_another_implementation(noted):
    note_process(noted, how="")
    first = processes_of(noted)
    note_process(SimpleNamespace(file=noted.file), how="")
    assert not {*processes_of(noted)} & {*first}


SLEEPERS = """
import os, time, torch
from keyedopt.conformance.suite.support.ranks import on_ranks
def body():
    os.write(1, b"%d\\n" % os.getpid())  # both ranks write to one pipe
    time.sleep(60)
on_ranks(body, limit=60)
"""


@slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(how):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        found = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(how)
        process.wait(timeout=10)
    end = time.monotonic() + 10
    while any(_runs(rank) for rank in found) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(rank) for rank in found)


@slow
def test_under_torchrun_one_rank_writes_and_all_exit_alike(tmp_path):
    """torch's optimizers in the backward pass fail cases of this area; one rank imports them later."""
    code = (
        "import os, time\ntime.sleep(int(os.environ['RANK']) / 2)\n"
        "from keyedopt.reference import KeyedOptimizerWrapper\n"
        "from torch.distributed.optim import _apply_optimizer_in_backward\n"
        "def apply_optimizer_in_backward(*given): _apply_optimizer_in_backward(*given)\n"
    )
    for target in ("one", "two"):
        (tmp_path / f"{target}.py").write_text(code, encoding="utf-8")
    check = "keyedopt check one two --area sharded --output results > $RANK.txt; echo $? > $RANK.code"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    subprocess.run(
        [*launcher, "bash", "-c", check],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=180,
        check=True,
    )
    for target in ("one", "two"):
        result = json.loads((tmp_path / "results" / f"{target}.json").read_text(encoding="utf-8"))
        outcomes = {case["case"].rpartition("::")[2]: case["outcome"] for case in result["cases"]}
        outcomes = {case: outcome for case, outcome in outcomes.items() if outcome != "unsupported"}
        assert outcomes == {
            "test_init_state": "pass",
            "test_wrapping[keyed]": "pass",
            "test_in_backward_in_data_parallel[after]": "fail",
            "test_in_backward_in_data_parallel[before]": "fail",
            "test_in_backward_with_fsdp": "fail",
        }
    assert [(tmp_path / f"{rank}.code").read_text(encoding="utf-8").strip() for rank in (0, 1)] == ["1"] * 2
    assert "SHARD-020" in (tmp_path / "0.txt").read_text(encoding="utf-8")
    assert not (tmp_path / "1.txt").read_text(encoding="utf-8")


@pytest.fixture
def torchrun_store(monkeypatch):
    """Serve a store as torchrun's agent does."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    names = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "WORLD_SIZE": 2, "RANK": 0}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}.items():
        monkeypatch.setenv(name, str(value))
    return server


LATE = """
import sys, time
from keyedopt.conformance.suite.support.torchrun import largest_code, meet
time.sleep(0.5)
assert not meet("a case", 120)
sys.exit(largest_code(1))
"""


def test_processes_of_torchrun_meet_before_a_case_and_return_one_code(torchrun_store):
    from keyedopt.conformance.suite.support.torchrun import largest_code, meet

    late = "rank 1 of torchrun did not come within 0.01 s: see its messages; --time-limit gives more"
    assert meet("a case", 0.01) == late
    with subprocess.Popen([sys.executable, "-c", LATE], env={**os.environ, "RANK": "1"}) as other:
        assert meet("a case", 120) == ""
        assert largest_code(0) == 1
    assert other.returncode == 1
    assert meet("the next case", 30) == "rank 1 of torchrun has ended before: see its messages"


@pytest.fixture
def device_under_test():
    yield choose_device
    choose_device("cpu")


@pytest.mark.parametrize(
    ("device", "backend", "own"),
    [("cpu", "gloo", "cpu"), ("cuda", "nccl", "cuda:1"), ("cuda:0", "nccl", "cuda:1")],
)
def test_a_rank_has_its_own_device_and_the_backend_of_its_type(
    monkeypatch, device_under_test, device, backend, own
):
    asked, set_device = [], []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **_: asked.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", set_device.append)
    device_under_test(device)
    ranks._join("/dev/null", 1, 2, 1.0, "a case")
    assert asked == [backend]
    assert the_device() == torch.device(own)
    assert set_device == ([torch.device(own)] if backend == "nccl" else [])


@pytest.mark.parametrize(
    ("device", "more", "reason"),
    [
        ("cpu", 7, ""),
        ("cuda", 0, ""),
        ("cuda:1", 1, "3 ranks need 3 devices cuda; here are 2"),
        ("meta", 0, "torch.distributed has no backend for meta"),
    ],
)
def test_each_rank_needs_a_device(monkeypatch, device, more, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.why_no_ranks(torch.device(device), more) == reason


def test_under_torchrun_each_rank_of_this_machine_needs_a_device(monkeypatch, torchrun_store):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert ranks.why_no_ranks(torch.device("cuda")) == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks.why_no_ranks(torch.device("cuda")) == "2 ranks need 2 devices cuda; here are 1"


def test_a_fork_after_the_use_of_cuda_is_not_blamed_on_the_implementation(monkeypatch, device_under_test):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    device_under_test("cuda")
    with pytest.raises(RuntimeError, match="a fork cannot use cuda after its parent has"):
        on_ranks(number)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
