"""The first run on a GPU, rehearsed without one: order, limits, kills, and what its host has."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from making import left_behind, mark

from keyedopt.benchmarks.gpu import (
    asv_runs,
    checks,
    first_light,
    summary,
    unpack_bundle,
)
from keyedopt.benchmarks.gpu.stage import STAGES, Stage, saver

SCRIPT = Path(checks.__file__).with_name("first_light.sh")
ROOT = SCRIPT.parents[2]

#: Stands for every stage: notes the call, saves one item, and hangs if it is the stage that is asked to.
STAND_IN = """
import os, pathlib, time

def run(context):
    name, log = context.file.stem.partition("-")[2], pathlib.Path(os.environ["LOG"])
    with log.open("a") as file:
        file.write(name + " " + str(int(context.seconds)) + chr(10))
    context.save({"items": [name]})
    if os.environ.get("HANGS") == name:
        context.start(["sleep", "1000"], context.work / "sleep.txt")
        context.save({"items": [name, "hangs"]})
        time.sleep(1000)
    if os.environ.get("BREAKS") == name:
        raise RuntimeError("broken")
    context.save({"items": [name, "end"]})
"""

#: Runs the stages of the rehearsal, of which all have the module of the stand-in; imports no torch.
DRIVER = """
import pathlib, sys
from keyedopt.benchmarks.gpu import first_light, stage
from dataclasses import replace
stages = [replace(one, module="stand_in") for one in stage.STAGES]
sys.exit(first_light.Run(pathlib.Path(sys.argv[1]), stages=stages).run(*sys.argv[2:]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for results, with a stand-in for the stages."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("KEYEDOPT_FIRST_LIGHT_WORK", str(tmp_path / "work"))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path / "out"


def calls(folder):
    """Return the stages that were called, each with its limit in seconds."""
    lines = (folder.parent / "log").read_text().splitlines()
    return [(name, int(seconds)) for name, seconds in map(str.split, lines)]


def outcomes(folder):
    plain = json.loads((folder / first_light.OUTCOMES).read_text())["stages"]
    return {name: one["outcome"] for name, one in plain.items()}


def stand_ins(*names, seconds=50):
    return [Stage(number, name, seconds, "stand_in") for number, name in enumerate(names, 1)]


class Clock:
    """A clock that stands still until a test sets it."""

    time = 0.0

    def now(self):
        return self.time


# --- order, limits, kills -------------------------------------------------------------------------


def test_stages_rise_in_value_and_fit_into_two_calls():
    assert [one.number for one in STAGES] == list(range(1, 8))
    assert [one.seconds for one in STAGES] == [60, 90, 200, 60, 120, 60, 100]
    assert sum(one.seconds for one in STAGES[:5]) <= 590 - first_light.RESERVE
    assert len({one.file for one in STAGES} | {first_light.OUTCOMES}) <= 8


def test_limits_and_order_with_a_fake_clock(folder, monkeypatch, capsys):
    """The second stage hangs until its limit is over on the clock, and the others end before that."""
    monkeypatch.setenv("HANGS", "two")
    clock, stages = Clock(), stand_ins("one", "two", "three", seconds=200)
    sleep = Patient(clock, folder, "two")
    run = first_light.Run(folder, budget=1000, stages=stages, now=clock.now, sleep=sleep)
    assert run.run() == 1
    assert calls(folder) == [("one", 200), ("two", 200), ("three", 200)]
    assert outcomes(folder) == {"one": "done", "two": "cut short", "three": "done"}
    assert 200 <= clock.time <= 240
    assert json.loads((folder / "2-two.json").read_text())["items"] == ["two", "hangs"]
    assert "two: cut short" in capsys.readouterr().out
    again = first_light.Run(folder, budget=1000, stages=stages, now=clock.now, sleep=sleep)
    assert again.run() == 2, "there is nothing left to run"


class Patient:
    """Lets the fake clock go on only when the stage hangs; the others end in no time."""

    def __init__(self, clock, folder, hanging):
        self.clock, self.folder, self.hanging = clock, folder, hanging

    def __call__(self, seconds):
        files = self.folder.glob(f"*-{self.hanging}.json")
        running = outcomes(self.folder).get(self.hanging) == "running"
        if running and any("hangs" in path.read_text() for path in files):
            self.clock.time += 40.0
        time.sleep(0.02)


def test_a_stage_gets_at_most_what_is_left_of_the_budget(folder, capsys):
    clock = Clock()
    run = first_light.Run(folder, budget=80, stages=stand_ins("one", "two"), now=clock.now, sleep=time.sleep)
    clock.time = 30.0
    assert run.run() == 0
    assert [limit for _, limit in calls(folder)] == [40, 40]
    clock.time = 65.0
    assert run.run("two") == 2, "five seconds are too few to begin"
    assert "two: no time is left; a second call goes on here" in capsys.readouterr().out


def test_a_stage_that_fails_is_named_and_the_next_runs(folder, monkeypatch, capsys):
    monkeypatch.setenv("BREAKS", "one")
    assert first_light.Run(folder, stages=stand_ins("one", "two")).run() == 1
    assert outcomes(folder) == {"one": "failed", "two": "done"}
    plain = json.loads((folder / "1-one.json").read_text())
    assert (plain["items"], plain["complete"]) == (["one"], False)
    assert "RuntimeError: broken" in plain["error"]
    assert "RuntimeError: broken" in capsys.readouterr().out


@pytest.mark.parametrize("killed", [one.name for one in STAGES])
@pytest.mark.complete(sample=2)
def test_results_survive_a_kill_in_each_stage_and_a_second_call_goes_on(folder, killed):
    """SIGKILL leaves the files of all stages before, and what the running stage had saved."""
    names = [one.name for one in STAGES]
    before, after = names[: names.index(killed)], names[names.index(killed) :]
    command = [sys.executable, "-c", DRIVER, str(folder), names[max(0, names.index(killed) - 1)]]
    process = subprocess.Popen(command, env={**os.environ, "HANGS": killed, **mark("light")})
    file = folder / next(one.file for one in STAGES if one.name == killed)
    while not (file.exists() and "hangs" in file.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads(file.read_text())["items"] == [killed, "hangs"]
    ran = before[-1:]
    assert outcomes(folder) == {**dict.fromkeys(ran, "done"), killed: "running"}
    for stage in (one for one in STAGES if one.name in ran):
        assert json.loads((folder / stage.file).read_text())["complete"]
    done = subprocess.run([sys.executable, "-c", DRIVER, str(folder), killed], check=False, timeout=100)
    assert done.returncode == (1 if len(before) > 1 else 0), (
        "stages before the one that was asked for are open"
    )
    assert [name for name, _ in calls(folder)] == [*ran, killed, *after]
    plain = json.loads(file.read_text())
    assert plain["items"] == [killed, "end"]
    assert plain["interrupted"]["items"] == [killed, "hangs"], "what was measured before the kill stays"
    assert len(list(folder.iterdir())) <= 8
    assert not left_behind("light")


def test_a_second_call_repeats_only_what_was_killed(folder):
    run = first_light.Run(folder, stages=stand_ins("one", "two", "three"))
    run._note(run.stages[0], outcome="failed")
    run._note(run.stages[1], outcome="running")
    again = first_light.Run(folder, stages=run.stages)
    assert [one.name for one in again.pending(None)] == ["two", "three"]
    assert [one.name for one in again.pending("1")] == ["one", "two", "three"]
    assert [one.name for one in again.pending("three")] == ["three"]
    with pytest.raises(ValueError, match="no stage 'four'"):
        again.pending("four")


def test_a_result_file_keeps_what_an_interrupted_stage_had(tmp_path):
    file = tmp_path / "x.json"
    saver(file, {"stage": "x"})({"items": [1]})
    saver(file, {"stage": "x"})({"items": [2]})
    saver(file, {"stage": "x"})({"items": [3]})
    plain = json.loads(file.read_text())
    assert (plain["items"], plain["interrupted"]) == ([3], {"stage": "x", "items": [2]})


# --- what the host has ----------------------------------------------------------------------------

#: The import names of packages that the GPU host has, as far as a stage could meet them, and of the bundle.
LISTED = (
    *("torch", "numpy", "pytest", "_pytest", "hypothesis", "typer", "rich", "packaging", "pandas", "jinja2"),
    *("matplotlib", "triton", "sympy", "mpmath", "networkx", "filelock", "fsspec", "markupsafe", "click"),
    *("pygments", "pluggy", "iniconfig", "attr", "attrs", "sortedcontainers", "yaml", "tabulate", "build"),
    *("setuptools", "pkg_resources", "pyarrow", "psutil", "typing_extensions", "dateutil", "six", "xdist"),
    *("execnet", "cpuinfo", "shellingham", "markdown_it", "mdurl", "annotated_doc", "pip", "zipp", "tqdm"),
    *("pytest_benchmark", "py", "torchmetrics", "colorama", "pyproject_hooks", "functorch", "torchgen"),
    # Newer versions of typer and importlib_metadata, which may be in this environment, import these.
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "lazy_importer"),
)
BUNDLED = (
    *("tomlkit", "jsonschema", "jsonschema_specifications", "referencing", "rpds", "asv", "asv_runner"),
    *("json5", "pympler", "importlib_metadata", "fbgemm_gpu", "keyedopt", "suites", "stand_in"),
)

BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Listed:
    allowed = {allowed!r}
    find_distributions = staticmethod(PathFinder.find_distributions)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if path is None and not (top in sys.stdlib_module_names or top in self.allowed or top[0] == "_"):
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Listed()
"""


def only_listed(tmp_path):
    """Return an environment for processes in which only the packages of the host can be imported."""
    (tmp_path / "blocker").mkdir(exist_ok=True)
    text = BLOCKER.format(allowed=[*LISTED, *BUNDLED])
    (tmp_path / "blocker" / "sitecustomize.py").write_text(text)
    paths = [str(tmp_path / "blocker"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("stage", ["kernels", "conformance", "asv"])
def test_a_stage_with_processes_of_its_own_runs_on_the_cpu(stage, tmp_path):
    """In an environment that has only the packages of the host and of the bundle."""
    (one,) = (each for each in STAGES if each.name == stage)
    command = [sys.executable, "-m", "keyedopt.benchmarks.gpu.stage", stage, str(tmp_path / one.file)]
    command += ["--device", "cpu", "--small", "--work", str(tmp_path / "work"), "--seconds", "280"]
    done = subprocess.run(command, env=only_listed(tmp_path), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain = json.loads((tmp_path / one.file).read_text())
    assert plain["complete"]
    if stage == "kernels":
        assert [(case["algorithm"], case["wrong"]) for case in plain["cases"]] == [("sgd", [])]
    if stage == "conformance":
        assert plain["checks"]["fused-first"]["outcome"] == "exit code 0"
        assert {case["outcome"] for case in plain["checks"]["fused-first"]["result"]["cases"]} >= {"pass"}
    if stage == "asv":
        (run,) = plain["runs"].values()
        assert run["outcome"] == "exit code 0", run
        asv_runs.unpack(tmp_path / one.file, tmp_path / "history")
        assert (tmp_path / "history" / "benchmarks.json").exists()


def test_stages_import_only_what_the_host_has(tmp_path):
    modules = [one.module for one in STAGES]
    modules += ["keyedopt.cli.main", "keyedopt.tools.kernel_cache", "keyedopt.benchmarks.asv.base"]
    code = f"""
import importlib
for name in {modules!r}:
    importlib.import_module(name)
try:
    import torchrec
except ModuleNotFoundError as error:
    print(error)
"""
    env = only_listed(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "No module named 'torchrec'\n"), done.stderr


def test_a_bundle_is_unpacked_once_and_runs_from_source(tmp_path):
    """With the checkout as it is: a link in the place of its archive."""
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "manifest.json").write_text('{"checkout": "1"}')
    plain = tmp_path / "checkout.tar"
    subprocess.run(["tar", "cf", str(plain), "-C", str(ROOT), "pyproject.toml"], check=True)
    subprocess.run(["xz", str(plain)], check=True)
    plain.with_suffix(".tar.xz").rename(bundle / "checkout.tar.xz")
    unpack_bundle.unpack(bundle, site)
    for path in (site / "packages" / "keyedopt").iterdir():
        (site / "checkout" / path.name).symlink_to(ROOT / path.name)
    text = f'. {site}/environment.sh; cd /; {sys.executable} -S -c "import sys; print(sys.path[1])"'
    done = subprocess.run(["sh", "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(site / "packages")
    assert (site / "packages" / "keyedopt" / "fused" / "__init__.py").exists()
    points = (site / "packages" / "keyedopt-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "fused = keyedopt.conformance.targets.builtin:fused" in points
    (site / "mine").touch()
    unpack_bundle.unpack(bundle, site)
    assert (site / "mine").exists(), "the same bundle is not unpacked again"
    (bundle / "manifest.json").write_text('{"checkout": "2"}')
    unpack_bundle.unpack(bundle, site)
    assert not (site / "mine").exists()


def test_the_summary_names_what_is_missing_and_wrong(tmp_path):
    files = {one.name: tmp_path / one.file for one in STAGES}
    files["environment"].write_text(
        '{"complete": true, "imports": {"x": "ImportError: no"}, "doctor_code": 1}'
    )
    files["kernels"].write_text("{")
    files["speed"].write_text("[]")
    row = {"workload": "w", "task": "t", "peer": "torch", "ratio": 4.0, "matches": True}
    skipped = {"workload": "w", "task": "t", "who": "fbgemm", "why": "no"}
    files["asv"].write_text('{"complete": false, "error": "RuntimeError: x"}')
    assert summary.lines(tmp_path) == [
        "1 environment: x cannot be imported: ImportError: no",
        "1 environment: doctor: exit code 1",
        "2 kernels: cannot be read",
        "5 speed: of another format",
        "7 asv: cut short by RuntimeError: x",
        "7 asv: 0 files",
    ]
    found = {"complete": True, "reports": [{"rows": [row], "skipped": [skipped]}]}
    files["speed"].write_text(json.dumps(found))
    assert [line.split(": ", 1)[1] for line in summary.lines(tmp_path) if line.startswith("5")] == [
        f"{'w':18} {'t':26} {'torch':8}   4.00 x",
        f"{'w':18} {'t':26} {'fbgemm':8} left out: no",
        "geometric mean of 1: t torch 4.00 x",
    ]
