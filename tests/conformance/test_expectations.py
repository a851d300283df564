"""Known failures: applied to a result, held to be true, and rewritten without losing a word."""

import datetime
import tomllib

import pytest
from making import CLAUSE, result

from keyedopt.conformance import expectations, spec
from keyedopt.conformance.expectations import ExpectationsError, Known
from keyedopt.conformance.results.verdict import judge

CASE = "test_keyed_load::test_a"
OTHER = "test_keyed_load::test_b"
ENTRY = f"""
[[known]]
clause = "{CLAUSE}"
cases = ["{CASE}"]
reason = "because"
link = "https://example.com"
"""


@pytest.fixture
def listed(tmp_path):
    def write(text):
        path = tmp_path / "known.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def applied(path, run, **options):
    return expectations.apply(run, expectations.read(path), path, **options)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[known", "cannot be read"),
        ("\0", "cannot be read"),
        ("a." * 500_000 + "a = 1", "cannot be read: a key, or a text, of one line has more than 500 dots"),
        ("[[known]]\nwhen = {" + "a." * 500_000 + "a = 1}", "more than 500 dots"),
        ("knwon = 1", r"may hold \[\[known\]\] entries only, not knwon"),
        ("known = 1", "entries only"),
        ("known = [1]", "entry 1: allowed are"),
        (ENTRY + "surplus = 1", "entry 1: allowed are cases, clause"),
        (ENTRY + ENTRY.replace(f'"{CLAUSE}"', "1"), "entry 2: 'clause' must be a text"),
        (ENTRY.replace('"because"', '" "'), "entry 1: 'reason' must be a text that is not empty"),
        (ENTRY.replace('link = "https://example.com"', ""), "entry 1: 'link' must be"),
        (ENTRY.replace(f'["{CASE}"]', f'"{CASE}"'), "entry 1: 'cases' must list"),
        (ENTRY.replace(f'["{CASE}"]', "[]"), "entry 1: 'cases' must list"),
        (ENTRY.replace(f'["{CASE}"]', "[1]"), "entry 1: 'cases' must list"),
        (ENTRY + 'expires = "2027-01-01"', "entry 1: 'expires' must be a date"),
        (ENTRY + "expires = 2027-01-01T00:00:00Z", "entry 1: 'expires' must be a date"),
        (ENTRY + "when = 1", "entry 1: 'when' must map"),
        (ENTRY + "when = { torch = 2 }", "entry 1: 'when' must map"),
        (ENTRY + 'when = { torch = "two" }', "entry 1: torch = 'two' is not a version range"),
        (ENTRY + ENTRY, f"lists {CLAUSE} by {CASE} twice"),
    ],
)
def test_a_malformed_list_is_refused(listed, text, said):
    with pytest.raises(ExpectationsError, match=said):
        expectations.read(listed(text))


def test_a_list_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    for path in (tmp_path, tmp_path / "missing.toml", tmp_path / "latin.toml"):
        with pytest.raises(ExpectationsError, match="cannot be read"):
            expectations.read(path)
    with pytest.raises(ExpectationsError, match="there is no expectations file 'nothing'; keyedopt ships"):
        expectations.find("nothing")


def test_an_empty_list_is_a_list(listed):
    assert expectations.read(listed("")) == ()
    assert expectations.read(listed("known = []")) == ()


# --- applying -------------------------------------------------------------------------------------


def test_a_failure_that_is_listed_is_known(listed):
    run = applied(listed(ENTRY), result({"outcome": "fail"}))
    assert run.cases[0].outcome == "known"
    assert run.cases[0].known == {"reason": "because", "link": "https://example.com"}
    assert judge(run).green


def test_a_crash_that_is_listed_is_known(listed):
    assert judge(applied(listed(ENTRY), result({"outcome": "error"}))).green


def test_another_failure_is_not_known(listed):
    run = applied(listed(ENTRY), result({"outcome": "fail"}, {"case": OTHER, "outcome": "fail"}))
    assert [case.outcome for case in run.cases] == ["known", "fail"]
    assert not judge(run).green


def test_an_entry_that_passes_fails_the_gate(listed):
    run = applied(listed(ENTRY), result({}))
    assert run.cases[0].outcome == "unexpected-pass"
    assert any("unexpected pass" in reason for reason in judge(run).reasons)


