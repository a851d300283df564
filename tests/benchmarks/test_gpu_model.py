"""The model of a backward pass on a GPU: the measured kernels leave room for the planned programs."""

import json
from dataclasses import astuple
from statistics import geometric_mean

import pytest

from keyedopt.benchmarks.gpu import model

MEASURED = json.loads(model.KERNELS.read_text(encoding="utf-8"))["workloads"]
#: Warps of a kernel that run on a multiprocessor at a time, at least.
WARPS = {
    "write_keys": 32,
    "radix_pass": 24,  # the first pass of several; 32 of the others
    "find_runs": 32,
    "sum_chunks": 32,
    "fold_chunks": 32,
    "update": 24,
}


@pytest.mark.parametrize("name", [work.name for work in model.workloads()])
def test_every_kernel_has_the_planned_occupancy(name: str) -> None:
    launches = MEASURED[name]["launches"]
    assert {one["kernel"] for one in launches} == set(WARPS)
    assert len(launches) <= 10
    for one in launches:
        assert model.occupancy(one) * one["warps"] >= WARPS[one["kernel"]], one
    passes = [model.occupancy(one) for one in launches if one["kernel"] == "radix_pass"]
    assert min(passes[1:]) >= 4


def test_predictions_grow_with_the_work() -> None:
    measured = MEASURED["8x200k-uniform"]
    (work,) = (one for one in model.workloads() if one.name == "8x200k-uniform")
    one = model.predict(work, measured)
    twice = {**measured, "lookups": measured["lookups"] // 2}
    assert all(0 < seconds < 1e-2 for seconds in astuple(one)[1:])
    assert model.predict(work, twice).sort > one.sort
    assert one.update > one.bound


def test_the_model_prints_a_line_for_each_workload(capsys: pytest.CaptureFixture[str]) -> None:
    model.main()
    said = capsys.readouterr().out
    assert all(f"\n{work.name} " in said for work in model.workloads())


def test_predictions_are_corrected_by_what_was_measured() -> None:
    """The numbers in the docstring of the model: mean ratios of 1, and the largest error of each part."""
    seen = model.measured_times()
    assert set(seen) == {work.name for work in model.workloads()}
    largest = {"sort": 1.15, "sums": 1.6, "update": 1.79, "fbgemm": 1.75}
    for part, most in largest.items():
        ratios = [
            seen[work.name][part] / getattr(model.predict(work, MEASURED[work.name]), part)
            for work in model.workloads()
        ]
        assert geometric_mean(ratios) == pytest.approx(1, rel=0.01)
        assert max(max(one, 1 / one) for one in ratios) <= most, part
