"""Launches of the kernels: arguments, grids and constants for a group of tables, its runs and gradients."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup, RowGradients, Step
from keyedopt.fused.backends.triton import chunks, forward
from keyedopt.fused.backends.triton.collect import collect, count_runs
from keyedopt.fused.backends.triton.device_buffers import (
    alignment,
    columns_for,
    pack_rows,
    step_buffer,
    to_device,
)
from keyedopt.fused.backends.triton.device_flags import error_flag, step_increment
from keyedopt.fused.backends.triton.grads import Grads, pack_grads
from keyedopt.fused.backends.triton.groups import Group, bags_of, blocks
from keyedopt.fused.backends.triton.layout import STEP_FIELDS
from keyedopt.fused.backends.triton.lookup_batch import is_scaled, lookup_buffer, normalized
from keyedopt.fused.backends.triton.prepare import Runs
from keyedopt.fused.backends.triton.sort import REGISTERS
from keyedopt.fused.backends.triton.update import update


def look_up(group: Group, lookups: Sequence[Lookup], outputs: Sequence[Tensor]) -> None:
    """Write the output of each lookup."""
    lookups = [normalized(lookup) for lookup in lookups]
    shape, columns = group.shape, columns_for(len(lookups))
    begins = blocks([bags_of(lookup) for lookup in lookups], shape.rows)
    if not begins[-1]:
        return
    places = [group.places[lookup.table] for lookup in lookups]
    weights = [group.tables[place].weight.data_ptr() for place in places]
    addresses = [out.data_ptr() for out in outputs]
    align = alignment([*weights, *addresses], 16)
    device = group.device
    tables = pack_rows([weights, [group.units[place] for place in places]])
    forward.pool[(begins[-1],)](
        to_device(lookup_buffer(group, lookups, begins), device),
        to_device(tables, device, group.check),
        to_device(addresses, device),
        error_flag(device),
        LOOKUPS=columns,
        WEIGHT=group.weight_dtype,
        ALIGN=align,
        UNIT=group.unit,
        SCALED=is_scaled(lookups),
        ROWS=shape.rows,
        WIDTH=shape.width,
        UNROLL=shape.unroll,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )


def check_offsets(group: Group, lookups: Sequence[Lookup]) -> None:
    """Set the error flag if offsets are invalid; no other kernel reads them."""
    lookups = [normalized(lookup) for lookup in lookups]
    block = 1024
    begins = blocks([bags_of(lookup) + 1 for lookup in lookups], block)
    buffer = to_device(lookup_buffer(group, lookups, begins), group.device)
    columns = columns_for(len(lookups))
    forward.check_offsets[(begins[-1],)](
        buffer, error_flag(group.device), LOOKUPS=columns, BLOCK=block, num_warps=4, maxnreg=64
    )


def count_up(counters: Sequence[Tensor]) -> None:
    """Add 1 to step counts, each (1,) int64, unless the error flag is set."""
    if counters:
        torch._foreach_add_(list(counters), [step_increment(counters[0].device)] * len(counters))


def run_chunks(
    group: Group, runs: Runs, grads: Grads, tables: Tensor, counters: Sequence[Tensor] = ()
) -> tuple[Tensor, int, int]:
    """Sum the chunks of long runs, and add 1 to step counts.

    Returns:
        The sums, the number of chunks, and the logarithm of the length of a chunk.
    """
    shape, device = group.shape, group.device
    chunk = runs.tuning.chunk_for(runs.count, shape.width)
    number, log = runs.count // chunk, chunk.bit_length() - 1
    folds = number >> runs.tuning.fold
    partials = torch.empty(max(number + folds, 1), 2, shape.width, dtype=torch.float32, device=device)
    constants = {
        "TABLES": group.columns,
        "UNIT": group.unit,
        "ROWS": shape.rows,
        "WIDTH": shape.width,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
    }
    if number:
        chunks.sum_chunks[(-(-number // shape.rows),)](
            error_flag(device),
            runs.keys,
            runs.places,
            runs.places if runs.scales is None else runs.scales,
            tables,
            grads.buffer,
            partials,
            to_device(pack_rows([[one.data_ptr() for one in counters]], begins=()), device),
            number,
            log,
            runs.shift,
            LOOKUPS=columns_for(runs.lookups),
            **grads.constants,
            SCALED=runs.scales is not None,
            COUNTERS=columns_for(len(counters)) if counters else 0,
            UNROLL=shape.unroll,
            **constants,
        )
    else:
        count_up(counters)
    if folds:
        chunks.fold_chunks[(-(-folds // shape.rows),)](
            error_flag(device), runs.keys, tables, partials, number, log, FOLD=runs.tuning.fold, **constants
        )
    return partials, number, log


def step_constants(group: Group, step: Step) -> dict[str, Any]:
    """Return the constants of the rule."""
    algorithm = "adam" if step.algorithm == "sparse_adam" else step.algorithm
    kinds = group.kinds
    return {
        "FIRST": kinds[0],
        "SECOND": kinds[1],
        "COUNTED": group.tables[0].row_counter is not None,
        "ALGORITHM": algorithm,
        "STATES": len(group.tables[0].states),
        "DECAY": step.decay if step.weight_decay else "none",
        "BEFORE": step.eps_placement == "before_bias_correction",
        "LIMITED": step.max_norm is not None,
        "MAXIMIZE": step.maximize,
        "RANDOM": step.seed is not None and group.tables[0].weight.dtype is not torch.float32,
    }


def scalar(value: Any, buffer: Tensor, name: str) -> Tensor:
    """Return a number of the step as a tensor on the device: the given tensor, or a view of the buffer."""
    if isinstance(value, Tensor) and value.device == buffer.device:
        return value.detach()
    return buffer[STEP_FIELDS.index(name) :].view(torch.float64)


def run_update(group: Group, runs: Runs, grads: Sequence[Tensor], step: Step) -> None:
    """Update the rows of the runs; without runs, the row of every position."""
    summed, shape = runs.starts is None, group.shape
    packed = pack_grads(grads, group)
    tables, row_align, align = group.buffer()
    partials, number, log = packed.tensors[0], 0, 0
    if summed:
        count_up(step.counters)
    else:
        partials, number, log = run_chunks(group, runs, packed, tables, step.counters)
    buffer = to_device(step_buffer(step, group.device), group.device)
    none = runs.keys
    update[(-(-runs.count // runs.tuning.block),)](
        error_flag(group.device),
        runs.keys,
        runs.places,
        none if runs.scales is None else runs.scales,
        none if runs.starts is None else runs.starts,
        none if runs.counts is None else runs.counts,
        none if runs.ends is None else runs.ends,
        partials,
        tables,
        packed.buffer,
        buffer,
        scalar(step.lr, buffer, "lr"),
        scalar(step.count, buffer, "count"),
        runs.count,
        runs.shift,
        number,
        log,
        SUMMED=summed,
        TABLES=group.columns,
        LOOKUPS=columns_for(runs.lookups),
        WEIGHT=group.weight_dtype,
        ALIGN=align,
        UNIT=group.unit,
        ROW_ALIGN=row_align,
        **packed.constants,
        SCALED=runs.scales is not None,
        **step_constants(group, step),
        FOLD=runs.tuning.fold,
        BLOCK=runs.tuning.block,
        ROWS=shape.rows,
        WIDTH=shape.width,
        UNROLL=shape.unroll,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )


def run_collect(
    group: Group, runs: Runs, grads: Sequence[Tensor], capacities: Sequence[int] | None
) -> list[RowGradients]:
    """Return the sums of every table.

    Args:
        group: the tables.
        runs: of what was looked up in them.
        grads: of the outputs of the lookups.
        capacities: rows of each table for which memory is allocated; None for the exact numbers, which
            synchronizes.
    """
    assert runs.counts is not None
    shape, device = group.shape, group.device
    packed = pack_grads(grads, group)
    # Zeros, because sizes are read from it below, also if kernels are only compiled.
    bases, firsts = group.bases, torch.zeros(group.columns + 1, dtype=torch.int64, device=device)
    before = torch.zeros(len(runs.counts) + 1, dtype=torch.int64, device=device)
    torch.cumsum(runs.counts, 0, dtype=torch.int64, out=before[1:])
    begins = to_device(pack_rows([bases[:-1]]), device)
    count_runs[(1,)](
        runs.keys,
        runs.starts,
        runs.counts,
        before,
        begins,
        firsts,
        runs.count,
        runs.count.bit_length(),
        TABLES=group.columns,
        BLOCK=runs.tuning.block,
        num_warps=1,
        maxnreg=REGISTERS,
    )
    if capacities is None:
        edges = firsts.tolist()
        edges = [*edges[: len(group.tables)], edges[-1]]
        capacities = [end - begin for begin, end in pairwise(edges)]
    rows, sums = allocate_sums(capacities, group)
    align = alignment([one.data_ptr() for one in sums], 16)
    columns = [
        bases[:-1],
        group.units,
        [one.data_ptr() for one in sums],
        [one.data_ptr() for one in rows],
        group.heights,
    ]
    tables = to_device(pack_rows(columns), device)
    partials, number, log = run_chunks(group, runs, packed, tables)
    collect[(len(runs.counts),)](
        error_flag(device),
        runs.keys,
        runs.places,
        runs.keys if runs.scales is None else runs.scales,
        runs.starts,
        runs.counts,
        runs.ends,
        partials,
        tables,
        packed.buffer,
        before,
        firsts,
        runs.shift,
        number,
        log,
        TABLES=group.columns,
        LOOKUPS=columns_for(runs.lookups),
        **packed.constants,
        ALIGN=align,
        UNIT=group.unit,
        SCALED=runs.scales is not None,
        FOLD=runs.tuning.fold,
        BLOCK=runs.tuning.block,
        ROWS=shape.rows,
        WIDTH=shape.width,
        UNROLL=shape.unroll,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )
    return [RowGradients(*one) for one in zip(group.numbers, rows, sums, strict=True)]


def allocate_sums(capacities: Sequence[int], group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Return padding row numbers (U,) and zero sums (U, D) for each table, as views of two tensors."""
    ends = list(accumulate(capacities, initial=0))
    sizes = [-(-count * width // 4) * 4 for count, width in zip(capacities, group.widths, strict=True)]
    begins = list(accumulate(sizes, initial=0))  # aligned to 16 bytes
    every = torch.full((ends[-1],), -1, dtype=torch.int64, device=group.device)
    numbers = torch.zeros(begins[-1], dtype=torch.float32, device=group.device)
    rows = [every[begin:end] for begin, end in pairwise(ends)]
    parts = zip(begins, capacities, group.widths, strict=False)
    return rows, [numbers[begin : begin + u * d].view(u, d) for begin, u, d in parts]
