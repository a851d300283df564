"""The suite gives the known verdicts: on the reference, on torchrec, on what merely wraps torchrec."""

import subprocess
import sys
from pathlib import Path

import pytest
from keyedopt.conformance import expectations, runner, spec
from keyedopt.conformance.verdict import clause_outcomes, judge

ROOT = Path(__file__).parents[1]
FINDINGS = sorted((ROOT / "conformance" / "findings").glob("torchrec_*.py"))


@pytest.fixture(scope="module")
def on_reference():
    return runner.run("reference")


@pytest.fixture(scope="module")
def on_torchrec(torchrec):
    return runner.run("torchrec")


def test_the_reference_passes_every_clause_of_every_level(on_reference):
    verdict = judge(on_reference)
    assert verdict.reasons == ()
    assert verdict.conformant
    assert set(verdict.clauses) == set(spec.clauses())
    assert {case.outcome for case in on_reference.cases} == {"pass", "observed"}


def test_a_full_check_is_quick(on_reference):
    """The budget is 60 s on 2 cores; a run far beyond it means that something hangs or loops."""
    assert on_reference.seconds < 180


def test_torchrec_fails_only_what_is_explained(on_torchrec):
    path = expectations.find("torchrec")
    verdict = judge(expectations.apply(on_torchrec, expectations.read(path), path))
    assert verdict.reasons == ()
    assert not verdict.conformant, "known failures of a must are still failures"


def test_every_failing_clause_of_torchrec_has_a_reproducer(torchrec):
    entries = expectations.read(expectations.find("torchrec"))
    links = {entry.link for entry in entries}
    assert links == {str(path.relative_to(ROOT)) for path in FINDINGS}
    for entry in entries:
        text = (ROOT / entry.link).read_text(encoding="utf-8")
        assert entry.clause in text, f"{entry.link} does not name {entry.clause}"


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_a_finding_is_still_there(path, torchrec):
    """Exits with 1 as long as the defect is there; 0 means: fixed, take it off the list."""
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("defect:"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_what_only_subclasses_torchrec_gets_the_verdicts_of_torchrec(on_torchrec, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "targets"))
    subclassed = runner.run("subclassed_torchrec")
    assert clause_outcomes(subclassed) == clause_outcomes(on_torchrec)
    seen = {case.case: (case.outcome, case.observed) for case in on_torchrec.cases}
    assert {case.case: (case.outcome, case.observed) for case in subclassed.cases} == seen
