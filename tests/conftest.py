"""Shared by the tests of the harness."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import idle_threads  # noqa: F401 - before torch is imported
import made_results
import pytest
from making import case_with, drawn_case, functions, observing_case, valid, without_progress
from sampling import PARTS, ROOT, Sample, commit, select
from warm_server import Warm
from warm_worker import WarmWorkers

from keyedopt.benchmarks import build_process
from keyedopt.cli import last
from keyedopt.cli import main as cli
from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results import model as results
from keyedopt.conformance.run import processes, runner

#: A shell in the background, nohup and some CI systems ignore these. Processes inherit that, not a handler.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

#: `python -m pytest` puts the checkout on the path, where `reference` would be importable by its bare name.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != ROOT]

#: The files that take longest, begun first: at the end one of them would keep one process busy, and no other.
LONGEST = (
    *("test_mutants", "test_fused_verdict", "test_triton_compiled", "test_pretend_verdicts", "test_cli"),
    *("test_findings", "test_reports_page", "test_triton_executed", "test_signals"),
    *("test_untrusted_files", "test_fused_checkpoints", "test_process", "test_architecture"),
    *("test_sanitize", "test_benchmarks_killed", "test_runner", "test_replay", "test_cli_outputs"),
    *("test_suite_verdicts", "test_benchmarks_pytest", "test_triton_traffic", "test_triton_interpreter"),
    *("test_made_results", "test_reports_like", "test_tutorial", "test_reports_plots", "test_documentation"),
    *("test_runner_hostile", "test_benchmarks_asv", "test_mutants_tool", "test_benchmarks_ab_round"),
    *("test_native_memory", "test_gpu_checks", "test_first_light", "test_scale", "test_ranks"),
    "test_benchmarks_commits",
)

#: Registering the pretend accelerator changes torch for a process: `test_pretend` runs these tests elsewhere.
collect_ignore_glob = [] if os.environ.get("KEYEDOPT_TESTS_PRETEND") == "1" else ["conformance/pretend/*"]


def pytest_addoption(parser):
    """Add the options that choose between the everyday set and the complete set."""
    group = parser.getgroup("keyedopt's own tests")
    group.addoption("--complete", action="store_true", help="run the complete set: every long loop, whole")
    group.addoption("--sample", metavar="SEED", help="the seed of the everyday sample (default: the commit)")
    group.addoption(
        "--part", type=int, choices=range(1, PARTS + 1), help=f"only this part of {PARTS} of the long loops"
    )


def pytest_xdist_auto_num_workers():
    """Return one process more than there are cores: many tests wait for a limit or another process."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config):
    """Decide which set of tests is run, once for all processes of pytest."""
    seed = getattr(config, "workerinput", {}).get("sample") or config.getoption("--sample") or commit()
    complete = config.getoption("--complete") or config.getoption("--part") is not None
    config.sample = Sample(seed, complete)
    if not hasattr(config, "workerinput"):  # the processes of pytest inherit its environment
        config.add_cleanup(_isolate_cache().cleanup)


def _isolate_cache():
    """Give every process of the tests a cache without the developer's last result of keyedopt."""
    real, folder = last.path().parents[1], tempfile.TemporaryDirectory(prefix="keyedopt-cache-")
    for entry in real.glob("*"):
        if entry.name != "keyedopt":
            Path(folder.name, entry.name).symlink_to(entry.absolute())
    os.environ["XDG_CACHE_HOME"] = folder.name
    return folder


def pytest_configure_node(node):
    """Give a process of pytest the seed of the sample; a commit may be made while tests run."""
    node.workerinput["sample"] = node.config.sample.seed


def pytest_report_header(config):
    """Say which set is run, and how to repeat its sample."""
    part = config.getoption("--part")
    if part is not None:
        return f"long loops: part {part} of {PARTS} of the complete set"
    if config.sample.complete:
        return "complete set: every long loop, whole"
    return f"everyday set: long loops are sampled; repeat this sample with --sample {config.sample.seed}"


@pytest.fixture(scope="session")
def sample(pytestconfig):
    """Choose from a long loop: a sample in the everyday set, everything in the complete set."""
    return pytestconfig.sample


def pytest_collection_modifyitems(config, items):
    """Keep the tests of the set that is run, and put the tests of the longest files first."""
    kept = select(items, config.sample, config.getoption("--part"))
    ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    places = {name: place for place, name in enumerate(LONGEST)}
    items[:] = sorted(kept, key=lambda item: places.get(item.path.stem, len(places)))


if collect_ignore_glob:

    @pytest.fixture(autouse=True)
    def pretend_stays_out():
        """Fail the test that registers the pretend accelerator here, and not those that it disturbs."""
        yield
        assert "keyedopt.conformance.pretend" not in sys.modules, "this test belongs in conformance/pretend/"


@pytest.fixture(scope="session")
def torchrec():
    """Skip where torchrec is not installed, unless it has to be (CI)."""
    try:
        import torchrec
    except ImportError:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHREC") == "1":
            raise
        pytest.skip("torchrec is not installed: see the README, section torchrec")
    return torchrec


