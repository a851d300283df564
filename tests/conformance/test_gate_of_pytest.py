"""pytest on the suite without the runner: known failures, levels, and an exit status like that of a check."""

import subprocess
import sys

import pytest

from keyedopt.conformance import expectations
from keyedopt.conformance.results.verdict import FAILING, failing, judge
from keyedopt.conformance.run.replay import source_of

pytestmark = pytest.mark.complete(loop=__name__, sample=1, spread=True)


@pytest.fixture
def run(failed, acme, tmp_path, monkeypatch):
    """Run pytest on the cases of a clause that fails."""
    verdict = judge(failed)
    clause = next(each for each in failing(verdict) if verdict.clauses[each] in FAILING)
    case = next(each for each in failed.cases if clause in each.clauses)
    monkeypatch.setenv("PYTHONPATH", str(acme["wrong"]))

    def call(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--implementation", "acme"]
        source = source_of(case.case)
        command += ["--pyargs", f"keyedopt.conformance.suite.{source.area}.{source.file}"]
        command += ["--keyedopt-clause", clause, *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return call, clause


def test_the_exit_status_of_pytest_is_that_of_the_gate(run, failed, tmp_path):
    call, clause = run
    done = call("--level", "should")
    assert done.returncode == 1, done.stdout
    assert "gate: red (exit 1)" in done.stdout
    assert f"{clause}: fail" in done.stdout
    known = tmp_path / "known.toml"
    expectations.update(known, failed)
    done = call("--expectations", known)
    assert done.returncode == 0, done.stdout
    assert "gate: green (exit 0)" in done.stdout
    assert "xfailed" in done.stdout


def test_a_listed_failure_that_passes_turns_the_gate_of_pytest_red(run, failed, acme, tmp_path, monkeypatch):
    expectations.update(tmp_path / "known.toml", failed)
    monkeypatch.setenv("PYTHONPATH", str(acme["sound"]))
    done = run[0]("--expectations", tmp_path / "known.toml")
    assert done.returncode == 1, done.stdout
    assert "unexpected pass" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--expectations", "none.toml"), "there is no expectations file 'none.toml'"),
        (("--level", "maybe"), "invalid choice: 'maybe'"),
        (("--level", "must", "-n", "1"), "judge a whole run: use no -n"),
        (("--keyedopt-clause", "KEYED-0001"), "there is no clause 'KEYED-0001'; did you mean KEYED-0"),
        (("--keyedopt-area", "keyd"), "there is no area 'keyd'; did you mean keyed?"),
    ],
)
def test_what_the_gate_of_pytest_cannot_use_is_an_error(run, options, said):
    done = run[0](*options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in done.stdout + done.stderr
