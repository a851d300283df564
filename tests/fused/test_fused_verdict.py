"""The fused implementation passes the suite, on every backend that this machine has.

The backend that is tried first is asked for clauses of every area, every backend for clauses of the areas in
which a backend does the work. The complete set has all of these clauses. In the median of many draws the
errors of `fused` are at most twice those of the reference, see `precision`.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from making import ON_CPU, left_out, without_torchrec

from keyedopt.conformance.results import precision
from keyedopt.conformance.results.verdict import failing, judge
from keyedopt.conformance.run import runner
from keyedopt.fused import backends

#: The folder of the targets that are made for these tests.
SUPPORT = str(Path(__file__).parents[1] / "support")
#: The areas in which a backend does the work.
BACKED = ("fused", "algorithms", "accumulate", "sparse", "in_backward")

#: What says that a backend has to be there.
REQUIRED = {
    "native": "KEYEDOPT_REQUIRE_NATIVE",
    "fbgemm": "KEYEDOPT_REQUIRE_TORCHREC",
    "torch": "KEYEDOPT_REQUIRE_NATIVE",
}


def check_precision(on_reference, result, least):
    """Check that errors are at most twice those of the reference, in so many comparisons or more."""
    compared = list(precision.compare(on_reference, result))
    assert len(compared) >= least
    assert [str(one) for one in compared if not one.holds()] == []


#: The errors that a backend measures; FBGEMM follows the specification in few steps.
LEAST = {"fbgemm": 10}


@pytest.fixture
def backend(request, monkeypatch):
    """Make `"auto"` try one backend first, in every process of a run."""
    why = backends.available()[request.param]
    if why:
        if os.environ.get(REQUIRED[request.param]) == "1":
            pytest.fail(f"{request.param} is required, and {why}")
        pytest.skip(f"{request.param}: {why}")
    monkeypatch.setenv(backends.PREFERRED, request.param)
    return request.param


def test_it_passes_every_clause_of_every_level(on_fused):
    verdict = judge(on_fused)
    assert verdict.reasons == ()
    if not on_fused.options["clauses"]:
        assert verdict.conformant
        assert set(verdict.clauses) == ON_CPU
    left = left_out(on_fused) - {("FT-036", "unsupported")}  # it needs torchft
    assert left == (set() if importlib.util.find_spec("torchrec") else without_torchrec(on_fused))


def test_its_errors_are_those_of_the_reference(on_fused, on_reference):
    check_precision(on_reference, on_fused, least=250)


@pytest.mark.complete(sample=3, spread=True)
@pytest.mark.parametrize("backend", ["native", "fbgemm", "torch"], indirect=True)
def test_every_backend_passes(backend, on_reference, on_fused, sample):
    clauses = tuple(sample.clauses(BACKED, 2, backend))
    if sample.complete and backend == "native":  # it is tried first without the variable, too
        result = on_fused
    else:
        result = runner.run("fused", runner.Options(clauses=clauses))
    assert failing(judge(result)) == []
    assert {outcome for _, outcome in left_out(result)} <= {"unsupported"}
    for case in result.cases:  # where a backend was asked for, a case that another one ran does not count
        counts = case.outcome in ("pass", "observed")
        assert not counts or case.backend in (None, backend), case.case
    check_precision(on_reference, result, least=LEAST.get(backend, 250) if sample.complete else 0)


def test_it_passes_without_extensions(sample, cold, monkeypatch):
    """A machine without a C++ compiler gets torch's kernels, and a warning, which is no error of a case."""
    monkeypatch.setenv("PYTHONWARNINGS", "error:keyedopt's C++ extensions")
    clauses = tuple(sample.clauses((*BACKED, "clipping", "sharded"), 2, "without extensions"))
    result = runner.run("without_extensions:IMPLEMENTATION", runner.Options(clauses=clauses), path=[SUPPORT])
    assert failing(judge(result)) == []
    assert {outcome for _, outcome in left_out(result)} <= {"unsupported"}
    assert "native" not in {case.backend for case in result.cases}


@pytest.mark.complete(spread=True)
@pytest.mark.parametrize("share", range(3))
def test_the_kernels_for_cuda_pass_in_the_interpreter(share, monkeypatch, on_reference, sample):
    if os.environ.get("KEYEDOPT_REQUIRE_TRITON") != "1":
        pytest.importorskip("triton", reason="triton: pip install 'keyedopt[cuda]'")
    monkeypatch.setenv("KEYEDOPT_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = sample.clauses(("fused", "accumulate"), 3, "triton")[share::3]
    # FUSED-080 records the error of a million sums, which the interpreter takes minutes for
    clauses = tuple(clause for clause in chosen if clause != "FUSED-080")
    options = runner.Options(clauses=clauses, limit=120.0)
    result = runner.run("quick_interpreter:IMPLEMENTATION", options, path=[SUPPORT])
    assert failing(judge(result)) == []
    # two trajectories of eight algorithms
    check_precision(on_reference, result, least=16 if "FUSED-037" in clauses else 0)
