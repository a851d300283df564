"""``keyedopt bench`` that is interrupted or killed: nothing is lost, half-written or left running."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from making import alive, command, left_behind, mark, refused, valid
from repositories import committed, git, reference_repository, worktrees

from keyedopt.benchmarks import ab_round, commit_builds, compare
from keyedopt.benchmarks.ab_round import Measured
from keyedopt.benchmarks.timing import Bandwidth
from keyedopt.benchmarks.workloads import WORKLOADS, Lookups

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
LINE = ("--implementation", "reference", "--against", "torch", "--task", "train-sgd", "--task", "train-adam")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Give a folder for temporary files of its own, and a small workload."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setitem(WORKLOADS, TINY.name, TINY)
    monkeypatch.setattr(compare.timing, "memory_bandwidth", lambda clock, device: Bandwidth(1e9, 1e9))
    yield tmp_path
    assert list((tmp_path / "temporary").glob("keyedopt-*")) == []


def end(*_):
    """Be told to end, as by a system that shuts down."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)


def second(function, then=end):
    """Return a function that does what another does, and is told to end when it is called again."""
    calls = []

    def call(*given, **options):
        calls.append(given)
        return function(*given, **options) if len(calls) == 1 else then()

    return call


def started(folder, *line, name):
    """Start a command that is going to be killed, in a folder with its own temporary files."""
    (folder / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "temporary"), **mark(name)}
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def killed(process, ready):
    """Kill a process as soon as something is there."""
    with process:
        while not ready():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL


# --- a report -------------------------------------------------------------------------------------


@slow
def test_a_run_that_is_told_to_end_keeps_what_it_has(run_line, place, monkeypatch):
    monkeypatch.setattr(compare, "_row", second(compare._row))
    (place / "x.json").write_text("an earlier report")
    line = ("bench", "run", *LINE, "--workload", "tiny", "--seconds", "0.01", "--output", "x.json")
    assert "interrupted; 1 comparisons are in x.partial.json" in refused(run_line(*line))
    assert (place / "x.json").read_text() == "an earlier report"
    partial = valid(place / "x.partial.json")
    assert not partial["complete"]
    assert [row["task"] for row in partial["rows"]] == ["train-sgd"]
    monkeypatch.undo()
    monkeypatch.setitem(WORKLOADS, TINY.name, TINY)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(place)
    assert run_line(*line).returncode == 0
    assert valid(place / "x.json")["complete"]
    assert not (place / "x.partial.json").exists()


def test_a_partial_report_is_refused_where_a_whole_one_is_needed(run_line, place, monkeypatch):
    monkeypatch.setattr(compare, "_row", second(compare._row))
    run_line("bench", "run", *LINE, "--workload", "tiny", "--seconds", "0.01", "--output", "x.json")
    done = run_line("report", "x.partial.json", "--output", "site")
    assert "it is of an interrupted run" in done.stderr


def test_a_run_that_is_told_to_end_before_it_has_anything_leaves_nothing(run_line, place, monkeypatch):
    monkeypatch.setattr(compare, "_row", end)
    line = ("bench", "run", *LINE, "--workload", "tiny", "--output", "new/folder/x.json")
    assert "interrupted; nothing was written" in refused(run_line(*line))
    assert [path.name for path in place.iterdir()] == ["temporary"]


@slow
def test_a_run_that_is_killed_keeps_what_it_has(tmp_path):
    (tmp_path / "x.json").write_text("an earlier report")
    target = ("--implementation", "reference", "--against", "torch,reference", "--seconds", "0.01")
    work = ("--workload", "small-step", "--task", "train-sgd", "--task", "train-adam", "--task", "train-lamb")
    process = started(tmp_path, *command("bench", "run", *target, *work, "--output", "x.json"), name="report")
    killed(process, (tmp_path / "x.partial.json").exists)
    assert (tmp_path / "x.json").read_text() == "an earlier report"
    assert valid(tmp_path / "x.partial.json")["rows"]
    assert not left_behind("report")


@pytest.mark.parametrize("option", ["--trace", "--conformance"])
def test_a_report_does_not_replace_what_is_read(run_line, place, option):
    (place / "x.pt").write_text("read")
    said = refused(run_line("bench", "run", option, "x.pt", "--output", f"../{place.name}/x.pt"))
    assert f"--output would replace the file of {option}" in said


def test_a_device_is_no_file_to_write(run_line, place):
    assert "it is not a regular file" in refused(run_line("bench", "run", "--output", os.devnull))
    os.mkfifo(place / "pipe")
    assert "it is not a regular file" in refused(run_line("bench", "gate", "HEAD", "--output", "pipe"))


# --- the gate -------------------------------------------------------------------------------------


