"""The fused implementation passes the suite, on every backend that this machine has."""

import os

import pytest

from keyedopt.conformance import runner, spec
from keyedopt.conformance.verdict import judge

#: The areas in which a backend does the work.
BACKED = ("fused", "algorithms", "accumulate", "sparse", "in_backward")


@pytest.fixture
def backend(request, monkeypatch):
    """Make `"auto"` try one backend first, in every process of a run."""
    from keyedopt.fused import backends

    why = backends.available()[request.param]
    if why:
        if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
            pytest.fail(f"{request.param} is required, and {why}")
        pytest.skip(f"{request.param}: {why}")
    monkeypatch.setenv(backends.PREFERRED, request.param)
    return request.param


def test_it_passes_every_clause_of_every_level():
    result = runner.run("fused")
    verdict = judge(result)
    assert verdict.reasons == ()
    assert verdict.conformant
    assert set(verdict.clauses) == set(spec.clauses())
    assert {case.outcome for case in result.cases} == {"pass", "observed"}


@pytest.mark.parametrize("backend", ["native", "torch"], indirect=True)
def test_every_backend_passes(backend):
    result = runner.run("fused", runner.Options(areas=BACKED))
    assert judge(result).reasons == ()
    assert {case.outcome for case in result.cases} == {"pass", "observed"}


def test_the_kernels_for_cuda_pass_in_the_interpreter(monkeypatch):
    if os.environ.get("KEYEDOPT_REQUIRE_TRITON") != "1":
        pytest.importorskip("triton", reason="triton: pip install 'keyedopt[cuda]'")
    monkeypatch.setenv("KEYEDOPT_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    areas = [spec.areas()[name] for name in ("fused", "accumulate")]
    # FUSED-080 records the error of a million sums, which the interpreter takes minutes for
    clauses = tuple(clause.id for area in areas for clause in area.clauses if clause.id != "FUSED-080")
    result = runner.run("fused", runner.Options(clauses=clauses, limit=120.0))
    assert judge(result).reasons == ()
