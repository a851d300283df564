"""Launches of the kernels: arguments, grids and constants for a group of tables, its runs and gradients."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup, RowGradients, Step
from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.triton import chunks, forward
from keyedopt.fused.backends.triton.collect import collect, count_runs
from keyedopt.fused.backends.triton.device_buffers import (
    alignment,
    columns_for,
    known_on_device,
    pack_rows,
    step_buffer,
    to_device,
)
from keyedopt.fused.backends.triton.device_flags import error_flag, step_increment
from keyedopt.fused.backends.triton.grads import Grads
from keyedopt.fused.backends.triton.groups import DTYPES, Group, bags_of, blocks, number_of
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.layout import STEP_FIELDS
from keyedopt.fused.backends.triton.lookup_batch import is_scaled, lookup_buffer, normalized
from keyedopt.fused.backends.triton.prepare import Runs
from keyedopt.fused.backends.triton.sort import REGISTERS
from keyedopt.fused.backends.triton.update import update

#: Registers of a thread that has a run of a block and a part of a row, at least, for 25 warps on a
#: multiprocessor; a second state needs 16 more, for 21 warps.
RUN_REGISTERS = 80


def look_up(group: Group, lookups: Sequence[Lookup], outputs: Sequence[Tensor]) -> None:
    """Write the output of each lookup."""
    lookups = [normalized(lookup) for lookup in lookups]
    shape, columns = group.shape, columns_for(len(lookups))
    begins = blocks([bags_of(lookup) for lookup in lookups], shape.rows)
    if not begins[-1]:
        return
    places = [group.places[lookup.table] for lookup in lookups]
    weights = [address(group.tables[place].weight) for place in places]
    addresses = [out.data_ptr() for out in outputs]
    units = [group.units[place] for place in places]
    buffer = to_device(lookup_buffer(group, lookups, begins), group.device)
    tables = to_device(pack_rows([weights, units]), group.device, group.check)
    made = to_device(pack_rows([addresses, units], begins=()), group.device)
    align, scaled = alignment([*weights, *addresses], 16), is_scaled(lookups)
    run_pool(group, begins[-1], (buffer, tables, made), columns, align, scaled)


def run_pool(
    group: Group, programs: int, buffers: tuple[Tensor, ...], columns: int, align: int, scaled: bool
) -> None:
    """Launch `forward.pool` with its first arguments and constants."""
    shape = group.shape
    # several lookups with scales would spill 14 registers
    registers = max(shape.registers, 80) if scaled and columns > 1 else shape.registers
    start(
        forward.pool,
        programs,
        (*buffers, error_flag(group.device)),
        (),
        (group.number, columns, align, scaled),
        lambda: {
            "LOOKUPS": columns,
            "WEIGHT": group.weight_dtype,
            "ALIGN": align,
            "SCALED": scaled,
            "UNROLL": shape.unroll,
            **group.tile,
            "maxnreg": registers,
        },
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
    """Add 1 to step counts, each (1,) int64, unless the error flag is set.

    Their versions do not change: the caller has noted the change already, as for counts that kernels write.
    To read a count of an unknown version would synchronize.
    """
    if counters:
        one = step_increment(counters[0].device)
        torch._foreach_add_([count.data for count in counters], [one] * len(counters))


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
    flag, counted = error_flag(device), columns_for(len(counters)) if counters else 0
    if number:
        scaled, addresses = runs.scales is not None, partials
        if counters:
            addresses = to_device(pack_rows([[one.data_ptr() for one in counters]], begins=()), device)
        start(
            chunks.sum_chunks,
            -(-number // shape.rows),
            (
                *(flag, runs.keys, runs.places, runs.scales if scaled else runs.places, tables, grads.buffer),
                *(partials, addresses),
            ),
            (number, log, runs.shift),
            (group.number, runs.kinds, grads.key, counted),
            lambda: {
                "TABLES": group.columns,
                "LOOKUPS": columns_for(runs.lookups),
                **grads.constants,
                "SCALED": scaled,
                "COUNTERS": counted,
                "UNROLL": shape.unroll,
                **group.tile,
            },
        )
    else:
        count_up(counters)
    if folds:
        start(
            chunks.fold_chunks,
            -(-folds // shape.rows),
            (flag, runs.keys, tables, partials),
            (number, log),
            (group.number, runs.kinds, runs.tuning.fold),
            lambda: {"TABLES": group.columns, "FOLD": runs.tuning.fold, **group.tile},
        )
    return partials, number, log


def step_constants(group: Group, step: Step) -> dict[str, Any]:
    """Return the constants of the rule."""
    algorithm = "adam" if step.algorithm == "sparse_adam" else step.algorithm
    kinds = group.kinds
    return {
        "FIRST": kinds[0],
        "STATE": DTYPES[group.tables[0].states[0].dtype if kinds[0] == "full" else torch.float32],
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


class StepArguments(NamedTuple):
    """What kernels read of a step.

    Args:
        tensors: the buffer of the step, its learning rate and its count: the given tensors, or views of the
            buffer.
        key: a number that determines dtype and alignment of the tensors, and the constants.
        constants: of the rule.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    key: int
    constants: dict[str, Any]


