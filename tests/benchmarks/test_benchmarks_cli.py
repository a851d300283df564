"""``keyedopt bench``: the table, the JSON, what may be published, and bad input."""

import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from making import refused, result, valid
from rich.console import Console

from keyedopt.benchmarks import compare, harness
from keyedopt.benchmarks.timing import Bandwidth
from keyedopt.benchmarks.workloads import WORKLOADS, Lookups, SparseGradients
from keyedopt.cli import bench_proof as proof
from keyedopt.cli import bench_run, progress
from keyedopt.conformance import spec
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.targets.implementation import TargetError
from keyedopt.reports.load import OURS

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
SPARSE = SparseGradients("few-rows", "for tests", tables=1, rows=30, dim=4, lookups=40)
LINE = ("bench", "run", "--implementation", "reference", "--seconds", "0.01")


@pytest.fixture
def small(monkeypatch):
    """Have small workloads, an idle machine, no second of copying, and intervals of any width."""
    for work in (TINY, SPARSE):
        monkeypatch.setitem(WORKLOADS, work.name, work)
    monkeypatch.setattr(compare.timing, "memory_bandwidth", lambda clock, device: Bandwidth(1e9, 1e9))
    monkeypatch.setattr(compare, "WIDEST", float("inf"))  # hundredths of a second give any interval
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def conformance(path, name="reference", version=torch.__version__, cases=None, **changes):
    """Write a result of the present build in which every clause held, or only the given cases ran."""
    build = changes.pop("build", digest(compare.find("reference").root))
    about = {**result().implementation, "name": name, "versions": changes.pop("versions", {}), "build": build}
    environment = {**result().environment, "torch": version, "device": changes.pop("device", "cpu")}
    held = [{"case": f"test::{clause}", "clauses": (clause,)} for clause in spec.clauses()]
    made = result(*(held if cases is None else cases), implementation=about, environment=environment)
    results.write(dataclasses.replace(made, **changes), path)
    return path


def test_a_list_shows_workloads_and_tasks(run_line):
    done = run_line("bench", "list", "--all")
    assert done.returncode == 0
    for name in (*WORKLOADS, *compare.TASKS):
        assert name in done.stdout


def test_a_list_has_one_line_for_the_optimizers_of_a_task(run_line):
    lines = run_line("bench", "list").stdout.splitlines()
    assert len(lines) < 80
    (line,) = (each for each in lines if each.startswith("train_joined-* "))
    of_it = [name for name in compare.TASKS if name.startswith("train_joined-")]
    assert f" {len(of_it)} " in line
    named = run_line("bench", "list", "train_joined").stdout
    assert [each.split()[0] for each in named.splitlines()[1:]] == of_it
    done = run_line("bench", "list", "trian_joined")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no workload or task begins with 'trian_joined'" in done.stderr
    assert "did you mean train_joined" in done.stderr


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
        assert row["backend"] is row["peer_backend"] is None
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
        *("w", "t", "fused", "acme", times, times, 1.0, 1.0, 1.0, 0.0, 3, 1.0, 1.0, 8, 1.0, 1.0),
        *(0.0, matches, [1.0], [1.0]),
    )
    assert report.status(row) == said
    whole = dataclasses.replace(report, rows=[row])
    assert whole.to_dict()["rows"] == [{**dataclasses.asdict(row), "status": said}]


def test_a_complete_result_without_a_failing_must_proves(tmp_path):
    assert proof.from_file(conformance(tmp_path / "x.json"), "reference", "cpu")["conformant"]


