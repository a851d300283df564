"""Reference and fused hold every clause on the pretend accelerator, in each case that is not CPU-only.

The everyday set asks for a sample of the clauses of each area, the complete set for all clauses of `fused`
and a larger sample of those of the reference, which is plain torch on every device.
"""

import dataclasses
import importlib.util

import pytest
from making import left_out, without_torchrec

from keyedopt.conformance import expectations, spec
from keyedopt.conformance.results.verdict import failing, judge
from keyedopt.conformance.run import runner

#: The clauses of cases that the pretend accelerator cannot run: shards in the memory of the host, ranks over
#: gloo, storage that is freed, and exported models.
CPU_ONLY = {
    *("COMB-022", "WRAP-021", "FT-036", "FUSED-024", "FUSED-103"),
    *(clause.id for clause in spec.areas()["sharded"].clauses),
}


#: The areas with cases that an accelerator can run.
AREAS = tuple(area for area in spec.areas() if area != "sharded")
#: The modules that a run on the pretend accelerator imports.
IMPORTS = ("keyedopt.conformance.pretend",)


def on_npu(target, clauses):
    return runner.run(target, runner.Options(clauses=tuple(clauses), device="npu", imports=IMPORTS))


@pytest.mark.complete(sample=1, spread=True)
@pytest.mark.parametrize("target", ["reference", "fused"])
def test_every_clause_holds_where_the_verdict_says(target, sample):
    whole = sample.complete and target == "fused"
    asked = sample if whole else dataclasses.replace(sample, complete=False)
    clauses = asked.clauses(AREAS, 20 if sample.complete else 2, f"{target} npu")
    found = on_npu(target, clauses)
    assert failing(judge(found)) == []
    left = {(clause, "unsupported") for clause in CPU_ONLY}
    left |= set() if importlib.util.find_spec("torchrec") else without_torchrec(found)
    assert {one for one in left_out(found) if one[0] in clauses} == {one for one in left if one[0] in clauses}
    elsewhere = {case.case for case in found.cases if (case.device or "npu").partition(":")[0] != "npu"}
    unsupported = {case.case for case in found.cases if case.outcome == "unsupported"}
    assert elsewhere <= unsupported
    assert found.environment["device"].partition(":")[0] == "npu"
    if whole:
        assert judge(found).conformant
        for_the_cpu = [case for case in found.cases if case.case in unsupported and not unclaimed(case)]
        assert len(for_the_cpu) <= 0.1 * len(found.cases)


def unclaimed(case):
    return case.seen.startswith("not claimed")


@pytest.mark.complete(sample=1, spread=True)
@pytest.mark.parametrize(
    ("target", "areas"),
    [
        ("torch", ("algorithms", "sparse", "in_backward")),
        ("torchft", ("fault_tolerance",)),
        ("torchrec", ("clipping", "semi_sync", "devices")),
    ],
)
def test_the_gates_of_libraries_are_green(torchrec, target, areas, sample):
    """What a library does wrong on accelerators only is in its list."""
    result = on_npu(target, sample.clauses(areas, 4, f"{target} npu"))
    path = expectations.find(target)
    known = expectations.read(path)
    verdict = judge(gated := expectations.apply(result, known, path))
    assert {verdict.clauses[clause] for clause in failing(verdict)} <= {"known"}
    here = {case for entry in known if entry.when.get("device") == "!=cpu" for case in entry.cases}
    found = {case.case for case in gated.cases if case.outcome == "known"}
    assert here & {case.case for case in gated.cases} <= found
    assert here or target != "torchrec"
