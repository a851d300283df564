"""The suite accepts implementations that are sound, and differ from the reference where documents leave room.

What they do is in ``targets/sound*.py``. The clauses are those whose cases asked for more than documents do,
and failed them; ``keyedopt check sound:IMPLEMENTATION`` with that folder on the path runs all others.
"""

from pathlib import Path

import pytest

from keyedopt.conformance.results.verdict import judge
from keyedopt.conformance.run import runner

TARGETS = [str(Path(__file__).parents[1] / "targets")]
CLAUSES = (
    *("KEYED-001", "KEYED-013", "KEYED-044", "KEYED-091", "COMB-011", "COMB-016", "COMB-018", "COMB-019"),
    *("WARM-045", "WARM-053"),
    *("ALGO-028", "ALGO-070", "ALGO-071", "ALGO-080", "ALGO-082", "ALGO-083", "ALGO-099", "ALGO-100"),
    *("ALGO-107", "ALGO-108", "ALGO-109", "ALGO-110", "ALGO-116"),
    *("ACC-002", "ACC-009", "ACC-010"),
    *("SEMI-011", "SEMI-019", "FT-004", "FT-033"),
    *("SPARSE-008", "SPARSE-014", "SPARSE-046", "SPARSE-048", "SPARSE-055", "SPARSE-074"),
)


@pytest.mark.parametrize(
    ("target", "clauses"), [("IMPLEMENTATION", CLAUSES), ("EMBEDDING", ("FUSED-039", "FUSED-052"))]
)
def test_sound_implementations_are_accepted(target, clauses):
    result = runner.run(f"sound:{target}", runner.Options(clauses=clauses), path=TARGETS)
    held = [case for case in result.cases if case.outcome == "pass"]
    rest = [case for case in result.cases if case.outcome != "pass" and "not claimed" not in str(case.seen)]
    assert {case.case: (case.expected, case.seen) for case in rest} == {}
    assert judge(result).reasons == ()
    assert {clause for case in held for clause in case.clauses} >= {*clauses}


def test_a_case_that_needs_a_name_of_an_area_that_is_not_claimed_is_unsupported():
    options = runner.Options(clauses=("COMB-023",))
    result = runner.run("vendor:COMBINED_ALONE", options, path=TARGETS)
    said = {(case.outcome, case.seen) for case in result.cases if "COMB-023" in case.clauses}
    assert said == {("unsupported", "not claimed: KeyedOptimizerWrapper")}
    verdict = judge(result)
    assert not verdict.conformant, "none of its musts was looked at"
    assert (
        "combined: none of its musts was checked: their cases are not claimed, or could not run"
        in verdict.reasons
    )
