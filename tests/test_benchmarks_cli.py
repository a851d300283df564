"""``keyedopt bench``: the table, the JSON, what may be published, and bad input."""

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from making import refused, result, valid

from keyedopt.benchmarks import compare
from keyedopt.benchmarks.workloads import WORKLOADS, Lookups, SparseGradients
from keyedopt.cli import bench
from keyedopt.conformance import result as results
from keyedopt.conformance import spec
from keyedopt.conformance.implementation import TargetError

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
SPARSE = SparseGradients("few-rows", "for tests", tables=1, rows=30, dim=4, lookups=40)
LINE = ("bench", "--implementation", "reference", "--seconds", "0.01")


@pytest.fixture
def small(monkeypatch):
    """Have small workloads, no load on the machine, and no second of copying."""
    for work in (TINY, SPARSE):
        monkeypatch.setitem(WORKLOADS, work.name, work)
    monkeypatch.setattr(compare.timing, "copy_bandwidth", lambda clock, device: 1e9)
    made = compare.environment
    monkeypatch.setattr(compare, "environment", lambda device: {**made(device), "load": [0.0, 0.0, 0.0]})


def conformance(path, name="reference", version=torch.__version__, cases=None, **changes):
    """Write a result in which every clause held, or only the given cases ran."""
    about = {**result().implementation, "name": name, "versions": changes.pop("versions", {})}
    environment = {**result().environment, "torch": version}
    held = [{"case": f"test::{clause}", "clauses": (clause,)} for clause in spec.clauses()]
    made = result(*(held if cases is None else cases), implementation=about, environment=environment)
    results.write(dataclasses.replace(made, **changes), path)
    return path


def test_a_list_shows_workloads_and_tasks(run_line):
    done = run_line("bench", "--list")
    assert done.returncode == 0
    for name in (*WORKLOADS, *bench.TASKS):
        assert name in done.stdout


