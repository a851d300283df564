"""The runner against implementations that crash, hang, leave, lie and shout: each costs one case alone."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import CLAUSE, TARGETS, case_with, left_behind, mark, module, plain_cases, valid

from keyedopt.conformance import formats, runner, spec
from keyedopt.conformance.runner import Options, RunError
from keyedopt.conformance.verdict import judge
from keyedopt.conformance.workers import Workers, WorkersError

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
    "many_at_once": ("fail", "BaseExceptionGroup: several"),
    "endless_recursion": ("fail", "RecursionError: "),
    "close_streams": ("pass", ""),
    "noise": ("pass", ""),
    "threads": ("pass", ""),
    "fork": ("pass", ""),
    "settings": ("fail", "RuntimeError: left a mess"),
    "look_around": ("pass", ""),
}


# --- hostile cases --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    """Which case does what, and one that behaves."""
    chosen = plain_cases()
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
        patch.chdir(Path(__file__).parents[1])  # where our modules could be imported by bare names
        options = Options(clauses=clauses, limit=3, workers=2)
        result = runner.run("hostile", options, path=[TARGETS], output=output)
    formats.write(result, output)
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
    junit = ElementTree.parse(formats.write(result, tmp_path / "x.xml"))
    assert len(list(junit.iter("error"))) == sum(outcome == "error" for outcome, _ in HOSTILE.values())
    assert (
        formats.write(result, tmp_path / "x.md").read_text(encoding="utf-8").replace("\n", "").isprintable()
    )


def test_no_process_and_no_journal_is_left_behind(hostile):
    assert left_behind("hostile") == []
    assert [path.name for path in hostile[1].parent.iterdir()] == ["x.json"]


def test_a_worker_loads_no_module_of_ours_under_a_bare_name(hostile, tmp_path_factory):
    notes = json.loads((tmp_path_factory.getbasetemp() / "notes.json").read_text())
    modules = set(notes["modules"])
    assert modules & {"reference", "conformance", "cli", "tests", "suite", "conftest", "making"} == set()
    assert "keyedopt.conformance.suite.support" in modules


# --- the smoke stage ------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, monkeypatch):
    def make(source):
        module(tmp_path, "broken", source)
        return lambda **options: runner.smoke("broken", path=[str(tmp_path)], **options)

    return make


BUILD = "class KeyedOptimizerWrapper:\n def __init__(self, params, factory): {}\n def step(self): {}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os._exit(0)", "ended the interpreter when it was imported or built (exit status 0)"),
        ("import os; os._exit(7)", "(exit status 7): it printed nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "(killed by SIGKILL)"),
        ("import ctypes; ctypes.string_at(0)", "(killed by SIGSEGV)"),
        ("import os\nprint('a\\n\\x1b[31mlast', flush=True); os._exit(1)", "(exit status 1): \\x1b[31mlast"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("raise KeyboardInterrupt", "(killed by SIGINT)"),
        ("x = 1", "broken has none of the public names (KeyedOptimizer, KeyedOptimizerWrapper, …)"),
        (BUILD.format("1/0", "pass"), "broken cannot be built: KeyedOptimizerWrapper around torch.optim.SGD"),
        (BUILD.format("pass", "raise E('a\\nb')\nclass E(Exception): pass"), "and one step give E: a b"),
        (BUILD.format("raise SystemExit", "pass"), "ended the interpreter"),
    ],
)
def test_what_cannot_be_built_says_so_in_one_line(broken, source, said):
    with pytest.raises(RunError) as caught:
        broken(source)()
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(1000)",
        "import ctypes; ctypes.PyDLL(None).sleep(1000)",
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)",
    ],
)
def test_what_hangs_on_import_is_given_up_and_leaves_no_process(broken, source, monkeypatch):
    monkeypatch.setenv("MARKER", mark("hanging")["MARKER"])
    with pytest.raises(RunError, match=r"broken was not imported and built within 0\.7 s"):
        broken(source)(seconds=0.7)
    assert left_behind("hanging") == []


def test_what_is_noisy_and_starts_threads_and_children_on_import_is_examined(broken, monkeypatch):
    monkeypatch.setenv("MARKER", mark("noisy")["MARKER"])
    examined = broken(
        "import subprocess, sys, threading, time\n"
        "from keyedopt.reference import *\n"
        "print('{}\\n' * 100000); print('x', file=sys.stderr); input_is = sys.stdin.read()\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "subprocess.Popen(['sleep', '1000'])\n"
    )()
    assert examined["implementation"]["areas"] == list(spec.areas())
    assert left_behind("noisy") == []


def test_a_device_or_dtype_that_is_not_supported_is_refused():
    with pytest.raises(RunError, match="reference supports the devices cpu, not 'tpu'"):
        runner.smoke("reference", Options(device="tpu"))
    with pytest.raises(RunError, match="acme supports the dtypes float32, not 'float64'"):
        runner.smoke("vendor:IMPLEMENTATION", Options(dtypes=("float64",)), path=[TARGETS])


ABSENT = """
from keyedopt.conformance.implementation import Implementation
acme = Implementation(name="acme", root="not_installed.optim", install="pip install not-installed")
"""


def test_what_is_not_installed_says_how_to_install_it(tmp_path):
    module(tmp_path, "described", ABSENT)
    with pytest.raises(RunError) as caught:
        runner.smoke("described:acme", path=[str(tmp_path)])
    assert "there is no module 'not_installed.optim'" in str(caught.value)
    assert str(caught.value).endswith("; install it with: pip install not-installed")


# --- workers that cannot begin --------------------------------------------------------------------

FLAKY = """\
import os, sys
from keyedopt.reference import *
if "pytest" in sys.modules:
    {}
