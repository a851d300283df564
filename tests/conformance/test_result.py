"""Result files and journals: written whole or not at all, and read back only if they are what they seem."""

import dataclasses
import json
import os

import jsonschema
import pytest
from making import CLAUSE, NASTY, result, valid

from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.model import Journal, ResultError, write_atomically
from keyedopt.conformance.results.untrusted import clean, error_text, one_line, plain, source


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "deep" / "er" / "x.json"
    results.write(result({}, {"case": "test_keyed_load::test_b", "outcome": "fail", "seen": "ü"}), path)
    return path


def test_what_is_written_is_read_back(written):
    made = results.read(written)
    assert [case.outcome for case in made.cases] == ["pass", "fail"]
    assert results.read(written) == made
    assert dataclasses.replace(made, cases=()) == dataclasses.replace(
        result(), cases=(), options=made.options
    )


def test_the_schema_is_one_and_describes_a_result(written):
    jsonschema.Draft202012Validator.check_schema(results.schema())
    jsonschema.validate(valid(written), results.schema())


def test_every_cut_of_a_file_is_refused(written):
    text = written.read_text(encoding="utf-8")
    for length in range(0, len(text) - 2, 97):
        written.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ResultError, match="not a result file, or is truncated"):
            results.read(written)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "not a result file"),
        (b"null", "not a result file"),
        (b'"text"', "not a result file"),
        (b"{}", "not a result file"),
        (b"[" * 100_000, "not a result file"),
        (b"1" * 10_000, "not a result file"),
        (b'{"schema": 2}', "format version 2; this keyedopt reads version 1"),
        (b'{"schema": "x"}', "format version 'x'"),
        (b'{"schema": null}', "format version None"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_bytes(text)
    for partial in (False, True):
        with pytest.raises(ResultError) as caught:
            results.read(path, partial=partial)
        assert said in str(caught.value)
        assert len(one_line(str(caught.value))) < 500


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cases", None),
        ("cases", [{}]),
        ("complete", "yes"),
        ("implementation", {}),
        ("options", {"level": "maybe"}),
        ("options", {"suite": "one"}),
        ("seconds", -1),
        ("surplus", 1),
        ("schema", True),
    ],
)
def test_a_result_with_a_wrong_part_is_refused(written, path, value):
    written.write_text(json.dumps({**valid(written), path: value}))
    with pytest.raises(ResultError):
        results.read(written)


def test_an_outcome_that_does_not_exist_is_refused(written):
    written.write_text(written.read_text().replace('"fail"', '"fine"'))
    with pytest.raises(ResultError, match=r"\$\.cases\[1\]\.outcome"):
        results.read(written)


@pytest.mark.parametrize("name", ["missing.json", ".", "x" * 300 + ".json", "nul\0.json"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ResultError, match="cannot be read"):
        results.read(tmp_path / name)


def test_a_partial_result_is_read_only_on_demand(tmp_path):
    results.write(result({}, complete=False), tmp_path / "x.json")
    with pytest.raises(ResultError, match="of an interrupted run"):
        results.read(tmp_path / "x.json")
    assert not results.read(tmp_path / "x.json", partial=True).complete


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(written, monkeypatch):
    before = written.read_text()
    monkeypatch.setattr(results.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        results.write(result(), written)
    assert written.read_text() == before
    assert list(written.parent.iterdir()) == [written]


def test_what_cannot_be_written_is_found_out_early(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "x.json", tmp_path / "folder"):
        with pytest.raises(ResultError, match=r"cannot be written .*: name another file"):
            results.refuse_unwritable(path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResultError, match=r"cannot be written .*: name another file"):
        results.refuse_unwritable(tmp_path / "link" / "x.json")
    with pytest.raises(ResultError, match=r"(?i)name too long"):
        results.refuse_unwritable(tmp_path / "new" / ("x" * 300))
    before = sorted(tmp_path.iterdir())
    results.refuse_unwritable(tmp_path / "new" / "deep" / "x.json")
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


# --- the journal ----------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "x.json", result(complete=False)) as journal:
        for case in result(
            {}, {"case": "test_keyed_load::test_b"}, {"case": "test_keyed_load::test_c"}
        ).cases:
            journal.add(case)
    return tmp_path / "x.json.journal"


def test_a_journal_is_a_partial_result(journal):
    found = results.read(journal, partial=True)
    assert not found.complete
    assert len(found.cases) == 3
    with pytest.raises(ResultError):
        results.read(journal)


def test_a_journal_that_was_cut_short_keeps_what_is_whole(journal):
    text = journal.read_text()
    journal.write_text(text[:-20])
    assert len(results.read(journal, partial=True).cases) == 2
    for cut in ("", text[:50], "[]\n"):
        journal.write_text(cut)
        with pytest.raises(ResultError, match="holds no journal"):
            results.read(journal, partial=True)


# --- text and data of strangers -------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY, ids=map(str, range(len(NASTY))))
def test_text_of_a_stranger_is_made_fit_to_print(text):
    for fit in (one_line(text), clean(text), error_text(RuntimeError(text))):
        assert fit.replace("\n", "").isprintable() or not fit
        assert len(fit) < 2100
        fit.encode("utf-8")
        assert clean(fit, 3000) == fit
    assert "\n" not in one_line(text)


class Opaque:
    def __repr__(self):
        raise SystemExit


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1.5, "text", [], {}, [1, [2, {"a": None}]], 2**62),
        *((1, 2), {1: 2}, {(1,): {2}}, {1, 2}, b"x", 1j, -1 - 2j, 2**80, "\x00", "\ud800", {"python": 1}),
        *([(1,), float("inf")], {"a": -float("inf")}, [[[]]], ()),
    ],
    ids=repr,
)
def test_a_literal_survives_as_json_and_as_source(value):
    kept = json.loads(json.dumps(plain(value), allow_nan=False))
    kept_source = source(kept)
    again = eval(kept_source, {"nan": float("nan"), "inf": float("inf")})
    assert again == value
    assert type(again) is type(value)


def test_not_a_number_survives():
    assert plain(float("nan")) == {"python": "nan"}
    assert source({"python": "nan"}) == "nan"


def endless():
    found = []
    found.append(found)
    return found


STRANGE = [Opaque(), [Opaque()], {"a": Opaque()}, object(), endless(), 10**6000, "x" * 10**6, CLAUSE.__len__]


@pytest.mark.parametrize("value", STRANGE, ids=map(str, range(len(STRANGE))))
def test_whatever_is_returned_becomes_json(value):
    text = json.dumps(plain(value), allow_nan=False)
    assert len(text) < 3000


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "print(1)", "[x for x in ()]", "a.b", "1 if x else 2", "1;2", "(", "f'{1}'", "x"],
)
def test_source_is_never_code(text):
    with pytest.raises(ValueError, match="is not a literal"):
        source([{"python": text}])


def test_a_full_disk_is_said_with_the_file_and_leaves_nothing(tmp_path):
    """Links to /dev/full stand for files on a full disk."""
    output = tmp_path / "x.json"
    for name, write in (
        ("x.json.journal", lambda: Journal(output, result(complete=False))),
        (f".x.json.{os.getpid()}", lambda: write_atomically(output, "text")),
    ):
        (tmp_path / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: '.*x\.json"):
            write()
        assert list(tmp_path.iterdir()) == []
