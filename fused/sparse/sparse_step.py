"""Gradients that list rows: checked, and handed to a backend, which sums duplicates and updates in one go."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import choose, first
from keyedopt.fused.backends.interface import Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.table_views import PackedRows, TableViews
from keyedopt.fused.bulk import native
from keyedopt.fused.dense import dense_step
from keyedopt.reference.rules.options import Rows

# --- checks ---------------------------------------------------------------------------------------


def check_gradient(param: Tensor, finite: bool) -> None:
    """Refuse a gradient that no algorithm can take: layout, rows; on demand, one that is not finite."""
    grad = param.grad
    assert grad is not None
    values = grad
    if grad.layout is torch.sparse_coo:
        if grad.sparse_dim() != 1:
            raise RuntimeError(
                f"a sparse gradient must be so in its rows alone, not {grad.sparse_dim()} ways"
            )
        check_indices(grad._indices(), param.shape)
        values = grad._values()
    elif grad.layout is not torch.strided:
        raise RuntimeError(f"a gradient must be dense or sparse COO, not {grad.layout}")
    if finite:
        check_finite(values)


def check_finite(values: Tensor) -> None:
    """Refuse infinity and NaN, with a RuntimeError."""
    if not values.isfinite().all():
        raise RuntimeError("a gradient is not finite, and error_if_nonfinite asks to refuse it")


def check_indices(indices: Tensor, sizes: Sequence[int]) -> None:
    """Refuse indices (dimensions, N) of a sparse gradient that are not in a parameter, with a ValueError."""
    if not indices.numel():
        return
    found: Any = False if native is None else native.outside(indices, tuple(sizes))
    if found is None:
        return
    if found:
        size, bad = found
        raise ValueError(f"indices of the gradient must be in [0, {size}), and {bad} is not")
    if indices.shape[0] == 1:  # of all elements is faster than by dimension
        lowest, highest = torch.aminmax(indices)
        both = (lowest, highest) if indices.device.type == "cpu" else torch.stack((lowest, highest)).tolist()
        extremes = [(int(both[0]), int(both[1]))]
    else:
        least, most = torch.aminmax(indices, dim=1)
        extremes = list(zip(least.tolist(), most.tolist(), strict=True))
    for (low, high), size in zip(extremes, sizes, strict=False):
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise ValueError(f"indices of the gradient must be in [0, {size}), and {bad} is not")


# --- updates --------------------------------------------------------------------------------------


def update(step: Step, work: Sequence[dense_step.Work], names: Sequence[str], which: Rows) -> None:
    """Update parameters of one group, in place, by gradients that are sparse or of some rows only.

    Args:
        step: the formula; its count is that of all of them.
        work: parameters, gradients, and states by name.
        names: the state tensors, as `ALGORITHMS` orders them.
        which: the rows to update: those given, all, or those whose gradient is not all zero.
    """
    if which is Rows.GIVEN and _update_at_once(step, work, names):
        return
    alike: dict[tuple[torch.device, torch.dtype], list[dense_step.Work]] = {}
    for item in work:
        if item[0].shape[:1].numel():  # a rank may hold no row of a table
            alike.setdefault((item[0].device, item[0].dtype), []).append(item)
    for same in alike.values():
        _update_alike(step, same, names, which)


def _update_at_once(step: Step, work: Sequence[dense_step.Work], names: Sequence[str]) -> bool:
    """Have the first backend do it in one call, if all is as it mostly is; else nothing is written."""
    backend = first(work[0][0].device) if work else None
    if backend is None:
        return False
    for _, grad, state in work:
        count = state.get("step")
        if not grad.is_sparse or (isinstance(count, Tensor) and count.ndim):
            return False
    return backend.update_listed(work, names, step)


def _update_alike(step: Step, work: Sequence[dense_step.Work], names: Sequence[str], which: Rows) -> None:
    """Update parameters of one device and dtype."""
    views = [TableViews(step.algorithm, param, state, names, _listing(grad)) for param, grad, state in work]
    tables = [view.table for view in views]
    lookups = [listed(index, grad) for index, (_, grad, _) in enumerate(work) if grad.is_sparse]
    packs = _pack([view.unusual for view in views], tables, lookups)
    backend = choose("auto", tables, step)
    if which is Rows.GIVEN:
        backend.update(tables, lookups, step)
    else:
        found = backend.coalesce(tables, lookups)
        if which is Rows.ALL:
            spread = []
            for one in found:
                rows = packs[one.table].rows[one.rows] if one.table in packs else one.rows
                spread.append(_spread(work[one.table], RowGradients(one.table, rows, one.grads)))
            dense_step.update(step, spread, names)
            return
        for index, (_, grad, _) in enumerate(work):
            if not grad.is_sparse:
                every = torch.arange(len(tables[index].weight), device=grad.device)
                found.append(RowGradients(index, every, grad.reshape(tables[index].weight.shape)))
        backend.update_rows(tables, [_nonzero(one) for one in found], step)
    for pack in packs.values():
        pack.write_back()
    for view in views:
        view.write_back()


def _pack(unusual: Sequence[bool], tables: list[Table], lookups: list[Lookup]) -> dict[int, PackedRows]:
    """Put copies of the rows in question in place of tables that no kernel takes, and of lookups in these."""
    packs: dict[int, PackedRows] = {}
    places = {lookup.table: place for place, lookup in enumerate(lookups)}
    for index, packed in enumerate(unusual):
        if not packed:
            continue
        if index in places:
            lookup = lookups[places[index]]
            packs[index] = PackedRows(tables[index], lookup.values)
            lookups[places[index]] = replace(lookup, values=packs[index].places)
        else:  # a gradient of every row
            weight = tables[index].weight
            packs[index] = PackedRows(tables[index], torch.arange(len(weight), device=weight.device))
        tables[index] = packs[index].table
    return packs


def _listing(grad: Tensor) -> int:
    """Return how many of a gradient's dimensions list rows."""
    return grad.sparse_dim() if grad.is_sparse else 1


def listed(table: int, grad: Tensor) -> Lookup:
    """Return row numbers (N,) and their gradients (N, D) as a lookup without pooling.

    What is listed in several dimensions is numbered through, as the table of `TableViews` is.
    """
    indices, values = grad._indices(), grad._values()
    if indices.shape[0] == 1 and values.ndim == 2:
        return Lookup(table, indices[0], grad=values)
    if indices.shape[0] == 1:
        rows = indices[0]
    else:
        rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
        for size, index in zip(grad.shape, indices, strict=False):
            rows = rows * size + index
    return Lookup(table, rows, grad=values.reshape(rows.shape[0], grad.shape[indices.shape[0] :].numel()))


def divided(grad: Tensor, scale: Tensor) -> Tensor:
    """Return a gradient divided by a scale of one number."""
    scale = scale.to(grad.device)
    if not grad.is_sparse:
        return grad / scale
    values = grad._values() / scale
    return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False)


def _spread(work: dense_step.Work, found: RowGradients) -> dense_step.Work:
    """Give every row a gradient: zero, where none is listed."""
    param, _, state = work
    grad = found.grads.new_zeros(len(param), found.grads.shape[1]).index_copy_(0, found.rows, found.grads)
    return param, grad.reshape(param.shape), state


def _nonzero(given: RowGradients) -> RowGradients:
    """Keep the rows whose gradient is not all zero."""
    kept = given.grads.any(dim=1)
    return RowGradients(given.table, given.rows[kept], given.grads[kept])
