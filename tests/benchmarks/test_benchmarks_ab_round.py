"""The processes that measure one build each, rounds of two of them, and builds of another repository."""

import math
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from making import module
from repositories import committed, git, worktrees

from keyedopt.benchmarks import ab_round, build_process, commit_builds
from keyedopt.benchmarks.ab_round import Request
from keyedopt.benchmarks.build_process import BuildProcess, ProcessError

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path):
    """Start a process whose worker has a source that is given."""
    started = []

    def start(source):
        for package in ("keyedopt", "keyedopt.benchmarks"):
            module(tmp_path, f"{package}.__init__", "")
        module(tmp_path, "keyedopt.benchmarks.worker", source)
        started.append(BuildProcess(tmp_path, 1))
        return started[-1]

    yield start
    for one in started:
        one.close()
        assert one._process.poll() is not None


ANSWERING = "import json, sys\nfor line in sys.stdin:\n    print(json.dumps({}), flush=True)\n"


def test_a_process_that_hangs_is_named(process, monkeypatch):
    monkeypatch.setattr(build_process, "PATIENCE", 0.05)
    side = process("import time\ntime.sleep(600)")
    side.send("time", 0.006)
    with pytest.raises(ProcessError, match=r"did not answer for 0.05 s at \('time', 0.006\)"):
        side.receive()


def test_a_process_that_ends_is_named(process):
    side = process("import sys\nsys.stdin.readline()\nsys.exit(3)")
    said = r"ended with 3 at \('start', 'fused', 'small-step', 'train-sgd'\)"
    with pytest.raises(ProcessError, match=said):
        build_process.start([side], [("fused", "small-step", "train-sgd", "cpu", "")])
    side.send("time", 1.0)  # into a pipe that nobody reads
    with pytest.raises(ProcessError, match="ended with 3"):
        side.receive()


def test_a_process_that_says_why_it_cannot_go_on_is_heard(process):
    both = [process(ANSWERING.format("'it broke'")) for _ in range(2)]
    assert build_process.start(both, [("a",), ("b",)]) == ["it broke"] * 2
    with pytest.raises(ProcessError, match="it broke"):
        build_process.alternate(both)


class Fake:
    """A side that takes no time: what it offers, by target, and how long a run of that takes."""

    seconds: ClassVar[dict[str, float]] = {}
    log: ClassVar[list[tuple]] = []
    closed = 0

    def __init__(self, folder, threads):
        self.number = len([one for one in Fake.log if one[0] == "new"])
        Fake.log.append(("new", folder, threads))

    def send(self, what, target, *others):
        self.said = (what, target)
        if what == "start":
            self.target = target

    def receive(self):
        Fake.log.append((self.number, *self.said))
        if self.said[0] == "start":
            return "" if self.target in Fake.seconds else f"{self.target} has none"
        return [Fake.seconds[self.target]]

    def close(self):
        Fake.closed += 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(ab_round, "BuildProcess", Fake)
    Fake.seconds, Fake.log, Fake.closed = {}, [], 0
    return Fake


def test_processes_run_alternately_and_change_places(fake):
    both = [fake("folder", 1) for _ in range(2)]
    fake.seconds = {"a": 0.1, "b": 0.2}
    build_process.start(both, [("a",), ("b",)])
    fake.log.clear()
    times = build_process.alternate(both)
    turns = [[one[0] for one in fake.log[at : at + 2]] for at in range(0, len(fake.log), 2)]
    assert turns == [[0, 1], [1, 0]] * 4 + [[0, 1]]
    assert times == [[0.1] * 9, [0.2] * 9]
    fake.seconds = {"a": 0.0, "b": 0.0}
    assert len(build_process.alternate(both)[0]) == build_process.MOST


# --- rounds ---------------------------------------------------------------------------------------


