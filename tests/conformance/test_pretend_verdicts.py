"""Reference and fused are conformant on the pretend accelerator, with every case that is not CPU-only."""

import pytest
from making import NOT_OURS, left_out

from keyedopt.conformance import expectations, spec
from keyedopt.conformance.results.verdict import judge

#: The clauses of cases that only the CPU can run: shards in the memory of the host, and ranks over gloo.
CPU_ONLY = {"COMB-022", "WRAP-021", "FT-036", *(clause.id for clause in spec.areas()["sharded"].clauses)}


@pytest.fixture(scope="module", params=["reference", "fused"])
def on_npu(request, check_once):
    return check_once(request.param, device="npu", imports=("keyedopt.conformance.pretend",))


def test_every_clause_holds(on_npu):
    verdict = judge(on_npu)
    assert verdict.reasons == ()
    assert verdict.conformant
    assert left_out(on_npu) == NOT_OURS | {(clause, "unsupported") for clause in CPU_ONLY}


def test_cases_run_where_the_verdict_says(on_npu):
    elsewhere = {case.case for case in on_npu.cases if (case.device or "npu").partition(":")[0] != "npu"}
    reasons = {case.case for case in on_npu.cases if case.outcome == "unsupported"}
    assert elsewhere <= reasons
    assert on_npu.environment["device"].partition(":")[0] == "npu"


def test_few_cases_are_for_the_cpu_only(on_npu):
    left = [case for case in on_npu.cases if case.outcome == "unsupported"]
    for_the_cpu = [case for case in left if not case.seen.startswith("not claimed")]
    assert len(for_the_cpu) <= 0.1 * len(on_npu.cases)


@pytest.mark.parametrize(
    ("target", "areas"),
    [("torch", ()), ("torchft", ()), ("torchrec", ("clipping", "semi_sync", "devices"))],
)
def test_the_gates_of_libraries_are_green(check_once, torchrec, target, areas):
    """What a library does wrong on accelerators only is in its list."""
    result = check_once(target, areas, "npu", imports=("keyedopt.conformance.pretend",))
    path = expectations.find(target)
    known = expectations.read(path)
    gated = expectations.apply(result, known, path)
    assert judge(gated).reasons == ()
    here = {case for entry in known if entry.when.get("device") == "!=cpu" for case in entry.cases}
    found = {case.case for case in gated.cases if case.outcome == "known"}
    assert here & {case.case for case in gated.cases} <= found
    assert here or target != "torchrec"