def test_an_entry_that_expired_fails_the_gate(listed):
    path = listed(ENTRY + "expires = 2027-01-31")
    fails = result({"outcome": "fail"})
    assert judge(applied(path, fails, today=datetime.date(2027, 1, 31))).green
    late = applied(path, fails, today=datetime.date(2027, 2, 1))
    assert late.cases[0].outcome == "fail"
    assert f"expired on 2027-01-31: {CLAUSE} (because)" in judge(late).reasons


WHOLE = {"level": "should"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY.replace(CLAUSE, "KEYED-9999"), "there is no clause KEYED-9999"),
        (ENTRY.replace(CASE, OTHER), f"names the case {OTHER}, which does not exist"),
        (ENTRY.replace(CLAUSE, "KEYED-002"), f"the case {CASE} does not test KEYED-002"),
    ],
)
def test_a_stale_entry_fails_the_gate(listed, text, said):
    run = applied(listed(text), result({"outcome": "fail"}, options=WHOLE))
    assert [said in problem for problem in run.expectations["problems"]] == [True]
    assert not judge(run).green


@pytest.mark.parametrize("part", [{"areas": ["keyed"]}, {"dtypes": ["float32"]}, {"clauses": [CLAUSE]}])
def test_a_part_of_the_suite_judges_only_what_it_ran(listed, part):
    path = listed(ENTRY + ENTRY.replace(CASE, OTHER))
    run = applied(path, result({"outcome": "fail"}, options={**WHOLE, **part}))
    assert run.expectations["problems"] == []


def test_a_clause_newer_than_the_suite_asked_for_is_not_stale(listed, monkeypatch):
    import dataclasses

    newer = {CLAUSE: dataclasses.replace(spec.clauses()[CLAUSE], since="9.9")}
    monkeypatch.setattr(spec, "clauses", lambda: newer)
    run = applied(listed(ENTRY), result(options={"suite": "9.8"}))
    assert run.expectations["problems"] == []
    run = applied(listed(ENTRY), result(options={"suite": "9.9"}))
    assert len(run.expectations["problems"]) == 1


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('torch = ">=2.13,<2.14"', True),
        ('torch = "==2.13.0"', True),
        ('torch = "<2.13"', False),
        ('acme-optim = ">=1"', True),
        ('Acme_Optim = ">=1"', True),
        ('acme-optim = ">=2"', False),
        ('unknown = ">=1"', False),
        ('device = "cpu"', True),
        ('device = "cuda"', False),
        ('dtype = "float32"', True),
        ('dtype = "float64"', False),
        ('dtype = "float32", device = "cuda"', False),
    ],
)
def test_conditions(listed, condition, holds):
    path = listed(ENTRY + f"when = {{ {condition} }}")
    fails = applied(path, result({"outcome": "fail", "dtype": "float32"}))
    assert fails.cases[0].outcome == ("known" if holds else "fail")
    passes = applied(path, result({"dtype": "float32"}))
    assert passes.cases[0].outcome == ("unexpected-pass" if holds else "pass")


def test_conditions_on_a_version_that_is_none(listed):
    strange = {**result().implementation, "versions": {"acme-optim": "unknown"}}
    run = applied(
        listed(ENTRY + 'when = { acme-optim = ">=1" }'),
        result({"outcome": "fail"}, implementation=strange),
    )
    assert run.cases[0].outcome == "fail"


def test_a_device_with_a_number_is_a_device_of_its_kind():
    entry = Known(CLAUSE, (CASE,), "r", "l", when={"device": "cuda"})
    assert entry.holds(result({"device": "cuda:1"}).cases[0], {})


@pytest.mark.parametrize(("device", "met"), [("cpu", False), ("npu", True), ("npu:1", True), (None, False)])
def test_an_entry_can_hold_on_every_accelerator(device, met):
    entry = Known(CLAUSE, (CASE,), "r", "l", when={"device": "!=cpu"})
    assert entry.holds(result({"device": device}).cases[0], {}) is met


def test_a_case_of_accelerators_that_a_run_on_the_cpu_does_not_have_is_not_stale(listed):
    other, whole = ENTRY.replace(CASE, OTHER), result({}, options=WHOLE)
    assert applied(listed(other + 'when = { device = "!=cpu" }'), whole).expectations["problems"] == []
    assert applied(listed(other), whole).expectations["problems"]


def test_the_list_itself_is_not_changed_by_an_unsupported_case(listed):
    run = applied(listed(ENTRY), result({"outcome": "unsupported"}))
    assert run.cases[0].outcome == "unsupported"
    assert run.expectations["problems"] == []


