"""Signals, pipes and stray processes: exit codes stay 0, 1 or 2, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from making import CLAUSE, alive, command, left_behind, mark, module

from keyedopt.conformance.run import runner
from keyedopt.conformance.run.runner import Options, RunError
from keyedopt.conformance.suite.support.scratch import scratch_folder
from keyedopt.tools import signals

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("turn", range(4))
def test_a_signal_at_any_moment_is_answered(turn, tmp_path):
    """A sample of what ``python -m keyedopt.tools.signals`` does."""
    assert signals.run(3, seed=turn) == []


def test_a_reader_that_goes_away_changes_no_exit_code():
    line = " ".join(command("list", "clauses"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -1; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    process = subprocess.Popen(
        command("explain", CLAUSE),
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    while not signals._heeds(process.pid):
        time.sleep(0.001)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 0


STRAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
from keyedopt.reference import *
"""


@slow
def test_a_process_in_another_session_is_ended_with_the_run(cold, tmp_path, monkeypatch):
    module(tmp_path, "stray", STRAY)
    monkeypatch.setenv("MARKER", mark("stray")["MARKER"])
    runner.run("stray", Options(clauses=(CLAUSE,), workers=1), path=[str(tmp_path)])
    assert left_behind("stray") == []


@slow
def test_nothing_outlives_a_check_that_is_killed(tmp_path):
    """Also a process in another session, and a worker that holds the interpreter."""
    held = "import ctypes\nif 'smoke' not in sys.argv[0]: ctypes.PyDLL(None).sleep(1000)\n"
    module(tmp_path, "stray", STRAY + held)
    environment = {**os.environ, **mark("killed"), "TMPDIR": str(tmp_path)}
    line = command("check", "stray", "--area", "wrapper", "--workers", "1")
    process = subprocess.Popen(line, env=environment, cwd=tmp_path, stdout=-3, stderr=-3)
    while not list(tmp_path.glob("keyedopt-*/stack-*")):  # a worker imports the target
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait()
    end = time.monotonic() + 2
    while alive("killed") and time.monotonic() < end:
        time.sleep(0.02)
    assert alive("killed") == []
    assert list(tmp_path.glob("keyedopt-*"))
    os.environ["TMPDIR"] = str(tmp_path)
    try:
        tempfile.tempdir = None
        with scratch_folder() as folder:
            assert list(tmp_path.glob("keyedopt-*")) == [folder]
    finally:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


def test_folders_of_killed_cases_are_removed_by_the_next_run_and_those_in_use_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = """
from keyedopt.conformance.suite.support.ranks import common_folder
with common_folder() as folder:
    print(folder, flush=True)
    input()
"""
    both = [subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) for _ in range(2)]
    killed, used = (Path(process.stdout.readline().strip()) for process in both)
    both[0].kill()
    both[0].wait()
    assert killed.is_dir()
    with scratch_folder() as own:
        assert {*tmp_path.iterdir()} == {used.parent, own}
    both[1].communicate("\n", timeout=60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time; time.sleep(1000)", "not imported and built within 2 s"),
        (
            "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)",
            "was stopped by",
        ),
    ],
    ids=["hangs", "stops"],
)
def test_a_target_that_hangs_costs_its_own_limit(tmp_path, source, said):
    module(tmp_path, "hanging", source)
    began = time.monotonic()
    with pytest.raises(RunError, match=said):
        runner.smoke("hanging", seconds=2, path=[str(tmp_path)])
    assert time.monotonic() - began < 60  # of which the import of torch takes most


def test_the_memory_of_a_target_is_bounded(tmp_path):
    source = """
import resource, torch
from keyedopt.reference import *
bound = resource.getrlimit(resource.RLIMIT_DATA)[0]
assert 0 < bound < 2**50 and open("/proc/self/oom_score_adj").read() == "1000\\n"
try:
    torch.empty(bound + 1, dtype=torch.uint8)
except RuntimeError:
    raise SystemExit("no memory for that")
"""
    module(tmp_path, "greedy", source)
    with pytest.raises(RunError, match="SystemExit: no memory for that"):
        runner.smoke("greedy", path=[str(tmp_path)])
    assert sys.executable
