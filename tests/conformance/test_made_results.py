"""Results that were made before the tests are taken only if they are of the same suite, build and options."""

import dataclasses

import made_results
import pytest
from making import CLAUSE, result

from keyedopt.conformance import expectations
from keyedopt.conformance.results import model
from keyedopt.conformance.run import runner


@pytest.fixture(scope="module")
def usual():
    """Make a result that says of itself that it is of the whole suite."""
    found = runner.run("reference", runner.Options(clauses=(CLAUSE,)))
    return dataclasses.replace(found, options={**found.options, "clauses": []})


@pytest.fixture
def made(usual, tmp_path, monkeypatch):
    """Make the result of the reference an earlier one, with changes; return what is found of it."""
    found = usual
    monkeypatch.setenv(made_results.FOLDER, str(tmp_path))

    def find(**changes):
        model.write(dataclasses.replace(found, **changes), tmp_path / "reference.json")
        return made_results.find("reference")

    return find, found


def test_a_result_of_the_same_state_is_taken(made):
    find, found = made
    assert find().cases == found.cases
    assert made_results.find("fused") is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("suite", {"hash": "another"}),
        ("implementation", {"build": "another"}),
        ("implementation", {"versions": {"keyedopt": "0.0.1"}}),
        ("environment", {"torch": "1.0"}),
        ("options", {"areas": ["keyed"]}),
        ("options", {"dtypes": ["float32"]}),
    ],
)
def test_a_result_of_another_state_is_not_taken(made, part, change):
    find, found = made
    assert find(**{part: {**getattr(found, part), **change}}) is None


def test_a_list_of_known_failures_is_undone(tmp_path):
    names = [f"test_keyed_load::test_{letter}" for letter in "abc"]
    crash = {"expected": "the case to end", "seen": "crash"}
    before = result(
        {"case": names[0], "outcome": "fail", "expected": "1", "seen": "2"},
        {"case": names[1], "outcome": "error", **crash},
        {"case": names[2]},
    )
    path = tmp_path / "known.toml"
    cases = ", ".join(f'"{name}"' for name in names)
    path.write_text(f"""[[known]]
clause = "KEYED-001"
cases = [{cases}]
reason = "r"
link = "https://example.com"
""")
    after = expectations.apply(before, expectations.read(path), path)
    assert [case.outcome for case in after.cases] == ["known", "known", "unexpected-pass"]
    assert made_results.without_expectations(after).cases == before.cases
