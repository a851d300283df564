"""The sort of the keys of a batch of lookups: by `radix`, or by torch if the keys are wide or very many."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing, current
from keyedopt.fused.backends.triton import radix
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.lookup_batch import LookupBatch

#: Programs of a pass on each multiprocessor; each takes tiles until none is left.
PROGRAMS = 4
#: What the next sort uses again, by device and stream.
_WORK: dict[tuple[torch.device, Any], "Work"] = {}
#: Keys of a sort whose memory is used again; more need so long that an allocation does not matter.
MOST_KEPT = 1 << 19


class Work:
    """Memory that only a sort uses: counts and tickets, which are 0 between two sorts, and what is named."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts = torch.zeros(3 * (2**8 + 1), dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int], tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def digits(self, passes: int, bins: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the buffer of counts, and of each pass the counts of the digits and the ticket."""
        known = self._views.get((passes, bins))
        used = passes * (bins + 1)
        if known is None:
            if len(self.counts) < used:
                self.counts = torch.zeros(used, dtype=torch.int32, device=self.device)
                self._views.clear()
            views = [(self.counts[one * bins :], self.counts[passes * bins + one :]) for one in range(passes)]
            known = self._views[passes, bins] = self.counts, views
        return known

    def memory(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        """Return memory by name, of at least this size."""
        known = self._memory.get((name, dtype))
        if known is None or len(known) < size:
            known = self._memory[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return known

    def forget(self) -> None:
        """Free the memory."""
        self._memory.clear()


@dataclass(frozen=True, eq=False)
class Sorted:
    """Sorted keys, with their places and scales.

    Args:
        keys: (n,) sorted.
        places, scales: (n,), in the order of the keys.
        work: a buffer whose first `used` numbers the caller must set to 0 for the next sort, or None.
        release: to be called after that, so that the next sort on the stream uses the memory again.
    """

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    work: Tensor | None = None
    used: int = 0
    release: Callable[[], None] | None = None


@cache
def digits(bits: int, most: int = 8) -> tuple[int, ...]:
    """Return the bits of the digit of each pass, the widest first, for keys of `bits` bits.

    There are at most three passes, so keys of more than 3 · `most` bits get wider digits.

    >>> digits(5), digits(13), digits(24), digits(25), digits(31)
    ((5,), (7, 6), (8, 8, 8), (9, 8, 8), (11, 10, 10))
    """
    passes = min(3, -(-bits // most))
    return tuple(-(-(bits - index) // passes) for index in range(passes))


@cache
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


def sort_in_passes(batch: LookupBatch) -> Sorted:
    """Sort keys of 32 bits. The caller must set `Sorted.work` to 0, and then call `Sorted.release`."""
    widths = digits(batch.bits, batch.tuning.digit)
    passes, bins, tile, count = len(widths), 2 ** widths[0], batch.tuning.tile, batch.count
    tiles, warps = -(-count // tile), min(8, max(1, tile // 64))
    device = batch.group.device
    programs = min(tiles, PROGRAMS * _multiprocessors(device))
    captured, stream = capturing(device), current(device)
    # A graph may be replayed beside other work, so it gets its own memory.
    work = None if captured else _WORK.pop((device, stream), None)
    if work is None:
        work = Work(device)
    counts, of_passes = work.digits(passes, bins)
    status = work.memory("status", torch.int32, tiles * bins)
    scratch = work.memory("scratch", torch.int32, programs * (tile + 2 * bins))
    dtype, kept = packing(batch.bits, widths[0], batch.place_bits) if passes > 1 else (torch.int32, 0)
    given = work.memory("given", torch.int32, count)
    keys = [
        given,
        *(work.memory(f"keys{one}", dtype, count) for one in range(1, passes)),
        batch.new(torch.int32),
    ]
    place_dtype = batch.place_dtype
    places = [given, *(work.memory(f"places{one}", place_dtype, count) for one in range(1, passes))]
    places.append(batch.new(place_dtype))
    scales = [given] * (passes + 1)
    if batch.scaled:
        scales = [given, *(work.memory(f"scales{one}", torch.float32, count) for one in range(1, passes))]
        scales.append(batch.new(torch.float32))
    batch.write_keys(given, widths=widths, totals=counts, status=status, clear=tiles * bins)
    for one, bits in enumerate(widths):
        last = one == passes - 1
        _start_pass(
            batch,
            (keys[one], places[one], keys[one + 1], places[one + 1], *scales[one : one + 2]),
            (*of_passes[one], status, scratch),
            (one, bits, 0 if one == 0 else sum(widths[:one]) - kept, kept, last),
            (programs, tiles, warps),
            (passes, bins, dtype, place_dtype),
        )
    return Sorted(
        *(keys[-1], places[-1], scales[-1] if batch.scaled else None, counts, passes * (bins + 1)),
        None if captured else partial(_release, work, (device, stream), count),
    )


def _release(work: Work, place: tuple[torch.device, Any], count: int) -> None:
    """Let the next sort on a stream use the memory of a sort of `count` keys."""
    if count > MOST_KEPT:
        work.forget()
    _WORK[place] = work


def _start_pass(
    batch: LookupBatch,
    moved: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    which: tuple[int, int, int, int, bool],
    sizes: tuple[int, int, int],
    kinds: tuple[Any, ...],
) -> None:
    """Launch one pass.

    Args:
        batch: what is sorted.
        moved: keys and places before and after the pass, and scales before and after.
        shared: counts of the digits, ticket, status and scratch.
        which: the number of the pass, its bits, its lowest bit in the stored keys, the bits of a key that
            its place stores, and whether it is the last pass.
        sizes: programs, tiles, and warps of a program.
        kinds: determines the types and the alignment of the tensors.
    """
    one, bits, low, kept, last = which
    programs, tiles, warps = sizes
    tile, first = batch.tuning.tile, one == 0
    registers = radix.FIRST_REGISTERS if first else radix.REGISTERS
    keys, places, to_keys, to_places, scales, to_scales = moved
    start(
        radix.radix_pass,
        programs,
        (keys, places, to_keys, to_places, scales, to_scales, batch.buffer, *shared),
        (batch.count, tiles, low, 2 * one + 1, batch.shift, batch.steps),
        (*which, warps, tile, batch.scaled, batch.columns, *kinds),
        lambda: {
            "FIRST": first,
            "LAST": last,
            "SCALED": batch.scaled,
            "LOOKUPS": batch.columns,
            "BITS": bits,
            "LOW": kept,
            "TILE": tile,
            "THREADS": 32 * warps,
            "num_warps": warps,
            "maxnreg": registers if bits <= 8 else radix.WIDE_REGISTERS,
        },
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
