"""Steps of our optimizers on the CPU as they mostly are, in little Python; all others go the general way.

A step of a small model is over in microseconds. In that of a large one nothing of an optimizer is left in the
caches, so that every line of Python waits for memory.
"""

import math
import os
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import first
from keyedopt.fused.backends.interface import ALGORITHMS
from keyedopt.fused.backends.native import INSTRUCTION_SET, NativeBackend
from keyedopt.fused.backends.native.describe import describe_options
from keyedopt.fused.dense.cpu_dense_steps import ALGORITHMS as NUMBERS
from keyedopt.fused.dense.cpu_dense_steps import extension

_CPU = torch.device("cpu")
_TINY = torch.finfo(torch.float32).tiny
#: A group, and of its parameters that have a gradient: these, their gradients, and their states by name.
Part = tuple[dict[str, Any], list[Tensor], list[Tensor], list[list[Any]]]


def step(optimizer: Any) -> bool:
    """Do a whole step, or nothing.

    Args:
        optimizer: a `RowOptimizer`; those whose class says itself that it is `quick` may be.

    Returns:
        Whether it is done. If not, because something is unusual or wrong, nothing is written.
    """
    native = extension()
    if native is None or "quick" not in vars(type(optimizer)) or hasattr(optimizer, "grad_scale"):
        return False
    algorithm, state, parts = optimizer.algorithm, optimizer.state, []
    for group in optimizer.param_groups:
        if group["rows"] != "given" or group["error_if_nonfinite"]:
            return False
        if any(type(group.get(name, "")) is not str for name in ("decay", "eps_placement")):
            return False  # an enumeration's member
        if algorithm != "sgd":
            names = (*ALGORITHMS[algorithm], "step")
        else:
            names = ("momentum_buffer",) if group["momentum"] else ()
        found = native.gathered(group["params"], state, names)
        if found is None:
            return False
        if found[0]:
            parts.append((group, *found))
    if not parts:
        return False
    return _sparse(optimizer, parts) if parts[0][2][0].is_sparse else _dense(algorithm, parts)


def _dense(algorithm: str, parts: list[Part]) -> bool:
    described, written = [], []
    for group, params, grads, states in parts:
        options = _options(algorithm, group)
        if options is None:
            return False
        counts: Any = 1.0 if algorithm == "sgd" else states[-1]
        described.append((options, params, grads, states if algorithm == "sgd" else states[:-1], counts))
        written += [params, *states]
    if not extension().step(described, torch.get_num_threads(), os.environ.get(INSTRUCTION_SET, "")):
        return False
    torch.autograd.graph.increment_version(chain.from_iterable(written))
    return True


def _options(algorithm: str, group: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return options as the kernels for dense gradients take them; None if their formula is another one."""
    number, get, lr = NUMBERS.get(algorithm), group.get, _rate(group)
    if number is None or lr is None or get("eps_placement", "inside_denominator") != "inside_denominator":
        return None
    if algorithm != "sgd" and group["eps"] <= _TINY:  # 0 / 0 is NaN there
        return None
    decay = group["decay"]
    if algorithm != "adam" and decay == "decoupled" and group["weight_decay"]:
        return None  # rounded otherwise
    return (
        *(number, group["maximize"], decay == "decoupled", get("nesterov", False), False),
        *(1.0, math.inf, lr, *get("betas", (0.9, 0.999)), get("eps", 0.0)),
        0.0 if decay == "none" else group["weight_decay"],
        *(get("momentum", 0.0), get("dampening", 0.0), get("lr_decay", 0.0)),
    )


def _rate(group: dict[str, Any]) -> float | None:
    """Return the rate, or None where it is on a device: to read it there would wait."""
    lr = group["lr"]
    return float(lr) if not isinstance(lr, Tensor) or lr.is_cpu else None


def _sparse(optimizer: Any, parts: list[Part]) -> bool:
    native, backend = extension(), first(_CPU)
    listed = [param for _, params, _, _ in parts for param in params]
    if not isinstance(backend, NativeBackend) or len(set(map(id, listed))) != len(listed):
        return False
    plans: list[Any] = []
    for group, params, grads, states in parts:
        lr = _rate(group)
        if lr is None or not all(grad.is_sparse for grad in grads):
            return False
        indices, values = [grad._indices() for grad in grads], [grad._values() for grad in grads]
        for param, rows in zip(params, indices, strict=True):
            if native.outside(rows, tuple(param.shape)) is not None:
                return False
        counts = states.pop() if optimizer.algorithm != "sgd" else []
        if any(isinstance(count, Tensor) and count.ndim for count in counts):
            return False  # one a row
        before = {int(count) for count in counts}
        described = native.listed(params, states, indices, values)
        if described is None or len(before) > 1:
            return False
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
    return True
