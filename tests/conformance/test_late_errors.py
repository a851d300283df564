"""Errors for invalid lookups may come late on an accelerator, and are charged to the case that caused them.

What the implementations do is in ``targets/late.py``.
"""

import pytest
from making import TARGETS

from keyedopt.conformance.run import runner
from keyedopt.conformance.suite.support.assertions import Mismatch, expect, expect_raises

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)

#: The clauses of invalid lookups, and of lookups that run after them.
CLAUSES = ("FUSED-024", "FUSED-025", "FUSED-027", "FUSED-029", "FUSED-030", "FUSED-089")
IMPORTS = ("keyedopt.conformance.pretend",)
#: Why a case does not run: the targets lack a class, or the case is one of the CPU.
LEFT_OUT = ("not claimed: EmbeddingCollection", "runs on the CPU only")
#: One worker, so that each case runs in the process of the one before.
IN_ONE_WORKER = {"imports": IMPORTS, "workers": 1}


def failures(target, clauses=CLAUSES, device="npu"):
    """Return what was seen in each case that failed, by clause, and the number of cases that passed."""
    found = runner.run(
        f"late:{target}", runner.Options(clauses=clauses, device=device, **IN_ONE_WORKER), path=[TARGETS]
    )
    assert found.complete
    failed = {}
    for case in found.cases:
        plainly = case.seen == "the case fails without its situation, too"
        assert case.outcome in ("pass", "fail") or plainly or case.seen.startswith(LEFT_OUT), case
        if case.outcome == "fail":
            failed.setdefault(case.clauses[0], []).append(f"{case.expected}; {case.seen}")
    return failed, sum(case.outcome == "pass" for case in found.cases)


@slow
def test_a_late_error_is_accepted_on_an_accelerator():
    failed, passed = failures("sound")
    assert failed == {}
    assert passed > 40


@slow
def test_a_late_error_is_not_accepted_on_the_cpu():
    failed, _ = failures("unsynchronized", ("FUSED-024",), "cpu")
    assert any("; no error" in one and "late" not in one for one in failed["FUSED-024"])


@slow
def test_an_error_that_never_comes_fails():
    failed, _ = failures("silent")
    assert {*failed} == {"FUSED-024", "FUSED-025", "FUSED-089"}
    assert all("late at most" in one and "; no error" in one for one in failed["FUSED-024"])


@slow
def test_an_invalid_lookup_must_change_nothing_before_its_error():
    failed, _ = failures("writing")
    assert {*failed} == {"FUSED-024", "FUSED-025", "FUSED-089"}
    early = [one for one in failed["FUSED-024"] if "before the error" in one and "unchanged" in one]
    assert early == failed["FUSED-024"]


@slow
def test_an_error_that_a_case_leaves_is_charged_to_it():
    failed, passed = failures("leaving", ("FUSED-027", "FUSED-030"))
    left = "no error that comes after the case; ValueError: a lookup in eval mode"
    assert left in failed.pop("FUSED-027")
    assert failed == {}, "the cases that ran after it"
    assert passed >= 8


@slow
def test_a_lost_device_costs_no_other_case():
    failed, passed = failures("losing", ("FUSED-089", "FUSED-030", "FUSED-022"))
    assert {*failed} == {"FUSED-089"}
    assert all("device-side assert" in one for one in failed["FUSED-089"])
    assert passed >= 8


def test_an_expectation_inside_an_action_is_not_its_error():
    def action():
        expect(False, "equal tables", "others")

    with pytest.raises(Mismatch) as raised:
        expect_raises(action, Exception, expected="an error")
    assert raised.value.expected == "equal tables"
