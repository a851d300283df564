"""The tables: columns as documented, one file at a time, bad files named and refused."""

import json
from pathlib import Path

import pytest

from keyedopt.reports.load import load
from keyedopt.reports.tables import COLUMNS, TEXT, TIME, Clause, described, table, update_readme
from keyedopt.tools import sample

ROOT = Path(__file__).parents[2]
CLAUSES = {
    "KEYED-001": Clause("KEYED-001", "keyed", "must", "Keys are unique.", "a document", since="0.1"),
    "KEYED-002": Clause("KEYED-002", "keyed", "should", "And so on.", "a document", since="0.1"),
}


def case(name, outcome="pass", clauses=("KEYED-001",), **rest):
    return {"case": f"test_keyed::{name}", "clauses": list(clauses), "outcome": outcome, **rest}


def result(*cases, name="acme", version="1.0", **rest):
    return {
        "implementation": {
            "name": name,
            "target": name,
            "version": version,
            "versions": {name: version},
            "areas": ["keyed"],
        },
        "environment": {"python": "3.11.7", "torch": "2.13.0", "keyedopt": "0.1.0", "device": "cpu"},
        "suite": {"version": "0.1", "hash": "0123456789abcdef"},
        "options": {"level": "should"},
        "started": "2026-11-21T08:00:00+00:00",
        "seconds": 1.5,
        "complete": True,
        "schema": 1,
        "cases": list(cases),
    } | rest


