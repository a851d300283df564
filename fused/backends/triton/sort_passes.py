"""The sort of the keys of a batch of lookups: by `radix`, or by torch if the keys are wide or very many."""

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

#: Programs of a pass on each multiprocessor; each takes tiles until none is left.
PROGRAMS = 2
#: Buffers of counts and tickets, by device and stream; 0 between two sorts.
_WORK: dict[tuple[torch.device, Any], Tensor] = {}


@dataclass(frozen=True, eq=False)
class Sorted:
    """Sorted keys, with their places and scales.

    Args:
        keys: (n,) sorted.
        places, scales: (n,), in the order of the keys; in the order of the lookups if `order` is given.
        order: (n,) the index of the value at each position, or None.
        work: a buffer that the caller must set to 0 for the next sort, or None.
    """

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    order: Tensor | None = None
    work: Tensor | None = None


def digits(bits: int, most: int = 8) -> tuple[int, int]:
    """Return the number of passes for keys of `bits` bits, and the bits of each pass.

    There are at most three passes, so keys of more than 3 · `most` bits get wider digits.

    >>> digits(5), digits(13), digits(21), digits(24), digits(31)
    ((1, 5), (2, 7), (3, 7), (3, 8), (3, 11))
    """
    passes = min(3, -(-bits // most))
    return passes, -(-bits // passes)


def packing(bits: int, digit: int, count: int) -> tuple[torch.dtype, int]:
    """Return the dtype of keys between passes, and how many bits of a key the order stores, see `radix`.

    Args:
        bits: of a key.
        digit: bits of a pass; the first pass must sort by all bits that the order stores.
        count: number of keys, which determines the free bits of a word of the order.

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
    """Sort keys of 32 bits; the body must set `Sorted.work` to 0.

    The next sort on the stream reuses the buffer only if the body did not fail.
    """
    passes, bits = digits(batch.bits, batch.tuning.digit)
    bins, tile = 2**bits, batch.tuning.tile
    tiles = -(-batch.count // tile)
    device = batch.group.device
    programs = min(tiles, PROGRAMS * _multiprocessors(device))
    captured, stream = capturing(device), current(device)
    # A graph may be replayed beside other work, so it gets its own buffer.
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
    """Return the number of multiprocessors of a device; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
