"""The command line: what it prints, how it ends, and that bad input costs one line and not a traceback."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
from making import (
    CLAUSE,
    TARGETS,
    alive,
    command,
    keyedopt,
    left_behind,
    mark,
    module,
    plain_cases,
    refused,
    result,
    valid,
)

from keyedopt.cli import main as cli
from keyedopt.conformance import expectations, formats, runner, spec
from keyedopt.conformance import result as results
from keyedopt.conformance.verdict import failing, judge

VERBS = ("check", "explain", "list", "replay")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run the command line in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["keyedopt", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, end.value.code, said.out, said.err)

    return call


@pytest.fixture
def found(monkeypatch, failed):
    """Let a check find what an earlier one did; may be changed."""
    answer = {"result": failed, "calls": []}

    def instead(target, options, **_):
        answer["calls"].append((target, options))
        if isinstance(answer["result"], Exception):
            raise answer["result"]
        return answer["result"]

    monkeypatch.setattr(runner, "run", instead)
    return answer


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=lambda a: a[0])
def test_help_says_something_and_imports_nothing_heavy(arguments):
    code = (
        "import atexit, sys; from keyedopt.cli.main import main;"
        "atexit.register(lambda: print({'torch', 'pytest', 'rich', 'hypothesis'} & set(sys.modules)));"
        f"sys.argv = ['keyedopt', *{arguments!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("set()\n")
    assert "Usage: keyedopt" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_arguments_show_the_help(run):
    done = run()
    assert done.returncode == 2
    assert "Usage: keyedopt" in done.stderr


# --- bad input ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, failed):
    results.write(failed, tmp_path / "x.json")
    (tmp_path / "cut.json").write_text((tmp_path / "x.json").read_text()[:-10])
    (tmp_path / "later.json").write_text(json.dumps({**valid(tmp_path / "x.json"), "schema": 2}))
    results.write(dataclasses.replace(failed, complete=False), tmp_path / "x.partial.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "bad.toml").write_text("[[known]]\nclause = 1")
    (tmp_path / "text.toml").write_text("[[known")
    (tmp_path / "good.toml").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("check", "Missing argument"),
        ("chekc reference", "No such command 'chekc'"),
        ("check reference --nonsense", "No such option: --nonsense"),
        ("check reference --level maybe", "is not one of 'must', 'should'"),
        ("check reference --area keyd", "there is no area 'keyd'; there are: keyed, combined"),
        ("check reference --require-areas keyed,keyd", "there is no area 'keyd'"),
        ("check reference --dtype float31", "there is no dtype 'float31'; there are: float64"),
        ("check reference --suite 99.0", "there is no version of the suite '99.0'; there are: 0.1"),
        ("check reference --suite x", "there is no version of the suite 'x'"),
        ("check reference --time-limit inf", "--time-limit is a number of seconds"),
        ("check reference --time-limit 0", "Invalid value for '--time-limit'"),
        ("check reference --workers 0", "Invalid value for '--workers'"),
        ("check reference --output x.txt", "has to end in .json, .xml, .md"),
        ("check reference --output x", "has to end in .json, .xml, .md"),
        ("check reference torchrec --output x.json", "is one file for several targets: give a folder"),
        ("check reference --output file/x.json", "file/x.json cannot be written (File exists)"),
        ("check reference --output folder.json", "(it is a folder): name another file"),
        ("check reference torchrec --output file", "file/reference.json cannot be written"),
        ("check reference --update-expectations", "name it with --expectations FILE"),
        ("check reference --expectations none.toml", "there is no expectations file 'none.toml'"),
        ("check reference --expectations bad.toml", "bad.toml, entry 1: 'clause' must be a text"),
        ("check reference --expectations text.toml", "text.toml cannot be read"),
        ("check reference --expectations folder", "folder cannot be read"),
        ("check reference torchrec --expectations good.toml", "check the targets one by one"),
        ("check reference --expectations file/x.toml --update-expectations", "file/x.toml cannot be written"),
        ("explain KEYED-9999", "there is no clause 'KEYED-9999'; did you mean KEYED-"),
        ("explain nothing", "there is no clause 'nothing'; see `keyedopt list clauses`"),
        ("list everything", "is not one of 'targets', 'clauses', 'areas'"),
        ("replay none.json KEYED-001", "none.json cannot be read"),
        ("replay folder KEYED-001", "folder cannot be read"),
        ("replay cut.json KEYED-001", "cut.json is not a result file, or is truncated"),
        ("replay later.json KEYED-001", "has format version 2; this keyedopt reads version 1"),
        ("replay x.json KEYED-9999", "has no case 'KEYED-9999'"),
        ("replay x.json nonsense", "has no case 'nonsense'"),
        ("replay x.json @CLAUSE[0]", "has no case"),
        ("replay x.json @CLAUSE[999]", "has no case"),
        ("replay x.json @CLAUSE --output file/again.py", "file/again.py cannot be written"),
        ("replay x.json @CLAUSE --output folder", "(it is a folder): name another file"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(run, files, failed, found, line, said):
    (files / "folder.json").mkdir()
    clause = failing(judge(failed))[0]
    done = run(*line.replace("@CLAUSE", clause).split())
    assert said in refused(done)
    assert done.stdout == ""
    assert found["calls"] == [], "nothing was run"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def", "'broken' cannot be imported: SyntaxError"),
        ("raise ImportError('two\\nlines')", "'broken' cannot be imported: ImportError: two lines"),
        ("import os; print('words\\n' * 9); os._exit(1)", "ended the interpreter"),
        ("import not_there", "'broken' needs 'not_there', which is not installed"),
        ("x = 1", "broken has none of the public names"),
    ],
)
def test_a_target_that_is_broken_is_one_line(run, tmp_path, source, said):
    module(tmp_path, "broken", source)
    done = run("check", "broken", "--output", "x.json")
    assert said in refused(done)
    assert not (tmp_path / "x.json").exists()


def test_a_target_that_is_not_there_is_one_line(run):
    for target in ("nothing_of_this_name", "no/such", "os:path.nothing", "-", "é!"):
        assert "keyedopt: " in refused(run("check", target))


def test_a_run_that_breaks_down_is_one_line(run, found):
    found["result"] = runner.RunError("the suite could not be run:\nbecause")
    assert refused(run("check", "acme")) == "keyedopt: the suite could not be run: because\n"


def test_an_output_that_becomes_unwritable_is_one_line_and_the_verdict_is_shown(run, found, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "x.json")

    monkeypatch.setattr(results, "write_atomically", full)
    done = run("check", "acme", "--output", "x.json")
    assert "No space left on device" in refused(done)
    assert "gate: red" in done.stdout


# --- what is shown and written --------------------------------------------------------------------


def test_a_check_shows_and_writes_what_it_found(run, found, failed, tmp_path):
    done = run("check", "acme", *(f"--output={name}" for name in ("out/x.json", "x.xml", "x.md")))
    assert done.returncode == 1
    assert done.stderr == ""
    assert "not conformant" in done.stdout
    assert "gate: red" in done.stdout
    rows = re.findall(r"^(keyed|clipping|all) +(\d+/\d+)? +(\d+/\d+)? *(\d+/\d+)?$", done.stdout, re.M)
    assert {row[0] for row in rows} >= {"keyed", "all"}
    shown = re.findall(r"^(?:fail|error) +([A-Z]+-\d+) \[(\w+)\] expected .*; seen .*$", done.stdout, re.M)
    assert [clause for clause, _ in shown] == failing(judge(failed))
    levels = [level for _, level in shown]
    assert levels == sorted(levels, key=spec.LEVELS.index), "the most serious first"
    assert results.read(tmp_path / "out" / "x.json").cases == failed.cases
    assert ElementTree.parse(tmp_path / "x.xml").getroot().tag == "testsuites"
    assert "not conformant" in (tmp_path / "x.md").read_text(encoding="utf-8")


def test_options_reach_the_run(run, found):
    run(
        *("check", "acme", "--level", "must", "--suite", spec.SUITE_VERSION, "--area", "keyed"),
        *("--area", "wrapper", "--require-areas", "keyed, fused", "--device", "cpu", "--dtype", "float32"),
        *("--time-limit", "5", "--workers", "1"),
    )
    ((target, options),) = found["calls"]
    assert target == "acme"
    assert options == runner.Options(
        level="must",
        suite=spec.SUITE_VERSION,
        areas=("keyed", "wrapper"),
        require_areas=("keyed", "fused"),
        device="cpu",
        dtypes=("float32",),
        limit=5.0,
        workers=1,
    )


def test_several_targets_are_written_to_a_folder_and_the_worst_counts(run, found, tmp_path):
    assert run("check", "acme.a", "acme:b", "--output", "out").returncode == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["acme.a.json", "acme.b.json"]
    found["result"] = runner.RunError("no")
    done = run("check", "a", "b")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2, "each target says what is wrong with it"


def test_known_failures_are_written_applied_and_held_to_be_true(run, found, failed, tmp_path):
    done = run("check", "acme", "--expectations", "new/known.toml", "--update-expectations")
    assert done.returncode == 0
    assert "rewrote new/known.toml; entries to be explained: " in done.stderr
    assert "gate: green" in done.stdout
    assert "not conformant" in done.stdout, "a known failure of a must is still one"
    text = (tmp_path / "new/known.toml").read_text(encoding="utf-8")
    (tmp_path / "new/known.toml").write_text(text.replace("to be explained", "explained"), encoding="utf-8")
    done = run("check", "acme", "--expectations", "new/known.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "known: explained: " in done.stdout
    passing = [dataclasses.replace(case, outcome="pass") for case in failed.cases]
    found["result"] = dataclasses.replace(failed, cases=tuple(passing))
    done = run("check", "acme", "--expectations", "new/known.toml")
    assert done.returncode == 1
    assert "unexpected pass: " in done.stdout
    done = run("check", "acme", "--expectations", "new/known.toml", "--update-expectations")
    assert (done.returncode, expectations.read(tmp_path / "new/known.toml")) == (0, ())


def test_a_shipped_list_is_known_by_name(run, found):
    found["result"] = result({})
    assert run("check", "acme", "--expectations", "torchrec").returncode in (0, 1)


def test_a_partial_run_is_shown_as_such_and_leaves_the_list_alone(run, found, failed, tmp_path):
    (tmp_path / "x.json").write_text("an earlier result")
    (tmp_path / "known.toml").write_text("")
    found["result"] = dataclasses.replace(failed, complete=False)
    options = ["--output", "x.json", "--expectations", "known.toml", "--update-expectations"]
    done = run("check", "acme", "other", "--area", "keyed")
    assert len(found["calls"]) == 1, "other targets are not begun"
    done = run("check", "acme", *options)
    assert "interrupted" in refused(done)
    assert "PARTIAL: the run was interrupted, there is no verdict" in done.stdout
    assert (tmp_path / "x.json").read_text() == "an earlier result"
    assert (tmp_path / "known.toml").read_text() == ""
    assert not results.read(tmp_path / "x.partial.json", partial=True).complete


def test_a_script_is_written(run, files, failed):
    clause = failing(judge(failed))[0]
    printed = run("replay", "x.json", clause)
    assert printed.returncode == 0
    for name in (f"{clause}[1]", clause.lower(), "x.partial.json"):
        source = "x.partial.json" if name == "x.partial.json" else "x.json"
        done = run("replay", source, clause if source != "x.json" else name, "--output", "again.py")
        assert done.returncode == 0, done.stderr
        compile((files / "again.py").read_text(), "again.py", "exec")
    exact = run("replay", "x.json", next(case.case for case in failed.cases if clause in case.clauses))
    assert exact.returncode == 0


def test_a_clause_is_explained(run):
    done = run("explain", CLAUSE.lower())
    clause = spec.clauses()[CLAUSE]
    assert done.returncode == 0
    assert clause.level in done.stdout
    assert spec.sources()[clause.document].title in done.stdout
    assert " ".join(clause.statement.split()) in " ".join(done.stdout.split())
    assert "cases:" in done.stdout


def test_every_clause_can_be_explained(run):
    for clause in list(spec.clauses())[::25]:
        assert run("explain", clause).returncode == 0


def test_lists(run, tmp_path, monkeypatch):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[keyedopt.implementations]\nacme = vendor:IMPLEMENTATION\nbad = leaves:x\nabsent = vendor:ABSENT\n"
    )
    module(tmp_path, "leaves", "import sys; sys.exit('no')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(TARGETS)
    targets = run("list").stdout
    assert re.search(r"^reference +0\.1\.0; areas: keyed", targets, re.M)
    assert re.search(r"^acme +unknown version; areas: keyed, wrapper, clipping", targets, re.M)
    assert re.search(r"^bad +broken: 'leaves' cannot be imported: SystemExit: no", targets, re.M)
    assert re.search(r"^absent +not installed; install it with: pip install not-installed", targets, re.M)
    assert run("list", "clauses").stdout.count("\n") == len(spec.clauses())
    assert run("list", "areas").stdout.count("\n") == len(spec.areas())


def test_a_terminal_that_cannot_show_a_character_gets_another():
    done = keyedopt("list", "clauses", env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0, done.stderr


# --- from end to end ------------------------------------------------------------------------------


def test_a_sound_library_from_end_to_end(acme, tmp_path):
    line = ["check", "acme", "--area", "fused", "--output", "x.json", "--require-areas", "fused"]
    done = keyedopt(*line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(acme["sound"])})
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.isascii()
    assert "acme unknown (torch " in done.stdout
    assert "conformant (areas fused only)\ngate: green; " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert judge(results.read(tmp_path / "x.json")).conformant


# --- interrupts -----------------------------------------------------------------------------------

KILLED = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


def journaled(folder):
    path = folder / "x.json.journal"
    return path.read_text().count("\n") - 1 if path.exists() else 0


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Interrupt runs of which one case sleeps, each in another way, when those before it are done."""
    sleeping = [case for case in plain_cases() if case.file.startswith("test_wrapper")][-1]
    runs = {}
    for name in KILLED:
        folder = tmp_path_factory.mktemp(name)
        (folder / "x.json").write_text("an earlier result")
        environment = {
            **os.environ,
            "PYTHONPATH": TARGETS,
            "HOSTILE": json.dumps({sleeping.name: "sleep"}),
            **mark(name),
        }
        line = command("check", "hostile", "--area", "wrapper", "--output", "x.json", "--workers", "1")
        runs[name] = (
            folder,
            subprocess.Popen(
                line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ),
        )
    done = {}
    for name, (folder, process) in runs.items():
        end = time.monotonic() + 60
        while journaled(folder) < 5 and time.monotonic() < end:
            time.sleep(0.05)
        before = len(alive(name))
        process.send_signal(KILLED[name])
        if name != "SIGKILL":
            process.send_signal(KILLED[name])  # twice, as impatient people do
        out, err = process.communicate(timeout=30)
        done[name] = folder, subprocess.CompletedProcess(name, process.returncode, out, err), before
    return done


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_a_partial_result(interrupted, name):
    folder, done, _ = interrupted[name]
    assert "interrupted" in refused(done)
    assert "PARTIAL: the run was interrupted" in done.stdout
    assert "written: x.partial.json" in done.stdout
    partial = results.read(folder / "x.partial.json", partial=True)
    assert not partial.complete
    assert len(partial.cases) >= 5
    assert sorted(path.name for path in folder.iterdir()) == ["x.json", "x.partial.json"]


@pytest.mark.parametrize("name", KILLED)
def test_an_interrupted_run_leaves_the_earlier_result_and_no_process(interrupted, name):
    folder, _, before = interrupted[name]
    assert before >= 2, "the command and its worker"
    assert (folder / "x.json").read_text() == "an earlier result"
    assert left_behind(name) == []


def test_a_killed_run_leaves_a_journal(interrupted):
    folder, done, _ = interrupted["SIGKILL"]
    assert done.returncode == -signal.SIGKILL
    partial = results.read(folder / "x.json.journal", partial=True)
    assert not partial.complete
    assert len(partial.cases) >= 5
    assert formats.markdown(partial)


def test_an_interrupt_while_the_target_is_imported_is_one_line(tmp_path):
    module(tmp_path, "slow", "import time; time.sleep(1000)")
    process = subprocess.Popen(
        command("check", "slow", "--output", "x.json"),
        cwd=tmp_path,
        env={**os.environ, **mark("importing")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while len(alive("importing")) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=30)
    assert "interrupted" in refused(subprocess.CompletedProcess("", process.returncode, out, err))
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]
    assert left_behind("importing") == []
