"""Whether one implementation is as precise as another, from two results."""

import dataclasses

import pytest
from making import CLAUSE, result

from keyedopt.conformance.results import model as results
from keyedopt.conformance.results import precision
from keyedopt.conformance.results.model import Case


def measured(path, *errors, single=1.0):
    """Write a result with these medians, (quantity, ULP) each, and the error of one draw, in one case."""
    records = [
        {
            "quantity": quantity,
            "dtype": "float32",
            "error": error,
            "unit": "ULP",
            "draws": 33,
        }
        for quantity, error in errors
    ]
    single = {"quantity": "weight", "dtype": "float32", "error": single, "budget": 9.0, "unit": "ULP"}
    records.append(single)
    case = Case(case="test_it::test", clauses=(CLAUSE,), outcome="pass", observed={"errors": records})
    results.write(dataclasses.replace(result(), cases=[case]), path)
    return str(path)


@pytest.mark.parametrize(
    ("reference", "other", "code"),
    [
        (0.8, 1.6, 0),
        (0.8, 1.7, 1),
        (0.1, 1.0, 0),
        (0.1, 1.01, 1),
        (0.0, 0.5, 0),
        (3.0, 6.0, 0),
        (3.0, 6.1, 1),
        (3.0, None, 1),
    ],
)
def test_twice_the_error_or_one_unit_is_as_precise(tmp_path, capsys, reference, other, code):
    one = measured(tmp_path / "one.json", ("weight", reference))
    two = measured(tmp_path / "two.json", ("weight", other), ("sum", 50.0), single=8.0)
    assert precision.main([one, two]) == code
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(f"1 compared, {code} beyond")
    assert len(out) == 1 + code


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    one = measured(tmp_path / "one.json", ("weight", 1.0))
    two = measured(tmp_path / "two.json", ("sum", 1.0))
    assert precision.main([one, two]) == 2
    assert precision.main([one]) == 2
    assert precision.main([one, str(tmp_path / "none.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
