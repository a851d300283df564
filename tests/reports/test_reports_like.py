"""`keyedopt check TARGET --like OTHER`: a copy is like the original, a mutant is not."""

import re
from pathlib import Path

import pytest

from keyedopt.cli import check

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

TARGETS = Path(__file__).parents[1] / "targets"


@pytest.fixture
def reachable(monkeypatch, acme):
    """Let worker processes import a version of the library that keyedopt knows nothing of."""

    def call(version):
        monkeypatch.setenv("PYTHONPATH", f"{acme[version]}:{TARGETS}:{Path(check.__file__).parents[2]}")

    return call


@slow
def test_a_copy_behaves_like_the_original(run_line, reachable):
    reachable("sound")
    done = run_line("check", "acme", "--like", "reference", "--area", "combined", "--area", "wrapper")
    assert (done.returncode, done.stderr) == (0, "")
    assert "differs" not in done.stdout
    assert "no difference (exit 0); compared: " in done.stdout


@slow
def test_a_mutant_does_not_and_is_told_where(run_line, reachable, tmp_path):
    reachable("wrong")
    arguments = ("--area", "combined", "--dtype", "float32", "--output", tmp_path / "x.json")
    done = run_line("check", "acme", "--like", "reference", *arguments)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("differs verdict COMB-")]
    assert lines
    assert all(" pass | fail " in line or " pass | pass " in line for line in lines)
    assert re.match(r"\d+ differences? \(exit 1\); compared: ", done.stdout.splitlines()[-1])
    assert (tmp_path / "x.json").exists()


@slow
def test_a_subclass_of_torchrec_behaves_like_torchrec(run_line, reachable, torchrec):
    reachable("sound")
    target = "subclassed_torchrec:IMPLEMENTATION"
    done = run_line("check", target, "--like", "torchrec", "--area", "wrapper", "--area", "warmup")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("reference", "torch", "--like", "torchrec"),
        ("reference", "--like", "torchrec", "--expectations", "torchrec"),
    ],
)
def test_one_target_is_compared_and_nothing_is_expected_of_it(run_line, arguments):
    done = run_line("check", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("keyedopt: --like compares one target with another one")


def test_an_original_that_is_not_there_is_wrong_input(run_line):
    done = run_line("check", "reference", "--like", "nowhere", "--area", "combined")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
