"""The self-check finds wrong kernels; planted ones of Triton run in its interpreter."""

import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sampling import chosen
from triton_process import hand_over, run_alone
from typer.testing import CliRunner

from keyedopt.cli.main import app
from keyedopt.fused import backends
from keyedopt.fused.backends import self_check
from keyedopt.fused.backends.interface import Step, Table
from keyedopt.fused.backends.torch import TorchBackend

#: The kernels of Triton with an argument by which they compute something else, and what is named.
PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "pool": ("pool", {"SCALED": False}),
    "write_keys": ("write_keys", {"PADDING": "last", "BLOCK": 8}),
    "radix_pass": ("radix_pass", {"SCALED": False}),
    "find_runs": ("find_runs", {"BLOCK": 8}),
    "sum_chunks": ("sum_chunks, fold_chunks or collect", {"SCALED": False}),
    "fold_chunks": ("sum_chunks, fold_chunks or collect", {"FOLD": 3}),
    "collect": ("sum_chunks, fold_chunks or collect", {"SCALED": False}),
    "update": ("update", {"MAXIMIZE": True}),
}


# --- in the process with the interpreter ----------------------------------------------------------


class Changed:
    """A kernel that is launched with other constants."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: self._kernel[grid](*args, **{**named, **self._constants})


@contextmanager
def planted_kernel(name: str) -> Iterator[None]:
    from keyedopt.tools.compile_ahead import KERNELS

    (module,) = (module for module, kernel in KERNELS if kernel == name)
    with patch.object(module, name, Changed(getattr(module, name), PLANTED[name][1])):
        yield


def check_planted(names: Collection[str]) -> dict[str, str]:
    from keyedopt.fused.backends.triton import TritonBackend
    from keyedopt.fused.backends.triton.shapes import Tuning

    torch.set_num_threads(1)
    backend = TritonBackend(Tuning(block=16, chunk=8, fold=2, values=16, probes=4, tile=128))
    step = Step("rowwise_adagrad", lr=0.1, eps=1e-8)
    tables = [Table(torch.zeros(4, 8), (torch.zeros(4),))]
    found = {"": self_check.wrong_kernel(backend, tables, step)}
    for name in names:
        with planted_kernel(name):
            found[name] = self_check.wrong_kernel(backend, tables, step)
    return found


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, *chosen(request, "name"))


def test_kernels_that_are_right_pass(found: dict[str, str]) -> None:
    assert found[""] == ""


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_kernel_is_named(found: dict[str, str], name: str) -> None:
    assert f"the kernel {PLANTED[name][0]} computes wrong results on cpu" in found[name]
    assert "backend='torch'" in found[name]


class Doubtful(TorchBackend):
    """A backend that updates twice as often as it is asked to, unless it is right."""

    name = "doubtful"
    checked_devices = ("cpu",)
    right = False
    checks = 0

    def update(self, tables: Any, lookups: Any, step: Any) -> None:
        type(self).checks += 1
        for _ in range(1 if self.right else 2):
            super().update(tables, lookups, step)


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setitem(backends.BACKENDS, "doubtful", backends.Registered(__name__, "Doubtful"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Doubtful.__module__])
    monkeypatch.setattr(self_check, "_FOUND", {})
    monkeypatch.setattr(Doubtful, "right", False)
    monkeypatch.setattr(Doubtful, "checks", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield Doubtful
    backends._load.cache_clear()


def some() -> tuple[list[Table], Step]:
    return [Table(torch.ones(4, 8))], Step("sgd", lr=0.1)


def test_a_named_backend_with_a_wrong_kernel_raises(doubtful: Any) -> None:
    with pytest.raises(self_check.WrongKernelError, match=r"the kernel update .* on cpu"):
        backends.choose("doubtful", *some())


def test_auto_warns_and_takes_the_next_backend(doubtful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.PREFERRED, "doubtful")
    with pytest.warns(RuntimeWarning, match=r"the kernel update .* next backend"):
        assert backends.choose("auto", *some()).name != "doubtful"
    monkeypatch.setenv(self_check.SELF_CHECK, "0")
    assert backends.choose("auto", *some()).name == "doubtful"


def test_what_was_right_is_not_checked_again(doubtful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    doubtful.right = True
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert backends.choose("doubtful", *some()).name == "doubtful"
        assert doubtful.checks == 1
        self_check._FOUND.clear()  # as in another process
    monkeypatch.setattr(self_check, "versions", lambda: {"torch": "another"})
    backends.choose("doubtful", *some())
    assert doubtful.checks == 2


def test_the_doctor_shows_what_is_wrong(doubtful: Any) -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "WRONG: backend 'doubtful': the kernel update" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    doubtful.right = True
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


if __name__ == "__main__":
    hand_over(check_planted(sys.argv[1:-1]))


class Exact(TorchBackend):
    """Outputs as exact as those of the kernels for CUDA; torch adds up thousands of equal rows less well."""

    long_run = 3077

    def look_up(self, tables: Any, lookups: Any) -> list[torch.Tensor]:
        return [output.float() for output in self_check.exact_outputs(tables, lookups)]


def test_kernels_that_are_more_exact_than_torch_pass() -> None:
    """As on an H100, where ``pool`` was called wrong because torch was."""
    tables = [Table(torch.zeros(4, 512), (torch.zeros(4),))]
    assert self_check.wrong_kernel(Exact(), tables, Step("rowwise_adagrad", lr=0.1, eps=1e-8)) == ""