@pytest.fixture
def rounds(monkeypatch):
    """Let builds and rounds of two processes take no time."""

    def measured(request, wanted, **_):
        return [Measured(key, (1.0, 1.0 + 0.001 * (len(key[1]) % 3))) for key in wanted]

    @contextlib.contextmanager
    def built(root, commits, progress):
        yield {commit: Path(commit) for commit in commits}

    monkeypatch.setattr(commit_builds, "repository_root", lambda at: at)
    monkeypatch.setattr(commit_builds, "resolve", lambda ref, root: ref)
    monkeypatch.setattr(commit_builds, "commit_of_checkout", lambda root: "checkout")
    monkeypatch.setattr(commit_builds, "built_commits", built)
    monkeypatch.setattr(ab_round, "measure", measured)
    return measured


GATE = ("bench", "gate", "HEAD", "--workload", "small-step", "--task", "train-sgd")


def test_a_gate_that_is_told_to_end_leaves_everything_as_it_was(run_line, place, rounds, monkeypatch):
    (place / "gate.json").write_text("an earlier verdict")
    monkeypatch.setattr(ab_round, "measure", second(rounds))
    for output in ("gate.json", "new/gate.json"):
        assert "interrupted; nothing was written" in refused(run_line(*GATE, "--output", output))
    assert (place / "gate.json").read_text() == "an earlier verdict"
    assert not (place / "new").exists()


@slow
def test_processes_that_measure_end_with_the_one_that_asks(tmp_path, monkeypatch):
    """A killed gate leaves the earlier verdict, no process, and a worktree that the next run removes."""
    repository = reference_repository(tmp_path / "repository")
    (repository / "gate.json").write_text("an earlier verdict")
    line = command(*GATE, "--implementation", "reference", "--output", "gate.json")
    process = started(repository, *line, name="gate")
    killed(process, lambda: sum("benchmarks.worker" in line for line in alive("gate")) == 2)
    assert (repository / "gate.json").read_text() == "an earlier verdict"
    while alive("gate"):  # they may still import what they need; then they see that nobody asks
        time.sleep(0.1)
    assert worktrees(repository) == 1
    monkeypatch.setattr(commit_builds, "_install", lambda source, scratch: source)
    with commit_builds.built(repository, "HEAD"):
        assert worktrees(repository) == 1
    assert worktrees(repository) == 0
    assert list((repository / "temporary").glob("keyedopt-commit-*")) == []


# --- commits --------------------------------------------------------------------------------------

#: A build that does not end, with a process of its own; it says that it is there, and ends who asked for it.
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "keyedopt"
version = "0.0.1"
"""
BACKEND = """
import os, signal, subprocess, time
def build_wheel(*_, **__):
    subprocess.Popen(["sleep", "1000"])
    with open(os.environ["BUILDING"], "w"):
        pass
    if "TOLD" in os.environ:
        os.kill(int(os.environ["TOLD"]), signal.SIGTERM)
    time.sleep(1000)
"""


@pytest.fixture
def repository(tmp_path):
    """Make a checkout of a commit whose build never ends."""
    return committed(tmp_path / "repository", {"pyproject.toml": PROJECT, "backend.py": BACKEND})


def test_a_build_of_a_commit_that_is_told_to_end_leaves_nothing(run_line, place, repository, monkeypatch):
    told = {"TOLD": str(os.getpid()), "BUILDING": str(place / "building"), **mark("commits")}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(repository)
    assert "interrupted" in refused(run_line("bench", "commits", "HEAD", "HEAD"))
    assert (place / "building").exists()
    assert worktrees(repository) == 0
    assert list((repository / ".git" / "worktrees").glob("*")) == []
    monkeypatch.delenv("MARKER")
    assert not left_behind("commits")


def test_what_a_killed_build_of_a_commit_leaves_the_next_one_removes(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("BUILDING", str(tmp_path / "building"))
    code = (
        "from keyedopt.benchmarks import commit_builds; from pathlib import Path\n"
        f"with commit_builds.built(Path({str(repository)!r}), 'HEAD'): pass"
    )
    process = started(tmp_path, sys.executable, "-c", code, name="killed")
    killed(process, (tmp_path / "building").exists)
    for path in Path("/proc").glob("[0-9]*/environ"):  # what it has left running
        with contextlib.suppress(OSError):
            if f"MARKER=killed-{os.getpid()}\0".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    assert worktrees(repository) == 1
    git(
        repository, "worktree", "lock", next((tmp_path / "temporary").glob("*/source"))
    )  # as while it is made
    monkeypatch.setattr(commit_builds, "_install", lambda source, scratch: source)
    with commit_builds.built(repository, "HEAD") as first:
        assert worktrees(repository) == 1
        with commit_builds.built(repository, "HEAD") as second_one:
            assert worktrees(repository) == 2, "one that is used stays"
            assert (first / "backend.py").exists()
            assert (second_one / "backend.py").exists()
    assert worktrees(repository) == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_worktrees_of_others_stay(tmp_path, repository, monkeypatch):
    git(repository, "worktree", "add", "--detach", tmp_path / "mine" / "source")
    git(repository, "worktree", "add", "--detach", tmp_path / "keyedopt-commit-x" / "source")
    monkeypatch.setattr(commit_builds, "_install", lambda source, scratch: source)
    with commit_builds.built(repository, "HEAD"):
        pass
    assert worktrees(repository) == 2
