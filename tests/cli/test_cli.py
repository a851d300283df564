"""The command line: help, interrupts, and that bad input costs one line and not a traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from making import (
    TARGETS,
    alive,
    command,
    functions,
    left_behind,
    mark,
    module,
    refused,
)
from typer.models import OptionInfo

from keyedopt.cli.main import app
from keyedopt.conformance import spec
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.markdown import markdown
from keyedopt.conformance.results.verdict import failing, judge
from keyedopt.conformance.run import runner

VERBS = ("check", "doctor", "explain", "findings", "list", "mutants", "precision", "replay", "verify")


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


def test_the_package_is_the_command_line():
    command = [sys.executable, "-m", "keyedopt", "list", "areas"]
    root = Path(__file__).parents[2]  # where the package is, also if it was installed before it had this
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("keyed ")


def test_help_is_short_to_type_and_no_line_of_it_is_cut(run_line):
    done = run_line("-h")
    assert done.returncode == 0
    assert "..." not in done.stdout.replace("[ARGS]...", "")
    assert run_line("--version").stdout == f"keyedopt {version('keyedopt')}, suite {spec.SUITE_VERSION}\n"


def commands(typer_app: typer.Typer) -> Iterator[Any]:
    for one in typer_app.registered_commands:
        yield one.callback
    for group in typer_app.registered_groups:
        yield from commands(group.typer_instance)


def test_an_option_whose_value_has_its_name_is_declared():
    """Typer 0.27 names an option by its metavar, in capitals, if both are the same word."""
    wrong = []
    for callback in commands(app):
        for name, kind in get_type_hints(callback, include_extras=True).items():
            for about in getattr(kind, "__metadata__", ()):
                same = str(getattr(about, "metavar", "")).lower() == name
                if same and isinstance(about, OptionInfo) and about.default is ...:
                    wrong.append(f"{callback.__name__} {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("check reference --level mus", "did you mean must?; see `keyedopt check --help`"),
        ("check reference --area keyd", "did you mean keyed?"),
        ("check reference --clause CLPI-001", "did you mean CLIP-001"),
        ("check torchrc", "did you mean torchrec"),
        ("check torch-rec", "did you mean torchrec"),
        ("check refernce", "did you mean reference?"),
        ("check torch.optm", "did you mean torch.optim"),
        ("explain clipp", "did you mean clipping?"),
        ("check reference --expectations torchrek", "did you mean torchrec"),
        ("check reference --device cudda", "did you mean cuda?"),
        ("bench run --workload smal-step", "did you mean small-step?"),
        ("findings torchrek", "did you mean torchrec"),
        ("mutants clippin", "did you mean clipping?"),
        ("mutants --base torchrek", "did you mean torchrec"),
        ("list target", "did you mean targets?"),
        ("bench run --nope", "see `keyedopt bench run --help`"),
    ],
)
def test_a_mistake_names_the_nearest_name_and_the_help_of_the_verb(run_line, line, said):
    message = refused(run_line(*line.split()))
    assert said in message
    assert message.lower().count("did you mean") <= 1
    assert "Value error" not in message


def test_no_arguments_show_the_help(run_line):
    done = run_line()
    assert done.returncode == 2
    assert "Usage: keyedopt" in done.stderr


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("check", "Missing argument"),
        ("chekc reference", "No such command 'chekc'"),
        ("check reference --nonsense", "No such option: --nonsense"),
        ("check reference --level maybe", "is not one of 'must', 'should'"),
        ("check reference --area keyd", "there is no area 'keyd'; there are: keyed, combined"),
        ("check reference --require-areas keyed,keyd", "there is no area 'keyd'"),
        ("check reference --clause NONE-001", "there is no clause 'NONE-001'; see `keyedopt list clauses`"),
        (
            "check reference CLIP-001",
            "CLIP-001 is a clause, not a target: give a target, and --clause CLIP-001",
        ),
        (
            "check reference --clause CLIP-001 --area keyed",
            "a clause of the area clipping, which --area leaves",
        ),
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
        ("explain clip-81", "there is no clause 'clip-81'; did you mean CLIP-081?"),
        ("explain nothing", "there is no clause 'nothing'; see `keyedopt list clauses` and `list areas`"),
        ("explain warmupp", "there is no clause 'warmupp'; did you mean warmup?"),
        ("list everything", "is not one of 'targets', 'clauses', 'areas'"),
        ("replay none.json KEYED-001", "there is no file none.json: name a result that `keyedopt check"),
        ("replay none.json", "there is no file none.json: name a result that `keyedopt check"),
        ("replay KEYED-001", "no check is remembered here: name a result file"),
        ("replay --all", "no check is remembered here: name a result file"),
        ("explain", "name one CLAUSE, PREFIX or AREA, or give --failed"),
        ("explain --failed", "no check is remembered here"),
        ("explain KEYED-001 --failed", "name one CLAUSE, PREFIX or AREA, or give --failed"),
        ("replay folder KEYED-001", "folder cannot be read"),
        ("replay cut.json KEYED-001", "cut.json is not a result file, or is truncated"),
        ("replay later.json KEYED-001", "has format version 2; this keyedopt reads version 1"),
        ("replay x.json KEYED-9999", "has no case 'KEYED-9999'"),
        (
            "replay x.json keyed-21",
            "has no case 'keyed-21': give a clause as CLAUSE or CLAUSE[n], or the name",
        ),
        ("replay x.json keyed-21", "; did you mean KEYED-021?"),
        ("replay x.json nonsense", "has no case 'nonsense'"),
        ("replay x.json @CLAUSE[0]", "has no case"),
        ("replay x.json @CLAUSE[999]", "has no case"),
        ("replay x.json @CLAUSE --output file/again.py", "file/again.py cannot be written"),
        ("replay x.json @CLAUSE --output folder", "(it is a folder): name another file"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(run_line, files, failed, checked, line, said):
    (files / "folder.json").mkdir()
    clause = failing(judge(failed))[0]
    done = run_line(*line.replace("@CLAUSE", clause).split())
    assert said in refused(done)
    assert done.stdout == ""
    assert checked["calls"] == [], "nothing was run"


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
def test_a_target_that_is_broken_is_one_line(run_line, tmp_path, source, said):
    module(tmp_path, "broken", source)
    done = run_line("check", "broken", "--output", "x.json")
    assert said in refused(done)
    assert not (tmp_path / "x.json").exists()


def test_a_target_that_is_not_there_is_one_line(run_line):
    for target in ("nothing_of_this_name", "no/such", "os:path.nothing", "-", "é!"):
        assert "keyedopt: " in refused(run_line("check", target))


def test_a_run_that_breaks_down_is_one_line(run_line, checked):
    checked["result"] = runner.RunError("the suite could not be run:\nbecause")
    assert refused(run_line("check", "acme")) == "keyedopt: the suite could not be run: because\n"


def test_an_output_that_becomes_unwritable_is_one_line_and_the_verdict_is_shown(
    run_line, checked, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device", "x.json")

    monkeypatch.setattr(results, "write_atomically", full)
    done = run_line("check", "acme", "--output", "x.json")
    assert "No space left on device" in refused(done)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("gate: red (exit 2); its files could not be written; "), "as the exit code is"


# --- surroundings ---------------------------------------------------------------------------------


FULL = "keyedopt: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("verb", ["--help", "bench list", "list clauses", "explain KEYED-001"])
def test_a_full_output_is_one_line_however_long_it_is(verb):
    line = f'exec "$0" -m keyedopt.cli.start {verb} > /dev/full'
    done = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("> /dev/full", 2, FULL),
        ("> /dev/full 2>&1", 2, ""),
    ],
)
def test_an_output_that_takes_nothing_ends_in_no_traceback(where, code, said):
    line = f'exec "$0" -m keyedopt.cli.start list areas {where}'
    done = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_a_working_folder_that_was_removed_is_one_line(tmp_path):
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m keyedopt.cli.start list areas'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert refused(done) == "keyedopt: the working folder was removed: change to another one\n"


def test_half_of_what_torchrun_sets_is_one_line(run_line, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    message = refused(run_line("check", "reference", "--area", "warmup"))
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT not: start it with" in message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "a", "RANK must be a number, not 'a': start it with torchrun"),
        ("MASTER_PORT", "1", "no agent of torchrun answers at 127.0.0.1:1 ("),
        ("MASTER_PORT", "99999", "no agent of torchrun answers at 127.0.0.1:99999 ("),
    ],
)
def test_what_only_looks_like_torchrun_is_one_line(run_line, monkeypatch, name, value, said):
    for each in ("TORCHELASTIC_RUN_ID", "RANK", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"):
        monkeypatch.setenv(each, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(name, value)
    assert said in refused(run_line("check", "reference", "--area", "warmup"))


# --- interrupts -----------------------------------------------------------------------------------

KILLED = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


def journaled(folder):
    path = folder / "x.json.journal"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def wait_until(condition, process):
    """Wait until a process has come so far; fail if it ends before, or does not come there."""
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Interrupt runs of which one case sleeps, each in another way, when those before it are done."""
    sleeping = [case for case in functions() if case.file == "test_wrapper_nesting"][-1]
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
        line += ["--time-limit", "600"]  # the case sleeps until the signal, however busy the machine is
        runs[name] = (
            folder,
            subprocess.Popen(
                line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ),
        )
    done = {}
    for name, (folder, process) in runs.items():
        wait_until(lambda folder=folder: journaled(folder) >= 5, process)
        before = len(alive(name))
        process.send_signal(KILLED[name])
        if name != "SIGKILL":
            process.send_signal(KILLED[name])  # twice, as impatient people do
        out, err = process.communicate(timeout=120)
        done[name] = folder, subprocess.CompletedProcess(name, process.returncode, out, err), before
    return done


@pytest.mark.complete
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


@pytest.mark.complete
@pytest.mark.parametrize("name", KILLED)
def test_an_interrupted_run_leaves_the_earlier_result_and_no_process(interrupted, name):
    folder, _, before = interrupted[name]
    assert before >= 2, "the command and its worker"
    assert (folder / "x.json").read_text() == "an earlier result"
    assert left_behind(name) == []


@pytest.mark.complete
def test_a_killed_run_leaves_a_journal(interrupted):
    folder, done, _ = interrupted["SIGKILL"]
    assert done.returncode == -signal.SIGKILL
    partial = results.read(folder / "x.json.journal", partial=True)
    assert not partial.complete
    assert len(partial.cases) >= 5
    assert markdown(partial)


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
    wait_until(lambda: len(alive("importing")) >= 2, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=120)
    assert "interrupted" in refused(subprocess.CompletedProcess("", process.returncode, out, err))
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]
    assert left_behind("importing") == []
