"""The suite gives the known verdict on torch's optimizers."""

import pytest
from making import reasons

from keyedopt.conformance import expectations
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results.verdict import clause_outcomes, judge, level_of

EXPECTED = expectations.find("torch")
#: What fails only on accelerators, where the default is foreach: see test_strangers.
ELSEWHERE = {one.clause for one in expectations.read(EXPECTED) if one.when.get("device") == "!=cpu"}
CLAUSES = {
    one.path.stem: set(one.clauses) - ELSEWHERE
    for one in findings()
    if one.library == "torch" and one.there and not set(one.clauses) <= ELSEWHERE
}


@pytest.fixture(scope="module")
def on_torch(check_once):
    return check_once("torch", areas=("algorithms", "sparse", "in_backward"))


def test_torch_fails_only_what_is_explained(on_torch):
    verdict = judge(expectations.apply(on_torch, expectations.read(EXPECTED), EXPECTED))
    assert reasons(verdict, on_torch) == []
    if not verdict.reasons:  # a sample may hold no must that torch claims
        # All that its documents say holds, of the names that torch has; a sample may not have the others.
        missing = [clause for clause in verdict.unchecked if level_of(clause) == "must"]
        assert verdict.word == ("partly checked" if missing else "conformant")


@pytest.mark.parametrize("name", CLAUSES)
def test_the_clauses_that_a_finding_names_fail(on_torch, name):
    outcomes = clause_outcomes(on_torch)
    assert [one for one in CLAUSES[name] if outcomes.get(one) in ("pass", "observed")] == []
