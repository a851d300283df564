"""`keyedopt diff`: what changed between two results, and whether it got worse."""

import json

import pytest
from test_reports_tables import case, result, store  # noqa: F401 - a fixture

from keyedopt.reports.diff import CompareError, difference, only
from keyedopt.reports.load import load
from keyedopt.reports.tables import Clause

CLAUSES = {
    f"KEYED-00{n}": Clause(f"KEYED-00{n}", "keyed", level, "It holds.", "a document", since="0.1")
    for n, level in ((1, "must"), (2, "should"), (3, "recorded"))
}


def error(size, **rest):
    return {"errors": [{"quantity": "weight", "error": size, "budget": 9.0, "unit": "ULP", **rest}]}


@pytest.fixture
def compared(store):  # noqa: F811
    def call(before, after, strict=False):
        sides = [
            load([store(f"{name}.json", content)], CLAUSES)
            for name, content in (("before", before), ("after", after))
        ]
        assert all(side.problems.empty for side in sides)
        return difference(*sides, strict=strict)

    return call


def test_a_result_is_no_different_from_itself(compared):
    one = result(
        case("a"), case("b", "fail"), case("c", "observed", ("KEYED-003",), observed={"x": [1, None]})
    )
    found = compared(one, one)
    assert found.changes == ()
    assert found.compared == {"cases": 3, "records": 1, "errors": 0}
    assert compared(one, one, strict=True).changes == ()


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ("pass", "fail", True),
        ("fail", "pass", False),
        ("fail", "error", True),
        ("pass", "unsupported", True),
        ("unsupported", "fail", True),
        ("unsupported", "pass", False),
        ("observed", "fail", True),
        ("known", "unsupported", True),
        ("pass", "known", True),
    ],
)
def test_an_outcome_that_changed_is_worse_or_better(compared, before, after, worse):
    other = case("b", clauses=("KEYED-002",))  # so that the area is claimed
    found = compared(
        result(case("a", before), other), result(case("a", after, expected="1", seen="2"), other)
    )
    (change,) = found.changes
    assert (change.kind, change.what, change.level) == ("verdict", "KEYED-001", "must")
    words = {"observed": "recorded", "unsupported": "could not run"}
    assert (change.before, change.after) == (words.get(before, before), words.get(after, after))
    assert change.worse is worse
    assert bool(found.worse) is worse


@pytest.mark.parametrize(
    ("before", "after", "name", "worse"),
    [("pass", "unsupported", "acme", True), ("unsupported", "fail", "acme", None),
     ("pass", "unsupported", "other", None), ("unsupported", "pass", "other", None)],
)  # fmt: skip
def test_an_area_that_one_run_does_not_claim_is_one_line(compared, before, after, name, worse):
    cases = [(case(letter, before), case(letter, after)) for letter in "abc"]
    one, other = (result(*side) for side in zip(*cases, strict=True))
    other["implementation"] = {**other["implementation"], "name": name}
    (change,) = compared(one, other).changes
    assert (change.what, change.worse) == ("area keyed", worse)


@pytest.mark.parametrize(
    ("before", "after"),
    [("known", "fail"), ("error", "known"), ("pass", "unexpected-pass"), ("observed", "pass")],
)
def test_what_was_expected_of_it_is_no_change_of_an_implementation(compared, before, after):
    assert compared(result(case("a", before)), result(case("a", after))).changes == ()


def test_a_clause_that_fails_by_one_more_case_is_worse(compared):
    before = result(case("a", "fail"), case("b"), case("c", "fail"))
    after = result(case("a", "fail"), case("b", "fail", expected="one", seen="two"), case("c"))
    (change,) = compared(before, after).changes
    assert (change.before, change.after, change.worse) == ("fail", "fail", True)
    assert change.detail == (
        "1 cases worse, 1 cases better of 3; after: fail test_keyed::b: expected one; seen two"
    )


def test_recorded_behaviour_that_changed_is_neither_worse_nor_better(compared):
    sides = [
        result(case("a", "observed", ("KEYED-003",), observed={"same": 1, "order": order}))
        for order in (["p", "q"], ["q", "p"])
    ]
    found = compared(*sides)
    (change,) = found.changes
    assert (change.kind, change.level, change.worse) == ("behaviour", "recorded", None)
    assert (change.before, change.after) == ("order/0: p; order/1: q", "order/0: q; order/1: p")
    assert not found.worse


@pytest.mark.parametrize(
    ("unit", "before", "after", "worse"),
    [
        ("ULP", 0.5, 1.4, ()),
        ("ULP", 0.5, 1.6, (True,)),
        ("ULP", 1.6, 0.5, (False,)),
        ("ULP", 0.5, None, (True,)),
        ("relative", 1e-8, 1.9e-8, ()),
        ("relative", 1e-8, 2.1e-8, (True,)),
    ],
)
def test_an_error_that_has_grown_by_more_than_rounding_is_worse(compared, unit, before, after, worse):
    sides = [result(case("a", dtype="float32", observed=error(size, unit=unit))) for size in (before, after)]
    assert tuple(change.worse for change in compared(*sides).changes) == worse


def test_suites_that_differ_are_said_and_what_both_have_is_compared(compared):
    before = result(case("a"), case("old"))
    after = result(case("a", "fail"), case("new", "fail"), suite={"version": "0.2", "hash": "f" * 16})
    found = compared(before, after)
    assert [change.what for change in found.changes] == ["KEYED-001"]
    assert "the suites differ, 0.1 (0123456789abcdef) and 0.2 (ffffffffffffffff)" in found.notes[0]
    assert found.notes[1] == "only before: 1 cases (test_keyed::old)"
    assert found.notes[2] == "only after: 1 cases (test_keyed::new)"


