"""Checks and preparation of the parameters, gradients and loaded state of SparseAdam."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.rules import coalesce


def check_parameters(params: list[Any]) -> None:
    """Raise ValueError, saying where, if a parameter is sparse, complex or listed twice."""
    seen: list[Tensor] = []
    for index, param in enumerate(params):
        tensor = param[1] if isinstance(param, tuple) and len(param) == 2 else param
        if not isinstance(tensor, Tensor):
            continue  # torch's error is clear
        if tensor.layout is not torch.strided or tensor.is_complex():
            raise ValueError(f"params[{index}] must be dense and real, not {tensor.layout} of {tensor.dtype}")
        if any(tensor is other for other in seen):
            raise ValueError(f"params[{index}] is listed twice: every step would update it twice")
        seen.append(tensor)


def sum_listed(grad: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the distinct indices that a sparse gradient lists, and the sums of the values at each."""
    sizes = grad.shape[: grad.sparse_dim()]
    positions = torch.zeros(grad._nnz(), dtype=torch.int64, device=grad.device)
    for size, indices in zip(sizes, grad._indices(), strict=True):
        positions = positions * size + indices
    positions, sums = coalesce(positions, grad._values())
    if not sizes:  # a single number
        return (), sums.sum(0)
    return tuple(torch.unravel_index(positions, sizes)), sums


def copy_state(param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a parameter.

    Raises:
        ValueError: its names, shapes or dtypes do not match the parameter.
    """
    if not entry:
        return {}
    if set(entry) != {"step", "exp_avg", "exp_avg_sq"}:
        raise ValueError(f"the state of a parameter must be step, exp_avg, exp_avg_sq, not {sorted(entry)}")
    step = float(entry["step"])
    if not (math.isfinite(step) and step >= 0 and step == int(step)):
        raise ValueError(f"step must be a whole number of at least 0, not {entry['step']!r}")
    copied: dict[str, Any] = {"step": int(step)}
    for name in ("exp_avg", "exp_avg_sq"):
        value = entry[name]
        if not isinstance(value, Tensor) or value.shape != param.shape or value.dtype != param.dtype:
            got = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be {param.dtype} of {tuple(param.shape)}, not {got}")
        copied[name] = value.detach().clone(memory_format=torch.preserve_format)
    return copied
