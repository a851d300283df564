"""What ``--json`` prints, and the result of the last check, which needs no file."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from making import CLAUSE

from keyedopt.cli import bench_table, last, listing
from keyedopt.conformance import spec
from keyedopt.conformance.results.verdict import FAILING, UNSUPPORTED, failing, judge


@pytest.fixture
def bad(failed):
    """The clauses that failed in the check of the wrong library."""
    verdict = judge(failed)
    return [clause for clause in failing(verdict) if verdict.clauses[clause] in FAILING]


@pytest.mark.parametrize("what", ["targets", "clauses", "areas", "devices"])
def test_a_list_as_json_is_one_object_with_that_list(run_line, what):
    plain = json.loads(run_line("list", what, "--json").stdout)
    assert list(plain) == [what]
    assert all({"name", "id"} & set(row) for row in plain[what])


def test_a_clause_has_the_same_members_in_every_list(run_line):
    clause = spec.clauses()[CLAUSE]
    one = {"id": CLAUSE, "level": clause.level, "area": clause.area, "statement": clause.statement}
    (explained,) = json.loads(run_line("explain", CLAUSE, "--json").stdout)["clauses"]
    assert one.items() <= explained.items()
    assert explained["cases"]
    assert one in json.loads(run_line("list", "clauses", "--json").stdout)["clauses"]
    area = json.loads(run_line("explain", clause.area, "--json").stdout)
    assert one in area["clauses"]
    assert CLAUSE in area["areas"][0]["clauses"]


def test_a_check_as_json_has_the_verdict_on_stdout_and_the_rest_on_stderr(run_line, checked, bad):
    done = run_line("check", "acme", "--json")
    plain = json.loads(done.stdout)
    (target,) = plain["targets"]
    assert done.returncode == plain["exit"] == 1
    assert (target["name"], target["gate"]) == ("acme", "red")
    outcomes = {row["id"]: row["outcome"] for row in target["clauses"]}
    assert {clause for clause, outcome in outcomes.items() if outcome in FAILING} == set(bad)
    assert all(("failure" in row) == (row["id"] in bad) for row in target["clauses"])
    assert "gate: red (exit 1)" in done.stderr


def test_a_check_as_json_has_the_words_of_result_files_and_those_that_readers_are_shown(
    run_line, checked, failed
):
    """`outcome` is what it was in older versions; `shown` is the word of the page and the documentation."""
    words = {"unsupported": ["not claimed: no such area", "no CUDA device"], "observed": [""]}
    made = [(outcome, seen) for outcome, listed in words.items() for seen in listed]
    cases = [
        dataclasses.replace(case, clauses=(clause,), outcome=outcome, seen=seen)
        for case, clause, (outcome, seen) in zip(failed.cases, spec.clauses(), made, strict=False)
    ]
    checked["result"] = dataclasses.replace(failed, cases=tuple(cases), options={})
    (target,) = json.loads(run_line("check", "acme", "--json").stdout)["targets"]
    rows = {row["id"]: (row["outcome"], row["shown"]) for row in target["clauses"]}
    assert [rows[case.clauses[0]] for case in cases] == [
        ("unsupported", "not claimed"),
        ("unsupported", "could not run"),
        ("observed", "recorded"),
    ]
    assert {shown for outcome, shown in rows.values() if outcome == "unsupported"} <= {*UNSUPPORTED}


def test_bad_input_and_an_interrupt_are_said_in_json(run_line, checked):
    done = run_line("check", "acme", "--area", "wraper", "--json")
    plain = json.loads(done.stdout)
    assert (done.returncode, plain["exit"], plain["targets"]) == (2, 2, [])
    assert "wrapper" in plain["problem"]
    checked["result"] = KeyboardInterrupt()
    done = run_line("check", "acme", "--json")
    (target,) = json.loads(done.stdout)["targets"]
    assert (done.returncode, target["problem"]) == (2, "interrupted; nothing more was written")


def test_a_target_without_a_verdict_says_why_in_json(run_line):
    done = run_line("check", "refrence", "--json")
    (target,) = json.loads(done.stdout)["targets"]
    assert done.returncode == 2
    assert "did you mean reference?" in target["problem"]


def test_the_last_check_is_replayed_and_explained_without_a_file(run_line, checked, bad, acme, monkeypatch):
    assert run_line("check", "acme").returncode == 1
    explained = run_line("explain", "--failed").stdout
    for clause in bad:
        assert f"\n{clause}  {spec.clauses()[clause].level}, area " in explained
    plain = json.loads(run_line("explain", "--failed", "--json").stdout)
    assert [row["id"] for row in plain["clauses"]] == bad
    assert all(row["failure"] for row in plain["clauses"])
    monkeypatch.setenv("PYTHONPATH", str(acme["wrong"]))
    monkeypatch.syspath_prepend(acme["wrong"])
    script = run_line("replay", bad[0], "--target", "acme")
    assert script.returncode == 0, script.stderr
    assert "def replay():" in script.stdout


def test_clauses_that_fail_for_one_cause_are_explained_too(run_line, checked, failed):
    cause = {"class": "Adam", "error": "RuntimeError: no kernel"}
    cases = [dataclasses.replace(one, cause=cause if one.outcome == "fail" else {}) for one in failed.cases]
    checked["result"] = dataclasses.replace(failed, cases=tuple(cases))
    assert run_line("check", "acme").returncode == 1
    plain = json.loads(run_line("explain", "--failed", "--json").stdout)
    named = {clause for cause in judge(checked["result"]).causes for clause in cause.clauses}
    assert named
    assert named <= {row["id"] for row in plain["clauses"]}


def test_a_partial_result_of_an_interrupt_is_not_remembered(run_line, checked, failed):
    checked["result"] = dataclasses.replace(failed, complete=False)
    assert run_line("check", "acme").returncode == 2
    assert not last.path().exists()


def test_a_cache_that_cannot_be_written_changes_no_verdict(run_line, checked, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(last, "path", lambda: tmp_path / "file" / "last.json")
    assert run_line("check", "acme").returncode == 1


def test_the_tests_do_not_write_to_the_cache_of_the_developer():
    code = "from keyedopt.cli import last; print(last.path())"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert path.endswith("keyedopt/last.json\n")
    assert not path.startswith(str(Path("~/.cache").expanduser()))


def test_a_remembered_result_is_untrusted(run_line):
    last.path().write_text('{"schema": 1, "cases": "x"}')
    assert "is not a result file" in run_line("explain", "--failed").stderr


def test_a_target_that_is_not_installed_says_how_to_install_it_or_nothing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = [row["problem"] for row in listing._targets()]
    assert "not installed; install it with: pip install galore-torch" in problems
    for problem in problems:
        assert re.fullmatch(r"not installed(; install it with: pip install \S.*)?", problem), problem


@pytest.mark.parametrize(
    "show", [bench_table.show_list, lambda: listing.listing("targets"), lambda: listing.listing("clauses")]
)
def test_a_list_fits_a_terminal(monkeypatch, capsys, show):
    monkeypatch.setattr(bench_table.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    show()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 70
