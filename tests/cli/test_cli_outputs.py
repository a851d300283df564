"""The command line: what it shows and writes, and how it ends."""

import dataclasses
import functools
import json
import os
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import (
    CLAUSE,
    TARGETS,
    keyedopt,
    module,
    refused,
    result,
    without_progress,
)

from keyedopt.cli.summary import WIDTH, next_steps, replay_command, show
from keyedopt.conformance import expectations, spec
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.verdict import FAILING, failing, gating, judge, level_of
from keyedopt.conformance.run import runner

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)

# --- what is shown and written --------------------------------------------------------------------


@slow
def test_a_run_stops_at_the_first_failing_case_and_gives_no_verdict(run_line, acme, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(acme["wrong"]))
    (tmp_path / "x.json").write_text("the result before")
    options = ("--area", "keyed", "--output", "x.json", "--workers", "1", "-x")
    done = run_line("check", "acme", *options)
    assert done.returncode == 1, done.stderr
    assert "PARTIAL: the run stopped at the first failing case, there is no verdict" in done.stdout
    last = "gate: red (exit 1); the run stopped at the first failing case; "
    assert done.stdout.splitlines()[-1].startswith(last)
    about = done.stdout.partition("\nacme ")[0].splitlines()
    assert max(map(len, about)) <= WIDTH
    assert re.search(r" \| keyedopt replay KEYED-\d+ --run --target acme$", about[1])
    assert (tmp_path / "x.json").read_text() == "the result before"
    with pytest.raises(results.ResultError):
        results.read(tmp_path / "x.partial.json")
    stopped = results.read(tmp_path / "x.partial.json", partial=True)
    failed = [case for case in stopped.cases if case.outcome in FAILING]
    assert len(failed) == 1
    assert f"fail  {failed[0].clauses[0]} [" in done.stdout
    assert not judge(stopped).green
    assert not judge(stopped).conformant


def test_classes_that_extend_no_optimizer_are_named(tmp_path, capsys):
    module(
        tmp_path,
        "plain",
        "import torch\n\nclass SGD:\n    def __init__(self, params, lr): ...\n    def step(self): ...\n\n"
        "class Adam(torch.optim.Adam): ...\n",
    )
    found = runner.run("plain", runner.Options(clauses=("ALGO-052",), workers=1), path=[str(tmp_path)])
    assert found.implementation["not_optimizers"] == ["SGD"]
    show(found, judge(found))
    assert "not subclasses of torch.optim.Optimizer: SGD;" in capsys.readouterr().out


def test_classes_of_another_meaning_are_not_judged_and_named(run_line, tmp_path, capsys):
    """A name is not a claim: the bases and required arguments tell wrappers and optimizers of frameworks."""
    module(
        tmp_path,
        "framework",
        "import torch\n\nclass OptimizerWrapper(torch.optim.Optimizer):\n"
        "    def __init__(self, params, scaler): ...\n"
        "class SparseAdam:\n    def __init__(self, learning_rate): ...\n",
    )
    refused = run_line("check", "framework")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "its OptimizerWrapper has the arguments (params, scaler): missing" in refused.stderr
    assert "its SparseAdam does not extend torch.optim.Optimizer" in refused.stderr
    module(tmp_path, "mixed", "from framework import *\nclass SGD(torch.optim.SGD): ...\n")
    options = runner.Options(areas=("algorithms", "sparse"), clauses=("ALGO-052", "SPARSE-001"), workers=1)
    found = runner.run("mixed", options, path=[str(tmp_path)])
    assert not {case.case for case in found.cases if case.outcome in FAILING}
    assert judge(found).unsupported == ("sparse",)
    show(found, judge(found))
    assert "not judged: SparseAdam does not extend torch.optim.Optimizer. To have" in capsys.readouterr().out


