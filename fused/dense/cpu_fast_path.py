"""Common steps on the CPU with little Python; the general path does all other steps.

Python takes most of the time of a step of a small model. After the forward and backward pass of a large model
the caches contain nothing of the optimizer, so each line of Python is slow.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import first
from keyedopt.fused.backends.interface import ALGORITHMS
from keyedopt.fused.backends.native import NativeBackend
from keyedopt.fused.backends.native.describe import describe_options
from keyedopt.fused.dense import cpu_dense_steps
from keyedopt.fused.dense.cpu_dense_steps import NOT_BUILT, REFUSED, extension
from keyedopt.fused.extensions import warn_if_missing
from keyedopt.reference.saved_groups import TORCH_OPTIONS

_CPU = torch.device("cpu")
_TINY = torch.finfo(torch.float32).tiny
#: A group, its parameters that have a gradient, their gradients, and lists of their states by name.
Part = tuple[dict[str, Any], list[Tensor], list[Tensor], list[list[Any]]]


def try_step(optimizer: Any) -> str:
    """Do the step of a `RuleOptimizer` and return "", or write nothing and return why the step is not done.

    Reasons are an option, a tensor or a class without support, and a step that will raise an error. A class
    must set `has_fast_path` in its own body, because a subclass may extend any method.
    """
    native = extension()
    if native is None:
        warn_if_missing()
        return NOT_BUILT
    if "has_fast_path" not in vars(type(optimizer)):
        return "the class has no fast path"
    if hasattr(optimizer, "grad_scale"):
        return "clipping scales the gradients"
    algorithm, state, parts = optimizer.algorithm, optimizer.state, []
    for group in optimizer.param_groups:
        if group["rows"] != "given" or group["error_if_nonfinite"]:
            return "it supports neither error_if_nonfinite nor rows other than 'given'"
        if any(type(group.get(name, "")) is not str for name in ("decay", "eps_placement")):
            return "an option is a member of an enumeration, not its value"
        if not group.keys().isdisjoint(TORCH_OPTIONS):
            return "an option was set by its name in torch"
        if algorithm != "sgd":
            names = (*ALGORITHMS[algorithm], "step")
        else:
            names = ("momentum_buffer",) if group["momentum"] else ()
        found = native.gathered(group["params"], state, names)
        if found is None:
            return "a parameter has no state yet, or is not a plain tensor"
        if found[0]:
            parts.append((group, *found))
    if not parts:
        return "no parameter has a gradient"
    return _sparse(optimizer, parts) if parts[0][2][0].is_sparse else _dense(algorithm, parts)


def _dense(algorithm: str, parts: list[Part]) -> str:
    described, written = [], []
    for group, params, grads, states in parts:
        options = _options(algorithm, group)
        if options is None:
            return "the C++ kernels have another formula for these options, or cannot read the learning rate"
        counts: Any = 1.0 if algorithm == "sgd" else states[-1]
        described.append((options, params, grads, states if algorithm == "sgd" else states[:-1], counts))
        written += [params, *states]
    if not cpu_dense_steps.run(described):
        return REFUSED
    torch.autograd.graph.increment_version(chain.from_iterable(written))
    return ""


def _options(algorithm: str, group: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return options as arguments of the kernels for dense gradients; None if their formula differs."""
    lr = _learning_rate(group)
    if lr is None or algorithm not in cpu_dense_steps.ALGORITHMS:
        return None
    if group.get("eps_placement", "inside_denominator") != "inside_denominator":
        return None
    if algorithm != "sgd" and group["eps"] <= _TINY:  # 0 / 0 is NaN in the kernels
        return None
    if algorithm != "adam" and group["decay"] == "decoupled" and group["weight_decay"]:
        return None  # the kernels round in another order
    return cpu_dense_steps.describe_options(algorithm, group, lr)


def _learning_rate(group: dict[str, Any]) -> float | None:
    """Return the learning rate, or None if it is on a device, where reading it synchronizes."""
    lr = group["lr"]
    return float(lr) if not isinstance(lr, Tensor) or lr.is_cpu else None


def _is_number(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.is_cpu and not count.is_sparse and not count.ndim
    return type(count) is int


def _sparse(optimizer: Any, parts: list[Part]) -> str:
    native, backend = extension(), first(_CPU)
    listed = [param for _, params, _, _ in parts for param in params]
    if not isinstance(backend, NativeBackend):
        return "the first backend for the CPU is not 'native'"
    if len(set(map(id, listed))) != len(listed):
        return "a parameter is listed twice"
    plans: list[Any] = []
    for group, params, grads, states in parts:
        lr = _learning_rate(group)
        if lr is None or not all(grad.is_sparse for grad in grads):
            return "some gradients are dense, or the learning rate is on a device"
        indices, values = [grad._indices() for grad in grads], [grad._values() for grad in grads]
        for param, grad, rows in zip(params, grads, indices, strict=True):
            if grad.shape != param.shape:
                return "a gradient does not have the shape of its parameter"
            if native.outside(rows, tuple(param.shape)) is not None:
                return "a gradient lists rows that it cannot check, or that do not exist"
        counts = states.pop() if optimizer.algorithm != "sgd" else []
        kinds = {(type(count), _is_number(count)) for count in counts}
        if len(kinds) > 1 or not all(number for _, number in kinds):
            return "step counts are not alike, or not one number each on the CPU"
        before = {int(count) for count in counts}
        described = native.listed(params, states, indices, values)
        if described is None:
            return "backend 'native' cannot use these tensors without copies"
        if len(before) > 1:
            return "parameters of one group have different step counts"
        count = max(before, default=0) + 1
        rule = describe_options(optimizer.algorithm, group, lr, count)
        plans.append((described, rule, params, states, counts, count, (indices, values)))
    for described, rule, params, states, counts, count, _ in plans:
        backend.update_described(described[0], described[1], rule)
        torch.autograd.graph.increment_version([*params, *chain.from_iterable(states)])
        if counts and isinstance(counts[0], Tensor):
            torch._foreach_add_(counts, 1)
        elif counts:
            for param in params:
                optimizer.state[param]["step"] = count
    return ""
