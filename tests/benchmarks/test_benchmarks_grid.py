"""``keyedopt bench grid``: its shapes, its order, its summary."""

import json
import os
from types import SimpleNamespace

import pytest

from keyedopt.benchmarks import compare, grid
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.timing import Bandwidth
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.cli import bench_proof

TINY = Lookups("2x50x4, 6x3 zipf", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)


def row(ratio, peer="fbgemm", matches=True, withheld=False):
    return SimpleNamespace(ratio=ratio, peer=peer, matches=matches, withheld=withheld)


def test_the_grid_has_each_shape_once_and_many_tables_and_small_batches_among_them():
    names = [(work.name, task.name) for work, task in grid.pairs()]
    assert len(set(names)) == len(names) > 45
    shapes = {(work.tables, work.batch) for work, _ in grid.pairs()}
    assert {(1, 1), (26, 1), (26, 16), (26, 128), (100, 128), (500, 128)} <= shapes
    assert all(task.joined for _, task in grid.pairs())
    assert {"train_joined-sgd", "train_joined-adagrad", "forward_joined"} <= {name for _, name in names}


def test_the_worst_ratio_comes_first_and_one_that_says_nothing_last():
    rows = [row(2.0), row(0.2, withheld=True), row(0.5), row(1.0)]
    assert [one.ratio for one in grid.worst_first(rows)] == [0.5, 1.0, 2.0, 0.2]


def test_a_summary_counts_what_is_slower_and_leaves_out_what_says_nothing():
    rows = [row(2.0), row(0.5), row(3.0), row(0.1, matches=False), row(0.2, withheld=True), row(4.0, "torch")]
    assert list(grid.summary(rows)) == [
        "against fbgemm: worst 0.50, median 2.00, best 3.00; 1 of 3 shapes are slower than fbgemm",
        "against torch: worst 4.00, median 4.00, best 4.00; 0 of 1 shapes are slower than torch",
    ]
    assert list(grid.summary([row(0.1, matches=False)])) == []


def test_the_command_measures_the_grid_and_writes_a_report(run_line, monkeypatch, tmp_path):
    chosen = [(TINY, TASKS[name]) for name in ("train_joined-sgd", "forward_joined")]
    monkeypatch.setattr(grid, "pairs", lambda: chosen)
    monkeypatch.setattr(compare.timing, "memory_bandwidth", lambda clock, device: Bandwidth(1e9, 1e9))
    monkeypatch.setattr(compare, "WIDEST", float("inf"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0,) * 3)
    proof = {"file": None, "conformant": True, "verdict": "conformant", "suite": "a", "build": "b"}
    monkeypatch.setattr(bench_proof, "on_the_spot", lambda target, device: proof)
    line = ("bench", "grid", "--implementation", "reference", "--against", "torch", "--seconds", "0.01")
    done = run_line(*line, "--check", "--output", tmp_path / "grid.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("publishable") == 2
    assert done.stdout.count(TINY.name) == 2
    assert "against torch: worst " in done.stdout
    written = json.loads((tmp_path / "grid.json").read_text())
    assert written["conformance"] == proof
    assert [one["task"] for one in written["rows"]] == ["train_joined-sgd", "forward_joined"]
    assert all(one["matches"] and one["threads"] == 1 for one in written["rows"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--against", "nope"), "nope"),
        (("--threads", "0"), "--threads"),
        (("--conformance", "nosuch.json"), "nosuch.json"),
    ],
)
def test_what_is_wrong_with_an_option_is_said(run_line, option, said):
    done = run_line("bench", "grid", *option)
    assert done.returncode == 2
    assert said in done.stderr
