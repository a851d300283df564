"""The part of the backward pass that needs no gradients: keys, sort, runs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.backends.triton import sort
from keyedopt.fused.backends.triton.device_buffers import columns_for
from keyedopt.fused.backends.triton.groups import Group
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.lookup_batch import LookupBatch
from keyedopt.fused.backends.triton.shapes import Tuning
from keyedopt.fused.backends.triton.sort_passes import Sorted, sort_by_torch, sort_in_passes
from keyedopt.fused.backends.triton.streams import StreamTensors, overlaps, side_stream


@dataclass(eq=False)
class Runs:
    """The lookups of a group, as runs of the same row.

    Args:
        keys, places, scales, starts, counts, ends: see `sort.find_runs`; the last three are None if every
            position is a run of its own.
        count: number of positions.
        shift: see `sort.place_of`.
        lookups: number of lookups, which is the number of columns of the buffer of gradients.
        tuning: the sizes that the kernels used.

    Attributes:
        kinds: what determines the code of kernels, besides tables, gradients and step.
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

    def __post_init__(self) -> None:
        places = self.places.dtype, columns_for(self.lookups), self.scales is None, self.starts is None
        self.kinds: Hashable = (self.keys.dtype, *places, self.tuning.block, self.tuning.fold)

    def filled(self) -> StreamTensors:
        """Return the tensors, with the stream that fills them."""
        made = (self.keys, self.places, self.scales, self.starts, self.counts, self.ends)
        return StreamTensors.record(*[one for one in made if one is not None], event=overlaps())


@dataclass(eq=False)
class Prepared:
    """The result of `prepare` for one lookup.

    Args:
        found: the runs of its group.
        filled: the tensors of the runs, with the stream that fills them.
        index: of the lookup among those of the runs.
    """

    found: Runs
    filled: StreamTensors
    index: int

    def runs(self) -> Runs:
        """Return the runs for use in the current stream."""
        self.filled.on_current_stream()
        return self.found


def prepare(group: Group, lookups: Sequence[Lookup], tuning: Tuning) -> list[Prepared]:
    """Find the runs, see `side_stream`; `forward.pool`, which checks the same lookups, reports errors."""
    parts = [part for one in lookups for part in (one.values, one.offsets, one.weights) if part is not None]
    with side_stream(group.device, parts):
        runs = make_runs(group, lookups, tuning, reported=False)
        filled = runs.filled()
    return [Prepared(runs, filled, index) for index in range(len(lookups))]


def make_keys(group: Group, lookups: Sequence[Lookup], tuning: Tuning) -> Runs:
    """Write key, place and scale of every value, in the order of the lookups; rows are distinct or −1."""
    batch = LookupBatch.of(group, lookups, tuning, padding="skipped")
    keys, places, scales = batch.new(batch.key_dtype), batch.new(batch.place_dtype), batch.new_scales()
    batch.write_keys(keys, places, scales)
    return Runs(keys, places, scales, None, None, None, batch.count, batch.shift, batch.lookups, batch.tuning)


def make_runs(group: Group, lookups: Sequence[Lookup], tuning: Tuning, reported: bool = True) -> Runs:
    """Sort the values of the lookups by row, and find the runs, without synchronizing."""
    return runs_of(LookupBatch.of(group, lookups, tuning, "last" if group.gap else "none", reported))


def runs_of(batch: LookupBatch) -> Runs:
    """Sort a batch by row, and find the runs, without synchronizing."""
    return _find_runs(batch, sort_in_passes(batch) if batch.narrow else sort_by_torch(batch))


def _find_runs(batch: LookupBatch, done: Sorted) -> Runs:
    count, tuning = batch.count, batch.tuning
    programs = -(-count // tuning.block)
    dtype = torch.int32 if count < 2**31 else torch.int64
    starts, ends = batch.new(torch.uint8), batch.new(dtype, programs)
    counts = batch.new(torch.int32, programs)
    start(
        sort.find_runs,
        programs,
        (done.keys, starts, counts, ends, done.keys if done.work is None else done.work),
        (count, done.used),
        (done.keys.dtype, dtype, done.work is None, tuning.block, tuning.probes),
        lambda: {
            "BLOCK": tuning.block,
            "PROBES": tuning.probes,
            "num_warps": max(1, min(4, tuning.block // 32)),
            "maxnreg": sort.REGISTERS,
        },
    )
    if done.release is not None:
        done.release()
    sorted_ = (done.keys, done.places, done.scales, starts, counts, ends)
    return Runs(*sorted_, count, batch.shift, batch.lookups, tuning)