@pytest.fixture(scope="session")
def torchft():
    """Skip where torchft is not installed, unless it has to be (CI)."""
    try:
        import torchft.optim
    except ImportError as error:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHFT") == "1":
            raise
        pytest.skip(f"torchft cannot be imported ({error}): pip install 'keyedopt[torchft]'")
    return torchft


@pytest.fixture(scope="session")
def check_once(tmp_path_factory, sample):
    """Run the suite on a target once for all processes of pytest; each reads the result.

    The complete set asks for every clause, the everyday set for 6 clauses of each area, those that findings
    of the library name, and those that a test asks for always. If the environment variable KEYEDOPT_RESULTS
    names a folder with a result of the whole suite on the same build, in the same versions, that result is
    taken instead (`made_results`).
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the one folder of all workers

    def check(target, areas=(), always=()):
        made = made_results.find(target)
        if made is not None:
            return made
        name = "-".join((target, *areas))
        file = folder / f"checked-{name}.json"
        with (folder / f"checked-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                found = [clause for one in findings() if one.library == target for clause in one.clauses]
                some = [*always, *found, *sample.clauses(areas or spec.areas(), 6, target)]
                clauses = () if sample.complete else tuple(dict.fromkeys(some))
                results.write(runner.run(target, runner.Options(areas=areas, clauses=clauses)), file)
        return results.read(file)

    return check


#: The clauses whose cases measure errors in many draws.
MEASURED = (
    *("ALGO-027", "ALGO-028", "ALGO-029", "ALGO-030", "ALGO-043"),
    *("SPARSE-008", "SPARSE-009", "FUSED-037"),
)


@pytest.fixture(scope="session")
def on_reference(check_once):
    """Check the reference, with the clauses that measure errors."""
    return check_once("reference", always=MEASURED)


@pytest.fixture(scope="session")
def on_fused(check_once):
    """Check `fused` with the backend that this machine's own kernels are."""
    return check_once("fused", always=MEASURED)


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Fork the fork server of each run from one process that has imported torch and the suite."""
    patch, started = pytest.MonkeyPatch(), Warm()
    patch.setattr(processes, "start_server", started.start)
    yield started
    patch.undo()
    started.end()


@pytest.fixture(scope="session")
def _workers():
    started = WarmWorkers()
    yield started
    started.end()


@pytest.fixture
def warm_workers(_workers, monkeypatch):
    """Fork the measuring processes of benchmarks from one process that has imported torch."""
    monkeypatch.setattr(build_process, "subprocess", _workers)


@pytest.fixture
def cold(warm, monkeypatch):
    """Let the runs of a test begin with a new process."""
    monkeypatch.setattr(processes, "start_server", warm.start_new)


FAULTS = """

class KeyedOptimizerWrapper(KeyedOptimizerWrapper):
    def load_state_dict(self, state_dict):
        pass


class GradientClippingOptimizer(GradientClippingOptimizer):
    def step(self, closure=None):
        return OptimizerWrapper.step(self, closure)
"""


@pytest.fixture(scope="session")
def acme(tmp_path_factory):
    """Write a library that keyedopt knows nothing of: ``acme``, in a sound and in a wrong version."""
    source = Path(__file__).parents[1] / "reference"
    folders = {}
    for version, faults in (("sound", ""), ("wrong", FAULTS)):
        folders[version] = tmp_path_factory.mktemp(version)
        package = folders[version] / "acme"
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in package.rglob("*.py"):
            path.write_text(path.read_text(encoding="utf-8").replace("keyedopt.reference", "acme"))
        with (package / "__init__.py").open("a") as file:
            file.write(faults)
    return folders


@pytest.fixture(scope="session")
def failed(acme):
    """Check the wrong library: a case with drawn inputs fails, and several with given ones."""
    loading = {case.clauses[0] for case in functions() if case.file.startswith("test_keyed_load")}
    others = [case.clauses[0] for case in (drawn_case(), case_with("dtype"), observing_case())]
    options = runner.Options(clauses=(*sorted(loading)[:8], *others))
    return runner.run("acme", options, path=[str(acme["wrong"])])


@pytest.fixture
def run_line(capsys, monkeypatch, tmp_path, tmp_path_factory):
    """Run the command line in this process; what it remembers is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    remembered = tmp_path_factory.mktemp("cache") / "last.json"
    monkeypatch.setattr(last, "path", lambda: remembered)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["keyedopt", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, end.value.code, said.out, without_progress(said.err))

    return call


@pytest.fixture
def checked(monkeypatch, failed):
    """Let a check find what an earlier one did; may be changed."""
    answer = {"result": failed, "calls": []}

    def instead(target, options, **_):
        answer["calls"].append((target, options))
        if isinstance(answer["result"], BaseException):
            raise answer["result"]
        return answer["result"]

    monkeypatch.setattr(runner, "run", instead)
    return answer


@pytest.fixture
def files(tmp_path, failed):
    """Write results and lists of known failures that can be read, and some that cannot."""
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