"""


@pytest.fixture
def flaky(tmp_path):
    def run(source, patience=60.0):
        module(tmp_path, "flaky", FLAKY.format(source))
        arguments = runner.pytest_arguments("flaky", Options(clauses=(CLAUSE,)), tmp_path)
        return list(Workers(arguments, tmp_path, 10.0, patience, [str(tmp_path)]).run(1))

    return run


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("os._exit(0)", "exit status 0: it printed nothing"),
        ("raise RuntimeError('not twice')", "RuntimeError: not twice"),
    ],
)
def test_a_target_that_is_imported_only_once_is_no_endless_run(flaky, source, said):
    with pytest.raises(WorkersError) as caught:
        flaky(source)
    assert said in str(caught.value)


def test_workers_that_hang_before_they_begin_are_given_up(flaky):
    with pytest.raises(WorkersError, match="a worker ran no case within 2 s"):
        flaky("import time; time.sleep(1000)", patience=2.0)


def test_a_run_without_a_case_is_refused():
    with pytest.raises(RunError, match="no case of the suite is selected by these options"):
        runner.run("reference", Options(clauses=(CLAUSE,), areas=("fused",), workers=1))


# --- what a run covers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partial():
    """Check what claims three areas and has one of them."""
    clauses = [
        next(clause.id for clause in area.clauses if clause.level != "observe")
        for area in spec.areas().values()
    ]
    case = case_with("dtype")
    options = Options(clauses=(*clauses, case.clauses[0]), workers=1)
    return runner.run("vendor:IMPLEMENTATION", options, path=[TARGETS]), case


def test_an_area_that_is_not_claimed_is_unsupported_and_never_passed(partial):
    result, _ = partial
    verdict = judge(result)
    claimed = {"keyed", "wrapper", "clipping"}
    assert verdict.unsupported == tuple(area for area in spec.areas() if area not in claimed)
    for case in result.cases:
        areas = {spec.clauses()[clause].area for clause in case.clauses}
        if areas & set(verdict.unsupported):
            assert case.outcome == "unsupported"
            assert case.seen.startswith("not claimed: ")


def test_a_claimed_name_that_is_missing_fails(partial):
    clipping = [case for case in partial[0].cases if case.clauses[0].startswith("CLIP")]
    assert clipping
    assert {case.outcome for case in clipping} == {"fail"}
    assert all("acme has no Gradient" in case.seen for case in clipping)
    assert not judge(partial[0]).conformant


def test_a_borrowed_name_is_used_and_a_claimed_area_passes(partial):
    outcomes = {case.outcome for case in partial[0].cases if case.clauses[0].startswith(("KEYED", "WRAP"))}
    assert "pass" in outcomes


def test_a_case_runs_in_the_dtypes_that_are_declared(partial):
    result, case = partial
    found = [item for item in result.cases if item.case.startswith(f"{case.file}::{case.name}[")]
    assert found
    assert {item.dtype for item in found} == {"float32"}
    assert {item.device for item in result.cases} == {"cpu"}


def test_the_result_says_what_was_checked(partial):
    about = partial[0].implementation
    assert about["name"] == "acme"
    assert about["version"] == partial[0].environment["keyedopt"]
    assert about["variants"] == {"adagrad": "duchi"}
    assert partial[0].suite["version"] == spec.SUITE_VERSION


# --- surroundings ---------------------------------------------------------------------------------


@pytest.fixture
def messy(tmp_path, monkeypatch):
    """Start from a folder full of pytest's settings, modules that shadow others, and plugins."""
    (tmp_path / "conftest.py").write_text("raise RuntimeError('conftest')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --of-another-plugin\npython_files = none.py\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--nonsense'\n")
    for name in ("torch", "json", "typing", "pytest", "hypothesis", "keyedopt"):
        module(tmp_path, name, "raise RuntimeError('shadow')")
    module(tmp_path / "src", "mine", "from keyedopt.reference import *")
    info = tmp_path / "bad_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbad = not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nonsense")
    monkeypatch.setenv("PYTEST_PLUGINS", "not_there_at_all")
    return tmp_path


