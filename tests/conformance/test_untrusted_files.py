"""A file that somebody sent: it runs no code, and is read or refused in one line."""

import dataclasses
import json
import os
import re
import shutil
import sys

import pytest
from making import CLAUSE, keyedopt, module, plain_cases, refused, result

from keyedopt.conformance.results import model
from keyedopt.conformance.run import replay
from keyedopt.conformance.run.replay import Declared, ReplayError
from keyedopt.reports.load import load
from keyedopt.tools import fuzz_readers, sample

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Write a result that was changed, and a module that notes that it was imported."""
    monkeypatch.chdir(tmp_path)
    module(
        tmp_path, "evil", f"open({str(tmp_path / 'ran')!r}, 'w'); OptimizerWrapper = KeyedOptimizer = print"
    )

    def write(about=(), options=(), **case):
        plain = plain_cases()[0]
        usual = {"case": f"{plain.file}::{plain.name}", "clauses": plain.clauses, "outcome": "fail"}
        made = result({**usual, **case})
        made.implementation.update(about)
        made.options.update(options)
        model.write(made, tmp_path / "sent.json")
        return made

    return write


@pytest.mark.complete(sample=2)
@pytest.mark.parametrize(
    ("about", "options", "case", "said"),
    [
        ({"target": "evil"}, {}, {}, "evil, which is not registered"),
        ({"target": "evil:print"}, {}, {}, "which is not registered"),
        ({"target": "reference"}, {"imports": ["evil"]}, {}, "the run imported evil first"),
        ({"target": "reference"}, {}, {"case": "support_wrapper::wrap_plainly"}, "the suite has no case"),
        ({"target": "reference"}, {}, {"case": "wrapper::wrap_plainly"}, "the suite has no case"),
        ({"target": "reference"}, {}, {"inputs": {"impl": 1}}, "is not that of the suite"),
    ],
)
def test_a_result_cannot_choose_what_runs(sent, tmp_path, about, options, case, said):
    names = ("OptimizerWrapper", "KeyedOptimizer", "KeyedOptimizerWrapper")
    sent({**about, "places": dict.fromkeys(names, "evil:print")}, options, **case)
    name = case.get("case") or f"{plain_cases()[0].file}::{plain_cases()[0].name}"
    assert said in refused(keyedopt("replay", "sent.json", name, "--run"))
    assert not (tmp_path / "ran").exists()


@slow
def test_the_places_of_a_result_are_not_used(sent, tmp_path):
    """The names come from the registered target, wherever the file says that they are."""
    sent({"target": "reference", "places": {"KeyedOptimizerWrapper": "evil:print"}})
    done = keyedopt("replay", "sent.json", plain_cases()[0].clauses[0], "--run")
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr
    assert not (tmp_path / "ran").exists()


def test_inputs_are_those_that_the_suite_declares():
    (case,) = result({"inputs": {"a": 1, "b": [2]}}).cases
    assert Declared({"a": 1}, ("b",)).check(case) == {"a": 1, "b": [2]}
    for declared in (Declared({"a": 2}, ("b",)), Declared({"a": 1})):
        with pytest.raises(ReplayError, match="is not that of the suite"):
            declared.check(case)


# --- readers ---------------------------------------------------------------------------------------


def _bad_files(folder):
    """Write files that no reader may trust; return what is said of each."""
    text = json.dumps(sample.check(0, 2, 2))
    (folder / "digits.json").write_text(re.sub(r'"seconds": [\d.]+', f'"seconds": {"7" * 400}', text))
    (folder / "integer.json").write_text(text.replace('"schema": 1', f'"schema": {"1" * 4000}'))
    (folder / "year.json").write_text(
        json.dumps({**json.loads(text), "started": "0001-01-01T00:00:00+14:00"})
    )
    (folder / "deep.json").write_text('{"suite": ' + "[" * 3000 + "]" * 3000 + "}")
    (folder / "wide.json").write_text("[" + "[]," * 5_000_000 + "[]]")
    os.mkfifo(folder / "fifo.json")
    (folder / "endless.json").symlink_to("/dev/zero")
    many = [[str(n) for n in range(10)]] * 12
    asv = {"version": 2, "commit_hash": "c", "date": 1, "params": {"machine": "m"}}
    asv |= {"result_columns": ["result", "params"], "results": {"time_a": [[1.0], many]}}
    (folder / "combinations.json").write_text(json.dumps(asv))
    return {
        "digits.json": "it has an integer of 400 digits",
        "integer.json": "it has an integer of 4000 digits",
        "year.json": "is not a time of the years",
        "deep.json": "nested too deeply",
        "wide.json": "has more than 4,000,000 values",
        "fifo.json": "it is not a regular file",
        "endless.json": "it is not a regular file",
        "combinations.json": "1 results for 1000000000000 combinations",
    }


def test_bad_files_among_good_ones_are_named_and_left_out(tmp_path):
    (tmp_path / "good.json").write_text(json.dumps(sample.check(0, 2, 2)))
    said = _bad_files(tmp_path)
    tables = load([tmp_path / "good.json", *(tmp_path / name for name in said)])
    assert list(tables.runs["file"]) == [str(tmp_path / "good.json")]
    problems = dict(zip(tables.problems["file"], tables.problems["reason"], strict=True))
    assert set(problems) == {str(tmp_path / name) for name in said}
    for name, words in said.items():
        assert words in problems[str(tmp_path / name)]


@pytest.mark.parametrize("name", ["digits.json", "integer.json", "year.json", "fifo.json", "endless.json"])
def test_diff_refuses_a_bad_file_and_does_not_say_worse(tmp_path, run_line, name):
    good = tmp_path / "good.json"
    good.write_text(json.dumps(sample.check(0, 2, 2)))
    _bad_files(tmp_path)
    assert name in refused(run_line("diff", good, tmp_path / name))
    if name != "year.json":  # precision does not read the time of a run
        assert name in refused(run_line("precision", good, tmp_path / name))


def test_a_result_of_many_clauses_for_each_case_is_refused(tmp_path):
    made = result({"clauses": tuple(f"X-{number:03}" for number in range(500))})
    model.write(made, tmp_path / "x.json")
    with pytest.raises(model.ResultError, match="clauses"):
        model.read(tmp_path / "x.json")


@pytest.mark.complete(sample=2)
@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_damaged_and_forged_inputs_are_read_or_refused(name):
    """A sample of what ``python -m keyedopt.tools.fuzz_readers`` does."""
    if name == "signatures" and shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is missing")
    count = 20 if name in fuzz_readers.SHARES else 200
    read, refusals = fuzz_readers.fuzz(name, count, seed=23)
    assert read + refusals == count
    assert read
    assert refusals


# --- replay ----------------------------------------------------------------------------------------


@pytest.fixture
def three(sent):
    """A clause with three cases: one that passed, one that is known, and one that failed."""
    made = sent()
    (case,) = made.cases
    outcomes = {"a": "pass", "b": "known", "c": "fail"}

    def cases(*names):
        listed = (
            dataclasses.replace(case, case=f"{case.case}[{name}]", outcome=outcomes[name]) for name in names
        )
        return dataclasses.replace(made, cases=tuple(listed))

    return cases, case.clauses[0]


@pytest.mark.parametrize(
    ("names", "chosen"), [("abc", "c"), ("acb", "c"), ("ab", "b"), ("a", "a"), ("ba", "b")]
)
def test_a_clause_is_replayed_by_a_case_that_failed(three, names, chosen):
    from keyedopt.cli.replay import choose

    cases, clause = three
    found = choose(cases(*names), clause)
    assert found.case.endswith(f"[{chosen}]")


def test_the_case_stands_first_in_a_script():
    case = plain_cases()[0]
    made = result({"case": f"{case.file}::{case.name}"})
    text = replay.script(made, made.cases[0], {}, {"KeyedOptimizerWrapper": "acme:x", "LAMB": "acme:y"})
    assert text.index(f"def {case.name}(") < text.index("class Mismatch")
    assert "LAMB" not in text, "a place that the case does not use"
    assert text.count("\n") < 180


@slow
def test_known_failures_of_torch_are_repeated(check_once, tmp_path):
    """A sample of ``keyedopt replay RESULT --all``: every failing and known case, as recorded."""
    found = check_once("torch", areas=("algorithms", "sparse", "in_backward"))
    failing = [case for case in found.cases if case.outcome in ("fail", "known")]
    listed = [case for case in failing if case.case.startswith("test_sparse")][::6]
    model.write(dataclasses.replace(found, cases=tuple(listed)), tmp_path / "torch.json")
    done = keyedopt("replay", tmp_path / "torch.json", "--all")
    assert done.returncode == 0, done.stdout
    assert (
        done.stdout
        == f"{len(listed)} of {len(listed)} failing and known cases fail again, with what was seen\n"
    )
    assert listed


@slow
def test_a_case_that_does_not_fail_again_is_named(sent):
    sent({"target": "reference"}, seen="something that is not so")
    done = keyedopt(
        "replay", "sent.json", "--all", env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 1
    assert done.stdout.startswith("not repeated: ")
    assert CLAUSE  # the result is of that clause
