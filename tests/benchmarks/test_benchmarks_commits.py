"""``keyedopt bench commits``: a small repository with three commits, and refused input."""

import math
import shutil

import pytest
from making import refused, valid
from repositories import git, reference_repository, worktrees

from keyedopt.benchmarks import build_process, commit_builds, commits
from keyedopt.benchmarks.ab_round import Measured

#: What makes the second commit another one: SparseAdam goes twice as far.
FAULT = """

class SparseAdam(SparseAdam):
    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Make a checkout of three commits: the reference, the same again, and one whose SparseAdam differs."""
    folder = reference_repository(tmp_path_factory.mktemp("repositories") / "repository")
    git(folder, "commit", "-qm", "two", "--allow-empty")
    with (folder / "reference" / "sparse_adam.py").open("a") as file:
        file.write(FAULT)
    git(folder, "commit", "-qam", "three")
    return folder


@pytest.fixture
def built_once(monkeypatch, tmp_path_factory):
    """Build what was built before no second time: a commit has one tree, whose name is its content's."""
    real = commit_builds._install

    def install(source, scratch):
        tree = git(source, "rev-parse", "HEAD^{tree}")
        if tree not in BUILT:
            kept = tmp_path_factory.mktemp("built")
            BUILT[tree] = real(source, kept)
        return BUILT[tree]

    monkeypatch.setattr(commit_builds, "_install", install)


#: Trees that were built, by the hash of their content.
BUILT = {}


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize(
    ("names", "same"), [(("HEAD~2", "HEAD~1"), True), (("HEAD~1", "HEAD"), False)], ids=["same", "other"]
)
def test_two_commits_are_built_and_measured(
    run_line, repository, built_once, warm_workers, monkeypatch, tmp_path, names, same
):
    for name, value in {"SECONDS": 0.0, "LEAST": 2, "TURN": 0.0}.items():
        monkeypatch.setattr(build_process, name, value)
    monkeypatch.chdir(repository)
    line = ("--implementation", "reference", "--rounds", "2", "--output", tmp_path / "x.json")
    work = ("--workload", "sparse-zipf", "--task", "sparse-adam")
    done = run_line("bench", "commits", *names, *line, *work)
    assert done.returncode == 0, done.stderr
    assert "keyedopt:" not in done.stderr
    report = valid(tmp_path / "x.json")
    (row,) = report["rows"]
    assert report["commits"] == [git(repository, "rev-parse", name) for name in names]
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["error"] == 0) == same
    assert ("results differ" in done.stdout) != same
    assert worktrees(repository) == 0
    assert git(repository, "status", "--porcelain") == ""


def test_what_a_commit_cannot_do_is_said(run_line, repository, built_once, warm_workers, monkeypatch):
    """This repository has no fused, and the one that is installed must not be measured in its stead."""
    monkeypatch.chdir(repository)
    done = run_line("bench", "commits", "HEAD~1", "HEAD", "--workload", "sparse-zipf", "--rounds", "1")
    assert done.returncode == 0
    assert "not measured: " in done.stdout
    assert "keyedopt.fused" in done.stdout


def test_a_commit_that_cannot_be_built_is_one_line(run_line, repository, monkeypatch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    (other / "pyproject.toml").write_text("no")
    git(other, "commit", "-qam", "broken")
    monkeypatch.chdir(other)
    assert "cannot be built" in refused(run_line("bench", "commits", "HEAD", "HEAD~1"))
    assert worktrees(other) == 0


def test_unknown_commits_and_changed_files_are_refused(run_line, repository, monkeypatch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    monkeypatch.chdir(other)
    for name in ("nope", "--all", ""):
        line = ("bench", "commits", "HEAD", *(["--"] if name else []), name)
        assert "no commit" in refused(run_line(*line))
    (other / "untracked").touch()
    commit_builds.refuse_changes(other)
    (other / "pyproject.toml").write_text("no")
    said = refused(run_line("bench", "commits", "HEAD", "HEAD~1"))
    assert "uncommitted changes (M pyproject.toml): commit them first" in said


def test_without_git_nothing_is_compared(run_line, repository, monkeypatch, tmp_path):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is needed" in refused(run_line("bench", "commits", "HEAD", "HEAD"))


def test_the_interval_is_that_of_the_rounds():
    rounds = [Measured(("w", "t"), (1.0, seconds), error=0.0) for seconds in (2.0, 2.2, 1.8)]
    ratio = commits.ratio_of(("w", "t"), rounds)
    logs = [math.log(2.0), math.log(2.2), math.log(1.8)]
    assert ratio.value == pytest.approx(math.exp(sum(logs) / 3))
    assert ratio.low < 1.8
    assert ratio.high > 2.2
    assert commits.ratio_of(("w", "t"), [Measured(("w", "t"), None, "no X")]).why == "no X"
