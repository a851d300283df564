"""The part of the backward that does not need gradients: keys, sort, runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.backends.triton import sort
from keyedopt.fused.backends.triton.groups import Group, bags_of, blocks
from keyedopt.fused.backends.triton.shapes import Tuning
from keyedopt.fused.backends.triton.words import columns_for, on_device, table


@dataclass(frozen=True, eq=False)
class Runs:
    """The lookups of a group, as runs of the same row.

    Args:
        keys, places, scales, starts, counts, ends: see `sort.find_runs`; None where there are none.
        count: number of positions.
        shift: see `sort.write_keys`.
        lookups: how many lookups there are, and so columns of the words of the gradients.
        tuning: with which they were made.
    """

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    starts: Tensor | None
    counts: Tensor | None
    ends: Tensor | None
    count: int
    shift: int
    lookups: int
    tuning: Tuning


@dataclass(frozen=True)
class Prepared:
    """What the forward keeps for one lookup: the runs of its group, and which of their lookups it is."""

    runs: Runs
    index: int


def lookup_words(lookups: Sequence[Lookup], begins: Sequence[int], bases: Sequence[int]) -> list[int]:
    """Return the words of some lookups, for programs that begin so and tables whose rows begin so."""
    counts = [len(lookup.values) for lookup in lookups]
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    rows = [
        list(begins[:-1]),
        firsts,
        counts,
        [bags_of(lookup) for lookup in lookups],
        [lookup.values.data_ptr() for lookup in lookups],
        [0 if lookup.offsets is None else lookup.offsets.data_ptr() for lookup in lookups],
        [0 if lookup.weights is None else lookup.weights.data_ptr() for lookup in lookups],
        list(bases),
        [int(lookup.mean and lookup.offsets is not None) for lookup in lookups],
    ]
    return table(rows)


def plain(lookup: Lookup) -> Lookup:
    """Return the lookup with integers of 64 bits, weights in float32, and everything contiguous."""
    offsets = None if lookup.offsets is None else lookup.offsets.long().contiguous()
    weights = None if lookup.weights is None else lookup.weights.detach().float().contiguous()
    values = lookup.values.long().contiguous()
    return Lookup(lookup.table, values, offsets, weights, lookup.mean, lookup.grad, lookup.prepared)


def is_scaled(lookups: Sequence[Lookup]) -> bool:
    """Return whether any gradient of these is multiplied by something."""
    return any(one.weights is not None or (one.mean and one.offsets is not None) for one in lookups)


def key_dtype(rows: int) -> torch.dtype:
    """Return the narrowest dtype for so many rows; a sort moves and compares no bits in vain."""
    return next((one for one in (torch.int16, torch.int32) if rows <= torch.iinfo(one).max), torch.int64)


def make_keys(group: Group, lookups: Sequence[Lookup], tuning: Tuning) -> Runs:
    """Write key, place and scale of every value, in the order of the lookups."""
    lookups = [plain(lookup) for lookup in lookups]
    device, columns = group.device, columns_for(len(lookups))
    count = sum(len(lookup.values) for lookup in lookups)
    begins = blocks([len(lookup.values) for lookup in lookups], tuning.values)
    bases = [group.bases[group.numbers.index(lookup.table)] for lookup in lookups]
    most = max(bags_of(lookup) for lookup in lookups)
    shift = max(most - 1, 1).bit_length()
    wide = (len(lookups) - 1).bit_length() + shift > 31
    keys = torch.empty(count, dtype=key_dtype(group.bases[-1]), device=device)
    places = torch.empty(count, dtype=torch.int64 if wide else torch.int32, device=device)
    scaled = is_scaled(lookups)
    scales = torch.empty(count, dtype=torch.float32, device=device) if scaled else None
    words = on_device(lookup_words(lookups, begins, bases), device)
    sort.write_keys[(begins[-1],)](
        words,
        keys,
        places,
        places if scales is None else scales,
        shift,
        most.bit_length(),
        LOOKUPS=columns,
        SCALED=scaled,
        BLOCK=tuning.values,
        num_warps=4,
        maxnreg=sort.REGISTERS,
    )
    return Runs(keys, places, scales, None, None, None, count, shift, len(lookups), tuning)


def make_runs(group: Group, lookups: Sequence[Lookup], tuning: Tuning) -> Runs:
    """Sort the values of the lookups by row, and find where the rows begin; nothing waits for the device."""
    given = make_keys(group, lookups, tuning)
    count, device = given.count, group.device
    keys, order = torch.sort(given.keys, stable=True)
    programs = -(-count // tuning.block)
    dtype = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
    starts = torch.empty(count, dtype=dtype, device=device)
    ends = torch.empty(programs, dtype=dtype, device=device)
    counts = torch.empty(programs, dtype=torch.int32, device=device)
    places = torch.empty_like(given.places)
    scales = None if given.scales is None else torch.empty_like(given.scales)
    sort.find_runs[(programs,)](
        keys,
        order,
        given.places,
        given.places if given.scales is None else given.scales,
        places,
        places if scales is None else scales,
        starts,
        counts,
        ends,
        count,
        SCALED=scales is not None,
        BLOCK=tuning.block,
        PROBES=tuning.probes,
        num_warps=max(1, min(4, tuning.block // 32)),
        maxnreg=sort.REGISTERS,
    )
    return Runs(keys, places, scales, starts, counts, ends, count, given.shift, given.lookups, tuning)
