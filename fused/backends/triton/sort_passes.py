"""The sort of the keys of some lookups: in passes of our own, or, where keys are wide, by torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing, current
from keyedopt.fused.backends.triton import radix
from keyedopt.fused.backends.triton.lookup_batch import LookupBatch

#: Programs of a pass on each multiprocessor: they take tiles as long as there are any.
PROGRAMS = 2
#: Words that are 0 between two sorts, by device and stream.
_WORK: dict[tuple[torch.device, Any], Tensor] = {}


@dataclass(frozen=True, eq=False)
class Sorted:
    """Keys in order, and what has come with them.

    Args:
        keys: (n,) sorted.
        places, scales: (n,), in the order of the keys; with `order`, still in that of the lookups.
        order: (n,) which value came to each position, or None.
        work: buffer that have to be 0 again for the next sort, or None.
    """

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    order: Tensor | None = None
    work: Tensor | None = None


def digits(bits: int, most: int = 8) -> tuple[int, int]:
    """Return in how many passes keys of so many bits are sorted, and how many bits a pass does.

    Passes are at most three; so digits of more than `most` bits are for keys of more than three times that.

    >>> digits(5), digits(13), digits(21), digits(24), digits(31)
    ((1, 5), (2, 7), (3, 7), (3, 8), (3, 11))
    """
    passes = min(3, -(-bits // most))
    return passes, -(-bits // passes)


def packing(bits: int, digit: int, count: int) -> tuple[torch.dtype, int]:
    """Return in what keys are kept between passes, and how many of their bits the order keeps, see `radix`.

    Args:
        bits: of a key.
        digit: bits that a pass sorts by: what the order keeps must be behind it after the first.
        count: of keys, by which it is known how many bits of a word of the order are free.

    >>> packing(15, 8, 2**28), packing(24, 8, 2**24), packing(24, 8, 2**24 + 1)
    ((torch.uint16, 0), (torch.uint16, 8), (torch.int32, 0))
    """
    low = max(0, bits - 16)
    fits = low <= digit and (count - 1).bit_length() <= 32 - low
    return (torch.uint16, low) if fits else (torch.int32, 0)


def sort_by_torch(batch: LookupBatch) -> Sorted:
    """Sort keys of 64 bits, or very many."""
    keys, places, scales = batch.new(batch.key_dtype), batch.new(batch.place_dtype), batch.new_scales()
    batch.write_keys(keys, places, scales)
    ordered, order = torch.sort(keys, stable=True)
    return Sorted(ordered, places, scales, order)


@contextmanager
def sort_in_passes(batch: LookupBatch) -> Iterator[Sorted]:
    """Sort keys of 32 bits; who is given them sets the work to 0 again.

    Only then does the next sort on the same stream get it, so one that fails spoils no other.
    """
    passes, bits = digits(batch.bits, batch.tuning.digit)
    bins, tile = 2**bits, batch.tuning.tile
    tiles = -(-batch.count // tile)
    device = batch.group.device
    programs = min(tiles, PROGRAMS * _multiprocessors(device))
    captured, stream = capturing(device), current(device)
    # A graph may be replayed beside anything else, so it gets its own.
    known = None if captured else _WORK.pop((device, stream), None)
    used = passes * (bins + 1)
    if known is None or len(known) < used:
        known = torch.zeros(max(used, 3 * (2**8 + 1)), dtype=torch.int32, device=device)
    work = known[:used]
    totals, tickets = work[: passes * bins].view(passes, bins), work[passes * bins :]
    status = batch.new(torch.int32, passes, tiles, bins)
    scratch = batch.new(torch.int32, programs, tile + bins)
    dtype, kept = packing(batch.bits, bits, batch.count) if passes > 1 else (torch.int32, 0)
    given, between = batch.new(torch.int32), [batch.new(dtype) for _ in range(passes - 1)]
    keys = [given, *between, given if between else batch.new(torch.int32)]
    orders = [given, *(batch.new(torch.int32) for _ in between)]
    places, scales = batch.new(batch.place_dtype), batch.new_scales()
    batch.write_keys(keys[0], totals=totals, status=status)
    for one in range(passes):
        first, last = one == 0, one == passes - 1
        radix.radix_pass[(programs,)](
            keys[one],
            orders[one],
            keys[one + 1],
            places if last else orders[one + 1],
            keys[0] if scales is None else scales,
            batch.buffer,
            totals[one],
            tickets[one:],
            status[one],
            scratch,
            batch.count,
            tiles,
            0 if first else one * bits - kept,
            batch.shift,
            batch.steps,
            FIRST=first,
            LAST=last,
            SCALED=scales is not None,
            LOOKUPS=batch.columns,
            BITS=bits,
            LOW=kept,
            TILE=tile,
            num_warps=max(1, min(16, tile // 64)),
            maxnreg=radix.REGISTERS,
        )
    yield Sorted(keys[-1], places, scales, work=work)
    if not captured:
        _WORK[(device, stream)] = known


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many a device has; the interpreter is one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
