"""The suite gives the known verdict on torch's optimizers, and every known failure has its reproducer."""

import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt.conformance import expectations, runner
from keyedopt.conformance.findings import findings
from keyedopt.conformance.verdict import clause_outcomes, judge

ROOT = Path(__file__).parents[1]
FINDINGS = {finding.path.stem: finding for finding in findings() if finding.library == "torch"}


@pytest.fixture(scope="module")
def on_torch():
    return runner.run("torch", runner.Options(areas=("algorithms", "sparse", "in_backward")))


def test_torch_fails_only_what_is_explained(on_torch):
    path = expectations.find("torch")
    verdict = judge(expectations.apply(on_torch, expectations.read(path), path))
    assert verdict.reasons == ()
    assert verdict.conformant, "all that its documents say holds"


def test_every_expected_failure_links_to_a_reproducer_that_names_its_clause():
    entries = expectations.read(expectations.find("torch"))
    by_link = {str(finding.path.resolve().relative_to(ROOT)): finding for finding in FINDINGS.values()}
    assert {entry.link for entry in entries} == set(by_link)
    for entry in entries:
        assert entry.clause in by_link[entry.link].clauses, entry


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_still_there(on_torch, name):
    finding = FINDINGS[name]
    done = subprocess.run([sys.executable, finding.path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("defect: expected ") for line in done.stdout.splitlines()), done.stdout
    assert "keyedopt" not in finding.path.read_text(encoding="utf-8")
    outcomes = clause_outcomes(on_torch)
    assert [clause for clause in finding.clauses if outcomes[clause] in ("pass", "observed")] == []
