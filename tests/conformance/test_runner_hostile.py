"""The runner against implementations that crash, hang, leave, lie and shout: each costs one case alone."""

import ast
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import TARGETS, left_behind, mark, plain_cases, valid

from keyedopt.conformance import spec
from keyedopt.conformance.results import output as outputs
from keyedopt.conformance.results.verdict import judge
from keyedopt.conformance.run import runner
from keyedopt.conformance.run.runner import Options

#: What a hostile case does -> the outcome, and what is said to be seen.
HOSTILE = {
    "segfault": ("error", "crash: killed by SIGSEGV"),
    "leave": ("error", "crash: exit status 3"),
    "leave_with_success": ("error", "crash: exit status 0"),
    "close_every_file": ("error", "crash: "),
    "sleep": ("error", "timeout: "),
    "hold_the_interpreter": ("error", "timeout: "),
    "sleep_unwatched": ("error", "timeout: "),
    "sys_exit": ("fail", "SystemExit: 0"),
    "interrupt": ("fail", "KeyboardInterrupt"),
    "generator_exit": ("fail", "GeneratorExit"),
    "skip": ("fail", "Skipped: not today"),
    "skip_as_unittest": ("fail", "SkipTest: not today"),
    "expect_failure": ("fail", "XFailed: known"),
    "end_the_session": ("fail", "Exit: enough"),
    "no_text": ("fail", "Unspeakable: its message cannot be read: RuntimeError"),
    "vicious_text": ("fail", "Vicious: its message cannot be read: SystemExit"),
    "text_of_a_stranger": ("fail", "RuntimeError: \\udcff"),
    "control_characters": ("fail", "RuntimeError: \\x00\\x1b[31m"),
    "markup": ("fail", "RuntimeError: [bold red]x[/]"),
    "megabytes": ("fail", "RuntimeError: xxx"),
    "code_without_a_file": ("fail", "TypeError: f.__init__() got an unexpected"),
    "many_at_once": ("fail", "BaseExceptionGroup: several"),
    "endless_recursion": ("fail", "RecursionError: "),
    "close_streams": ("pass", ""),
    "noise": ("pass", ""),
    "threads": ("pass", ""),
    "linger": ("pass", ""),
    "fork": ("pass", ""),
    "settings": ("fail", "RuntimeError: left a mess"),
    "look_around": ("pass", ""),
}


# --- hostile cases --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    """Which case does what, and one that behaves."""
    # The first actions crash or hang. They get cases without situations, because a case would crash or hang
    # again in each situation. Cases on ranks are left out: their failures name the rank first.
    varied = {case: bool(spec.clauses()[case.clauses[0]].varies) for case in plain_cases()}
    chosen = sorted((case for case in varied if case.area != "sharded"), key=varied.get)
    assert len(chosen) > len(HOSTILE)
    return dict(zip(HOSTILE, chosen, strict=False)), chosen[len(HOSTILE)]


@pytest.fixture(scope="module")
def hostile(plan, tmp_path_factory):
    hostile, innocent = plan
    clauses = tuple(case.clauses[0] for case in [*hostile.values(), innocent])
    output = tmp_path_factory.mktemp("hostile") / "x.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTILE", json.dumps({case.name: action for action, case in hostile.items()}))
        patch.setenv("MARKER", mark("hostile")["MARKER"])
        patch.setenv("NOTES", str(tmp_path_factory.getbasetemp() / "notes.json"))
        patch.chdir(Path(__file__).parents[2])  # where our modules could be imported by bare names
        options = Options(clauses=clauses, limit=3, workers=2)
        result = runner.run("hostile", options, path=[TARGETS], output=output)
    outputs.write(result, output)
    return result, output


def case_of(result, source):
    (found,) = [case for case in result.cases if case.case == f"{source.file}::{source.name}"]
    return found


@pytest.mark.parametrize("action", HOSTILE)
def test_a_hostile_case_costs_itself_and_is_reported_as_what_it_is(action, hostile, plan):
    case = case_of(hostile[0], plan[0][action])
    outcome, seen = HOSTILE[action]
    assert case.outcome == outcome
    assert case.seen.startswith(seen)
    assert bool(case.expected) == (outcome != "pass")
    assert len(case.seen) < 2100


def test_an_innocent_case_is_not_touched(hostile, plan):
    assert case_of(hostile[0], plan[1]).outcome == "pass"


def test_every_clause_is_accounted_for(hostile):
    result, _ = hostile
    assert result.complete
    verdict = judge(result)
    assert set(verdict.clauses) == set(result.options["clauses"])
    assert sum(count.total for row in verdict.counts.values() for count in row.values()) == len(
        result.options["clauses"]
    )


def test_a_crash_and_a_timeout_show_where(hostile, plan):
    for action in ("segfault", "sleep", "hold_the_interpreter"):
        assert action in case_of(hostile[0], plan[0][action]).trace
    for action in ("no_text", "endless_recursion"):
        assert "hostile.py" in case_of(hostile[0], plan[0][action]).trace


def test_the_files_of_a_hostile_run_are_valid(hostile, tmp_path):
    result, output = hostile
    assert len(valid(output)["cases"]) == len(result.cases)
    junit = ElementTree.parse(outputs.write(result, tmp_path / "x.xml"))
    assert len(list(junit.iter("error"))) == sum(case.outcome == "error" for case in result.cases)
    assert (
        outputs.write(result, tmp_path / "x.md").read_text(encoding="utf-8").replace("\n", "").isprintable()
    )


def test_no_process_and_no_journal_is_left_behind(hostile):
    assert left_behind("hostile") == []
    assert [path.name for path in hostile[1].parent.iterdir()] == ["x.json"]


def test_a_worker_loads_no_module_of_ours_under_a_bare_name(hostile, tmp_path_factory):
    notes = json.loads((tmp_path_factory.getbasetemp() / "notes.json").read_text())
    modules = set(notes["modules"])
    assert modules & {"reference", "conformance", "cli", "tests", "suite", "conftest", "making"} == set()
    assert "keyedopt.conformance.suite.support.assertions" in modules


def test_hostile_actions_are_all_tried():
    tree = ast.parse((Path(TARGETS) / "hostile.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert names - {"raise_", "trapped"} == set(HOSTILE)


def test_a_case_that_reaches_its_limit_is_run_twice_and_says_how_to_raise_it(hostile):
    late = {case.case: case for case in hostile[0].cases if case.runs == 2}
    timeouts = {case.case for case in hostile[0].cases if case.seen.startswith("timeout")}
    assert late.keys() == timeouts
    for case in late.values():
        assert "did not end within 3 s" in case.seen
        assert case.seen.endswith("--time-limit gives more")
