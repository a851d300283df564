"""The lookups of a group of tables, as arguments of the kernels that need no gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.triton import sort
from keyedopt.fused.backends.triton.device_buffers import columns_for, pack_rows, to_device
from keyedopt.fused.backends.triton.device_flags import error_flag
from keyedopt.fused.backends.triton.groups import Group, bags_of, blocks
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.layout import LOOKUP_FIELDS
from keyedopt.fused.backends.triton.shapes import Tuning

#: As many keys and more are sorted by torch: on an H100 a step of 0.7 million lookups took 13 % less time for
#: it, and one of 5 million 18 %. `radix` could sort fewer than 2²⁸: three bits of a word are the status.
MOST_KEYS = 2**19
#: A call has fewer lookups than this: `reduce.sum_runs` counts the positions of a run in int32.
MOST_LOOKUPS = 2**31


def normalized(lookup: Lookup) -> Lookup:
    """Return the lookup with integers of 64 bits, weights in float32, and everything contiguous."""
    integers = (lookup.values,) if lookup.offsets is None else (lookup.values, lookup.offsets)
    if lookup.weights is None and all(one.dtype is torch.int64 and one.is_contiguous() for one in integers):
        return lookup
    offsets = None if lookup.offsets is None else lookup.offsets.long().contiguous()
    weights = None if lookup.weights is None else lookup.weights.detach().float().contiguous()
    values = lookup.values.long().contiguous()
    return replace(lookup, values=values, offsets=offsets, weights=weights)


def is_scaled(lookups: Sequence[Lookup]) -> bool:
    """Return whether any lookup has weights or divides by the length of a bag."""
    return any(one.weights is not None or (one.mean and one.offsets is not None) for one in lookups)


def lookup_buffer(group: Group, lookups: Sequence[Lookup], begins: Sequence[int]) -> list[int]:
    """Return the buffer of some lookups in tables of a group; `begins` are their first programs."""
    counts = [lookup.values.numel() for lookup in lookups]
    places = [group.places[lookup.table] for lookup in lookups]
    bases, heights = group.bases, group.heights
    rows = {
        "program": begins[:-1],
        "start": blocks(counts, 1)[:-1],
        "count": counts,
        "bags": [bags_of(lookup) for lookup in lookups],
        "values": [address(lookup.values) for lookup in lookups],
        "offsets": [0 if lookup.offsets is None else address(lookup.offsets) for lookup in lookups],
        "weights": [0 if lookup.weights is None else address(lookup.weights) for lookup in lookups],
        "base": [bases[place] for place in places],
        "mean": [int(lookup.mean and lookup.offsets is not None) for lookup in lookups],
        "rows": [heights[place] for place in places],
        "origin": [0] * len(lookups),
        "pool_program": begins[:-1],
    }
    never = [LOOKUP_FIELDS.index(name) for name in ("program", "start", "pool_program")]
    return pack_rows([rows[name] for name in LOOKUP_FIELDS], never)


@lru_cache
def _sizes(lookups: int, bags: int, rows: int) -> tuple[int, int, int, torch.dtype, int, torch.dtype]:
    """Return what `LookupBatch` has of lookups with most `bags` and keys below `rows`."""
    shift, bits = max(bags - 1, 1).bit_length(), max(rows - 1, 1).bit_length()
    place_bits = (lookups - 1).bit_length() + shift
    key_dtype, place_dtype = (torch.int32 if most <= 31 else torch.int64 for most in (bits, place_bits))
    return columns_for(lookups), shift, bits, key_dtype, place_bits, place_dtype


@dataclass(eq=False)
class LookupBatch:
    """Some lookups in tables of a group; none of their memory is read here.

    Args:
        group: the tables.
        tuning: for the tile of the group.
        buffer: on the device, see `LOOKUP_FIELDS`.
        lookups, count: number of lookups, and of their values.
        programs: of `sort.write_keys`.
        bags, steps: most rows of an output; of a bisection of the bags, see `sort.place_of`.
        scaled: whether any lookup has weights or divides by the length of a bag.
        padding: the treatment of −1, see `sort.write_keys`.
        reported: whether `check` reads the error flag, see `device_flags.error_flag`.
        sources: own the memory whose addresses are in the buffer.

    Attributes:
        columns: of the buffer.
        shift: the number of bits of a bag in a place, see `sort.place_of`.
        bits, key_dtype: the number of bits of the largest key; the narrowest dtype for the keys.
        narrow: whether `radix` can sort the keys: at most 30 bits, and fewer than `MOST_KEYS` keys.
        place_bits, place_dtype: the same for the places, which have a lookup and a bag each.
    """

    group: Group
    tuning: Tuning
    buffer: Tensor
    lookups: int
    count: int
    programs: int
    bags: int
    steps: int
    scaled: bool
    padding: str = "none"
    reported: bool = True
    sources: Sequence[Lookup] = ()

    @classmethod
    def of(
        cls,
        group: Group,
        lookups: Sequence[Lookup],
        tuning: Tuning,
        padding: str = "none",
        reported: bool = True,
    ) -> "LookupBatch":
        """Return some lookups as a batch."""
        lookups, tuning = [normalized(lookup) for lookup in lookups], group.tuning(tuning)
        pooled = [one.offsets.numel() for one in lookups if one.offsets is not None]
        counts = [one.values.numel() for one in lookups]
        begins = blocks(counts, tuning.values)
        steps = max(pooled, default=0).bit_length()
        if steps > 30:
            raise ValueError(f"a lookup has fewer than 2**30 bags, not {max(pooled) - 1}")
        buffer = to_device(lookup_buffer(group, lookups, begins), group.device)
        most, scaled = max(bags_of(lookup) for lookup in lookups), is_scaled(lookups)
        sizes = (len(lookups), sum(counts), begins[-1], most, steps)
        return cls(group, tuning, buffer, *sizes, scaled, padding, reported, lookups)

    def __post_init__(self) -> None:
        if self.count >= MOST_LOOKUPS:
            raise ValueError(f"one call takes fewer than {MOST_LOOKUPS} lookups, not {self.count}: split it")
        sizes = _sizes(self.lookups, self.bags, self.group.bases[-1])
        self.columns, self.shift, self.bits, self.key_dtype, self.place_bits, self.place_dtype = sizes
        self.narrow = self.bits <= 30 and self.count < MOST_KEYS

    def new(self, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """Return memory on the device of the tables; by default one number for each value."""
        return self.buffer.new_empty(self.count if count is None else count, dtype=dtype)

    def new_scales(self) -> Tensor | None:
        """Return memory for scales, if there are any."""
        return self.new(torch.float32) if self.scaled else None

    def write_keys(
        self,
        keys: Tensor,
        places: Tensor | None = None,
        scales: Tensor | None = None,
        widths: Sequence[int] = (0,),
        totals: Tensor | None = None,
        status: Tensor | None = None,
        clear: int = 0,
    ) -> None:
        """Launch `sort.write_keys`: with places; or for `radix` with totals (passes, bins) and status.

        The first `clear` words of the status become 0.
        """
        passes, widest, scaled = 0 if totals is None else len(widths), widths[0], scales is not None
        registers = sort.REGISTERS if widest <= 8 and places is None else 2 * sort.REGISTERS
        place_dtype = None if places is None else places.dtype
        wide = widths.count(widest)
        start(
            sort.write_keys,
            self.programs,
            (
                self.buffer,
                error_flag(self.group.device, self.reported),
                keys,
                keys if places is None else places,
                keys if scales is None else scales,
                keys if totals is None else totals,
                keys if status is None else status,
            ),
            (self.shift, self.steps, clear),
            (
                self.columns,
                keys.dtype,
                place_dtype,
                scaled,
                passes,
                widest,
                wide,
                self.padding,
                self.tuning.values,
            ),
            lambda: {
                "LOOKUPS": self.columns,
                "PLACES": places is not None,
                "SCALED": scaled,
                "PADDING": self.padding,
                "PASSES": passes,
                "BITS": widest,
                "WIDE": wide,
                "BLOCK": self.tuning.values,
                "num_warps": 8,
                "maxnreg": registers,
            },
        )