def test_a_part_of_the_suite_proves_nothing(tmp_path):
    part = conformance(tmp_path / "x.json", cases=[{}], options={"level": "should", "areas": ["keyed"]})
    assert not proof.from_file(part, "reference", "cpu")["conformant"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "acme"}, "not of reference"),
        ({"version": "0.1"}, r"torch 0\.1"),
        ({"versions": {"numpy": "0.1"}}, r"numpy 0\.1, here is"),
        ({"versions": {"acme-optim": "1"}}, "here is None"),
        ({"build": "0" * 16}, "another build of reference"),
        ({"build": ""}, "another build of reference"),
        ({"device": "cuda:0"}, "made on cuda:0, not on cpu"),
    ],
)
def test_a_result_of_something_else_is_refused(tmp_path, changes, said):
    with pytest.raises(compare.RequestError, match=said):
        proof.from_file(conformance(tmp_path / "x.json", **changes), "reference", "cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--workload nope", "no workload 'nope'"),
        ("--task nope", "no task 'nope'"),
        ("--workload tower-24m --task train-sgd", "no workload is of the kind"),
        ("--against nope", "'nope'"),
        ("--implementation nope", "'nope'"),
        ("--device xla", "cannot be used"),
        ("--device nope", "keyedopt list devices"),
        ("--seconds 0", "--seconds"),
        ("--seconds nan", "--seconds"),
        ("--seconds 1e9", "--seconds"),
        ("--threads 0", "--threads"),
        ("--threads 100000", "--threads 100000 is too many: "),
        ("--output .", "cannot be written"),
        ("--dim 8", "--dim needs --trace"),
        ("--conformance x.json --check", "give --conformance or --check, not both"),
        ("--trace x.csv", "must be a .parquet or a .pt file"),
        ("--implementation reference --against torch --conformance x.json", "x.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(run_line, options, said):
    assert said in refused(run_line("bench", "run", *options.split()))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gate", "BASE"),
        ("gate HEAD", "not in a git checkout"),
        ("gate HEAD --rounds 1", "--rounds"),
        ("gate HEAD --threads 100000", "too many"),
        ("gate HEAD --task nope", "no task 'nope'"),
        ("gate HEAD --device xla", "cannot be used"),
        ("gate HEAD --import nope", "there is no module 'nope'"),
        ("commits HEAD HEAD --import nope", "there is no module 'nope'"),
        ("run --import nope", "there is no module 'nope'"),
        ("gate HEAD --implementation nope", "'nope'"),
        ("gate HEAD --output .", "cannot be written"),
        ("gate HEAD --seconds 3", "--seconds"),
        ("gate HEAD --against torch", "--against"),
        ("commits HEAD", "B"),
        ("commits HEAD HEAD", "not in a git checkout"),
        ("commits HEAD HEAD --against torch", "--against"),
        ("harness --task train-sgd", "--task"),
        ("harness --implementation torch", "--implementation"),
        ("harness --seconds 0", "--seconds"),
        ("list --task train-sgd", "--task"),
        ("run --rounds 3", "--rounds"),
        ("nope", "nope"),
    ],
)
def test_bad_input_of_a_verb_is_one_line(run_line, line, said):
    assert said in refused(run_line("bench", *line.split()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--implementation os --against torch", "nothing was compared: tiny train-sgd by os: no "),
        ("--implementation reference --against torchft", "nothing was compared: tiny train-sgd by torchft: "),
    ],
)
def test_a_run_that_compares_nothing_is_one_line(run_line, small, tmp_path, options, said):
    if "torchft" in options:
        pytest.importorskip("torchft")
    line = ("--workload", "tiny", "--task", "train-sgd", "--output", tmp_path / "x.json")
    assert said in refused(run_line("bench", "run", *options.split(), *line))
    assert not (tmp_path / "x.json").exists()


def test_a_peer_that_is_not_installed_says_how_to_get_it(run_line, monkeypatch):
    def missing(self):
        raise TargetError("'torchrec' needs 'tensordict', which is not installed in this environment")

    monkeypatch.setattr("keyedopt.conformance.targets.implementation.Implementation.surface", missing)
    done = run_line("bench", "run", "--implementation", "reference", "--against", "torchrec")
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


