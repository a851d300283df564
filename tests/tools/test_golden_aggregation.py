"""The stored curve of precision is what its script makes, and keeps its promises."""

import json

import pytest

from keyedopt.tools.golden import make_aggregation

STORED = json.loads(make_aggregation.FILE.read_text(encoding="utf-8"))
AT = {count: number for number, count in enumerate(STORED["counts"])}


def test_the_curve_goes_to_ten_million():
    assert STORED["counts"] == list(make_aggregation.COUNTS)
    assert max(STORED["counts"]) == 10_000_000


@pytest.mark.parametrize("kind", make_aggregation.KINDS)
def test_the_error_is_within_its_bounds(kind):
    errors = STORED[kind]["reference"]
    assert errors[AT[10_000]] <= 1e-6
    assert max(errors) <= 1e-5


def test_adding_up_one_by_one_would_not_do():
    assert STORED["equal"]["one by one"][AT[10_000_000]] > 1e-2


@pytest.mark.parametrize("kind", make_aggregation.KINDS)
def test_the_stored_curve_is_what_the_script_makes(kind, monkeypatch):
    # other ways to sum are torch's, and depend on the machine; ten million takes seconds
    monkeypatch.setattr(make_aggregation, "COUNTS", (1, 10, 100, 1_000, 10_000, 100_000))
    monkeypatch.setattr(make_aggregation, "WAYS", {"reference": make_aggregation.WAYS["reference"]})
    made = make_aggregation.curve(kind)["reference"]
    assert made == STORED[kind]["reference"][: len(made)]
