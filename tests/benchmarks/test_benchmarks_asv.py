"""asv: its check, a run of the installed commit, the data of its page, the machine."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt.benchmarks.asv import base, history, machine, publish
from keyedopt.benchmarks.asv.base import Suite, Timed
from keyedopt.benchmarks.asv.implementations import IMPLEMENTATIONS, PREFERRED, job_of
from keyedopt.benchmarks.tasks import TASKS, NotOffered
from keyedopt.benchmarks.workloads import WORKLOADS, Lookups

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "benchmarks" / "asv" / "suites"
TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
#: What is run in tests: an optimizer of small tables by two implementations, and a command.
CHOSEN = (r"tables\.Train\.track_.*\('sgd', 'small-step', '(fused:torch|fused:triton)'\)",)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a home with a machine that asv knows, and a configuration that writes elsewhere."""
    folder = tmp_path_factory.mktemp("asv")
    text = re.sub(r"^\s*//.*$", "", (ROOT / "asv.conf.json").read_text(encoding="utf-8"), flags=re.M)
    config = json.loads(text)
    config |= {"repo": str(ROOT), "benchmark_dir": str(SUITES)}
    config |= {f"{name}_dir": str(folder / name) for name in ("results", "env", "html")}
    (folder / "asv.conf.json").write_text(json.dumps(config))
    machine.remember(machine.describe("tested"), folder / machine.FILE)
    return folder