def test_a_run_ignores_the_settings_of_the_place_it_is_started_from(messy):
    before = sorted(path.name for path in messy.iterdir())
    result = runner.run("mine", Options(clauses=(CLAUSE,), workers=1))
    assert {case.outcome for case in result.cases} == {"pass"}
    after = {path.name for path in messy.iterdir()} - {"__pycache__"}
    assert after == set(before), "and leaves nothing there"


def test_the_runner_itself_never_imports_torch():
    code = (
        "import sys, keyedopt.cli.check, keyedopt.cli.replay; print({'torch', 'pytest'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- pytest without the runner --------------------------------------------------------------------


def pytest_(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_pytest_runs_the_suite_directly(tmp_path, more, acme):
    case = plain_cases()[0]
    done = pytest_(
        *("--pyargs", f"keyedopt.conformance.suite.{case.file}", "--implementation", "acme", "-q", *more),
        *("--keyedopt-clause", case.clauses[0], "--keyedopt-clause", CLAUSE),
        cwd=tmp_path,
        PYTHONPATH=str(acme["sound"]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_pytest_says_what_is_wrong_with_the_target(tmp_path):
    done = pytest_("--pyargs", "keyedopt.conformance.suite", "--implementation", "not_there", cwd=tmp_path)
    assert done.returncode == 4
    assert "there is no module 'not_there'" in done.stderr
    assert "Traceback" not in done.stderr


def test_pytest_asks_for_a_target(tmp_path):
    done = pytest_("--pyargs", f"keyedopt.conformance.suite.{plain_cases()[0].file}", cwd=tmp_path)
    assert done.returncode == 2
    assert "say which implementation to check: --implementation TARGET" in done.stdout


def test_the_plugin_is_inert_where_it_is_not_asked_for(tmp_path):
    (tmp_path / "__init__.py").touch()
    module(
        tmp_path,
        "test_mine",
        "import sys, pytest\n"
        "@pytest.fixture(params=['a', 'b'])\n"
        "def dtype(request): return request.param\n"
        "@pytest.fixture\n"
        "def device(): return 'mine'\n"
        "@pytest.mark.clause('X-1')\n"
        "def test_mine(dtype, device):\n"
        "    assert device == 'mine'\n"
        "    mine = [name for name in sys.modules if name.startswith('keyedopt')]\n"
        "    assert mine == ['keyedopt', 'keyedopt.conformance', 'keyedopt.conformance.plugin']\n"
        "    assert not {'torch', 'hypothesis.core'} & set(sys.modules)\n"
        "def test_impl(impl): pass\n",
    )
    done = pytest_("-p", "no:hypothesispytest", "-q", cwd=tmp_path)
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "fixture 'impl' not found" in done.stdout


def test_hostile_actions_are_all_tried():
    tree = ast.parse((Path(TARGETS) / "hostile.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert names - {"raise_", "trapped"} == set(HOSTILE)


def test_time_limits_are_kept(hostile):
    """Four hang for 2 s to 10 s; with the imports of a dozen new workers this is far below a minute."""
    assert hostile[0].seconds < 120
