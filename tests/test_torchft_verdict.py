"""The suite gives the known verdict on torchft's wrapper, and every known failure has its reproducer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt.conformance import expectations, runner
from keyedopt.conformance.findings import findings
from keyedopt.conformance.verdict import clause_outcomes, judge

ROOT = Path(__file__).parents[1]
FINDINGS = {finding.path.stem: finding for finding in findings() if finding.library == "torchft"}


@pytest.fixture(scope="module")
def on_torchft():
    """Skip where torchft is not installed, unless it has to be (CI)."""
    try:
        import torchft.optim  # noqa: F401 - to know whether it can be imported
    except ImportError as error:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHFT") == "1":
            raise
        pytest.skip(f"torchft cannot be imported ({error}): pip install 'keyedopt[torchft]'")
    return runner.run("torchft", runner.Options(areas=("fault_tolerance",)))


def test_torchft_fails_only_what_is_explained(on_torchft):
    path = expectations.find("torchft")
    verdict = judge(expectations.apply(on_torchft, expectations.read(path), path))
    assert verdict.reasons == ()
    assert not verdict.conformant, "known failures of a must are still failures"


def test_every_expected_failure_links_to_a_reproducer_that_names_its_clause():
    entries = expectations.read(expectations.find("torchft"))
    by_link = {str(finding.path.resolve().relative_to(ROOT)): finding for finding in FINDINGS.values()}
    assert {entry.link for entry in entries} == set(by_link)
    for entry in entries:
        assert entry.clause in by_link[entry.link].clauses, entry


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_still_there(on_torchft, name):
    finding = FINDINGS[name]
    done = subprocess.run([sys.executable, finding.path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("defect: expected ") for line in done.stdout.splitlines()), done.stdout
    assert "keyedopt" not in finding.path.read_text(encoding="utf-8")
    outcomes = clause_outcomes(on_torchft)
    assert [clause for clause in finding.clauses if outcomes[clause] in ("pass", "observed")] == []
