"""Steps with dense gradients: by fused kernels if possible, else by torch operators on parts of a tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from keyedopt.fused.backends import choose, described, torch_rules
from keyedopt.fused.backends.interface import Backend, RowGradients, Step
from keyedopt.fused.backends.parameter_tables import ParameterTable
from keyedopt.fused.dense import fused_kernels, triton_dense_steps
from keyedopt.fused.dense.fused_kernels import Work

__all__ = ["Work", "update"]

#: The algorithms whose formula has no sum over a row, so that shards of columns can be updated on their own.
ELEMENTWISE = ("sgd", "adagrad", "adam", "ftrl")
#: The number of elements that each thread updates at a time, so that they stay in its cache.
PIECE = 1 << 15


def update(step: Step, work: Sequence[Work], names: Sequence[str], scale: Tensor | None = None) -> None:
    """Update parameters with dense gradients, in place.

    Args:
        step: the formula. Its count holds for all parameters, unless it is a tensor: then each has its own.
        work: parameters, gradients of the same shape, and states by name.
        names: the state tensors, as `ALGORITHMS` orders them.
        scale: the divisor of all gradients, a tensor of one number. Some kernels overwrite gradients.
    """
    together: dict[tuple[torch.device, torch.dtype], list[Work]] = {}
    local = [_local(step, item, names) for item in work]
    for item in triton_dense_steps.update(step, local, names, scale):
        if not fused_kernels.refuses(step, item, names, scale):
            together.setdefault((item[0].device, item[0].dtype), []).append(item)
        elif not _update_as_table(step, item, names, scale):
            _update_one(step, item, names, scale)
    for same in together.values():
        fused_kernels.update(step, same, names, scale)


def explain(step: Step, item: Work, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return what updates a parameter with a dense gradient, and why nothing faster does.

    On the CPU this may update the item, which is not sharded.
    """
    reasons = {}
    if item[0].device.type in triton_dense_steps.DEVICES:
        wrong = triton_dense_steps.refuses(step, item, names)
        if not wrong:
            return triton_dense_steps.KERNEL, {}
        reasons[triton_dense_steps.KERNEL] = wrong
    refused = fused_kernels.refuses(step, item, names, None)
    if not refused:
        runs, others = fused_kernels.explain(step, item, names)
        return runs, reasons | others
    reasons["a fused kernel of torch"] = refused
    found = _table_backend(step, item, names)
    if isinstance(found, str):
        return "torch's operators", reasons | {"kernels for rows": found}
    return described(found[1]), reasons


def _local(step: Step, item: Work, names: Sequence[str]) -> Work:
    """Return the local shards of a DTensor if they can be updated separately, else the DTensor."""
    param, grad, state = item
    if not isinstance(param, DTensor):
        return item
    placements = param.placements
    if isinstance(grad, DTensor) and grad.placements != placements:
        grad = grad.redistribute(placements=placements)
    parts = [grad, *(state[name] for name in names)]
    if "step" in state and state["step"].ndim:
        parts.append(state["step"])
    if not is_local(step, param, parts):
        return param, grad, state  # torch's operators on DTensors do the collectives
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    here: Any = grad
    return param.to_local(), here.to_local(), local


def is_local(step: Step, param: DTensor, parts: Iterable[Any]) -> bool:
    """Return whether each rank updates its shard of a parameter and of the parts, gradient and states."""
    kinds = zip(param.placements, param.device_mesh.shape, strict=True)
    cut = any(kind.is_shard(1) and size > 1 for kind, size in kinds)
    alike = all(_spread_alike(part, param) for part in parts)
    return alike and not (cut and step.algorithm not in ELEMENTWISE)


def _spread_alike(part: Any, param: DTensor) -> bool:
    """Return whether a tensor has the same placements as the parameter."""
    if not isinstance(part, DTensor):
        return False
    kinds = zip(part.placements, param.placements, param.device_mesh.shape, strict=True)
    return all(one == other or size == 1 for one, other, size in kinds)


def _update_as_table(step: Step, item: Work, names: Sequence[str], scale: Tensor | None) -> bool:
    """Update a table on the CPU by a kernel for rows, in one pass; return False if there is none."""
    found = _table_backend(step, item, names)
    if isinstance(found, str):
        return False
    (view, backend), (param, grad, _) = found, item
    grad = grad if scale is None else grad.div_(scale)
    backend.update_rows([view.table], [RowGradients(0, torch.arange(len(param)), grad)], step)
    view.write_back()
    return True


def _table_backend(step: Step, item: Work, names: Sequence[str]) -> tuple[ParameterTable, Backend] | str:
    """Return a table on the CPU and the backend with a kernel for its rows, or why there is none."""
    param, grad, state = item
    if isinstance(param, DTensor) or param.device.type != "cpu" or param.ndim != 2:
        return "they are for tables (rows, width) on the CPU"
    if not param.numel() or not grad.is_contiguous():
        return "the table is empty, or its gradient not contiguous"
    view = ParameterTable(step.algorithm, param, state, names)
    backend = choose("auto", [view.table], step)
    if backend.copies_rows:
        return f"backend {backend.name!r}, which supports the table, would copy every row"
    return view, backend


def _update_one(step: Step, item: Work, names: Sequence[str], scale: Tensor | None) -> None:
    """Update a parameter by `torch_rules`, with as many rows at a time as fit in the cache."""
    param, grad, state = item
    if scale is not None:
        grad = grad / scale if 0 in grad.stride() else grad.div_(scale)
    counts: Tensor | None = state.get("step")
    if counts is not None and not counts.ndim:
        step = replace(step, count=counts) if isinstance(step.count, Tensor) else step
        counts = None
    tensors = [param, grad, *(state[name] for name in names), *([] if counts is None else [counts])]
    if isinstance(param, DTensor) and param.shape[-1:] == (1,) and _is_sharded(param, param.ndim - 1):
        _update_column(step, tensors, counts is not None)
        return
    rows = len(param) if param.ndim else 1
    piece = max(1, PIECE * torch.get_num_threads() * rows // max(1, param.numel()))
    pieces: list[Any] = [tensors]
    if rows > piece and param.device.type == "cpu" and not isinstance(param, DTensor):
        pieces = list(zip(*(tensor.split(piece) for tensor in tensors), strict=True))
    for index, (weight, g, *states) in enumerate(pieces):
        count = None if counts is None else states.pop()
        one = step if step.seed is None else replace(step, seed=step.seed + index)
        torch_rules.update(one, weight, g, states, count)


def _is_sharded(tensor: DTensor, dim: int) -> bool:
    return any(placement.is_shard(dim) for placement in tensor.placements)


def _update_column(step: Step, tensors: Sequence[Any], has_counts: bool) -> None:
    """Update a DTensor of one column, as a copy on each rank.

    DTensor does not broadcast a value for each row, in place, to a dimension of size 1 that is sharded.
    """
    copies = [tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim) for tensor in tensors]
    weight, grad, *states = copies
    torch_rules.update(step, weight, grad, states, states.pop() if has_counts else None)
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy.redistribute(placements=tensor.placements))
