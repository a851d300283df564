"""The sort of the keys of a batch of lookups: by `radix`, or by torch if the keys are wide or very many."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing, current_id, on_cuda
from keyedopt.fused.backends.triton import radix
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.lookup_batch import LookupBatch

#: Programs of a pass on each multiprocessor; each takes tiles until none is left.
PROGRAMS = 4
#: What the next sort uses again, by device and stream.
_WORK: dict[tuple[torch.device, Any], "Work"] = {}
#: See `Passes.allocate`.
Memory = tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]], list[tuple[Tensor, Tensor]]]
#: Keys of a sort whose memory is used again; more need so long that an allocation does not matter.
MOST_KEPT = 1 << 19


class Work:
    """Memory that only a sort uses: counts and tickets, which are 0 between two sorts, and `Memory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts = torch.zeros(3 * (2**8 + 1), dtype=torch.int32, device=device)
        self._memory: dict[Passes, tuple[int, Memory]] = {}

    def memory(self, passes: "Passes", count: int) -> Memory:
        """Return the memory of a sort of at least `count` keys."""
        known = self._memory.get(passes)
        if known is None or known[0] < count:
            used = len(passes.widths) * (passes.bins + 1)
            if len(self.counts) < used:
                self.counts = torch.zeros(used, dtype=torch.int32, device=self.device)
                self.forget()
            known = self._memory[passes] = count, passes.allocate(count, self.counts)
        return known[1]

    def forget(self) -> None:
        """Free the memory."""
        self._memory.clear()


@dataclass(frozen=True, eq=False)
class Passes:
    """What sorts of any number of keys have in common, see `passes_of`.

    Args:
        widths, lows: the bits of the digit of each pass, and its lowest bit in the stored keys.
        tile: see `Tuning`.
        dtype, kept: see `packing`.
        place_dtype: of places.
        scaled: whether there are scales.
    """

    widths: tuple[int, ...]
    lows: tuple[int, ...]
    tile: int
    dtype: torch.dtype
    kept: int
    place_dtype: torch.dtype
    scaled: bool

    @cached_property
    def bins(self) -> int:
        """The number of values of the widest digit."""
        return int(2 ** self.widths[0])

    def programs(self, count: int, device: torch.device) -> tuple[int, int]:
        """Return the number of programs of a pass, and of tiles."""
        tiles = -(-count // self.tile)
        return min(tiles, PROGRAMS * _multiprocessors(device)), tiles

    def allocate(self, count: int, counts: Tensor) -> Memory:
        """Return status, scratch, and what is before each pass: keys, places, scales, and its counts."""

        def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=counts.device)

        (programs, tiles), bins, passes = self.programs(count, counts.device), self.bins, len(self.widths)
        given = new(count)
        before = [(given, given, given)]
        for _ in self.widths[1:]:
            scales = new(count, torch.float32) if self.scaled else given
            before.append((new(count, self.dtype), new(count, self.place_dtype), scales))
        digits = [(counts[one * bins :], counts[passes * bins + one :]) for one in range(passes)]
        return new(tiles * bins), new(programs * (self.tile + 2 * bins)), before, digits


class Sorted(NamedTuple):
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


@cache
def passes_of(
    bits: int, place_bits: int, place_dtype: torch.dtype, scaled: bool, digit: int, tile: int
) -> Passes:
    """Return the passes for keys and places with these numbers of bits; the same for the same arguments."""
    widths = digits(bits, digit)
    dtype, kept = packing(bits, widths[0], place_bits) if len(widths) > 1 else (torch.int32, 0)
    lows = (0, *(end - kept for end in accumulate(widths[:-1])))
    return Passes(widths, lows, tile, dtype, kept, place_dtype, scaled)


def sort_in_passes(batch: LookupBatch) -> Sorted:
    """Sort keys of 32 bits. The caller must set `Sorted.work` to 0, and then call `Sorted.release`."""
    tuning, count, device, scaled = batch.tuning, batch.count, batch.group.device, batch.scaled
    passes = passes_of(batch.bits, batch.place_bits, batch.place_dtype, scaled, tuning.digit, tuning.tile)
    widths, bins = passes.widths, passes.bins
    programs, tiles = passes.programs(count, device)
    captured, stream = capturing(device), current_id(device)
    # A graph may be replayed beside other work, so it gets its own memory.
    work = None if captured else _WORK.pop((device, stream), None)
    if work is None:
        work = Work(device)
    status, scratch, before, of_passes = work.memory(passes, count)
    counts = work.counts
    given = before[0][0]
    batch.write_keys(given, widths=widths, totals=counts, status=status, clear=tiles * bins)
    made = batch.new(torch.int32), batch.new(passes.place_dtype), batch.new_scales()
    after = [*before[1:], (*made[:2], made[2] if scaled else given)]
    for one, ((keys, places, scales), (to_keys, to_places, to_scales)) in enumerate(
        zip(before, after, strict=True)
    ):
        start(
            radix.radix_pass,
            programs,
            (
                keys,
                places,
                to_keys,
                to_places,
                scales,
                to_scales,
                batch.buffer,
                *of_passes[one],
                status,
                scratch,
            ),
            (count, tiles, passes.lows[one], 2 * one + 1, batch.shift, batch.steps),
            (passes, one, batch.columns),
            partial(_constants, passes, one, batch.columns),
        )
    return Sorted(
        *made,
        counts,
        len(widths) * (bins + 1),
        None if captured else partial(_release, work, (device, stream), count),
    )


def _constants(passes: Passes, one: int, columns: int) -> dict[str, Any]:
    """Return the constants of a pass."""
    warps, bits = min(8, max(1, passes.tile // 64)), passes.widths[one]
    registers = radix.FIRST_REGISTERS if one == 0 else radix.REGISTERS
    return {
        "FIRST": one == 0,
        "LAST": one == len(passes.widths) - 1,
        "SCALED": passes.scaled,
        "LOOKUPS": columns,
        "BITS": bits,
        "LOW": passes.kept,
        "TILE": passes.tile,
        "THREADS": 32 * warps,
        "num_warps": warps,
        "maxnreg": registers if bits <= 8 else radix.WIDE_REGISTERS,
    }


def _release(work: Work, place: tuple[torch.device, Any], count: int) -> None:
    """Let the next sort on a stream use the memory of a sort of `count` keys."""
    if count > MOST_KEPT:
        work.forget()
    _WORK[place] = work


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 in the interpreter."""
    if not on_cuda(device):
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
