"""On a device whose tensors have no values, no case passes that needs one.

A check refuses ``meta``. Here it is allowed, to see which cases would pass: those named in
``without_values.txt``, which look at names, keys, shapes, errors, counts and numbers of the host only.
"""

from pathlib import Path

import pytest

from keyedopt.conformance import spec
from keyedopt.conformance.run import runner

HERE = Path(__file__).parent
#: Clauses whose cases compute for seconds before they compare.
LONG = {"ACC-015", "ALGO-095", "CLIP-006"}


@pytest.mark.complete(sample=1)
def test_only_cases_that_need_no_value_pass(sample):
    chosen = sample.clauses(spec.areas(), 3, "meta")
    clauses = tuple(name for name in chosen if name not in LONG)
    target, support = "without_values:IMPLEMENTATION", str(HERE.parent / "support")
    result = runner.run(target, runner.Options(clauses=clauses), path=[support])
    # A case in which the target ran no operator has no device, and counts for none.
    passed = [case.case for case in result.cases if (case.outcome, case.device) == ("pass", "meta")]
    named = (HERE / "without_values.txt").read_text(encoding="utf-8").split()
    found = {case.partition("[")[0] for case in passed}
    ran = {case.case.partition("[")[0] for case in result.cases}
    assert found == ({*named} & ran)
    if sample.complete:
        assert sorted(found) == named