@pytest.fixture(scope="module")
def asv(place):
    """Run asv there."""

    def call(*arguments):
        command = [sys.executable, "-m", "asv", *arguments, "--config", str(place / "asv.conf.json")]
        env = {**os.environ, "HOME": str(place)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def ran(asv, place):
    """Measure the commit that is there with the Python that is there, and publish."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    chosen = [part for pattern in CHOSEN for part in ("--bench", pattern)]
    where = ("--environment", f"existing:{sys.executable}", "--set-commit-hash", head)
    said = asv("run", *where, "--machine", "tested", "--show-stderr", "--record-samples", *chosen)
    asv("publish")
    return said, head, place


@slow
def test_asv_finds_no_fault_in_the_suites(asv):
    assert "No problems found" in asv("check", "--environment", f"existing:{sys.executable}")


@slow
def test_samples_of_our_own_clock_become_statistics(ran):
    """That asv takes a dictionary for samples is nowhere documented; asv is pinned, and this holds it."""
    _, head, place = ran
    found = {item.series: item for item in history.read(place / "results")}
    assert {item.commit for item in found.values()} == {head}
    params = (("optimizer", "sgd"), ("workload", "small-step"), ("implementation", "fused:torch"))
    seconds = found["tables.Train.track_seconds", params, "tested"]
    assert seconds.unit == "seconds"
    assert seconds.samples >= 6
    assert seconds.low <= seconds.value <= seconds.high
    speed = found["tables.Train.track_throughput", params, "tested"]
    assert speed.unit == "GB/s"
    assert speed.value > 0
    ratio = found["tables.Train.track_ratio", params, "tested"]
    assert ratio.unit == history.RATIO
    assert ratio.samples >= 3
    assert ratio.low <= ratio.value <= ratio.high


@slow
def test_what_an_implementation_does_not_offer_is_left_out(ran):
    said, _, place = ran
    assert "no backend triton" in said
    assert not any("fused:triton" in dict(item.params).values() for item in history.read(place / "results"))


@slow
def test_published_parameters_are_dimensions_of_the_page(ran):
    _, _, place = ran
    index = json.loads((place / "html" / "index.json").read_text())
    about = index["benchmarks"]["tables.Train.track_throughput"]
    assert about["param_names"] == ["optimizer", "workload", "implementation"]
    assert "'8x200k-zipf'" in about["params"][1]
    assert about["unit"] == "GB/s"
    assert index["params"]["machine"] == ["tested"]
    assert {"gpu", "device", "cuda", "cpu"} <= set(index["params"])


def test_what_nobody_measured_is_not_published(tmp_path, capsys):
    folder = ROOT / "benchmarks" / "results" / "asv"
    assert publish.main([str(folder), "--html-dir", str(tmp_path / "html")]) == 0
    series = {item.series for item in history.read(folder)}
    assert f"({len(series)} series)" in capsys.readouterr().out
    index = json.loads((tmp_path / "html" / "index.json").read_text())
    assert set(index["benchmarks"]) == {name for name, *_ in series}
    (summary,) = (tmp_path / "html").rglob("summary.json")
    rows = json.loads(summary.read_text())
    assert len(rows) == len(series)
    assert all(row["last_value"] is not None for row in rows)


def test_the_tutorial_counts_what_is_stored():
    found = history.read(ROOT / "benchmarks" / "results" / "asv")
    series, commits = {item.series for item in found}, {item.commit for item in found}
    text = (ROOT / "docs" / "tutorials" / "dashboard.md").read_text(encoding="utf-8")
    assert f"the results of {len(commits)} commits" in text
    assert f"0 regressions in {len(series)} series of {len(commits)} commits" in text
    assert f"({len(series)} series)" in text


def test_a_page_is_made_in_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish.main([]) == 2
    assert "asv.conf.json is missing" in capsys.readouterr().err
    assert history.main([]) == 2
    assert "benchmarks/results/asv" in capsys.readouterr().err


def test_a_shallow_clone_says_how_to_fetch_the_commits(tmp_path, monkeypatch, capsys):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), clone], check=True)
    monkeypatch.chdir(clone)
    assert publish.main([]) == 2
    assert "git fetch --unshallow" in capsys.readouterr().err


def test_nothing_is_published_of_no_results(tmp_path, capsys):
    (tmp_path / "benchmarks.json").write_text('{"version": 2}')
    assert publish.main([str(tmp_path), "--html-dir", str(tmp_path / "html")]) == 2
    assert capsys.readouterr().err == f"keyedopt: {tmp_path} has no results; measure with: asv run\n"


# --- old commits ----------------------------------------------------------------------------------


@slow
def test_old_commits_are_measured_by_the_benchmarks_of_today(tmp_path):
    """The benchmarks and conformance of a commit are not looked at; its implementation is what runs."""
    for part in ("benchmarks", "conformance", "fused"):
        (tmp_path / "keyedopt" / part).mkdir(parents=True)
    for part in ("benchmarks", "conformance"):
        (tmp_path / "keyedopt" / part / "__init__.py").write_text("raise RuntimeError('old')")
    (tmp_path / "keyedopt" / "fused" / "__init__.py").write_text("SGD = 'of the commit'")
    code = (
        "import suites.tables, suites.harness, sys, keyedopt.fused\n"
        "import keyedopt.benchmarks.tasks as tasks\n"
        "from keyedopt.benchmarks.asv import implementations\n"
        "import keyedopt.conformance.results.errors as errors\n"
        "print(keyedopt.fused.SGD, tasks.__file__, errors.__file__)\n"
        "suite = suites.tables.Train()\n"
        "try:\n    suite.setup('sgd', 'small-step', 'fused')\n"
        "except NotImplementedError as error:\n    print(error)\n"
        "print([name for name in ('benchmarks', 'asv', 'tasks', 'timing') if name in sys.modules])\n"
    )
    path = os.pathsep.join([str(tmp_path), str(SUITES.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("of the commit ")
    assert first.count(str(ROOT / "benchmarks")) == first.count(str(ROOT / "conformance")) == 1
    assert second == "no EmbeddingBagCollection and no EmbeddingBagConfig"
    assert third == "[]"


def test_the_suites_do_not_replace_benchmarks_that_are_in_use():
    code = "import keyedopt.benchmarks\nkeyedopt.benchmarks.__file__ = '/elsewhere/x.py'\nimport suites"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SUITES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "ImportError" in done.stderr
    assert "import suites first" in done.stderr


def test_a_job_that_changes_nothing_is_a_fault_and_not_a_measurement(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("keyedopt.benchmarks.asv.base.nothing_changed", lambda job: True)
    with pytest.raises(RuntimeError, match="changes nothing"):
        Suite().setup("train-sgd", "tiny", "reference")


def test_the_suites_cover_every_task():
    from keyedopt.benchmarks.asv.suites import dense, sparse, tables

    seen = set()
    for part in (dense, sparse, tables):
        for suite in (value for value in vars(part).values() if isinstance(value, type)):
            if issubclass(suite, Suite) and suite.__module__ == part.__name__:
                seen |= {suite.prefix + name for name in suite.params[0]}
    assert seen == set(TASKS)


def test_a_suite_measures_seconds_and_throughput(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    suite = Timed()
    suite.setup("train-sgd", "tiny", "reference")
    monkeypatch.setattr(base, "samples", lambda *_: [2.0, 4.0, 3.0])
    assert suite.track_seconds() == {"samples": [2.0, 4.0, 3.0], "number": 1}
    assert base.throughput(suite) == TASKS["train-sgd"].moved(TINY) / 3 / 1e9


def test_a_suite_measures_the_ratio_to_the_first_peer_that_does_the_task(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(base, "PEERS", ("fbgemm", "torch"))
    monkeypatch.setattr(base, "warm_up", lambda *_: None)
    compared = []
    monkeypatch.setattr(base, "measure", lambda *jobs: compared.append(jobs) or ([2.0, 6.0], [4.0, 4.0]))
    suite = Timed()
    suite.setup("train-partial_rowwise_adam", "tiny", "reference")
    assert math.isnan(suite.track_ratio())  # no peer does it
    suite.setup("train-sgd", "tiny", "reference")
    assert suite.track_ratio() == {"samples": [0.5, 1.5], "number": 1}
    assert compared[0][1] is suite.job
    suite.setup("train-sgd", "tiny", "torch")
    assert math.isnan(suite.track_ratio())


def why_not(subject):
    """Return why a backend or a peer is not there, or nothing."""
    from keyedopt.fused.backends import available

    if subject == "torchrec":
        missing = importlib.util.find_spec("torchrec") is None
        assert not (missing and os.environ.get("KEYEDOPT_REQUIRE_TORCHREC") == "1")
        return "torchrec" if missing else ""
    return available()["fbgemm" if subject == "fbgemm" else subject.removeprefix("fused:")]


@pytest.mark.parametrize("subject", IMPLEMENTATIONS)
def test_a_subject_does_what_it_is_asked_or_says_why_not(subject, monkeypatch):
    monkeypatch.delenv(PREFERRED, raising=False)
    if subject not in ("fused", "fused:torch", "reference", "torch"):
        missing = why_not(subject)
        if missing:
            with pytest.raises(NotOffered, match=f"no .*{re.escape(missing[:20])}"):
                job_of(subject, "train-sgd", TINY, "cpu")
            return
    job = job_of(subject, "train-sgd", TINY, "cpu")
    before = {name: value.clone() for name, value in job.results().items()}
    job.prepare()
    job.run()
    assert any((job.results()[name] != value).any() for name, value in before.items())
    assert PREFERRED not in os.environ


def test_an_unknown_subject_or_device_is_said(monkeypatch):
    with pytest.raises(NotOffered, match="no nope"):
        job_of("nope", "train-sgd", TINY, "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NotOffered, match="no CUDA"):
        job_of("fused", "train-sgd", TINY, "cuda")


# --- history --------------------------------------------------------------------------------------


def test_a_machine_is_described_in_texts_and_not_by_its_host():
    about = machine.describe()
    assert all(isinstance(value, str) for value in about.values())
    assert {"machine", "os", "arch", "cpu", "num_cpu", "ram", "gpu", "device", "cuda"} == set(about)
    assert about["machine"].startswith(f"{len(os.sched_getaffinity(0))}-core-")
    assert machine.describe("mine")["machine"] == "mine"


def test_naming_the_machine_makes_it_the_only_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("first", "second"):
        monkeypatch.setattr(sys, "argv", ["machine", name])
        assert machine.main() == 0
        assert capsys.readouterr().out.strip() == name
    known = json.loads((tmp_path / machine.FILE).read_text())
    assert set(known) == {"second", "version"}
    monkeypatch.setattr(sys, "argv", ["machine", "--beside", "third"])
    assert machine.main() == 0
    assert capsys.readouterr().out.strip() == "third"
    assert set(json.loads((tmp_path / machine.FILE).read_text())) == {"second", "third", "version"}


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (["a/b"], None, "give one name"),
        (["a", "b"], None, "give one name"),
        (["--beside", "a", "b"], None, "give one name"),
        (["--besides"], None, "give one name"),
        (["a"], "{", "not a list of asv machines"),
        (["a"], '{"version": 7}', "version 7"),
    ],
)
def test_a_name_or_a_file_that_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, arguments, text, said):
    monkeypatch.setenv("HOME", str(tmp_path))
    if text:
        (tmp_path / machine.FILE).write_text(text)
    monkeypatch.setattr(sys, "argv", ["machine", *arguments])
    assert machine.main() == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not text or (tmp_path / machine.FILE).read_text() == text
