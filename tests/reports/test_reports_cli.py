"""`keyedopt report` and `keyedopt diff` on the command line: what is written, exit codes, hostile text."""

import csv
import json
import subprocess
import sys
from xml.etree import ElementTree

import pandas as pd
import pytest
from generated_results import musts, whole
from making import NASTY
from test_reports_diff import bench
from test_reports_tables import case, result, store  # noqa: F401 - a fixture

from keyedopt.cli.report import clauses
from keyedopt.conformance import spec
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import shown_outcomes
from keyedopt.reports.badge import AMBER, GREEN, GREY, RED, badge
from keyedopt.reports.load import load
from keyedopt.reports.tables import COLUMNS

FORMULAS = ['=HYPERLINK("https://example.com")', "+1", "-2+3", "@SUM(A1)"]


@pytest.fixture
def hostile(store):  # noqa: F811
    """Store results whose every text is what a stranger might write."""
    texts = [*NASTY, *FORMULAS, "<script>alert(1)</script>"]
    cases = [
        case(f"case{n} {text}", "fail", expected=text, seen=text, inputs={"x": text})
        for n, text in enumerate(texts)
    ]
    cases += [
        case(f"seen{n}", "observed", ("KEYED-001",), observed={text[:50]: text})
        for n, text in enumerate(texts)
    ]
    name = 'ac<me> "|`x`'
    return store("hostile.json", result(*cases, name=name, version="=1+1"))


def test_a_case_is_one_that_ran(run_line, store, tmp_path):  # noqa: F811
    path = store("a.json", result(case("a"), case("b", "unsupported"), case("c", "fail")))
    done = run_line("report", path, "--output", tmp_path / "out", "--format", "csv")
    assert "(1 run, 2 cases, 0 speeds)" in done.stdout


def test_tables_are_written_in_every_format_and_agree(run_line, store, tmp_path):  # noqa: F811
    made = [case("a"), case("b", "fail", expected="1", seen="2", seconds=0.25)]
    files = [store("a.json", result(*made)), store("b.json", bench())]
    formats = [
        word for name in ("csv", "parquet", "json", "markdown", "badge") for word in ("--format", name)
    ]
    done = run_line("report", *files, "--output", tmp_path / "out", *formats)
    assert (done.returncode, done.stderr) == (0, "")
    expected = load(files, clauses()).by_name()
    for name, frame in expected.items():
        parquet = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        pd.testing.assert_frame_equal(parquet.astype(frame.dtypes), frame)
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        assert lines[0] == list(COLUMNS[name])
        assert len(lines) == len(frame) + 1
        plain = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
        assert len(plain) == len(frame)
    assert (tmp_path / "out" / "report.md").exists()
    assert (tmp_path / "out" / "acme-1.0.svg").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_one_bad_file_is_named_and_the_rest_is_reported(run_line, store, tmp_path):  # noqa: F811
    good, bad = store("in/good.json", result(case("a"))), store("in/bad.json", b"{")
    done = run_line("report", good.parent, "--output", tmp_path / "out", "--format", "csv")
    assert done.returncode == 1
    assert done.stderr.startswith(f"keyedopt: {bad} is left out: it is truncated")
    assert done.stderr.count("\n") == 1
    assert len(pd.read_csv(tmp_path / "out" / "runs.csv")) == 1


@pytest.mark.parametrize("there", [[], ["bad.json"]])
def test_nothing_to_report_is_wrong_input_and_nothing_is_written(
    run_line,
    store,  # noqa: F811
    tmp_path,
    there,
):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in there:
        store(f"in/{name}", b"\xff\xfe")
    done = run_line("report", folder, "--output", tmp_path / "out", "--format", "csv")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "keyedopt: there is nothing to report: no result could be read"
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(run_line, store, tmp_path):  # noqa: F811
    good = store("good.json", result(case("a")))
    done = run_line("report", good, "--output", good, "--format", "csv")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "name another folder" in done.stderr


def test_a_spreadsheet_computes_nothing_that_a_stranger_wrote(run_line, hostile, tmp_path):
    done = run_line("report", hostile, "--output", tmp_path / "out", "--format", "csv")
    assert done.returncode == 0
    for name in COLUMNS:
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for column, cell in row.items():
                    if COLUMNS[name][column].dtype == "string":
                        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")), (name, column, cell)
                    assert "\x1b" not in cell


