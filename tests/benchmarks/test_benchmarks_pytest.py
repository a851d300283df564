"""The pytest-benchmark suites, as the command line that is documented runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import chosen

ROOT = Path(__file__).parents[2]
#: Runs command lines of pytest, each in a copy of a process that has imported torch; says how each ended.
EACH = """
import json, os, runpy, sys
import hypothesis, torch, torch._dynamo
import keyedopt.benchmarks.asv.implementations

ended = {}
for name, (line, output) in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, 1), os.dup2(stream, 2)
        sys.argv = ["pytest", *line]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""
#: A plugin that fails a run in which a folder was loaded under its bare name.
WATCH = """
import sys

def pytest_sessionfinish(session):
    bare = {"benchmarks", "cli", "conformance", "fused", "reference", "reports"} & set(sys.modules)
    if bare:
        raise RuntimeError(f"loaded under bare names: {bare}")
"""
GROUPS = ("task", "implementation")
#: Wrong options, and what is said of them.
WRONG = {
    "workload": (("--workload", "nope"), "no workload 'nope'"),
    "task": (("--task", "nope"), "no task 'nope'"),
    "by": (("--by", "nope"), "no implementation 'nope'"),
    "rounds": (("--rounds", "0"), "--rounds must be at least 1"),
}
SMALL = ("-k", "test_task", "--workload", "small-step")
COMPARED = (
    "--task",
    "train-sgd",
    "--task",
    "forward",
    "--by",
    "fused",
    "--by",
    "fused:torch",
    "--rounds",
    "2",
)
LINES = {
    **{f"group {name}": (*SMALL, *COMPARED, f"--benchmark-group-by=param:{name}") for name in GROUPS},
    "command": ("-k", "test_command and help"),
    "not offered": (*SMALL, "--task", "train-lamb", "--by", "torch", "--rounds", "1"),
    **{f"wrong {name}": ("-k", "test_task", *options) for name, (options, _) in WRONG.items()},
}


class Done:
    """How a run ended, what it printed, and what it wrote."""

    def __init__(self, code, folder):
        self.code, self.folder = code, folder
        self.said = (folder / "said").read_text()

    def measured(self):
        assert self.code == 0, self.said
        return json.loads((self.folder / "measured.json").read_text())["benchmarks"]


@pytest.fixture(scope="module")
def done(request, sample, tmp_path_factory):
    """Run ``pytest benchmarks/`` with the configuration of the repository, from its top, for each line."""
    needed = LINES if sample.complete else [f"wrong {name}" for name in chosen(request, "name")]
    plugin = tmp_path_factory.mktemp("plugin")
    (plugin / "watching.py").write_text(WATCH)
    folders = {name: tmp_path_factory.mktemp("run") for name in needed}
    asked = {}
    for name in needed:
        line = ["benchmarks/", "-p", "watching", "-p", "no:cacheprovider", "--benchmark-only", *LINES[name]]
        line += [f"--benchmark-json={folders[name] / 'measured.json'}"]
        asked[name] = line, str(folders[name] / "said")
    # A worker of xdist says so in its environment, and pytest-benchmark would not measure in one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plugin), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", EACH, json.dumps(asked)]
    codes = json.loads(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout)
    return {name: Done(codes[name], folder) for name, folder in folders.items()}


@pytest.mark.complete
@pytest.mark.parametrize("name", GROUPS)
def test_the_documented_command_measures_and_groups(done, name):
    run = done[f"group {name}"]
    found = run.measured()
    assert len(found) == 4
    assert {item["params"]["implementation"] for item in found} == {"fused", "fused:torch"}
    assert {item["stats"]["rounds"] for item in found} == {2}
    assert all(item["extra_info"]["bytes"] > 0 for item in found)
    for item in found:
        assert f"benchmark '{name}={item['params'][name]}': 2 tests" in run.said


@pytest.mark.complete
def test_commands_of_the_harness_are_measured(done):
    (found,) = done["command"].measured()
    assert found["params"] == {"command": "help"}


@pytest.mark.complete
def test_what_an_implementation_does_not_offer_is_skipped_with_the_reason(done):
    assert done["not offered"].code == 0, done["not offered"].said
    assert "no LAMB" in done["not offered"].said


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("name", WRONG)
def test_what_there_is_not_is_said(done, name):
    run = done[f"wrong {name}"]
    assert run.code not in (0, 1)
    assert WRONG[name][1] in run.said