def step_arguments(group: Group, step: Step) -> StepArguments:
    """Return what kernels read of a step."""
    known = group.known.get("step")
    if known is None or known[0] is not step:
        constants = step_constants(group, step)
        given = [one if isinstance(one, Tensor) else None for one in (step.lr, step.count)]
        here = [one is not None and one.device == group.device for one in given]
        known = step, tuple(step_buffer(step, group.device)), given, here, constants
        if all(one is None or own for one, own in zip(given, here, strict=True)):
            group.known["step"] = known  # else the buffer has the value of a tensor, which changes
    _, numbers, given, here, constants = known
    buffer = known_on_device(numbers, group.device, lambda: numbers)
    made = group.known.get("numbers")
    if made is None or made.tensors[0] is not buffer or made.constants is not constants:
        lr, count = (
            one.detach() if own else buffer[STEP_FIELDS.index(name) :].view(torch.float64)
            for name, one, own in zip(("lr", "count"), given, here, strict=True)
        )
        kinds = tuple((one.dtype, one.data_ptr() & 15) for one in (lr, count))
        made = StepArguments((buffer, lr, count), number_of((kinds, *constants.values())), constants)
        group.known["numbers"] = made if not any(here) else None
    return made


def run_update(group: Group, runs: Runs, grads: Grads, step: Step) -> None:
    """Update the rows of the runs; without runs, the row of every position."""
    summed, scaled = runs.starts is None, runs.scales is not None
    tables, row_align, align = group.buffer()
    keys, partials, number, log = runs.keys, runs.keys, 0, 0
    if summed:
        count_up(step.counters)
    else:
        partials, number, log = run_chunks(group, runs, grads, tables, step.counters)
    arguments = step_arguments(group, step)
    start(
        update,
        -(-runs.count // runs.tuning.block),
        (
            *(error_flag(group.device), keys, runs.places, keys if runs.scales is None else runs.scales),
            keys if runs.starts is None else runs.starts,
            keys if runs.counts is None else runs.counts,
            keys if runs.ends is None else runs.ends,
            *(partials, tables, grads.buffer, *arguments.tensors),
        ),
        (runs.count, runs.shift, number, log),
        (group.number, runs.kinds, grads.key, arguments.key, row_align, align),
        lambda: {
            "SUMMED": summed,
            "TABLES": group.columns,
            "LOOKUPS": columns_for(runs.lookups),
            "WEIGHT": group.weight_dtype,
            "ALIGN": align,
            "ROW_ALIGN": row_align,
            **grads.constants,
            "SCALED": scaled,
            **arguments.constants,
            "FOLD": runs.tuning.fold,
            "BLOCK": runs.tuning.block,
            **group.tile,
            "maxnreg": max(group.shape.registers, RUN_REGISTERS + 16 * (len(group.tables[0].states) > 1)),
        },
    )


def run_collect(
    group: Group, runs: Runs, packed: Grads, capacities: Sequence[int] | None
) -> list[RowGradients]:
    """Return the sums of every table.

    Args:
        group: the tables.
        runs: of what was looked up in them.
        packed: gradients of the outputs of the lookups.
        capacities: rows of each table for which memory is allocated; None for the exact numbers, which
            synchronizes.
    """
    assert runs.counts is not None
    device = group.device
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
        runs.count,
        runs.shift,
        number,
        log,
        TABLES=group.columns,
        LOOKUPS=columns_for(runs.lookups),
        **packed.constants,
        ALIGN=align,
        SCALED=runs.scales is not None,
        FOLD=runs.tuning.fold,
        BLOCK=runs.tuning.block,
        **{**group.tile, "maxnreg": max(group.shape.registers, RUN_REGISTERS)},
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
