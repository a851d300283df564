"""Steps with sparse gradients: a backend sums duplicates and updates the rows in one call."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyedopt.fused.backends import choose, first
from keyedopt.fused.backends.interface import Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.parameter_tables import PackedRows, ParameterTable
from keyedopt.fused.dense import dense_step
from keyedopt.reference.rules.options import Rows


def conditions(grad: Tensor, finite: bool) -> list[Tensor]:
    """Return flags on the device of a gradient: all are true if it can be used, finite if it has to be."""
    values, flags = grad, []
    if grad.is_sparse:
        values = grad._values()
        if grad._indices().numel():
            low, high = torch.aminmax(grad._indices(), dim=1)
            flags = [low.amin() >= 0, *(one < size for one, size in zip(high, grad.shape, strict=False))]
    return [*flags, values.isfinite().all()] if finite else flags


def update(step: Step, work: Sequence[dense_step.Work], names: Sequence[str], which: Rows) -> None:
    """Update parameters of one group, in place, with gradients that are sparse or have rows of zeros to skip.

    Args:
        step: the formula; its count is that of all parameters.
        work: parameters, gradients, and states by name.
        names: the state tensors, as `ALGORITHMS` orders them.
        which: the rows to update.
    """
    if which is Rows.GIVEN and _update_at_once(step, work, names):
        return
    alike: dict[tuple[torch.device, torch.dtype], list[dense_step.Work]] = {}
    for item in work:
        if item[0].shape[:1].numel():  # a rank may have no row of a table
            alike.setdefault((item[0].device, item[0].dtype), []).append(item)
    for same in alike.values():
        _update_alike(step, same, names, which)


def _update_at_once(step: Step, work: Sequence[dense_step.Work], names: Sequence[str]) -> bool:
    """Update in one call of the first backend, if it accepts all parameters; else write nothing."""
    backend = first(work[0][0].device)
    if backend is None:
        return False
    for _, grad, state in work:
        count = state.get("step")
        if not grad.is_sparse or (isinstance(count, Tensor) and count.ndim):
            return False
    return backend.update_listed(work, names, step)


def _update_alike(step: Step, work: Sequence[dense_step.Work], names: Sequence[str], which: Rows) -> None:
    """Update parameters of one device and dtype."""
    views = [
        ParameterTable(step.algorithm, param, state, names, grad.sparse_dim() if grad.is_sparse else 1)
        for param, grad, state in work
    ]
    tables = [view.table for view in views]
    lookups = [_as_lookup(index, grad) for index, (_, grad, _) in enumerate(work) if grad.is_sparse]
    packs = _pack([view.is_strided for view in views], tables, lookups)
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
        backend.update_rows(tables, [nonzero(one) for one in found], step)
    for pack in packs.values():
        pack.write_back()
    for view in views:
        view.write_back()


def _pack(strided: Sequence[bool], tables: list[Table], lookups: list[Lookup]) -> dict[int, PackedRows]:
    """Replace strided tables, and the lookups in them, by contiguous copies of the listed rows."""
    packs: dict[int, PackedRows] = {}
    places = {lookup.table: place for place, lookup in enumerate(lookups)}
    for index, packed in enumerate(strided):
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


def _as_lookup(table: int, grad: Tensor) -> Lookup:
    """Return the rows (N,) that a gradient lists, and their gradients (N, D), as a lookup without pooling.

    Indices in several dimensions become row numbers of the table of `ParameterTable`.
    """
    indices, values = grad._indices(), grad._values()
    if indices.shape[0] == 1 and values.ndim == 2:
        return Lookup(table, indices[0], grad=values)
    rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for size, index in zip(grad.shape, indices, strict=False):
        rows = rows * size + index
    return Lookup(table, rows, grad=values.reshape(rows.shape[0], grad.shape[indices.shape[0] :].numel()))


def _spread(work: dense_step.Work, found: RowGradients) -> dense_step.Work:
    """Return work with a gradient for every row: zero unless the row is listed."""
    param, _, state = work
    grad = found.grads.new_zeros(len(param), found.grads.shape[1]).index_copy_(0, found.rows, found.grads)
    return param, grad.reshape(param.shape), state


def nonzero(given: RowGradients) -> RowGradients:
    """Return the rows whose gradient is not all zero."""
    kept = given.grads.any(dim=1)
    return RowGradients(given.table, given.rows[kept], given.grads[kept])
