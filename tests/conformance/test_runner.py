"""The runner: what it refuses to begin with, what a run covers, and where it is started from."""

import os
import re
import subprocess
import sys

import pytest
from making import CLAUSE, TARGETS, case_with, functions, left_behind, mark, module, plain_cases

from keyedopt.conformance import spec
from keyedopt.conformance.results.verdict import judge, shown
from keyedopt.conformance.run import runner
from keyedopt.conformance.run.processes import Processes
from keyedopt.conformance.run.runner import Options, RunError
from keyedopt.conformance.run.workers import Workers, WorkersError
from keyedopt.conformance.targets.implementation import Implementation
from keyedopt.conformance.targets.smoke import versions

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=3, spread=True)

# --- the smoke stage ------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, monkeypatch):
    def make(source):
        module(tmp_path, "broken", source)
        return lambda **options: runner.smoke("broken", path=[str(tmp_path)], **options)

    return make


BUILD = """
import torch
class KeyedOptimizerWrapper(torch.optim.Optimizer):
 def __init__(self, params, factory): {}
 def step(self): {}
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os._exit(0)", "ended the interpreter when it was imported or built (exit status 0)"),
        ("import os; os._exit(7)", "(exit status 7): it printed nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "(killed by SIGKILL)"),
        ("import ctypes; ctypes.string_at(0)", "(killed by SIGSEGV)"),
        ("import os; os.closerange(0, 256)", "broken closed file descriptors of its process when it was imp"),
        ("import os\nprint('a\\n\\x1b[31mlast', flush=True); os._exit(1)", "(exit status 1): \\x1b[31mlast"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("raise KeyboardInterrupt", "built (exit status 1): KeyboardInterrupt"),
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


@slow
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


@slow
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
    with pytest.raises(RunError, match="torch knows no device 'tpu'"):
        runner.smoke("reference", Options(device="tpu"))
    with pytest.raises(RunError, match="acme supports the dtypes float32, not 'float64'"):
        runner.smoke("vendor:IMPLEMENTATION", Options(dtypes=("float64",)), path=[TARGETS])


COMPILING = """
import subprocess
from pathlib import Path
from keyedopt.conformance.targets.implementation import Implementation
from keyedopt.reference.optimizers import SGD as Sound, Adam
class SGD(Sound):
    def step(self, closure=None):
        built = Path(__file__).with_name("built")
        if not built.exists():  # with something that is called as a compiler is
            command = "echo -n ninja > /proc/self/comm; sleep 2 & wait"
            process = subprocess.Popen(["bash", "-c", command])
            while process.poll() is None:  # and takes more CPU time than an import may
                pass
            built.touch()
        return super().step(closure)
class acme:
    pass
acme.SGD = SGD
described = {{
    "name": "acme", "root": acme, "areas": ("algorithms",), "compiles": {}, "dtypes": ("float32",),
    "absent": ("A*", "R*", "P*", "L*", "*.sparse"),
}}
acme = Implementation(**described)
"""


@pytest.mark.parametrize("compiles", [True, False])
def test_a_compilation_in_the_first_step_is_awaited_before_cases_run(compiles, tmp_path):
    module(tmp_path, "compiling", COMPILING.format(compiles))
    examined = runner.smoke("compiling:acme", path=[str(tmp_path)], seconds=0.7)
    assert (tmp_path / "built").exists() == examined["compiles"] == compiles
    assert examined["implementation"]["areas"] == ["algorithms", "sharded", "devices"]


def test_the_version_is_that_of_what_was_imported(tmp_path, monkeypatch):
    installed, checkout = tmp_path / "site", tmp_path / "checkout"
    about = installed / "acme_optim-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-optim\nVersion: 1.0\n")
    (about / "RECORD").write_text("acme_optim/__init__.py,,\n")
    for folder in (installed, checkout):
        (folder / "acme_optim").mkdir(parents=True)
        (folder / "acme_optim" / "__init__.py").write_text("__version__ = '2.0.dev1'\nclass SGD: ...\n")
    described = Implementation(name="acme", root="acme_optim", distributions=("acme-optim",))
    for folder, version in ((installed, "1.0"), (checkout, "2.0.dev1")):
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "acme_optim", raising=False)
        described.surface()
        assert versions(described) == {"acme-optim": version}
    monkeypatch.delitem(sys.modules, "acme_optim")


ABSENT = """
from keyedopt.conformance.targets.implementation import Implementation
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
if "smoke" not in sys.argv[0]:
    {}