def test_a_run_counts_memory_and_can_empty_caches(run_line, small, tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(compare.resources, "flush", lambda device: lambda: emptied.append(device))
    line = (*LINE, "--workload", "tiny", "--task", "train-sgd", "--against", "torch")
    for cold in ((), ("--cold",)):
        done = run_line(*line, *cold, "--output", tmp_path / "x.json")
        assert done.returncode == 0, done.stderr
        (row,) = valid(tmp_path / "x.json")["rows"]
        assert row["memory"] >= 0
        assert row["peer_memory"] >= 0
        assert row["launches"] is None
        assert bool(emptied) == bool(cold)


def test_extra_memory_is_what_a_run_needs_and_gives_back():
    held = compare.resources.extra_memory(lambda: torch.ones(8 << 20).sum(), "cpu")
    assert held is not None
    assert (32 << 20) * 0.9 < held < (32 << 20) * 2


def test_tables_that_do_not_fit_are_named(monkeypatch):
    monkeypatch.setattr(compare, "free_memory", lambda device: 1500)
    with pytest.raises(compare.NotOffered, match="too large"):
        compare._refuse_too_large(compare.TASKS["train-sgd"], TINY, "cpu")
    monkeypatch.setattr(compare, "free_memory", lambda device: 1600)
    compare._refuse_too_large(compare.TASKS["train-sgd"], TINY, "cpu")
    with pytest.raises(compare.NotOffered, match="too large"):
        compare._refuse_too_large(compare.TASKS["train-adam"], TINY, "cpu")


def test_the_suite_can_be_run_on_the_spot(run_line, small, tmp_path, monkeypatch):
    path = conformance(tmp_path / "made.json")
    asked = []

    def instead(target, options):
        asked.append((target, options.device, options.areas, options.clauses))
        monkeypatch.setattr(os, "getloadavg", lambda: (99.0,) * 3)  # the check itself makes the machine busy
        return results.read(path)

    monkeypatch.setattr(proof.runner, "run", instead)
    line = (*LINE, "--workload", "tiny", "--task", "train-sgd", "--against", "torch", "--check")
    done = run_line(*line, "--output", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    assert asked == [("reference", "cpu", (), ())]
    assert "publishable" in done.stdout
    assert valid(tmp_path / "x.json")["conformance"]["build"] == digest(compare.find("reference").root)


def test_a_build_is_known_by_its_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "acme_build"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1")
    about = compare.Implementation(name="acme", root="acme_build")
    first = digest(about.root)
    assert first == digest(about.root)
    (folder / "native.so").write_bytes(b"1")
    second = digest(about.root)
    (folder / "notes.txt").write_text("not part of it")
    assert first != second == digest(about.root)
    (folder / "__init__.py").write_text("x = 2")
    assert digest(about.root) not in (first, second)
    assert digest(object()) == ""
    assert digest(compare.find("fused").root) != digest(compare.find("reference").root) != ""


def test_a_bar_shows_what_comes_next_on_a_terminal_alone(monkeypatch):
    for terminal in (True, False):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=terminal, width=100)
        monkeypatch.setattr(progress, "Console", lambda console=console, **_: console)
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(shown, "isatty", lambda terminal=terminal: terminal, raising=False)
        with progress.progress("starting") as step:
            step("tiny train-sgd: torch", 3, 7)
        assert ("tiny train-sgd: torch" in shown.getvalue()) == terminal
        assert ("43%" in shown.getvalue()) == terminal


def test_an_interrupted_run_writes_nothing(run_line, small, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "compare", interrupt)
    done = run_line(*LINE, "--workload", "tiny", "--output", tmp_path / "x.json")
    assert "interrupted" in refused(done)
    assert not (tmp_path / "x.json").exists()


def test_the_harness_itself_is_measured(run_line, tmp_path, monkeypatch):
    """Imports and commands run as they are, once each, but for the suite."""
    monkeypatch.setattr(harness, "MODULES", ("keyedopt.cli.main",))
    monkeypatch.setattr(harness, "COMMANDS", {"help": ("--help",)})
    monkeypatch.setattr(harness, "BASE", (sys.executable, "-c", "pass"))
    monkeypatch.setattr("keyedopt.cli.bench_harness.PAIRS", 1)
    done = run_line("bench", "harness", "--seconds", "0.01", "--output", tmp_path / "x.json")
    assert (done.returncode, done.stderr) == (0, "")
    written = valid(tmp_path / "x.json")
    assert (written["kind"], written["schema"]) == ("keyedopt-harness", 1)
    assert [row["name"] for row in written["rows"]] == ["import keyedopt.cli.main", "keyedopt --help"]
    for row in written["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert len(row["samples"]) == len(row["base_samples"]) >= 1
        assert row["name"] in done.stdout


def test_a_harness_that_breaks_is_one_line(run_line, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "MODULES", ("keyedopt.nope",))
    done = run_line("bench", "harness", "--output", tmp_path / "x.json")
    assert "import keyedopt.nope ended with 1" in refused(done)
    assert not (tmp_path / "x.json").exists()


def test_reports_that_are_kept_can_be_read():
    kept = Path(compare.__file__).with_name("results")
    reports = [path for path in kept.rglob("*.json") if "asv" not in path.relative_to(kept).parts]
    of_trials = [path for path in reports if path.name == "noise.json"]
    assert of_trials
    assert len(of_trials) < len(reports)
    for path in reports:
        plain = json.loads(path.read_text())
        if path.parent.name.startswith("first-light"):
            assert plain["kind"] in OURS, path
        elif path in of_trials:
            assert plain["commit"]
            assert {len(row["slowdowns"]) for row in plain["rows"]} == {8}
        else:
            assert plain["schema"] == compare.SCHEMA, path


def test_a_ratio_with_a_wide_interval_is_withheld_and_a_missing_peer_is_named(run_line, small, monkeypatch):
    monkeypatch.setattr(compare, "WIDEST", 0.0)
    monkeypatch.setattr(compare, "PEERS", ("torch", "nothing_of_this_name"))
    done = run_line(*LINE, "--workload", "tiny", "--task", "train-sgd")
    assert "withheld: wide interval" in done.stdout
    assert re.search(r"torch +\d+ / \d+ +[\d.]+ +[\d.]+ +- ", done.stdout)
    assert "left out: nothing_of_this_name: there is no module" in done.stdout
