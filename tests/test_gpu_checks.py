"""The checks for a GPU host, as far as they can be tested without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.benchmarks import gpu_checks

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_a_first_step_equals_a_warm_one(library):
    rows = gpu_checks.run(library, "cpu", ["first step"])
    assert [row["algorithm"] for row in rows] == list(gpu_checks.ALGORITHMS)
    assert {row["outcome"] for row in rows} == {"held"}


def test_a_first_step_that_differs_is_noticed():
    class Drifting:
        """Tables whose rates grow from module to module."""

        EmbeddingBagConfig, SGD = fused.EmbeddingBagConfig, fused.SGD
        made = 0

        def EmbeddingBagCollection(self, configs, kind, options, device):  # noqa: N802
            self.made += 1
            return fused.EmbeddingBagCollection(configs, kind, {"lr": 0.01 * self.made}, device=device)

    row, *others = gpu_checks.run(Drifting(), "cpu", ["first step"])
    assert (row["outcome"], row["algorithm"]) == ("failed", "SGD")
    assert {other["outcome"] for other in others} == {"missing"}


@NO_GPU
def test_a_check_that_breaks_costs_itself_alone():
    rows = gpu_checks.run(fused, "cpu", ["no synchronization", "first step"])
    broken = [row for row in rows if row["check"] == "no synchronization"]
    assert {row["outcome"] for row in broken} == {"failed"}
    assert all(row["message"] for row in broken)
    assert {row["outcome"] for row in rows if row not in broken} == {"held"}


def test_fbgemm_is_compared_with_the_reference(monkeypatch):
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is in the extra `cpu`")
    monkeypatch.setattr(gpu_checks, "FBGEMM", {name: {} for name in gpu_checks.FBGEMM})
    monkeypatch.setitem(gpu_checks.FBGEMM, "Adagrad", {"lr_decay": 0.5})
    rows = {row["algorithm"]: row for row in gpu_checks.run(fused, "cpu", ["FBGEMM's operators"])}
    held = [name for name, row in rows.items() if row["outcome"] == "held"]
    assert held == ["SGD", "Adagrad", "RowWiseAdagrad"]
    assert "not adam" in rows["Adam"]["message"]  # on the CPU
    assert rows["Adam"]["outcome"] == "failed"

    class Faster:
        """Tables at twice the rate."""

        EmbeddingBagConfig, SGD = fused.EmbeddingBagConfig, fused.SGD

        def EmbeddingBagCollection(self, configs, kind, options, **more):  # noqa: N802
            return fused.EmbeddingBagCollection(configs, kind, {**options, "lr": 0.02}, **more)

    row, *_ = gpu_checks.run(Faster(), "cpu", ["FBGEMM's operators"])
    assert row["outcome"] == "failed"
    assert "differs" in row["message"]
    row, *_ = gpu_checks.run(reference, "cpu", ["FBGEMM's operators"])
    assert row["outcome"] == "missing"


@NO_GPU
def test_without_a_gpu_it_says_so(capsys, tmp_path):
    assert gpu_checks.main(["--output", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "CUDA: torch cannot use it here; nothing to check\n"
    assert not list(tmp_path.iterdir())


@NO_GPU
def test_the_script_writes_a_summary_of_nothing(tmp_path):
    script = Path(gpu_checks.__file__).with_name("gpu.sh")
    done = subprocess.run(
        ["bash", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 2, done.stderr
    assert not done.stderr
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "kind": "keyedopt-gpu",
        "why": "torch cannot use CUDA here",
        "missing": ["cuda"],
        "conformance": {},
        "checks": [],
        "ratios": [],
    }


def test_the_limits_of_the_script_are_within_ten_minutes():
    text = Path(gpu_checks.__file__).with_name("gpu.sh").read_text()
    runs = [int(limit) for limit in re.findall(r"conformance (?:triton|torch|fbgemm) (\d+)", text)]
    checks = [int(limit) for limit in re.findall(r"timeout -k 5 (\d+)", text)]
    usual, longer = (int(limit) for limit in re.findall(r"limit=(\d+)", text))
    parts = [
        longer if name in ("tables", "backward") else usual for name in re.findall(r"^part (\w+)", text, re.M)
    ]
    assert (len(runs), len(checks), len(parts)) == (3, 1, 4)
    assert sum(runs + checks + parts) <= 600