def test_results_without_a_case_in_common_cannot_be_compared(compared):
    with pytest.raises(CompareError, match="no case in common"):
        compared(result(case("a")), result(case("b")))


def bench(ratio=2.0, width=0.1, noise=0.01, matches=True, capability="AVX2", threads=None, **rest):
    row = {
        "workload": "w",
        "task": "t",
        "implementation": "fused",
        "peer": "torch",
        "ratio": ratio,
        "low": ratio - width,
        "high": ratio + width,
        "noise": noise,
        "matches": matches,
        "bytes": 8,
        "seconds": {"median": 1.0},
        "peer_seconds": {"median": 2.0},
        "bound": 0.5,
        "first": 3.0,
    } | ({} if threads is None else {"threads": threads, "peer_threads": 1})
    where = {
        "cpu": "A CPU",
        "cores": 2,
        "capability": capability,
        "load": [0.1],
        "device": "cpu",
        "gpu": None,
        "python": "3.11",
        "system": "Linux x86_64",
        "versions": {"keyedopt": "0.1.0", "torch": "2.13.0"},
        "commit": None,
    }
    return {
        "kind": "keyedopt-bench",
        "schema": 1,
        "implementation": "fused",
        "environment": where,
        "bandwidth": 1e10,
        "started": "2026-11-21T08:00:00+00:00",
        "seconds": 1.0,
        "rows": [row],
    } | rest


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (bench(2.0), bench(1.9), ()),
        (bench(2.0), bench(1.7), (True,)),
        (bench(2.0), bench(2.3), (False,)),
        (bench(2.0, noise=0.1), bench(1.7, noise=0.1), ()),
        (bench(2.0), bench(2.0, matches=False), (True,)),
    ],
)
def test_a_speed_has_moved_when_the_intervals_are_apart_by_more_than_the_noise(
    compared, before, after, worse
):
    assert tuple(change.worse for change in compared(before, after).changes) == worse


def test_other_vector_instructions_are_another_processor(compared):
    notes = compared(bench(), bench(capability="AVX512")).notes
    assert notes == ("processor: A CPU, 2 cores, AVX2 before, A CPU, 2 cores, AVX512 after",)


def test_speeds_of_other_numbers_of_threads_are_not_compared(compared):
    with pytest.raises(CompareError, match="no comparison in common"):
        compared(bench(threads=1), bench(1.0, threads=2))


def test_a_verdict_and_a_speed_cannot_be_compared(compared):
    with pytest.raises(CompareError, match=r"conformance and .* of bench"):
        compared(result(case("a")), bench())


def test_one_run_of_many_can_be_chosen(store):  # noqa: F811
    files = [store("a.json", result(case("x"))), store("b.json", result(case("x", "fail"), version="2"))]
    tables = load(files, CLAUSES)
    found = difference(*(only(tables, run) for run in ("acme 1.0", "acme 2")))
    assert [change.after for change in found.changes] == ["fail"]


# --- strict: is it like the original? ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [("fail", "pass"), ("fail", "error"), ("pass", "unsupported"), ("pass", "fail")]
)
def test_whatever_outcome_differs_is_a_difference_to_the_original(compared, before, after):
    (change,) = compared(result(case("a", before)), result(case("a", after)), strict=True).changes
    assert change.worse


def test_a_case_that_only_one_of_them_ran_is_a_difference_to_the_original(compared):
    found = compared(result(case("a"), case("b")), result(case("a"), case("c")), strict=True)
    (change,) = found.changes
    assert change.detail.startswith("2 cases differ of 3")


def test_records_and_errors_without_a_verdict_are_compared_with_the_original(compared):
    def made(size, seen, outcome="observed"):
        clause = ("KEYED-003",) if outcome == "observed" else ("KEYED-001",)
        return result(
            case("a", outcome, clause, observed=error(size, rows=3)),
            case("b", outcome, clause, observed={"rates": seen}, inputs=CURVE),
        )

    assert len(compared(made(0.5, [[0, 1.0]]), made(0.6, [[0, 1.5]]), strict=True).changes) == 2
    small = compared(made(0.5, [[0, 1.0]], "pass"), made(0.6, [[0, 1.5]], "pass"), strict=True)
    assert small.changes == ()  # what has a verdict is within its budget


CURVE = {"curve": {"lr": 1.0, "stages": [{"policy": "NONE"}], "points": [[0, 0, 1.0, 0.0]]}}


# --- how it is shown --------------------------------------------------------------------------------


def test_a_difference_is_shown_as_lines_as_markdown_and_as_data(compared):
    before = result(case("a"), case("b", "fail"))
    after = result(case("a", "fail", expected="`one`|", seen="\x1b[31m<b>two</b>"), case("b"))
    found = compared(before, after)
    text, markdown = found.text(), found.markdown()
    assert "worse verdict KEYED-001 [must] fail -> fail" in text
    assert text.splitlines()[2:4] == [
        "verdicts that changed: 1 (1 worse)",
        "compared: 2 cases, 0 records, 0 errors; 1 worse",
    ]
    assert "\x1b" not in text + markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| worse |"))
    assert row.count("|") - row.count("\\|") == 7
    assert "expected 'one'\\|; seen \\x1b[31m<b>two</b>`" in row
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["kind"] == "keyedopt-diff"
    assert plain["changes"][0]["worse"] is True