def test_a_run_writes_a_report(run_line, small, tmp_path):
    line = (*LINE, "--workload", "tiny", "--task", "train-sgd", "--against", "torch,reference")
    done = run_line(*line, "--output", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("unverified: no --conformance") == 2
    written = valid(tmp_path / "x.json")
    assert (written["schema"], written["kind"]) == (1, "keyedopt-bench")
    assert {row["peer"] for row in written["rows"]} == {"torch", "reference"}
    for row in written["rows"]:
        assert row["matches"]
        assert row["low"] <= row["ratio"] <= row["high"]
        assert len(row["samples"]) == len(row["peer_samples"]) == row["pairs"] >= 3
        assert row["seconds"]["p10"] <= row["seconds"]["median"] <= row["seconds"]["p90"]
    assert {"cpu", "threads", "load", "versions", "commit"} <= set(written["environment"])


@pytest.mark.parametrize(
    ("conformant", "matches", "load", "said"),
    [
        (True, True, 0.0, "publishable"),
        (False, True, 0.0, "unverified: not conformant"),
        (None, True, 0.0, "unverified: no --conformance"),
        (True, False, 0.0, "unverified: acme's results differ"),
        (True, True, 99.0, "unverified: busy machine"),
    ],
)
def test_only_what_is_proven_is_publishable(conformant, matches, load, said):
    proof = None if conformant is None else {"conformant": conformant}
    where = {"load": [load], "cores": 2}
    report = compare.Report("fused", where, 1e9, "2026-01-01T00:00:00+00:00", conformance=proof)
    times = {"p10": 1.0, "median": 1.0, "p90": 1.0}
    row = compare.Comparison(
        *("w", "t", "fused", "acme", times, times, 1.0, 1.0, 1.0, 0.0, 3, 1.0, 1.0, 8, 1.0),
        *(0.0, matches, [1.0], [1.0]),
    )
    assert bench.status(report, row) == said


def test_a_complete_result_without_a_failing_must_proves(tmp_path):
    assert bench._proof(None, "reference") is None
    assert bench._proof(conformance(tmp_path / "x.json"), "reference")["conformant"]


def test_a_part_of_the_suite_proves_nothing(tmp_path):
    part = conformance(tmp_path / "x.json", cases=[{}], options={"level": "should", "areas": ["keyed"]})
    assert not bench._proof(part, "reference")["conformant"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "acme"}, "not of reference"),
        ({"version": "0.1"}, r"torch 0\.1"),
        ({"versions": {"numpy": "0.1"}}, r"numpy 0\.1, here is"),
        ({"versions": {"acme-optim": "1"}}, "here is None"),
    ],
)
def test_a_result_of_something_else_is_refused(tmp_path, changes, said):
    with pytest.raises(compare.RequestError, match=said):
        bench._proof(conformance(tmp_path / "x.json", **changes), "reference")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--workload nope", "no workload 'nope'"),
        ("--task nope", "no task 'nope'"),
        ("--workload tower-24m --task train-sgd", "none of the workloads"),
        ("--against nope", "'nope'"),
        ("--implementation nope", "'nope'"),
        ("--device xla", "give cpu or cuda"),
        ("--device nope", "give cpu or cuda"),
        ("--seconds 0", "--seconds"),
        ("--threads 0", "--threads"),
        ("--output .", "cannot be written"),
        ("--implementation reference --against torch --conformance x.json", "x.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(run_line, options, said):
    assert said in refused(run_line("bench", *options.split()))


def test_a_peer_that_is_not_installed_says_how_to_get_it(run_line, monkeypatch):
    def missing(self):
        raise TargetError("'torchrec' needs 'tensordict', which is not installed in this environment")

    monkeypatch.setattr("keyedopt.conformance.implementation.Implementation.surface", missing)
    done = run_line("bench", "--implementation", "reference", "--against", "torchrec")
    assert "not installed" in refused(done)
    monkeypatch.undo()
    found = compare.find("torchrec").install
    assert "pip install" in found


def test_a_peer_that_is_not_installed_is_left_out_where_nobody_asked_for_it(monkeypatch):
    real = compare.find

    def find(name):
        if name == "torchrec":
            raise TargetError("there is no module 'torchrec'")
        return real(name)

    monkeypatch.setattr(compare, "find", find)
    monkeypatch.setattr(compare, "PEERS", ("torch", "torchrec"))
    assert [about.name for about, _ in compare.implementations("reference", None)] == ["reference", "torch"]
    with pytest.raises(TargetError, match="torchrec"):
        list(compare.implementations("reference", ["torchrec"]))


def test_an_interrupted_run_writes_nothing(run_line, small, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "compare", interrupt)
    done = run_line(*LINE, "--workload", "tiny", "--output", tmp_path / "x.json")
    assert "interrupted" in refused(done)
    assert not (tmp_path / "x.json").exists()


def test_reports_that_are_kept_can_be_read():
    kept = Path(compare.__file__).with_name("results")
    reports = [path for path in kept.rglob("*.json") if "asv" not in path.relative_to(kept).parts]
    assert reports
    for path in reports:
        assert json.loads(path.read_text())["schema"] == compare.SCHEMA, path


def test_the_script_for_a_gpu_host_asks_for_what_there_is():
    """It cannot run here; what it asks of the command line can be read."""
    text = Path(compare.__file__).with_name("gpu.sh").read_text().replace("\\\n", " ")
    parts = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("part ")]
    assert len(parts) >= 4
    for words in parts:
        given = [
            [value for name, value in itertools.pairwise(words) if name == option]
            for option in ("--workload", "--task")
        ]
        assert compare.chosen(*given)
        assert {word for word in words if word.startswith("--")} <= {"--workload", "--task", "--seconds"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_the_script_for_a_gpu_host_says_what_is_missing(tmp_path):
    script = Path(compare.__file__).with_name("gpu.sh")
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 2
    assert "CUDA: torch cannot use it here" in done.stdout