# --- rewriting ------------------------------------------------------------------------------------


def test_a_new_list_names_just_what_fails_and_says_that_it_is_to_be_explained(tmp_path):
    path = tmp_path / "new" / "known.toml"
    run = result({"outcome": "fail", "seen": "\x1b[31m\n'\"\\ \ud800"}, {"case": OTHER})
    assert expectations.update(path, run) == 1
    (entry,) = expectations.read(path)
    assert (entry.clause, entry.cases) == (CLAUSE, (CASE,))
    assert entry.reason.startswith("to be explained: ")
    assert entry.link == "to be given: a reproducer"
    assert judge(applied(path, run)).green


KEPT = f"""\
# Known failures of acme.

[[known]]  # the oldest one
clause = "{CLAUSE}"
cases = [
    "{CASE}",
    "{OTHER}",
]
reason = "because" # see the mail of May
link = 'https://example.com/"1"'
expires = 2099-01-01
when = {{ torch = ">=2" }}

[[known]]
clause = "KEYED-002"
cases = ["test_keyed_load::test_c"]
reason = "gone soon"
link = "x"
"""


def test_rewriting_keeps_what_still_fails_word_for_word(listed):
    path = listed(KEPT)
    run = result(
        {"outcome": "fail"},
        {"case": OTHER},
        {"case": "test_keyed_load::test_c", "clauses": ("KEYED-002",)},
        {"case": "test_keyed_load::test_d", "clauses": ("KEYED-003", "KEYED-004"), "outcome": "error"},
        options=WHOLE,
    )
    assert expectations.update(path, run) == 2
    text = path.read_text()
    for kept in ("# Known failures of acme.", "# the oldest one", "# see the mail of May", "2099-01-01"):
        assert kept in text
    entries = expectations.read(path)
    assert [entry.clause for entry in entries] == [CLAUSE, "KEYED-003", "KEYED-004"]
    assert entries[0].cases == (CASE,)
    assert entries[0].reason == "because"
    assert entries[0].when == {"torch": ">=2"}
    assert expectations.update(path, run) == 0
    assert path.read_text() == text


def test_rewriting_a_list_that_is_true_changes_nothing(listed):
    path = listed(KEPT)
    run = result(
        {"outcome": "fail"},
        {"case": OTHER, "outcome": "error"},
        {"case": "test_keyed_load::test_c", "clauses": ("KEYED-002",), "outcome": "fail"},
    )
    expectations.update(path, run)
    assert path.read_text() == KEPT


@pytest.mark.parametrize("part", [{"areas": ["warmup"]}, {"dtypes": ["float32"]}, {"clauses": ["KEYED-009"]}])
def test_rewriting_keeps_what_a_part_of_the_suite_did_not_run(listed, part):
    path = listed(KEPT)
    expectations.update(path, result(options=part))
    assert path.read_text() == KEPT


def test_rewriting_keeps_what_holds_under_other_conditions(listed):
    path = listed(ENTRY + 'when = { device = "cuda" }')
    expectations.update(path, result({"outcome": "fail"}))
    kept, fresh = expectations.read(path)
    assert kept.when == {"device": "cuda"}
    assert kept.reason == "because"
    assert fresh.reason.startswith("to be explained")
    expectations.update(path, result({}))
    assert [entry.when for entry in expectations.read(path)] == [{"device": "cuda"}]


def test_rewriting_an_inline_list_keeps_its_entries(listed):
    inline = f'known = [{{ clause = "{CLAUSE}", cases = ["{CASE}"], reason = "because", link = "x" }}]'
    path = listed(inline)
    expectations.update(path, result({"outcome": "fail"}, {"case": OTHER, "outcome": "fail"}))
    assert [entry.reason[:7] for entry in expectations.read(path)] == ["because", "to be e"]


def test_rewriting_a_malformed_list_is_refused_and_leaves_it(listed):
    path = listed(ENTRY + "surplus = 1")
    with pytest.raises(ExpectationsError):
        expectations.update(path, result({}))
    assert "surplus" in path.read_text()


def test_a_list_of_nothing_is_a_list(listed):
    path = listed(ENTRY)
    expectations.update(path, result({}))
    assert tomllib.loads(path.read_text()).get("known", []) == []
    assert expectations.read(path) == ()
