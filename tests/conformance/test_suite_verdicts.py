"""The suite gives the known verdicts: on the reference, on torchrec, on what merely wraps torchrec."""

from pathlib import Path

import pytest
from making import ON_CPU, left_out, reasons, without_torchrec

from keyedopt.conformance import expectations
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results.verdict import clause_outcomes, judge
from keyedopt.conformance.run import runner

FINDINGS = {finding.path.stem: finding for finding in findings() if finding.library == "torchrec"}


#: The clauses of models that torchrec shards, and the one that needs torchft.
SHARDED_BY_TORCHREC = tuple(f"SHARD-{number:03}" for number in range(25, 29))
GROUPS_OF_TORCHFT = ("FT-036", "unsupported")


@pytest.fixture(scope="module")
def on_torchrec(torchrec, check_once):
    return check_once("torchrec")


def test_the_reference_passes_every_clause_of_every_level(on_reference):
    verdict = judge(on_reference)
    assert verdict.reasons == ()
    if not on_reference.options["clauses"]:
        assert verdict.conformant
        assert set(verdict.clauses) == ON_CPU
    # A kept result is of an environment without torchrec.
    left = left_out(on_reference) - {GROUPS_OF_TORCHFT}
    assert left in (set(), without_torchrec(on_reference))


@pytest.mark.complete
def test_the_reference_trains_in_models_that_torchrec_shards(torchrec):
    result = runner.run("reference", runner.Options(clauses=SHARDED_BY_TORCHREC))
    assert judge(result).reasons == ()
    assert {clause for case in result.cases for clause in case.clauses} == {*SHARDED_BY_TORCHREC}
    assert left_out(result) == set()


def test_torchrec_fails_only_what_is_explained(on_torchrec):
    path = expectations.find("torchrec")
    verdict = judge(expectations.apply(on_torchrec, expectations.read(path), path))
    assert reasons(verdict, on_torchrec) == []
    assert not verdict.conformant, "known failures of a must are still failures"


def test_the_clauses_that_a_finding_names_are_those_that_torchrec_fails(on_torchrec):
    outcomes = clause_outcomes(on_torchrec)
    known = expectations.read(expectations.find("torchrec"))
    here = {Path(entry.link).stem for entry in known if entry.when.get("device", "cpu") == "cpu"}
    for name, finding in FINDINGS.items():
        if not finding.there or name not in here:
            continue
        assert finding.clauses, finding.path
        held = [clause for clause in finding.clauses if outcomes[clause] in ("pass", "observed")]
        assert held == [], finding.path


@pytest.mark.complete
def test_what_only_subclasses_torchrec_gets_the_verdicts_of_torchrec(on_torchrec, monkeypatch, sample):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "targets"))
    clauses = sample.clauses(on_torchrec.implementation["areas"], 5, "subclassed")
    subclassed = runner.run("subclassed_torchrec:IMPLEMENTATION", runner.Options(clauses=tuple(clauses)))
    asked = [case for case in on_torchrec.cases if {*case.clauses} & {*clauses}]
    seen = {case.case: (case.outcome, case.observed) for case in asked}
    assert {case.case: (case.outcome, case.observed) for case in subclassed.cases} == seen
