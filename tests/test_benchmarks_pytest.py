"""The pytest-benchmark suites, as the command line that is documented runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: A plugin that fails a run in which a folder was loaded under its bare name.
WATCH = """
import sys

def pytest_sessionfinish(session):
    bare = {"benchmarks", "cli", "conformance", "fused", "reference", "reports"} & set(sys.modules)
    if bare:
        raise RuntimeError(f"loaded under bare names: {bare}")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run ``pytest benchmarks/`` with the configuration of the repository, from its top."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "watching.py").write_text(WATCH)
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH", "")) if part)

    def call(*arguments):
        command = [sys.executable, "-m", "pytest", "benchmarks/", "-p", "watching", *arguments]
        command += ["-p", "no:cacheprovider"]
        # A worker of xdist says so in its environment, and pytest-benchmark would not measure in one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env["PYTHONPATH"] = path
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    return call


@pytest.mark.parametrize("group", ["param:task", "param:implementation"])
def test_the_documented_command_measures_and_groups(run, tmp_path, group):
    written = tmp_path / "measured.json"
    chosen = ("--workload", "small-step", "--task", "train-sgd", "--task", "forward", "--rounds", "2")
    line = ("--benchmark-only", f"--benchmark-group-by={group}", f"--benchmark-json={written}")
    done = run(*line, *chosen, "--by", "fused", "--by", "fused:torch", "-k", "test_task")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())["benchmarks"]
    assert len(found) == 4
    assert {item["params"]["implementation"] for item in found} == {"fused", "fused:torch"}
    assert {item["stats"]["rounds"] for item in found} == {2}
    assert all(item["extra_info"]["bytes"] > 0 for item in found)
    name = group.partition(":")[2]
    for item in found:
        assert f"benchmark '{name}={item['params'][name]}': 2 tests" in done.stdout


def test_commands_of_the_harness_are_measured(run, tmp_path):
    written = tmp_path / "measured.json"
    done = run("--benchmark-only", f"--benchmark-json={written}", "-k", "test_command and help")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(written.read_text())["benchmarks"]
    assert found["params"] == {"command": "help"}


def test_what_an_implementation_does_not_offer_is_skipped_with_the_reason(run):
    chosen = ("--workload", "small-step", "--task", "train-lamb", "--by", "torch", "--rounds", "1")
    done = run("--benchmark-only", "-k", "test_task", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no LAMB" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workload", "nope"), "no workload 'nope'"),
        (("--task", "nope"), "no task 'nope'"),
        (("--by", "nope"), "no implementation 'nope'"),
        (("--rounds", "0"), "--rounds must be at least 1"),
    ],
)
def test_what_there_is_not_is_said(run, options, said):
    done = run("--benchmark-only", "-k", "test_task", *options)
    assert done.returncode not in (0, 1)
    assert said in done.stdout + done.stderr
