"""A name means what ran: the backend of a case and of a figure is the one that ran, not the one asked for."""

import pytest
import torch

from keyedopt.benchmarks.asv.implementations import job_of
from keyedopt.benchmarks.tasks import NotOffered
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.run import runner
from keyedopt.conformance.run.runner import Options
from keyedopt.fused import EmbeddingBagCollection, EmbeddingBagConfig, backends


@pytest.fixture
def fbgemm():
    if why := backends.available()["fbgemm"]:
        pytest.skip(why)


def test_a_figure_of_a_backend_that_did_not_run_is_not_offered(fbgemm):
    work = WORKLOADS["small-step"]
    with pytest.raises(NotOffered, match=r"not by fbgemm: (native|torch) ran"):
        job_of("fused:fbgemm", _task("lars_sgd"), work, "cpu")
    job_of("fused:fbgemm", _task("sgd"), work, "cpu")


def _task(optimizer):
    from keyedopt.benchmarks.tasks import TASKS

    return next(name for name in TASKS if name.startswith("train") and name.endswith(optimizer))


def test_a_case_names_its_backend_and_counts_for_the_one_that_was_asked(fbgemm, monkeypatch):
    monkeypatch.setenv("KEYEDOPT_BACKEND", "fbgemm")
    result = runner.run("fused", Options(clauses=("FUSED-001", "FUSED-066")))
    assert result.environment["backend"] == "fbgemm"
    ran = {case.backend for case in result.cases} - {None}
    assert ran - {"fbgemm"}, "a step that FBGEMM does not do"
    for case in result.cases:
        assert case.backend in (None, "fbgemm") or case.outcome == "unsupported"
        if case.outcome == "unsupported" and case.backend:
            assert f"asked of the backend fbgemm, but {case.backend} ran" == case.seen


@pytest.mark.parametrize(("name", "error"), [("natve", ValueError), ("triton", RuntimeError)])
def test_a_preferred_backend_that_cannot_run_is_refused(monkeypatch, name, error):
    if backends.available().get(name) == "":
        pytest.skip(f"{name} can run here")
    monkeypatch.setenv("KEYEDOPT_BACKEND", name)
    table = EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])
    with pytest.raises(error, match=name):
        EmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1})