def test_markdown_and_badges_show_what_strangers_write_and_do_not_obey_it(run_line, hostile, tmp_path):
    done = run_line(
        *("report", hostile, "--output", tmp_path / "out", "--format", "markdown", "--format", "badge")
    )
    assert done.returncode == 0
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert all(character.isprintable() or character == "\n" for character in text)
    for line in text.splitlines():
        outside = "".join(line.split("`")[::2])
        assert "<" not in outside
        assert "](" not in outside
        assert "@someone" not in outside
    (path,) = (tmp_path / "out").glob("*.svg")
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "title", "rect", "g", "text"}
    assert one_line('keyedopt: ac<me> "|`x`', 30) in root.get("aria-label")


#: The numbers of clauses and of musts of the area `wrapper`, which has one observation.
ALL, MUSTS = len(spec.areas()["wrapper"].clauses), len(musts("wrapper"))
WHOLE = f"checked {ALL} of {ALL} clauses, {MUSTS} of {MUSTS} musts on cpu"


@pytest.mark.parametrize(
    ("outcomes", "options", "said", "colour"),
    [
        (
            {},
            {},
            f"conformant | {WHOLE} | {MUSTS}/{MUSTS} must, {ALL - MUSTS - 1}/",
            GREEN,
        ),
        (
            {"should": "known"},
            {},
            f"conformant | {WHOLE} | {MUSTS}/{MUSTS} must, 0/",
            AMBER,
        ),
        (
            {"WRAP-001": "unsupported"},
            {},
            f"partly checked | checked {ALL - 1} of {ALL} clauses, {MUSTS - 1} of {MUSTS} musts on cpu",
            AMBER,
        ),
        (
            {"must": "fail"},
            {},
            f"not conformant | {WHOLE} | 0/{MUSTS} must",
            RED,
        ),
        ({}, {"areas": ["wrapper"]}, f"conformant (areas wrapper only) | {WHOLE}", GREY),
        ({"must": "fail"}, {"areas": ["wrapper"]}, "not conformant (areas wrapper only) | checked", RED),
    ],
)
def test_a_badge_says_what_held_in_words_and_in_colour(tmp_path, outcomes, options, said, colour):
    results.write(whole(outcomes=outcomes, options=options), tmp_path / "x.json")
    root = ElementTree.fromstring(badge(load([tmp_path / "x.json"], clauses()), "acme 1.2.3"))
    assert root.get("aria-label").startswith(f"keyedopt: acme 1.2.3: {said}")
    assert colour in {element.get("fill") for element in root.iter()}


def test_tables_say_of_a_run_what_the_verdict_says(failed, tmp_path):
    results.write(failed, tmp_path / "x.json")
    tables = load([tmp_path / "x.json"], clauses())
    outcomes = dict(zip(tables.clauses["clause"], tables.clauses["outcome"], strict=True))
    assert outcomes == shown_outcomes(failed)
    assert set(tables.clauses["level"]) <= {"must", "should", "recorded"}


@pytest.mark.parametrize(("after", "code"), [(case("a"), 0), (case("a", "fail", expected="1", seen="2"), 1)])
def test_diff_exits_with_1_when_something_got_worse(run_line, store, after, code):  # noqa: F811
    files = [store("a.json", result(case("a"))), store("b.json", result(after, version="2.0"))]
    done = run_line("diff", *files)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith("before: acme 1.0 (")
    assert ("; 1 worse\n" if code else "; nothing worse\n") in done.stdout
    plain = json.loads(run_line("diff", *files, "--format", "json").stdout)
    assert len(plain["changes"]) == code
    assert run_line("diff", *files, "--format", "markdown").stdout.startswith("## `acme 1.0")


@pytest.mark.parametrize("bad", [b"{", result(case("a"), complete=False), bench(), result(case("b"))])
def test_what_cannot_be_compared_is_said_in_one_line(run_line, store, bad):  # noqa: F811
    files = [store("a.json", result(case("a"))), store("b.json", bad)]
    done = run_line("diff", *files)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert str(files[1]) in done.stderr


def test_a_missing_library_is_named_with_what_installs_it(store):  # noqa: F811
    code = (
        "import sys; sys.modules['pandas'] = None; "
        f"sys.argv = ['keyedopt', 'diff', {str(store('a.json', result(case('a'))))!r}, 'b.json']; "
        "from keyedopt.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "keyedopt: reports need pandas; install it with: pip install 'keyedopt[reports]'\n"


def test_the_page_of_clauses_without_texts_is_written_and_nothing_is_warned_of(run_line, store, tmp_path):  # noqa: F811
    known, stranger = case("a"), case("b", "observed", ("SAMPLE-001",), observed={"order": 1})
    files = [store("a.json", result(known, stranger)), store("b.json", bench())]
    done = run_line("report", *files, "--output", tmp_path / "out", "--format", "html", "--plots")
    assert (done.returncode, done.stderr) == (0, "")
    assert "SAMPLE-001" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
