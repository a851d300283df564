"""The suite gives the known verdicts: on the reference, on torchrec, on what merely wraps torchrec."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt.conformance import expectations, runner, spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.verdict import clause_outcomes, judge

ROOT = Path(__file__).parents[1]
FINDINGS = {finding.path.stem: finding for finding in findings() if finding.library == "torchrec"}


@pytest.fixture(scope="module")
def on_reference():
    return runner.run("reference")


@pytest.fixture(scope="module")
def on_torchrec(torchrec):
    return runner.run("torchrec")


@pytest.fixture(scope="module")
def reproduced(torchrec):
    """Run every reproducer, once: exit status and output by name."""
    code = (
        "import json\n"
        "from keyedopt.conformance.findings import findings, run\n"
        "chosen = [finding for finding in findings() if finding.library == 'torchrec']\n"
        "print(json.dumps({f.path.stem: [code, text] for f, code, text in run(chosen)}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_reference_passes_every_clause_of_every_level(on_reference):
    verdict = judge(on_reference)
    assert verdict.reasons == ()
    assert verdict.conformant
    assert set(verdict.clauses) == set(spec.clauses())
    assert {case.outcome for case in on_reference.cases} == {"pass", "observed"}


def test_torchrec_fails_only_what_is_explained(on_torchrec):
    path = expectations.find("torchrec")
    verdict = judge(expectations.apply(on_torchrec, expectations.read(path), path))
    assert verdict.reasons == ()
    assert not verdict.conformant, "known failures of a must are still failures"


def test_every_expected_failure_of_torchrec_links_to_a_reproducer_that_names_its_clause():
    entries = expectations.read(expectations.find("torchrec"))
    by_link = {f"conformance/findings/{finding.path.name}": finding for finding in findings()}
    own = {link for link, finding in by_link.items() if finding.library == "torchrec"}
    assert {entry.link for entry in entries} >= own
    for entry in entries:
        assert entry.clause in by_link[entry.link].clauses, entry


def test_the_clauses_that_a_finding_names_are_those_that_torchrec_fails(on_torchrec):
    outcomes = clause_outcomes(on_torchrec)
    for finding in FINDINGS.values():
        assert finding.clauses, finding.path
        held = [clause for clause in finding.clauses if outcomes[clause] in ("pass", "observed")]
        assert held == [], finding.path


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_still_there(name, reproduced):
    """A reproducer exits with 1 as long as the defect is there; 0 means: fixed, take it off the list."""
    code, output = reproduced[name]
    assert code == 1, output
    assert any(line.startswith("defect: expected ") for line in output.splitlines()), output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_a_script_of_torch_and_torchrec_alone(name):
    text = FINDINGS[name].path.read_text(encoding="utf-8")
    assert "keyedopt" not in text
    assert len(text.splitlines()) <= 80


def test_a_finding_runs_as_a_script(torchrec):
    finding = next(iter(FINDINGS.values()))
    done = subprocess.run([sys.executable, finding.path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr


def test_what_only_subclasses_torchrec_gets_the_verdicts_of_torchrec(on_torchrec, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "targets"))
    subclassed = runner.run("subclassed_torchrec:IMPLEMENTATION")
    seen = {case.case: (case.outcome, case.observed) for case in on_torchrec.cases}
    assert {case.case: (case.outcome, case.observed) for case in subclassed.cases} == seen