def test_a_round_is_of_both_builds(fake):
    fake.seconds = {"was": 0.2, "fused": 0.3}
    keys = [("small-step", "train-sgd"), ("small-step", "train-adam")]
    request = Request((Path("base"), Path("checkout")), ("was", "fused"), threads=2)
    asked = []
    found = list(ab_round.measure(request, keys, progress=asked.append))
    assert [one.key for one in found] == keys == asked
    assert [one.slowdown for one in found] == [pytest.approx(math.log(1.5))] * 2
    assert fake.log[:2] == [("new", Path("base"), 2), ("new", Path("checkout"), 2)]
    assert fake.closed == 2
    (one,) = ab_round.measure(Request((Path("base"),) * 2, ("fused", "nope")), keys[:1])
    assert (one.slowdown, one.why) == (None, "nope has none")


# --- real processes and builds --------------------------------------------------------------------

CHANGED = """

class SparseAdam:
    def __init__(self, *arguments, **named):
        raise RuntimeError("it was not there then")
"""


@pytest.fixture
def quick(monkeypatch, warm_workers):
    for name, value in {"SECONDS": 0.0, "LEAST": 2, "TURN": 0.0}.items():
        monkeypatch.setattr(build_process, name, value)


def tree_of(folder, **parts):
    """Make a tree like that of a build, with links to the given folders and to the running packages."""
    (folder / "keyedopt").mkdir(parents=True)
    running = {name: commit_builds.HERE / name for name in commit_builds.RUNNING}
    for name, path in {**running, **parts}.items():
        (folder / "keyedopt" / name).symlink_to(path)
    return folder


@slow
def test_processes_measure_the_build_that_they_are_given(tmp_path, quick):
    """In one build the reference has no SparseAdam, so the two can be told apart."""
    now, then = commit_builds.HERE / "reference", tmp_path / "reference"
    shutil.copytree(now, then, ignore=shutil.ignore_patterns("__pycache__"))
    with (then / "sparse_adam.py").open("a") as file:
        file.write(CHANGED)
    trees = tree_of(tmp_path / "0", reference=then), tree_of(tmp_path / "1", reference=now)
    keys = [("small-step", "train-sgd"), ("sparse-zipf", "sparse-adam")]
    steps, sparse = ab_round.measure(Request(trees, ("reference",) * 2), keys)
    assert math.isfinite(steps.slowdown)
    assert sparse.slowdown is None
    assert "it was not there then" in sparse.why
    (foreign,) = ab_round.measure(Request(trees, ("fused",) * 2), keys[:1])
    assert "fused" in foreign.why  # the installed one is not measured in its place
    (outside,) = ab_round.measure(Request(trees, ("torch",) * 2), keys[:1])
    assert "not part of the repository" in outside.why


LIBRARY = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme"
version = "0.1"
[tool.setuptools]
py-modules = ["acme"]
"""
SLOW = "from keyedopt.reference import *\nimport time\n{}\n"


@slow
def test_the_library_of_another_repository_is_gated(run_line, tmp_path, monkeypatch, quick, request):
    """Its checkout has an uncommitted change that makes SGD slow, which the gate must find."""
    request.addfinalizer(lambda: sys.modules.pop("acme", None))
    files = {"pyproject.toml": LIBRARY, "acme.py": SLOW.format(""), ".gitignore": "__pycache__/\n"}
    folder = committed(tmp_path / "acme", files)
    slow = "class SGD(SGD):\n    def step(self, *a):\n        super().step(*a)\n        sum(range(10**6))"
    (folder / "acme.py").write_text(SLOW.format(slow))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    line = ("bench", "gate", "HEAD", "--implementation", "acme", "--workload", "1k-parameters")
    done = run_line(*line, "--task", "step-sgd", "--rounds", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worse: 1k-parameters step-sgd takes" in done.stdout
    assert git(folder, "status", "--porcelain") == "M acme.py"
    assert worktrees(folder) == 0
    assert git(folder, "stash", "list") == ""


def test_what_a_build_needs_decides_whether_it_is_isolated(tmp_path):
    file = tmp_path / "pyproject.toml"
    for requires, here in (('["setuptools"]', True), ('["setuptools>=10000"]', False), ('["nope"]', False)):
        file.write_text(f"[build-system]\nrequires = {requires}\n")
        assert commit_builds._can_build_here(tmp_path) == here
    file.write_text("[")
    assert not commit_builds._can_build_here(tmp_path)
