"""A failing case as a script: it needs torch and the implementation alone, and tells when it holds."""

import ast
import inspect
import json
import os
import subprocess
import sys

import pytest
from making import case_with, drawn_case, functions, level, plain_cases, result

from keyedopt.conformance import spec
from keyedopt.conformance.results.untrusted import plain
from keyedopt.conformance.run import case_sources, replay
from keyedopt.conformance.run.replay import ReplayError
from keyedopt.conformance.targets.find import find

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

#: Runs scripts without keyedopt, and prints the exit code and the last line of each.
DRIVER = """\
import contextlib, io, json, os, runpy, sys
sys.modules["keyedopt"] = None
found = {}
for path in json.load(sys.stdin):
    out, sys.argv = io.StringIO(), [path]
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
    found[os.path.basename(path)] = code, out.getvalue().strip()
print(json.dumps(found))
"""


def run(scripts, folder):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([str(path) for path in scripts]),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def written(made, case, imports=()):
    """Return the script of a case, with the places and inputs of the result, which replay checks before."""
    inputs = case.inputs if case.dtype is None else {"dtype": case.dtype, **case.inputs}
    return replay.script(made, case, inputs, made.implementation["places"], imports)


LEAVES = """
import os
class KeyedOptimizerWrapper(KeyedOptimizerWrapper):
    def __init__(self, *args, **kwargs):
        os._exit(0)
"""


@pytest.fixture(scope="session")
def scripts(failed, acme, tmp_path_factory):
    """Write the scripts of failing cases of several kinds, and of one that holds; return what they say."""
    folder = tmp_path_factory.mktemp("scripts")
    bad = [case for case in failed.cases if case.outcome == "fail"]
    drawn = [case for case in bad if drawn_case().name in case.case]
    given = [case for case in bad if case.inputs]
    chosen = {
        "drawn": drawn[0],
        "given": next(case for case in given if case not in drawn),
        "plain": next(case for case in bad if not case.inputs and case.dtype is None),
        "observed": next(case for case in failed.cases if case.outcome == "observed"),
        "holds": next(case for case in failed.cases if case.outcome == "pass"),
    }
    paths = []
    for name, case in chosen.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(written(failed, case), encoding="utf-8")
    said = {version: run(paths, place) for version, place in acme.items()}
    return said, chosen, folder


@pytest.mark.parametrize("kind", ["drawn", "given", "plain"])
def test_a_script_fails_as_long_as_the_case_fails_and_then_holds(scripts, kind):
    said, chosen, _ = scripts
    code, line = said["wrong"][f"{kind}.py"]
    assert code == 1
    assert line.startswith("fails: ")
    assert chosen[kind].seen.split("\n")[0][:40] in line
    assert said["sound"][f"{kind}.py"] == [0, "holds"]


def test_a_script_of_a_case_that_holds_says_so(scripts):
    said, _, _ = scripts
    assert said["wrong"]["holds.py"] == [0, "holds"]


def test_a_script_of_an_observation_shows_it(scripts):
    said, _, _ = scripts
    code, line = said["sound"]["observed.py"]
    assert code == 0
    assert line.startswith("holds; observed: ")


def test_a_drawn_input_is_kept_shrunken(scripts):
    _, chosen, folder = scripts
    inputs = chosen["drawn"].inputs
    assert inputs
    assert len(json.dumps(inputs)) < 500
    for name in inputs:
        assert f"{name}=" in (folder / "drawn.py").read_text()


def test_a_script_names_what_it_is_about(scripts):
    _, chosen, folder = scripts
    docstring = ast.get_docstring(ast.parse((folder / "plain.py").read_text()))
    clause = chosen["plain"].clauses[0]
    assert clause in docstring
    assert spec.clauses()[clause].statement in docstring
    assert "acme" in docstring


@slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [(LEAVES, "fails: it ended the interpreter (exit status 0)"), ("", "holds")],
    ids=["leaves", "mended"],
)
def test_a_script_of_a_crash_survives_it(tmp_path, acme, fault, said):
    imports = "from acme import *\nfrom acme import KeyedOptimizerWrapper\n"
    (tmp_path / "leaving.py").write_text(imports + fault)
    case = plain_cases()[0]
    made = result({"case": f"{case.file}::{case.name}", "clauses": case.clauses, "outcome": "error"})
    names = [name for area in spec.areas().values() for name in area.names]
    made.implementation["places"] = {name: f"leaving:{name}" for name in names}
    script = tmp_path / "again.py"
    script.write_text(written(made, made.cases[0]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(acme["sound"])])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (bool(fault), said), done.stderr


@slow
def test_a_script_runs_on_the_device_of_the_run(tmp_path):
    case = plain_cases()[0]
    made = result({"case": f"{case.file}::{case.name}", "clauses": case.clauses, "device": None})
    made.environment["device"] = "npu:1"
    imports = ["keyedopt.conformance.pretend"]
    made.implementation["places"] = find("reference").surface().places()
    script = tmp_path / "again.py"
    text = written(made, made.cases[0], imports)
    assert "choose_device('npu:1')" in text
    script.write_text(text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "holds"), done.stderr


@slow
def test_every_case_can_be_written_as_a_script(tmp_path, sample):
    """No name is left undefined: linted, since running all would take minutes."""
    chosen = sample.choose(case_sources.cases(), 300, name=lambda case: f"{case.file} {case.name}")
    for number, case in enumerate(chosen):
        function = functions()[case]
        names = [name for name in inspect.signature(function).parameters if name != "impl"]
        made = result({"case": f"{case.file}::{case.name}[x]", "inputs": dict.fromkeys(names, plain((1,)))})
        made.implementation["places"] = {"KeyedOptimizer": "acme:KeyedOptimizer"}
        inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        drawn = [name for name in inspect.signature(inner).parameters if name not in ("impl", *names)]
        made.cases[0].inputs.update(dict.fromkeys(drawn, 1))
        (tmp_path / f"{number:04}_{case.name}.py").write_text(written(made, made.cases[0]))
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F63,F7,F811,F82", tmp_path]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:3000]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"case": "test_gone::test_a"}, "the suite has no case test_gone::test_a"),
        ({"case": "../spec/__init__::test_a"}, "the suite has no case"),
        ({"case": "assertions::expect"}, "the suite has no case assertions::expect"),
        ({"case": "support_wrapper::wrap_plainly"}, "the suite has no case"),
        ({"case": "test_keyed_load::test_gone[1]"}, r"the suite has no case test_keyed_load::test_gone\[1\]"),
        ({"case": ""}, "the suite has no case"),
        ({"inputs": {}}, "were not kept"),
        ({"inputs": {"dtype": {"python": "__import__('os')"}}}, "was not kept as a literal"),
    ],
)
def test_what_cannot_be_repeated_says_why(changes, said):
    case = case_with("dtype")
    made = result({"case": f"{case.file}::{case.name}[float32]", **changes})
    made.implementation["places"] = {"KeyedOptimizer": "acme:KeyedOptimizer"}
    with pytest.raises(ReplayError, match=said):
        written(made, made.cases[0])


def test_an_object_without_a_place_cannot_be_repeated():
    case = plain_cases()[0]
    made = result({"case": f"{case.file}::{case.name}"})
    with pytest.raises(ReplayError, match="acme is an object that no script can import"):
        written(made, made.cases[0])


def test_a_title_of_a_stranger_cannot_end_the_docstring():
    case = plain_cases()[0]
    made = result({"case": f"{case.file}::{case.name}", "clauses": case.clauses})
    made.implementation.update(name='"""\nimport os\n\\', places={"KeyedOptimizer": '"""\n:x'})
    tree = ast.parse(written(made, made.cases[0]))
    assert level(case) in ast.get_docstring(tree)
    imports = [node.names[0].name for node in tree.body if isinstance(node, ast.Import)]
    assert "os" not in imports
