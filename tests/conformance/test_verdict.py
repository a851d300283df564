"""The verdict; JUnit, Markdown and the summary are valid whatever a message holds."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest
from making import CLAUSE, NASTY, result, valid

from keyedopt.cli.summary import show, show_gate
from keyedopt.conformance import spec
from keyedopt.conformance.results import output
from keyedopt.conformance.results.junit import junit
from keyedopt.conformance.results.markdown import markdown
from keyedopt.conformance.results.verdict import SEVERITY, clause_outcomes, failing, judge, shown_outcomes

MUST = next(clause.id for clause in spec.clauses().values() if clause.level == "must")
SHOULD = next(clause.id for clause in spec.clauses().values() if clause.level == "should")
RECORDED = next(clause.id for clause in spec.clauses().values() if clause.level == "recorded")


@pytest.fixture(params=NASTY, ids=map(str, range(len(NASTY))))
def nasty(request):
    text = request.param
    known = {"reason": text, "link": text}
    return result(
        {"outcome": "fail", "expected": text, "seen": text, "trace": text, "inputs": {"x": text}},
        {"case": "test_keyed_load::test_b", "outcome": "error", "seen": text, "observed": text},
        {"case": "test_keyed_load::test_c", "outcome": "known", "known": known},
        {"case": "test_keyed_load::test_d", "outcome": "unsupported", "seen": text},
        {"case": f"test_keyed_load::test_e[{text}]", "outcome": "unexpected-pass"},
        expectations={"file": "x.toml", "problems": [text]},
    )


def test_junit_is_valid_whatever_a_message_holds(nasty):
    root = ElementTree.fromstring(junit(nasty))
    keyed, gate = root.findall("testsuite")
    counted = {name: keyed.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "5", "failures": "2", "errors": "1", "skipped": "2"}
    assert gate.find("testcase/failure") is not None


def test_markdown_is_one_row_a_clause_whatever_a_message_holds(nasty):
    text = markdown(nasty)
    assert text.replace("\n", "").isprintable()
    rows = [line for line in text.splitlines() if CLAUSE in line and line.startswith("|")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 6
    outside = re.sub(r"`[^`]*`", "", text)
    for held in ("<img", "![", "@someone", "[link", "<b>"):
        assert held not in outside


def test_the_summary_is_one_line_a_clause_whatever_a_message_holds(nasty, capsys):
    show(nasty, judge(nasty))
    show_gate(nasty, judge(nasty), 1)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert sum(f"{CLAUSE} [" in line for line in out.splitlines()) == 1


def test_json_is_valid_whatever_a_message_holds(nasty, tmp_path):
    output.write(nasty, tmp_path / "x.json")
    assert len(valid(tmp_path / "x.json")["cases"]) == 5


@pytest.mark.parametrize("suffix", output.FORMATS)
def test_a_partial_result_never_replaces_a_complete_one(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    assert output.write(result({}), path) == path
    before = path.read_text()
    partial = output.write(result({}, complete=False), path)
    assert partial == tmp_path / f"x.partial{suffix}"
    assert path.read_text() == before
    assert "interrupted" in partial.read_text() or suffix == ".json"


# --- the verdict ----------------------------------------------------------------------------------


def of(clause, outcome, **options):
    return result({"clauses": (clause,), "outcome": outcome}, options={"clauses": [clause], **options})


@pytest.mark.parametrize(
    ("clause", "outcome", "level", "green", "conformant"),
    [
        (MUST, "pass", "should", True, True),
        (MUST, "fail", "should", False, False),
        (MUST, "fail", "must", False, False),
        (MUST, "known", "must", True, False),
        (MUST, "error", "must", False, False),
        (MUST, "unexpected-pass", "must", False, True),
        (SHOULD, "fail", "should", False, True),
        (SHOULD, "fail", "must", True, True),
        (SHOULD, "known", "should", True, True),
        (SHOULD, "error", "must", False, True),
        (RECORDED, "observed", "should", True, True),
        (RECORDED, "fail", "should", True, True),
    ],
)
def test_the_gate_and_conformance(clause, outcome, level, green, conformant):
    verdict = judge(of(clause, outcome, level=level))
    assert (verdict.green, verdict.conformant) == (green, conformant)


def test_silence_is_never_a_pass():
    empty = result(options={})
    asked = [clause for clause in spec.clauses().values() if not clause.accelerator]  # it was made on a CPU
    verdict = judge(empty)
    assert not verdict.green
    assert not verdict.conformant
    assert len(verdict.reasons) == len(asked)
    assert f"{MUST}: it was not run" in verdict.reasons
    totals = [count for row in verdict.counts.values() for count in row.values()]
    assert sum(count.total for count in totals) == len(asked)
    assert sum(count.passed for count in totals) == 0


def test_nothing_looked_at_is_not_green():
    nothing = dataclasses.replace(result({}), implementation={**result().implementation, "areas": []})
    verdict = judge(nothing)
    assert not verdict.green
    assert not verdict.conformant
    assert verdict.unsupported == tuple(spec.areas())


def test_a_required_area_that_is_not_claimed_is_red():
    claims = {**result().implementation, "areas": ["keyed"]}
    options = {"clauses": [CLAUSE], "require_areas": ["keyed", "fused"]}
    verdict = judge(result({}, implementation=claims, options=options))
    assert verdict.reasons == ("the area fused is required, and not claimed",)


def test_an_interrupted_run_is_no_verdict():
    verdict = judge(result({}, complete=False))
    assert verdict.reasons == ("the run was interrupted",)
    assert not verdict.conformant


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        (("pass", "fail", "pass"), "fail"),
        (("fail", "error"), "error"),
        (("known", "pass"), "known"),
        (("unsupported", "pass"), "pass"),
        (("unsupported", "unsupported"), "unsupported"),
        (("unexpected-pass", "known"), "unexpected-pass"),
    ],
)
def test_a_clause_has_the_most_serious_outcome_of_its_cases(outcomes, whole):
    listed = [{"case": f"test_keyed_load::test_{index}", "outcome": o} for index, o in enumerate(outcomes)]
    assert clause_outcomes(result(*listed)) == {CLAUSE: whole}


def test_a_clause_that_could_not_be_checked_is_shown_as_such():
    verdict = judge(of(MUST, "unsupported"))
    assert verdict.unchecked == (MUST,)
    assert not verdict.green


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (["not claimed: KeyedOptimizer"], "not claimed"),
        (["needs an accelerator"], "could not run"),
        (["not claimed: float64", "torchrec cannot be imported: no"], "could not run"),
    ],
)
def test_what_is_not_claimed_is_told_from_what_could_not_run(seen, word, capsys):
    cases = [
        {"case": f"test_keyed_load::test[{n}]", "outcome": "unsupported", "seen": text}
        for n, text in enumerate(seen)
    ]
    made = result(*cases)
    assert shown_outcomes(made)[CLAUSE] == word
    show(made, judge(made))
    assert f"\n{word}: {CLAUSE}\n" in capsys.readouterr().out
    skips = [skip.get("message") for skip in ElementTree.fromstring(junit(made)).iter("skipped")]
    assert skips[-1] == (seen[-1] if seen[-1].startswith(word) else f"could not run: {seen[-1]}")


def test_clauses_newer_than_the_version_asked_for_are_not_gated(monkeypatch):
    newer = {
        **spec.clauses(),
        "KEYED-999": dataclasses.replace(spec.clauses()[CLAUSE], id="KEYED-999", since="9.10"),
    }
    monkeypatch.setattr(spec, "clauses", lambda: newer)
    asked = {"clauses": [CLAUSE, "KEYED-999"]}
    cases = [{}, {"case": "test_keyed_load::test_b", "clauses": ("KEYED-999",), "outcome": "fail"}]
    assert judge(result(*cases, options={**asked, "suite": "9.9"})).green
    assert not judge(result(*cases, options={**asked, "suite": "9.10"})).green


def test_the_most_serious_come_first():
    listed = [
        {"case": f"test_keyed_load::test_{clause}_{outcome}", "clauses": (clause,), "outcome": outcome}
        for clause, outcome in [(RECORDED, "error"), (SHOULD, "fail"), (MUST, "fail"), ("GONE-001", "fail")]
    ]
    assert failing(judge(result(*listed))) == [MUST, SHOULD, RECORDED, "GONE-001"]
    assert failing(judge(of(MUST, "known"))) == [MUST]


def test_every_outcome_of_the_schema_is_ranked():
    from keyedopt.conformance.results.model import schema

    outcomes = schema()["properties"]["cases"]["items"]["properties"]["outcome"]["enum"]
    assert set(SEVERITY) == set(outcomes)


def test_failures_of_one_cause_are_one_line_and_the_target_could_not_be_judged(capsys):
    cause = {"class": "Adam", "error": "RuntimeError: no kernel"}
    failing_must = {"clauses": (MUST,), "outcome": "fail", "cause": cause}
    follower = {"case": "test_keyed_load::test_b", "clauses": (SHOULD,), "outcome": "fail", "cause": cause}
    checked = {"level": "must", "clauses": [MUST, SHOULD]}
    run = result(failing_must, follower, options=checked)
    verdict = judge(run)
    assert (verdict.word, verdict.green, failing(verdict)) == ("could not be judged", False, [])
    said = "Adam could not be judged: its first step raises RuntimeError: no kernel; failing for it: 2, "
    assert verdict.reasons == (f"{said}of them musts: 1",)
    show(run, verdict)
    show_gate(run, verdict, 1)
    shown = capsys.readouterr().out
    assert shown.count("no kernel") == 1
    assert "gate: red (exit 1); 1 other reason above" in shown
    for other in (
        {"case": "test_keyed_load::test_c", "clauses": (MUST,), "outcome": "fail"},  # for another reason
        {"case": "test_keyed_load::test_c", "clauses": (MUST,), "outcome": "known", "cause": cause},
    ):
        verdict = judge(result(failing_must, follower, other, options=checked))
        assert (verdict.word, verdict.green) == ("not conformant", False)
        assert failing(verdict) == [MUST]
    listed = [{**one, "outcome": "known"} for one in (failing_must, follower)]
    assert judge(result(*listed, options=checked)).word == "not conformant"


def test_a_failure_names_the_clause_that_it_follows(capsys):
    clause, before = "ALGO-092", "ALGO-072"
    assert before in spec.clauses()[clause].follows

    def shown(**changes):
        first = {"clauses": (before,), "outcome": "fail", "inputs": {"algorithm": "Adam"}, **changes}
        last = {
            "case": "test_b::test_c",
            "clauses": (clause,),
            "outcome": "fail",
            "inputs": {"algorithm": "Adam"},
        }
        run = result(first, last, options={"clauses": [before, clause]})
        show(run, judge(run))
        return capsys.readouterr().out

    assert f"follows {before}: Adam | " in shown()
    assert f"follows {before}" not in shown(inputs={"algorithm": "SGD"})
    assert f"follows {before}" not in shown(outcome="pass")


def test_the_clauses_that_a_clause_follows_exist_and_follow_none_in_turn():
    following = [clause for clause in spec.clauses().values() if clause.follows]
    assert following
    for clause in following:
        assert not any(spec.clauses()[before].follows for before in clause.follows)
