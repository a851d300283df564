"""The suite gives the known verdict on torchft's wrapper."""

import pytest
from making import reasons

from keyedopt.conformance import expectations
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results.verdict import clause_outcomes, judge
from keyedopt.conformance.run import runner

FINDINGS = {finding.path.stem: finding for finding in findings() if finding.library == "torchft"}


@pytest.fixture(scope="module")
def on_torchft(check_once, torchft):
    return check_once("torchft", areas=("fault_tolerance",), always=("FT-036",))


def test_torchft_fails_only_what_is_explained(on_torchft):
    path = expectations.find("torchft")
    verdict = judge(expectations.apply(on_torchft, expectations.read(path), path))
    assert reasons(verdict, on_torchft) == []
    assert not verdict.conformant, "known failures of a must are still failures"


@pytest.mark.parametrize("name", FINDINGS)
def test_the_clauses_that_a_finding_names_fail(on_torchft, name):
    outcomes = clause_outcomes(on_torchft)
    assert [clause for clause in FINDINGS[name].clauses if outcomes[clause] in ("pass", "observed")] == []


def test_replica_groups_of_torchft_survive(on_torchft):
    assert clause_outcomes(on_torchft)["FT-036"] == "pass"


@pytest.mark.complete
@pytest.mark.parametrize("target", ["reference", "fused"])
def test_replica_groups_of_ours_survive(on_torchft, target):
    result = runner.run(target, runner.Options(clauses=("FT-036",)))
    assert clause_outcomes(result)["FT-036"] == "pass"