"""


@pytest.fixture
def flaky(tmp_path):
    def run(source, patience=60.0):
        module(tmp_path, "flaky", FLAKY.format(source))
        arguments = runner.pytest_arguments("flaky", Options(clauses=(CLAUSE,)), tmp_path)
        with Processes(tmp_path, [str(tmp_path)]) as processes:
            processes.collect([*arguments, "--keyedopt-defer"])
            return list(Workers("flaky", 10.0, patience, processes).run(1))

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


@slow
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
        next(clause.id for clause in area.clauses if clause.level != "recorded")
        for area in spec.areas().values()
    ]
    case = case_with("dtype", area="keyed")
    options = Options(clauses=(*clauses, case.clauses[0]), workers=1)
    return runner.run("vendor:IMPLEMENTATION", options, path=[TARGETS]), case


def test_an_area_that_is_not_claimed_is_unsupported_and_never_passed(partial):
    result, _ = partial
    verdict = judge(result)
    claimed = {"keyed", "wrapper", "clipping", "sharded", "devices"}
    assert verdict.unsupported == tuple(area for area in spec.areas() if area not in claimed)
    apart = [clause for clause in verdict.clauses if spec.clauses()[clause].area not in claimed]
    assert {verdict.clauses[clause] for clause in apart} == {"unsupported"}
    for case in result.cases:
        areas = {spec.clauses()[clause].area for clause in case.clauses}
        assert areas & claimed, "a case of unclaimed areas only is not collected"
        if areas & set(verdict.unsupported):
            assert case.outcome == "unsupported"
            assert case.seen.startswith("not claimed: ")


def test_a_case_whose_library_is_missing_could_not_run(tmp_path):
    lacks = 'import sys; sys.modules["torchrec.sparse.jagged_tensor"] = None\n'
    module(tmp_path, "acme", f"{lacks}from keyedopt import reference as SURFACE")
    options = Options(clauses=("FUSED-102",), workers=1)
    result = runner.run("acme:SURFACE", options, path=[str(tmp_path)])
    assert result.cases
    assert all(case.seen.startswith("torchrec cannot be imported") for case in result.cases)
    assert {shown(case) for case in result.cases} == {"could not run"}


def test_a_claimed_name_that_is_missing_fails(partial):
    clipping = [case for case in partial[0].cases if case.clauses[0].startswith("CLIP")]
    assert clipping
    assert {case.outcome for case in clipping} == {"fail"}
    assert all("acme has no Gradient" in case.seen for case in clipping)
    assert not judge(partial[0]).conformant


def test_what_a_module_only_imports_disturbs_no_case(tmp_path):
    module(tmp_path, "apart", "from torch.optim import SGD, Adam\n\nclass SGD(SGD): ...\n")
    result = runner.run("apart", Options(clauses=("ALGO-052",), workers=1), path=[str(tmp_path)])
    found = {(case.outcome, "[SGD" in case.case) for case in result.cases}
    assert found == {("pass", True), ("unsupported", False)}


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
    assert about["variants"] == {"LAMB": "per_tensor"}
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


@slow
def test_a_run_ignores_the_settings_of_the_place_it_is_started_from(messy):
    before = sorted(path.name for path in messy.iterdir())
    result = runner.run("mine", Options(clauses=(CLAUSE,), workers=1))
    assert {case.outcome for case in result.cases} == {"pass"}
    after = {path.name for path in messy.iterdir()} - {"__pycache__"}
    assert after == set(before), "and leaves nothing there"


def test_what_a_target_sets_for_the_process_is_undone(tmp_path):
    settings = (
        "torch.set_default_dtype(torch.float64)\ntorch.set_default_device('cpu')\n"
        "torch.set_grad_enabled(False)\ntorch.set_flush_denormal(True)\n"
    )
    module(tmp_path, "settings", f"import torch\n{settings}from keyedopt.reference import *\n")
    result = runner.run(
        "settings", Options(clauses=("WRAP-008", "CLIP-006", "CLIP-019")), path=[str(tmp_path)]
    )
    assert {case.outcome for case in result.cases} == {"pass"}


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


@slow
@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_pytest_runs_the_suite_directly(tmp_path, more, acme):
    case = plain_cases()[0]
    done = pytest_(
        *(
            "--pyargs",
            f"keyedopt.conformance.suite.{case.area}.{case.file}",
            "--implementation",
            "acme",
            "-q",
            *more,
        ),
        *("--keyedopt-clause", case.clauses[0], "--keyedopt-clause", CLAUSE),
        cwd=tmp_path,
        PYTHONPATH=str(acme["sound"]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9] passed", done.stdout, re.MULTILINE)
    assert "failed" not in done.stdout


@slow
def test_pytest_gives_cases_the_names_that_they_have_in_a_check(tmp_path):
    """A list of known failures names cases, also those in situations, whose choice depends on what there is.

    One clause has cases in all dtypes, one has cases of two areas.
    """
    by_hand = next(case.clauses[0] for case in functions() if case.name == "test_training_as_by_hand")
    clauses = (by_hand, "WARM-050")
    asked = [part for clause in clauses for part in ("--keyedopt-clause", clause)]
    options = ("--implementation", "reference", *asked, "--collect-only", "-q")
    done = pytest_("--pyargs", "keyedopt.conformance.suite.warmup", *options, cwd=tmp_path)
    names = {"".join(parts) for parts in re.findall(r"(test_\w+)\.py(::.+)$", done.stdout, re.M)}
    found = runner.run("reference", Options(clauses=clauses))
    assert {case.partition("::")[0] for case in names} > {"test_warmup_rates"}
    of_area = {case.case for case in found.cases if case.case.startswith("test_warmup_")}
    assert names == of_area != {case.case for case in found.cases}
    assert any(case.dtype and case.inputs.get("situation") for case in found.cases), "else it shows nothing"


def test_pytest_says_what_is_wrong_with_the_target(tmp_path):
    done = pytest_("--pyargs", "keyedopt.conformance.suite", "--implementation", "not_there", cwd=tmp_path)
    assert done.returncode == 4
    assert "there is no module 'not_there'" in done.stderr
    assert "Traceback" not in done.stderr


def test_pytest_asks_for_a_target(tmp_path):
    case = plain_cases()[0]
    done = pytest_("--pyargs", f"keyedopt.conformance.suite.{case.area}.{case.file}", cwd=tmp_path)
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
        "    folders = ['keyedopt', 'keyedopt.conformance', 'keyedopt.conformance.run']\n"
        "    assert mine == [*folders, 'keyedopt.conformance.run.plugin']\n"
        "    assert not {'torch', 'hypothesis.core'} & set(sys.modules)\n"
        "def test_impl(impl): pass\n",
    )
    done = pytest_("-p", "no:hypothesispytest", "-q", cwd=tmp_path)
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "fixture 'impl' not found" in done.stdout