@slow
def test_a_run_without_a_failing_case_is_complete_with_x_too(run_line, acme, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(acme["sound"]))
    done = run_line("check", "acme", "--area", "wrapper", "--output", "x.json", "-x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results.read(tmp_path / "x.json").complete


def test_a_case_of_a_clause_about_situations_is_replayed(run_line):
    assert run_line("check", "reference", "--clause", "ACC-028", "--output", "x.json").returncode == 0
    done = run_line("replay", "x.json", "ACC-028", "--run")
    assert done.returncode == 0, done.stderr  # the script holds


def test_known_failures_do_not_stop_a_run(acme, failed):
    clause = failing(judge(failed))[0]
    options = runner.Options(clauses=(clause,), workers=1)
    known = {case.case for case in failed.cases if case.outcome in FAILING and clause in case.clauses}
    assert known
    early = dataclasses.replace(options, exitfirst=True)
    assert not runner.run("acme", early, path=[str(acme["wrong"])]).complete
    assert runner.run("acme", early, path=[str(acme["wrong"])], expected=known).complete


@pytest.mark.parametrize(
    "more", [["--like", "reference"], ["--expectations", "k.toml", "--update-expectations"]]
)
def test_x_goes_with_nothing_that_needs_every_case(run_line, more):
    assert "-x stops early" in refused(run_line("check", "acme", "-x", *more))


def test_a_check_shows_and_writes_what_it_found(run_line, checked, failed, tmp_path):
    done = run_line("check", "acme", *(f"--output={name}" for name in ("out/x.json", "x.xml", "x.md")))
    assert done.returncode == 1
    assert done.stderr == ""
    assert "not conformant" in done.stdout
    assert "gate: red" in done.stdout
    rows = re.findall(r"^(keyed|clipping|all) +(\d+/\d+)? +(\d+/\d+)? *(\d+/\d+)?$", done.stdout, re.M)
    assert {row[0] for row in rows} >= {"keyed", "all"}
    line = r"^(?:fail|error) +([A-Z]+-\d+) \[(\w+)\] .+\n      .+ \| (.+)\n      .+(?:; seen |: ).+$"
    shown = re.findall(line, done.stdout, re.M)
    about = done.stdout.partition("fail ")[2].partition("\nacme ")[0]
    assert max(map(len, about.splitlines())) <= WIDTH
    assert re.search(r"^gate: red \(exit 1\); \d+ musts? and \d+ shoulds? failed; ", done.stdout, re.M)
    assert [clause for clause, _, _ in shown] == failing(judge(failed))
    commands = {re.sub("acme$", "TARGET", again) for _, _, again in shown}
    assert commands == {f"keyedopt replay {clause} --run --target TARGET" for clause, _, _ in shown}
    levels = [level for _, level, _ in shown]
    assert levels == sorted(levels, key=spec.LEVELS.index), "the most serious first"
    again = f"keyedopt replay out/x.json {shown[0][0]} --run --target acme"
    steps = f"why:   keyedopt explain {shown[0][0]}\nagain: {again}\nacme unknown (torch "
    assert steps in done.stdout
    assert done.stdout.splitlines()[-1].startswith("gate: red (exit 1); ")
    assert results.read(tmp_path / "out" / "x.json").cases == failed.cases
    assert ElementTree.parse(tmp_path / "x.xml").getroot().tag == "testsuites"
    assert "not conformant" in (tmp_path / "x.md").read_text(encoding="utf-8")


def test_github_shows_what_failed(run_line, checked, failed, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = run_line("check", "acme")
    line = r"^::error title=keyedopt ([A-Z]+-\d+) \(\w+\)::.* \| keyedopt replay \1 --run --target acme%0A.+$"
    found = re.findall(line, done.stdout, re.M)
    assert found == gating(judge(failed))[:10]


def test_what_is_below_the_level_of_the_gate_is_a_warning(run_line, checked, failed, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    gated = dataclasses.replace(failed, options={**failed.options, "level": "must"})
    musts = [clause for clause in failing(judge(failed)) if level_of(clause) == "must"]
    without = [case for case in gated.cases if not {*musts} & {*case.clauses}]
    for cases, errors, code in ((gated.cases, musts, 1), (tuple(without), [], 0)):
        checked["result"] = dataclasses.replace(gated, cases=cases, options=options_of(gated, cases))
        done = run_line("check", "acme", "--level", "must")
        assert done.returncode == code
        shoulds = [each for each in failing(judge(checked["result"])) if level_of(each) == "should"]
        assert re.findall(r"^::error title=keyedopt ([A-Z]+-\d+) ", done.stdout, re.M) == errors
        assert re.findall(r"^::warning title=keyedopt ([A-Z]+-\d+) ", done.stdout, re.M) == shoulds
        why = re.search(r"^gate: \w+ \(exit \d\); (.*); \d+ cases in ", done.stdout, re.M)[1]
        number = f"{len(musts)} must{'s' if len(musts) > 1 else ''} failed"
        assert why == (number if errors else "all that fails is known or below the level of the gate")


def options_of(made, cases):
    """Return the options of a run of just these cases."""
    return {**made.options, "clauses": sorted({clause for case in cases for clause in case.clauses})}


def test_the_time_limit_of_a_replay_reaches_the_import(run_line, files, failed, monkeypatch):
    limits = []

    def declared(target, options, path):
        limits.append(options.limit)
        raise runner.RunError("it was not imported")

    monkeypatch.setattr(runner, "declared", declared)
    clause = failing(judge(failed))[0]
    done = run_line("replay", "x.json", clause, "--target", "acme", "--time-limit", "77")
    assert "it was not imported" in refused(done)
    assert limits == [77.0]


def test_options_reach_the_run(run_line, checked):
    run_line(
        *("check", "acme", "--level", "must", "--suite", spec.SUITE_VERSION, "--area", "keyed"),
        *("--area", "wrapper,warmup", "--require-areas", "keyed, fused", "--device", "cpu"),
        *("--dtype", "float32, float64"),
        *("--time-limit", "5", "--workers", "1"),
    )
    ((target, options),) = checked["calls"]
    assert target == "acme"
    assert options == runner.Options(
        level="must",
        suite=spec.SUITE_VERSION,
        areas=("keyed", "wrapper", "warmup"),
        require_areas=("keyed", "fused"),
        device="cpu",
        dtypes=("float32", "float64"),
        limit=5.0,
        workers=1,
    )


def test_several_targets_are_written_to_a_folder_and_the_worst_counts(run_line, checked, failed, tmp_path):
    done = run_line("check", "acme.a", "acme:b", "--output", "out")
    assert done.returncode == 1
    table = done.stdout.rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["target", "acme.a", "acme:b", "exit"]
    assert table[-1] == "exit 1: red: acme.a, acme:b"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["acme.a.json", "acme.b.json"]
    options = {**failed.options, "stopped_at": failed.cases[-1].case}
    checked["result"] = dataclasses.replace(failed, complete=False, options=options)
    done = run_line("check", "acme.a", "acme:b", "-x")
    assert done.returncode == 1
    assert done.stdout.endswith("\nexit 1: no verdict on acme.a, acme:b\n")
    checked["result"] = runner.RunError("no")
    done = run_line("check", "a", "b")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2, "each target says what is wrong with it"


def test_known_failures_are_written_applied_and_held_to_be_true(run_line, checked, failed, tmp_path):
    done = run_line("check", "acme", "--expectations", "new/known.toml", "--update-expectations")
    assert done.returncode == 0
    assert "rewrote new/known.toml; new entries: " in done.stderr
    assert "new/known.toml: entries to be explained: " in done.stderr
    assert "gate: green" in done.stdout
    assert "not conformant" in done.stdout, "a known failure of a must is still one"
    done = run_line("check", "acme", "--expectations", "new/known.toml")
    assert "new/known.toml: entries to be explained: " in done.stderr, "as long as nobody has"
    text = (tmp_path / "new/known.toml").read_text(encoding="utf-8")
    (tmp_path / "new/known.toml").write_text(text.replace("to be explained", "explained"), encoding="utf-8")
    done = run_line("check", "acme", "--expectations", "new/known.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^\d+ known, unchanged \(-v shows them\)$", done.stdout, re.M)
    assert "): explained: " not in done.stdout
    assert "): explained: " in run_line("check", "acme", "--expectations", "new/known.toml", "-v").stdout
    passing = [dataclasses.replace(case, outcome="pass") for case in failed.cases]
    checked["result"] = dataclasses.replace(failed, cases=tuple(passing))
    done = run_line("check", "acme", "--expectations", "new/known.toml")
    assert done.returncode == 1
    assert "unexpected pass: " in done.stdout
    done = run_line("check", "acme", "--expectations", "new/known.toml", "--update-expectations")
    assert (done.returncode, expectations.read(tmp_path / "new/known.toml")) == (0, ())


def test_a_shipped_list_is_known_by_name(run_line, checked):
    checked["result"] = result({})
    assert run_line("check", "acme", "--expectations", "torchrec").returncode in (0, 1)


def test_a_partial_run_is_shown_as_such_and_leaves_the_list_alone(run_line, checked, failed, tmp_path):
    (tmp_path / "x.json").write_text("an earlier result")
    (tmp_path / "known.toml").write_text("")
    checked["result"] = dataclasses.replace(failed, complete=False)
    options = ["--output", "x.json", "--expectations", "known.toml", "--update-expectations"]
    done = run_line("check", "acme", "other", "--area", "keyed")
    assert len(checked["calls"]) == 1, "other targets are not begun"
    done = run_line("check", "acme", *options)
    assert "interrupted" in refused(done)
    assert "PARTIAL: the run was interrupted, there is no verdict" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("gate: red (exit 2); the run was interrupted; ")
    assert (tmp_path / "x.json").read_text() == "an earlier result"
    assert (tmp_path / "known.toml").read_text() == ""
    assert not results.read(tmp_path / "x.partial.json", partial=True).complete


@slow
def test_a_script_is_written(run_line, files, failed, acme):
    (files / "acme").symlink_to(acme["wrong"] / "acme")
    clause, target = failing(judge(failed))[0], ("--target", "acme")
    printed = run_line("replay", "x.json", clause, *target)
    assert printed.returncode == 0
    for name in (f"{clause}[1]", clause.lower(), "x.partial.json"):
        source = "x.partial.json" if name == "x.partial.json" else "x.json"
        chosen = clause if source != "x.json" else name
        done = run_line("replay", source, chosen, "--output", "again.py", *target)
        assert done.returncode == 0, done.stderr
        compile((files / "again.py").read_text(), "again.py", "exec")
    name = next(case.case for case in failed.cases if clause in case.clauses)
    exact = run_line("replay", "x.json", name, *target)
    assert exact.returncode == 0


@slow
@pytest.mark.parametrize(("version", "code"), [("wrong", 1), ("sound", 0)])
def test_the_command_that_a_check_prints_repeats_the_case(
    run_line, checked, acme, monkeypatch, version, code
):
    first = run_line("check", "acme", "--output", "a b/x.json").stdout.splitlines()[-3]
    assert first.startswith("again: keyedopt replay 'a b/x.json' ")
    monkeypatch.setenv("PYTHONPATH", str(acme[version]))
    done = run_line(*shlex.split(first)[2:], "--output", "again.py")
    assert done.returncode == code
    assert Path("again.py").exists()
    unwritten = run_line("check", "acme").stdout.splitlines()[-3]
    assert re.match(r"again: keyedopt replay [A-Z]+-\d+ --run --target acme$", unwritten)


def test_the_command_that_a_check_prints_imports_what_the_check_did(failed):
    command = functools.partial(replay_command, target="acme", imports=("a_device",))
    _, again = next_steps(judge(failed), command)
    assert again.endswith(" --run --target acme --import a_device")


def test_a_clause_is_explained(run_line):
    done = run_line("explain", CLAUSE.lower())
    clause = spec.clauses()[CLAUSE]
    assert done.returncode == 0
    assert clause.level in done.stdout
    assert all(" ".join(ground.split()) in " ".join(done.stdout.split()) for ground in clause.grounds)
    assert " ".join(clause.statement.split()) in " ".join(done.stdout.split())
    assert "cases:" in done.stdout


def test_only_some_clauses_are_checked(run_line):
    done = run_line("check", "reference", "--clause", "WARM-001,comb-002", "--clause", "WARM-002")
    assert done.returncode == 0
    assert ": conformant (clauses WARM-001, COMB-002, WARM-002 only); checked 3 of 3" in done.stdout


def test_an_area_is_explained(run_line):
    done = run_line("explain", "warmup")
    assert done.returncode == 0
    for clause in spec.areas()["warmup"].clauses:
        assert f"{clause.id}  {clause.level}  " in done.stdout


def test_a_prefix_lists_the_clauses_that_fit(run_line):
    lines = run_line("explain", "CLIP-00").stdout.splitlines()
    found = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert found == [one for one in spec.clauses() if one.startswith("CLIP-00")]
    data = json.loads(run_line("explain", "clip", "--json").stdout)
    assert [one["id"] for one in data["clauses"]] == [
        one for one in spec.clauses() if one.startswith("CLIP-")
    ]


def test_every_clause_can_be_explained(run_line, sample):
    for clause in sample.clauses(spec.areas(), 1, "explain"):
        assert run_line("explain", clause).returncode == 0


def test_lists(run_line, tmp_path, monkeypatch):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[keyedopt.implementations]\nacme = vendor:IMPLEMENTATION\nbad = leaves:x\nabsent = vendor:ABSENT\n"
    )
    module(tmp_path, "leaves", "import sys; sys.exit('no')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(TARGETS)
    targets = run_line("list").stdout
    assert re.search(r"^reference +0\.1\.0; areas: keyed", targets, re.M)
    assert re.search(r"^acme +unknown version; areas: keyed, wrapper, clipping", targets, re.M)
    assert re.search(r"^bad +broken: 'leaves' cannot be imported: SystemExit: no", targets, re.M)
    assert re.search(r"^absent +not installed; install it with: pip install not-installed", targets, re.M)
    assert run_line("list", "clauses").stdout.count("\n") == len(spec.clauses())
    assert run_line("list", "areas").stdout.count("\n") == len(spec.areas())


def test_a_terminal_that_cannot_show_a_character_gets_another():
    done = keyedopt("list", "clauses", env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0, done.stderr


# --- from end to end ------------------------------------------------------------------------------


@slow
def test_a_sound_library_from_end_to_end(acme, tmp_path):
    line = ["check", "acme", "--area", "wrapper", "--output", "x.json", "--require-areas", "wrapper"]
    done = keyedopt(*line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(acme["sound"])})
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done.stdout + done.stderr
    assert done.stdout.isascii()
    assert "acme unknown (torch " in done.stdout
    clauses = spec.areas()["wrapper"].clauses
    of, musts = len(clauses), sum(clause.level == "must" for clause in clauses)
    checked = f"checked {of} of {of} clauses, {musts} of {musts} musts on cpu"
    verdict = rf"conformant \(areas wrapper only\); {checked}\ngate: green \(exit 0\); "
    assert re.search(verdict, done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert judge(results.read(tmp_path / "x.json")).conformant


# --- verbs of the conformance part ----------------------------------------------------------------


def test_precision_reads_two_results(run_line, files):
    done = run_line("precision", "x.json", "none.json")
    assert done.returncode == 2
    assert "none.json" in done.stderr


def test_findings_are_reproduced_by_name(run_line):
    assert "there is no finding" in refused(run_line("findings", "nothing_of_this_name"))
    done = run_line("findings", "torch_sgd_nan")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("defect   torch_sgd_nan: ")
