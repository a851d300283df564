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
PROGRAMS = 4
#: Buffers of counts and tickets, by device and stream; 0 between two sorts.
_WORK: dict[tuple[torch.device, Any], Tensor] = {}


@dataclass(frozen=True, eq=False)
class Sorted:
    """Sorted keys, with their places and scales.

    Args:
        keys: (n,) sorted.
        places, scales: (n,), in the order of the keys.
        work: a buffer that the caller must set to 0 for the next sort, or None.
    """

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    work: Tensor | None = None


def digits(bits: int, most: int = 8) -> list[int]:
    """Return the bits of the digit of each pass, the widest first, for keys of `bits` bits.

    There are at most three passes, so keys of more than 3 · `most` bits get wider digits.

    >>> digits(5), digits(13), digits(24), digits(25), digits(31)
    ([5], [7, 6], [8, 8, 8], [9, 8, 8], [11, 10, 10])
    """
    passes = min(3, -(-bits // most))
    return [-(-(bits - index) // passes) for index in range(passes)]


def packing(bits: int, digit: int, place: int) -> tuple[torch.dtype, int]:
    """Return the dtype of keys between passes, and how many bits of a key its place stores, see `radix`.

    Args:
        bits: of a key.
        digit: bits of a pass; the first pass must sort by all bits that the place stores.
        place: bits of a place; 32 bits are stored.

    >>> packing(15, 8, 28), packing(24, 8, 24), packing(24, 8, 25)
    ((torch.uint16, 0), (torch.uint16, 8), (torch.int32, 0))
    """
    low = max(0, bits - 16)
    fits = low <= digit and place <= 32 - low
    return (torch.uint16, low) if fits else (torch.int32, 0)


def sort_by_torch(batch: LookupBatch) -> Sorted:
    """Sort keys of 64 bits, or very many."""
    keys, places, scales = batch.new(batch.key_dtype), batch.new(batch.place_dtype), batch.new_scales()
    batch.write_keys(keys, places, scales)
    ordered, order = torch.sort(keys, stable=True)
    return Sorted(ordered, places[order], None if scales is None else scales[order])


@contextmanager
def sort_in_passes(batch: LookupBatch) -> Iterator[Sorted]:
    """Sort keys of 32 bits; the body must set `Sorted.work` to 0.

    The next sort on the stream reuses the buffer only if the body did not fail.
    """
    widths = digits(batch.bits, batch.tuning.digit)
    passes, bins, tile = len(widths), 2 ** widths[0], batch.tuning.tile
    tiles, warps = -(-batch.count // tile), min(8, max(1, tile // 64))
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
    status = batch.new(torch.int32, tiles, bins)
    scratch = batch.new(torch.int32, programs, tile + 2 * bins)
    dtype, kept = packing(batch.bits, widths[0], batch.place_bits) if passes > 1 else (torch.int32, 0)
    given, between = batch.new(torch.int32), [batch.new(dtype) for _ in range(passes - 1)]
    keys = [given, *between, given if between else batch.new(torch.int32)]
    places = [given, *(batch.new(batch.place_dtype) for _ in range(passes))]
    scales = [batch.new_scales() for _ in places]
    batch.write_keys(keys[0], widths=widths, totals=totals, status=status)
    for one, bits in enumerate(widths):
        first, last = one == 0, one == passes - 1
        registers = radix.FIRST_REGISTERS if first else radix.REGISTERS
        radix.radix_pass[(programs,)](
            keys[one],
            places[one],
            keys[one + 1],
            places[one + 1],
            *(given if scale is None else scale for scale in scales[one : one + 2]),
            batch.buffer,
            totals[one],
            tickets[one:],
            status,
            scratch,
            batch.count,
            tiles,
            0 if first else sum(widths[:one]) - kept,
            2 * one + 1,
            batch.shift,
            batch.steps,
            FIRST=first,
            LAST=last,
            SCALED=scales[0] is not None,
            LOOKUPS=batch.columns,
            BITS=bits,
            LOW=kept,
            TILE=tile,
            THREADS=32 * warps,
            num_warps=warps,
            maxnreg=registers if bits <= 8 else radix.WIDE_REGISTERS,
        )
    yield Sorted(keys[-1], places[-1], scales[-1], work)
    if not captured:
        _WORK[(device, stream)] = known


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