@pytest.fixture
def store(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return put


def test_every_table_has_the_documented_columns_also_when_it_is_empty(store):
    full = load([store("a.json", result(case("x"))), ROOT / "benchmarks" / "results"], CLAUSES)
    assert full.problems.empty, full.problems.to_string()
    for tables in (load([]), full):
        for name, frame in tables.by_name().items():
            assert list(frame.columns) == list(COLUMNS[name])
            for column, about in COLUMNS[name].items():
                kind = TEXT if about.dtype == TEXT else about.dtype
                assert str(frame[column].dtype) == kind, (name, column)


def test_the_readme_documents_the_columns():
    path = ROOT / "reports" / "README.md"
    assert path.read_text(encoding="utf-8") == update_readme(path)
    assert described() in path.read_text(encoding="utf-8")


def test_failures_of_one_cause_are_a_line_of_their_run(store):
    cause = {"class": "Adam", "error": "RuntimeError: no\nkernel"}
    listed = [case(name, "fail", [clause], cause=cause) for name, clause in zip("xy", CLAUSES, strict=True)]
    tables = load([store("a.json", result(*listed))], CLAUSES)
    assert list(tables.runs["causes"]) == [
        "Adam could not be judged: its first step raises RuntimeError: no kernel; "
        "failing for it: 2, of them musts: 0"
    ]


def test_a_clause_has_the_worst_outcome_of_its_cases(store):
    cases = [
        case("a"),
        case("b", "known", known={"reason": "it is so", "link": "a.py"}),
        case("c", "fail", ("KEYED-001", "KEYED-002"), expected="1", seen="2", inputs={"n": 3}),
    ]
    tables = load([store("a.json", result(*cases))], CLAUSES)
    clauses = tables.clauses.set_index("clause")
    assert clauses.loc["KEYED-001", ["outcome", "cases", "passed", "failed", "known"]].tolist() == [
        *("fail", 3, 1, 1, 1)
    ]
    assert clauses.loc["KEYED-002", ["area", "level", "outcome"]].tolist() == ["keyed", "should", "fail"]
    last = tables.cases.iloc[-1]
    assert (last["clause"], last["expected"], last["seen"]) == ("KEYED-002", "1", "2")
    assert json.loads(last["inputs"]) == {"n": 3}
    assert last["replay"] == f"keyedopt replay {tables.runs['file'][0]} test_keyed::c --run"
    assert tables.runs["verdict"][0] == "not conformant"


def test_what_observing_cases_recorded_is_flattened(store):
    seen = {"with": ["a", 2], "python": True, "none": None, "odd": {"python": "inf"}}
    tables = load([store("a.json", result(case("a", "observed", observed=seen)))], CLAUSES)
    found = tables.records.set_index("name")["text"].to_dict()
    assert found == {"with/0": "a", "with/1": "2", "python": "true", "none": "null", "odd": "inf"}


def test_measured_errors_are_rows_of_their_own(store):
    error = {"quantity": "weight", "error": 0.5, "budget": 2.0, "unit": "ULP", "steps": 3}
    made = case("a", dtype="float32", inputs={"algorithm": "Adam"}, observed={"errors": [error]})
    tables = load([store("a.json", result(made))], CLAUSES)
    row = tables.errors.iloc[0]
    assert row.loc["subject":"steps"].tolist() == ["Adam", "weight", "float32", 0.5, 2.0, "ULP", 3]
    assert tables.records.empty


def test_labels_tell_runs_apart_by_as_little_as_is_needed(store):
    other = {"python": "3.11.7", "torch": "2.11.0", "keyedopt": "0.1.0", "device": "cpu"}
    files = [
        store("a.json", result(case("x"))),
        store("b.json", result(case("x"), environment=other)),
        store("c.json", result(case("x"), version="2.0")),
        store("d.json", result(case("x"), version="3.0")),
        store("e.json", result(case("x"), version="3.0", seconds=2.0)),
    ]
    labels = load(files).runs["run"].tolist()
    assert labels[:3] == ["acme 1.0, torch 2.13.0", "acme 1.0, torch 2.11.0", "acme 2.0"]
    assert len(set(labels)) == 5


WRONG = {
    "truncated": (b'{"suite": {"version": "0.1"', "truncated"),
    "empty": (b"", "empty"),
    "binary": (bytes(range(128, 256)), "not text"),
    "a list": ([1, 2], "not a result"),
    "something else": ({"name": "package", "scripts": {}}, "not a result of check"),
    "another version": (result(schema=2), "format version 2"),
    "no version": ({**result(), "schema": None}, "format version None"),
    "partial": (result(complete=False), "interrupted"),
    "no cases": ({k: v for k, v in result().items() if k != "cases"}, "'cases' is a required property"),
    "an outcome": (result(case("x", "perhaps")), "perhaps"),
    "a case twice": (result(case("x"), case("x")), "twice"),
    "no case": (result("x"), "is not of type 'object'"),
    "no date": (result(started="yesterday"), "ISO 8601"),
    "bench of another version": ({"kind": "keyedopt-bench", "schema": 99}, "format version 99"),
    "bench without rows": ({"kind": "keyedopt-bench", "schema": 1}, "missing"),
    "asv of another version": ({"commit_hash": "a", "results": {}, "version": 1}, "version 1"),
    "pytest-benchmark": ({"machine_info": {}, "benchmarks": [], "version": "2.0"}, "pytest-benchmark 2.0"),
    "deep": (b'{"suite": ' + b"[" * 200_000, "nested"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_file_is_named_and_refused_and_the_rest_goes_on(store, name):
    content, why = WRONG[name]
    bad, good = store("bad.json", content), store("good.json", result(case("x")))
    tables = load([bad.parent])
    assert tables.runs["file"].tolist() == [str(good)]
    assert tables.problems["file"].tolist() == [str(bad)]
    assert why in tables.problems["reason"][0]
    assert tables.clauses[tables.clauses["cases"] > 0]["clause"].tolist() == ["KEYED-001"]


def test_a_copy_a_missing_file_and_an_empty_folder_are_refused(store, tmp_path):
    one, two = store("a.json", result(case("x"))), store("b.json", result(case("x")))
    (tmp_path / "nothing").mkdir()
    tables = load([one, one, two, tmp_path / "missing.json", tmp_path / "nothing"])
    assert len(tables.runs) == 1
    reasons = dict(zip(tables.problems["file"], tables.problems["reason"], strict=True))
    assert reasons[str(two)] == f"it is a copy of {one}, which is in the report already"
    assert "No such file" in reasons[str(tmp_path / "missing.json")]
    assert "without results" in reasons[str(tmp_path / "nothing")]


def test_text_of_strangers_cannot_command_a_terminal(store):
    odd = case("a", "fail", expected="\x1b[31mred\x07", seen="<script>\u202e")
    tables = load([store("a.json", result(odd, name="ac\x1b]0;me"))])
    assert "\x1b" not in tables.runs["run"][0]
    assert tables.cases["expected"][0] == "\\x1b[31mred\\x07"
    assert tables.cases["seen"][0] == "<script>\\u202e"


def test_the_benchmarks_of_the_repository_are_rows_of_speeds():
    tables = load([ROOT / "benchmarks" / "results" / "2-core-avx512-epyc" / "default.json"])
    speeds = tables.speeds
    assert (speeds["low"] <= speeds["ratio"]).all()
    assert (speeds["ratio"] <= speeds["high"]).all()
    assert (speeds["of_bound"] == speeds["seconds_median"] / speeds["bound_seconds"]).all()
    assert speeds["run"].unique().tolist() == ["fused 0.1.0 bench"]
    assert tables.problems.empty


def test_files_of_ours_that_are_no_results_may_lie_among_them(store):
    store("in/a.json", result(case("x")))
    store("in/baseline.json", {"kind": "keyedopt-baseline", "schema": 1, "rows": []})
    tables = load([store("in/d.json", {"kind": "keyedopt-diff", "schema": 1, "changes": []}).parent])
    assert len(tables.runs) == 1
    assert tables.problems.empty


def test_points_of_asv_have_parameters_units_and_dates(store):
    about = {"bench.Step.time_step": {"param_names": ["dim"], "unit": "seconds"}, "version": 2}
    store("asv/benchmarks.json", about)
    store("asv/box/machine.json", {"machine": "box", "version": 1})
    point = {
        "commit_hash": "0123456789abcdef",
        "date": 1795250909000,
        "params": {"machine": "box", "gpu": ""},
        "python": "3.11",
        "result_columns": [
            *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b")
        ],
        "results": {
            "bench.Step.time_step": [[0.5, None], [["64", "'big'"]], "v", 1, 2.0, [0.4, None], [0.6, None]],
            "bench.Step.peakmem_step": [[1024], []],
            "bench.Step.time_failed": [None, [["1"]]],
        },
        "version": 2,
    }
    store("asv/box/01234567-env.json", point)
    tables = load([store("asv/box/01234567-env.json", point).parents[1]])
    assert tables.problems.empty
    rows = tables.history[["benchmark", "parameters", "value", "unit", "low", "high"]]
    assert rows.iloc[0].tolist() == ["bench.Step.time_step", "dim=64", 0.5, "s", 0.4, 0.6]
    assert rows.iloc[1, :4].tolist() == ["bench.Step.peakmem_step", "", 1024.0, "B"]
    assert len(rows) == 2
    assert str(tables.history["date"][0].date()) == "2026-11-21"


def test_pytest_benchmark_is_one_point_for_each_benchmark(store):
    made = {
        "machine_info": {"node": "box", "python_version": "3.11.7", "cpu": {"brand_raw": "A CPU"}},
        "commit_info": {"id": "0123456789abcdef"},
        "datetime": "2026-11-21T08:00:00+00:00",
        "version": "5.1.0",
        "benchmarks": [
            {
                "fullname": "bench.py::test_step[64]",
                "params": {"dim": 64},
                "stats": {"median": 0.5, "q1": 0.4, "q3": 0.6},
            }
        ],
    }
    history = load([store("a.json", made)]).history
    assert history.iloc[0, [0, 1, 2, 5, 6]].tolist() == ["bench.py::test_step", "dim=64", "box", 0.5, "s"]


def test_a_missing_value_is_missing_and_no_text():
    frame = table("problems", [("a", None)])
    assert frame["reason"].isna().all()
    assert table("runs", []).dtypes["started"] == TIME


def test_made_up_results_are_read_like_real_ones(tmp_path):
    assert sample.write(tmp_path, implementations=2, clauses=20, measurements=9000) == 4
    tables = load([tmp_path])
    assert tables.problems.empty
    plain = len(tables.cases) - len(tables.records) - tables.errors["case"].nunique() * 2
    assert plain + len(tables.records) + len(tables.errors) == 9000
    assert tables.clauses[tables.clauses["cases"] > 0]["clause"].nunique() == 20
    assert len(tables.speeds) == 20
