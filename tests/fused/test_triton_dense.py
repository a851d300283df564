"""The Triton kernel for dense gradients in Triton's interpreter, in a process of its own.

This file is the script of the process. There the steps of optimizers on the CPU are as on CUDA.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sampling import chosen
from torch.nn import Parameter
from triton_dense import DENSE_STEPS, check_dense, ulp
from triton_process import hand_over, outcomes, run_alone

from keyedopt import fused, reference
from keyedopt.fused import backends
from keyedopt.fused.backends import self_check
from keyedopt.fused.backends.interface import Step
from keyedopt.fused.dense import cpu_fast_path, dense_step, fused_kernels, triton_dense_steps

SHAPES = ((0,), (1,), (3,), (1025,), (8, 4), ())


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let the kernel update parameters on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(triton_dense_steps, "DEVICES", ("cpu",)))
        stack.enter_context(patch.object(cpu_fast_path, "try_step", lambda optimizer: "as on CUDA"))
        yield


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    params.append(Parameter(torch.randn(5, 7, generator=generator).to(dtype).t()))
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
    return params


def states_of(optimizer: Any) -> list[torch.Tensor]:
    return [value for entry in optimizer.state.values() for _, value in sorted(entry.items())]


# --- the cases ------------------------------------------------------------------------------------


def case_kernel(name: str) -> None:
    check_dense(DENSE_STEPS[name], first=name == "sgd_momentum")


def case_many(count: int) -> None:
    check_dense(DENSE_STEPS["adam"], [place % 4 for place in range(count)])


def case_nothing() -> None:
    check_dense(DENSE_STEPS["adam"], [0, 0])


def case_second_moment() -> None:
    """torch's fused kernel on CUDA has an error of 1.3e-5 here."""
    params = parameters()
    optimizer = fused.Adam(params, lr=0.1)
    with as_on_cuda(), patch.object(dense_step, "fused_kernels", None):  # which would raise
        optimizer.step()
    for param in params:
        for name, part in (("exp_avg", 1 - 0.9), ("exp_avg_sq", 1 - 0.999)):
            grad: Any = param.grad
            exact = part * grad.double() ** (1 if name == "exp_avg" else 2)
            off = (optimizer.state[param][name].double() - exact).abs()
            assert (off <= 2 * ulp(exact)).all(), name
            assert (off <= 1e-6 * exact.abs()).all(), name


def case_optimizer(name: str, options: dict[str, Any]) -> None:
    """Ten steps follow the reference in float64, with the state, the keys and the versions of its state."""
    params, exact = parameters(), parameters(dtype=torch.float64)
    ours, theirs = getattr(fused, name)(params, **options), getattr(reference, name)(exact, **options)
    for step in range(10):
        versions = [param._version for param in params]
        if step == 5:
            ours.grad_scale = torch.tensor(2.0, dtype=torch.float64)
            for param in exact:
                param.grad = param.grad / 2
        with as_on_cuda(), patch.object(dense_step, "fused_kernels", None):  # which would raise
            ours.step()
        theirs.step()
        assert all(param._version > old for param, old in zip(params, versions, strict=True))
    for one, other in zip(params, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)
    for entry, right in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert entry.keys() == right.keys()
        for key, value in entry.items():
            torch.testing.assert_close(value.double(), right[key], rtol=2e-6, atol=1e-6)
    assert [type(one) for one in states_of(ours)] == [type(one) for one in states_of(theirs)]
    assert triton_dense_steps.KERNEL not in ours.explain()
    with as_on_cuda():
        first, *more = ours.explain().splitlines()
    assert first.endswith(f"{ours.algorithm} by {triton_dense_steps.KERNEL}"), first
    assert not any(line.startswith("  not") for line in more if "fast path" not in line), more


def case_launches() -> None:
    """One launch updates all parameters of a step, whose counts differ."""
    params = parameters()
    optimizer = fused.AdamW(params, lr=0.1)
    with as_on_cuda():
        optimizer.step()
        work: Any = []
        for number, (param, entry) in enumerate(optimizer.state.items()):
            entry["step"] += number
            work.append((param, param.grad, entry))
        step = optimizer.make_step(optimizer.param_groups[0], count=work[0][2]["step"])
        from keyedopt.fused.backends.triton import dense_launch

        with patch.object(dense_launch, "start", side_effect=dense_launch.start) as start:
            assert triton_dense_steps.update(step, work, ("exp_avg", "exp_avg_sq"), None) == []
        assert start.call_count == 1
        work[0][2]["step"] = work[0][2]["step"].float()  # as after loading a checkpoint of torch's Adam
        assert triton_dense_steps.update(step, work, ("exp_avg", "exp_avg_sq"), None) == []


