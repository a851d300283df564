"""Steps with dense gradients on CUDA, in the Triton kernel `update_dense`: many parameters in one launch.

torch's fused kernel for Adam has β in float32, and computes 1 − β from it: with β₂ = 0.999 each addition to
the second moment is off by 1.3e-5. The Triton kernel has 1 − β rounded once, as the kernels of tables have.
It updates float32 parameters: of Adam, and of SGD and Adagrad with options for which torch's formulas differ.
All other steps are left to torch's kernels.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keyedopt.fused import backends
from keyedopt.fused.backends import self_check, torch_rules
from keyedopt.fused.backends.interface import Backend, Step
from keyedopt.fused.backends.memory import is_dense
from keyedopt.fused.backends.streams import as_current
from keyedopt.fused.dense.fused_kernels import Work, same_formula
from keyedopt.reference.memory import PLAIN

if TYPE_CHECKING:
    from keyedopt.fused.backends.triton.dense_launch import Dense, Launch  # which needs Triton

KERNEL = "Triton kernel for dense gradients"
#: Where the kernel runs; tests add the CPU.
DEVICES: tuple[str, ...] = ("cuda",)
ALGORITHMS = ("sgd", "adagrad", "adam")
#: Sizes of the parameters of the self-check.
SIZES = (1, 0, 5000, 3, 1025)


def update(step: Step, work: Sequence[Work], names: Sequence[str], scale: Tensor | None) -> list[Work]:
    """Update the parameters that the kernel supports, and return the others; see `dense_step.update`.

    Gradients are not written. The first step of a kind runs the self-check, which synchronizes.
    """
    rest: list[Work] = []
    together: dict[torch.device, list[Work]] = {}
    for item in work:
        if _unsupported(step, item, names):
            rest.append(item)
        else:
            together.setdefault(item[0].device, []).append(item)
    backend = _backend() if together else ""
    if isinstance(backend, str):
        return list(work)
    for device, items in together.items():
        with as_current(device):
            launch = _prepare(step, items, names, scale)
            why = _wrong(backend, step, launch)
            if not why:
                _run(launch)
        if why:
            warnings.warn(f"{why}; torch's kernel runs instead", RuntimeWarning, stacklevel=2)
            rest += items
        else:
            written = ((param, *[state[name] for name in names]) for param, _, state in items)
            torch.autograd.graph.increment_version(chain.from_iterable(written))
    return rest


def refuses(step: Step, item: Work, names: Sequence[str]) -> str:
    """Return why the kernel does not update a parameter; empty if it does. May run the self-check."""
    backend = _unsupported(step, item, names) or _backend()
    if isinstance(backend, str):
        return backend
    with as_current(item[0].device):
        return _wrong(backend, step, _prepare(step, [item], names, None))


def _unsupported(step: Step, item: Work, names: Sequence[str]) -> str:
    """Return why the kernel does not support these options, dtypes or layouts; empty if it does."""
    param, grad, state = item
    device = param.device
    if device.type not in DEVICES:
        return f"it is for CUDA, not for {device.type}"
    if param.dtype is not torch.float32:
        return f"it is for float32, not for {param.dtype}"
    if step.algorithm not in ALGORITHMS:
        return f"it has no formula for {step.algorithm}"
    if step.algorithm != "adam" and same_formula(step, state, names):
        return "torch's fused kernel is as exact"
    if step.algorithm == "adam" and state["step"].ndim:
        return "steps are counted by row"
    if isinstance(step.lr, Tensor) and step.lr.device != device:
        return "the learning rate is on another device"
    contiguous = param.is_contiguous()
    for tensor in (param, grad, *[state[name] for name in names]):
        if type(tensor) not in PLAIN or tensor.dtype is not torch.float32 or tensor.device != device:
            return "parameter, gradient and state must be plain float32 tensors on one device"
        if tensor.shape != param.shape:
            return "parameter, gradient and state must have one shape"
        if not (tensor.is_contiguous() if contiguous else tensor.stride() == param.stride()):
            return "parameter, gradient and state must have the same strides"
    return "" if contiguous or is_dense(param) else "there are gaps between the elements"


def _backend() -> Backend | str:
    """Return the backend of the kernel, or why it is not used."""
    if os.environ.get(backends.PREFERRED) == "torch":
        return f"{backends.PREFERRED} asks for 'torch'"
    return backends.load("triton")


def _prepare(step: Step, work: Sequence[Work], names: Sequence[str], scale: Tensor | None) -> "Launch":
    """Return the launch for parameters of the current device."""
    from keyedopt.fused.backends.triton.dense_launch import Dense, prepare

    params, grads = [param for param, _, _ in work], [grad for _, grad, _ in work]
    states = [[state[name] for _, _, state in work] for name in names]
    divisor = None if scale is None else scale.to(params[0].device, torch.float32).reshape(())
    return prepare(step, Dense(params, grads, states, _counts(step, work)), divisor)


def _run(launch: "Launch") -> None:
    from keyedopt.fused.backends.triton.dense_launch import run

    run(launch)


def _counts(step: Step, work: Sequence[Work]) -> list[Tensor]:
    """Return step counts on the device of the parameters, in float32 or float64."""
    if step.algorithm == "sgd":
        return []
    if not isinstance(step.count, Tensor):
        device = work[0][0].device
        return [torch.full((), float(step.count), dtype=torch.float64, device=device)] * len(work)
    counts = [state["step"] for _, _, state in work]
    dtypes = {count.dtype for count in counts}
    if dtypes in ({torch.float64}, {torch.float32}):
        return counts
    return list(torch.stack(counts).double().unbind())


# --- the self-check -------------------------------------------------------------------------------


def _wrong(backend: Backend, step: Step, launch: "Launch") -> str:
    """Return what is wrong with the kernel of a launch, and what to do; empty if it is right."""
    device = launch.dense.params[0].device
    if not self_check.asked(backend, device):
        return ""
    key = backend.name, "update_dense", str(device), launch.key
    return self_check.check_once(backend, device, key, lambda: wrong_kernel(backend, step, launch))


def wrong_kernel(backend: Backend, step: Step, launch: "Launch") -> str:
    """Compare the kernel of a launch with torch's operators in float64, on other parameters.

    Returns:
        What is wrong, and what to do; empty if the kernel is right.
    """
    from keyedopt.fused.backends.triton.dense_launch import prepare, run

    step = replace(step, lr=torch.full_like(step.lr, 0.1) if isinstance(step.lr, Tensor) else 0.1, count=2)
    seen, divisor = _problem(launch)
    right = [[one.double() for one in listed] for listed in (seen.params, seen.grads, *seen.states)]
    try:
        for weight, grad, *states in zip(*right, strict=True):
            exact = replace(step, lr=float(step.lr))
            torch_rules.update(exact, weight, grad if divisor is None else grad / divisor, states)
        run(prepare(step, seen, divisor, launch.constants["COLUMNS"]))
        ours = [one for listed in (seen.params, seen.grads, *seen.states) for one in listed]
        if self_check.near(ours, [one for listed in right for one in listed]):
            return ""
        why = "computes wrong results"
    except Exception as error:
        why = f"raised {type(error).__name__}: {error}"
    device = seen.params[0].device
    return self_check.report(backend, "update_dense", why, device, f"{step.algorithm} in torch.float32")


def _problem(launch: "Launch") -> tuple["Dense", Tensor | None]:
    """Return parameters with the alignment, states and counts of others, and a divisor if there is one."""
    from keyedopt.fused.backends.triton.dense_launch import Dense

    generator = torch.Generator().manual_seed(0)  # torch's global generator does not change
    device = launch.dense.params[0].device
    begin = launch.constants["ALIGN"] // 4 % 4

    def numbers(least: float) -> list[Tensor]:
        made = [torch.empty(begin + size).uniform_(least, 1, generator=generator) for size in SIZES]
        return [one.to(device)[begin:] for one in made]

    params, grads = numbers(-1), numbers(-1)
    states = [numbers(0) for _ in launch.dense.states]
    counts = [torch.full_like(count, 2) for count in launch.dense.counts[:1]] * len(SIZES)
    divisor = torch.full((), 3.0, device=device) if launch.constants["SCALED"] else None
    return Dense(params, grads, states, counts), divisor
