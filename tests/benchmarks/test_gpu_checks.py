"""The checks for a GPU host, as far as they can be tested without one."""

import os
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.benchmarks.gpu import checks

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_a_first_step_equals_a_warm_one(library):
    rows = checks.run(library, "cpu", ["first step"])
    assert [row["algorithm"] for row in rows] == list(checks.ALGORITHMS)
    assert {row["outcome"] for row in rows} == {"held"}


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_a_first_whole_step_equals_a_warm_one(library):
    rows = checks.run(library, "cpu", ["first step, tables and dense"])
    assert [(row["algorithm"], row["outcome"], row["message"]) for row in rows] == [
        (name, "held", "") for name in ("SGD", "Adagrad", "Adam")
    ]
    model = checks.Whole(library, "Adam", "cpu")
    before = model.contents()
    for _ in range(2):
        model.step(checks.features("cpu"))
    moved = [not torch.equal(one, other) for one, other in zip(before, model.contents(), strict=False)]
    assert all(moved)
    assert float(model.optimizer.last_total_grad_norm) > 1.0, "the clip does something"


def test_the_sort_beside_the_forward_is_compared_with_a_sort_in_it(monkeypatch):
    monkeypatch.setenv(checks.OVERLAP, "0")
    rows = checks.run(fused, "cpu", ["sort beside the forward"])
    assert [(row["algorithm"], row["outcome"], row["message"]) for row in rows] == [
        (name, "held", "") for name in ("SGD", "RowWiseAdagrad", "Adam")
    ]
    assert os.environ[checks.OVERLAP] == "0"
    monkeypatch.delenv(checks.OVERLAP)
    checks.run(fused, "cpu", ["sort beside the forward"])
    assert checks.OVERLAP not in os.environ


@pytest.mark.parametrize("fault", ["other numbers", "forwards count", "alarm"])
def test_a_sort_beside_the_forward_that_goes_wrong_is_noticed(fault):
    class Wrong(fused.EmbeddingBagCollection):
        """Tables that go wrong with what is let go, with what is not used, or where the sort is beside."""

        def forward(self, given):
            if fault == "forwards count":
                self.fused_optimizer.param_groups[0]["lr"] *= 0.9
            if fault == "other numbers" and os.environ[checks.OVERLAP] == "1":
                given = {name: (values.flip(0), offsets) for name, (values, offsets) in given.items()}
            return super().forward(given)

        def check(self):
            if fault == "alarm":
                raise ValueError("values must be row numbers")

    class Surface:
        EmbeddingBagConfig, SGD, EmbeddingBagCollection = fused.EmbeddingBagConfig, fused.SGD, Wrong

    row, *others = checks.run(Surface(), "cpu", ["sort beside the forward"])
    assert row["outcome"] == "failed"
    assert ("row numbers" if fault == "alarm" else "other bits") in row["message"]
    assert {other["outcome"] for other in others} == {"missing"}


def test_the_time_without_overlap_is_taken_in_turn(monkeypatch):
    """On a clock that sees how the sort is asked for."""
    asked = []

    class Clock(checks.clock_of("cpu").__class__):
        def time(self, run):
            run()
            return 2.0 if asked[-1] == "0" else 1.0

    class Noting(fused.EmbeddingBagCollection):
        def forward(self, given):
            asked.append(os.environ[checks.OVERLAP])
            return super().forward(given)

    class Surface:
        EmbeddingBagConfig, RowWiseAdagrad = fused.EmbeddingBagConfig, fused.RowWiseAdagrad
        EmbeddingBagCollection = Noting

    monkeypatch.setattr(checks, "clock_of", lambda device: Clock())
    found = checks.time_without_overlap(Surface(), "cpu", 8, checks.Budget(seconds=0.0))
    assert found == "8 bags: 2.00 times as long without (2.00 to 2.00)"
    assert asked == [*"10", *"01", *"10"]


def test_streams_and_memory_of_the_checks(monkeypatch):
    """What these do on CUDA, by what they ask of torch."""
    asked = Mock()
    asked.memory_reserved.return_value, asked.mem_get_info.return_value = 1 << 28, (0, 1 << 30)
    asked.stream.return_value = nullcontext()
    monkeypatch.setattr(checks.torch, "cuda", asked)
    other, here = asked.Stream.return_value, asked.current_stream.return_value
    with checks.elsewhere("cuda"):
        other.wait_stream.assert_called_once_with(here)
        asked.stream.assert_called_once_with(other)
        here.wait_stream.assert_not_called()
    here.wait_stream.assert_called_once_with(other)
    with checks.short_of_memory("cuda"):
        asked.set_per_process_memory_fraction.assert_called_once_with(0.5)
    asked.set_per_process_memory_fraction.assert_called_with(1.0)


def test_a_first_step_that_differs_is_noticed():
    class Drifting:
        """Tables whose rates grow from module to module."""

        EmbeddingBagConfig, SGD = fused.EmbeddingBagConfig, fused.SGD
        made = 0

        def EmbeddingBagCollection(self, configs, kind, options, device):  # noqa: N802
            self.made += 1
            return fused.EmbeddingBagCollection(configs, kind, {"lr": 0.01 * self.made}, device=device)

    row, *others = checks.run(Drifting(), "cpu", ["first step"])
    assert (row["outcome"], row["algorithm"]) == ("failed", "SGD")
    assert {other["outcome"] for other in others} == {"missing"}


@NO_GPU
def test_a_check_that_breaks_costs_itself_alone():
    rows = checks.run(fused, "cpu", ["no synchronization", "first step"])
    broken = [row for row in rows if row["check"] == "no synchronization"]
    assert {row["outcome"] for row in broken} == {"failed"}
    assert all(row["message"] for row in broken)
    assert {row["outcome"] for row in rows if row not in broken} == {"held"}


def test_fbgemm_is_compared_with_the_reference(monkeypatch):
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is in the extra `cpu`")
    monkeypatch.setattr(checks, "FBGEMM", {name: {} for name in checks.FBGEMM})
    monkeypatch.setitem(checks.FBGEMM, "Adagrad", {"lr_decay": 0.5})
    rows = {row["algorithm"]: row for row in checks.run(fused, "cpu", ["FBGEMM's operators"])}
    held = [name for name, row in rows.items() if row["outcome"] == "held"]
    assert held == ["SGD", "Adagrad", "RowWiseAdagrad"]
    assert "not adam" in rows["Adam"]["message"]  # on the CPU
    assert rows["Adam"]["outcome"] == "failed"

    class Faster:
        """Tables at twice the rate."""

        EmbeddingBagConfig, SGD = fused.EmbeddingBagConfig, fused.SGD

        def EmbeddingBagCollection(self, configs, kind, options, **more):  # noqa: N802
            return fused.EmbeddingBagCollection(configs, kind, {**options, "lr": 0.02}, **more)

    row, *_ = checks.run(Faster(), "cpu", ["FBGEMM's operators"])
    assert row["outcome"] == "failed"
    assert "differs" in row["message"]
    row, *_ = checks.run(reference, "cpu", ["FBGEMM's operators"])
    assert row["outcome"] == "missing"


@NO_GPU
def test_without_a_gpu_it_says_so(capsys, tmp_path):
    assert checks.main(["--output", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "CUDA: torch cannot use it here; nothing to check\n"
    assert not list(tmp_path.iterdir())