def case_no_synchronization() -> None:
    from test_triton_steps import NoSynchronization
    from torch.utils._python_dispatch import _disable_current_modes

    from keyedopt.fused.backends.triton import dense_launch

    def quiet(*given: Any) -> None:
        with _disable_current_modes():
            start(*given)

    start = dense_launch.start
    work = []
    for param in parameters():
        entry = {
            "step": torch.tensor(1.0),
            "exp_avg": param.detach().abs(),
            "exp_avg_sq": param.detach().abs(),
        }
        work.append((param, param.grad, entry))
    with as_on_cuda(), patch.object(dense_launch, "start", quiet), NoSynchronization():
        for lr in (0.1, 0.2, torch.tensor(0.3)):
            step = Step("adam", lr=lr, count=work[0][2]["step"], eps=1e-8)
            scale = torch.tensor(2.0, dtype=torch.float64)
            assert triton_dense_steps.update(step, work, ("exp_avg", "exp_avg_sq"), scale) == []


def case_refusals() -> None:
    """What the kernel does not support is explained, and stays with torch's kernels."""

    def why(algorithm: Any, tensor: torch.Tensor, **options: Any) -> str:
        param = Parameter(tensor)
        param.grad = torch.ones_like(param)
        optimizer = algorithm([param], lr=0.1, **options)
        with as_on_cuda():
            optimizer.step()
            lines = optimizer.explain().splitlines()
        (found,) = (one for one in lines if one.startswith(f"  not {triton_dense_steps.KERNEL}: "))
        return found.partition(": ")[2]

    assert why(fused.Adam, torch.ones(3, dtype=torch.bfloat16)) == "it is for float32, not for torch.bfloat16"
    strides = "parameter, gradient and state must have the same strides"
    assert why(fused.Adam, torch.ones(5, 8)[:, :4]) == strides
    assert why(fused.Adam, torch.ones(5, 8), bias_correction="per_row") == "steps are counted by row"
    assert why(fused.SGD, torch.ones(3), momentum=0.9) == "torch's fused kernel is as exact"
    assert why(fused.Adagrad, torch.ones(3)) == "torch's fused kernel is as exact"
    assert why(fused.LAMB, torch.ones(3, 3)) == "it has no formula for lamb"
    with patch.dict("os.environ", {"KEYEDOPT_BACKEND": "torch"}):
        assert why(fused.Adam, torch.ones(3)) == "KEYEDOPT_BACKEND asks for 'torch'"
    with patch.object(backends, "load", lambda name: "Triton is missing"):
        assert why(fused.Adam, torch.ones(3)) == "Triton is missing"


def case_wrong_kernel() -> None:
    """A kernel that the self-check finds wrong is not used; it is checked once, and warned of."""
    from keyedopt.fused.backends.triton import TritonBackend, dense_launch

    class Changed:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **named: self.kernel[grid](*args, **{**named, "MAXIMIZE": True})

    with ExitStack() as stack:
        stack.enter_context(as_on_cuda())
        stack.enter_context(patch.object(TritonBackend, "checked_devices", ("cpu",)))
        stack.enter_context(patch.object(self_check, "_passed", lambda *given: None))
        stack.enter_context(patch.object(self_check, "_FOUND", {}))
        checks = stack.enter_context(
            patch.object(triton_dense_steps, "wrong_kernel", side_effect=triton_dense_steps.wrong_kernel)
        )
        torchs = stack.enter_context(patch.object(fused_kernels, "update", side_effect=fused_kernels.update))
        right = fused.Adam(parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right.step()
            right.step()
        assert (checks.call_count, torchs.call_count) == (1, 0)
        self_check._FOUND.clear()
        stack.enter_context(patch.object(dense_launch, "update_dense", Changed(dense_launch.update_dense)))
        optimizer = fused.Adam(parameters(SHAPES[:3]), lr=0.1)
        with pytest.warns(RuntimeWarning, match="the kernel update_dense computes wrong results .*torch's k"):
            optimizer.step()
        assert torchs.call_count == 1
        assert "computes wrong results" in optimizer.explain()
        assert checks.call_count == 2


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"lr": 0.1}),
    "adam_l2": ("Adam", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    "adam_before": ("Adam", {"lr": 0.1, "eps_placement": "before_bias_correction"}),
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "decay": "decoupled"}),
    "adagrad": ("Adagrad", {"lr": 0.1, "weight_decay": 0.1, "decay": "decoupled"}),
}


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in DENSE_STEPS:
        yield f"kernel-{name}", partial(case_kernel, name)
    for count in (70, 1030):
        yield f"many-{count}", partial(case_many, count)
    for name, (kind, options) in OPTIMIZERS.items():
        yield f"optimizer-{name}", partial(case_optimizer, kind, options)
    yield "nothing", case_nothing
    yield "second_moment", case_second_moment
    yield "launches", case_launches
    yield "no_synchronization", case_no_synchronization
    yield "refusals", case_refusals
    yield "wrong_kernel", case_wrong_kernel


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, *chosen(request, "name"))


@pytest.mark.complete(sample=8)
@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_dense_steps(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hand_over(outcomes((name, case) for name, case in cases() if name in sys.argv[1:-1]))
