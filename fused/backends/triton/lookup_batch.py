"""The lookups of a group of tables, as arguments of the kernels that need no gradients."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.backends.triton import sort
from keyedopt.fused.backends.triton.device_buffers import columns_for, pack_rows, to_device
from keyedopt.fused.backends.triton.device_flags import error_flag
from keyedopt.fused.backends.triton.groups import Group, bags_of, blocks
from keyedopt.fused.backends.triton.layout import LOOKUP_FIELDS
from keyedopt.fused.backends.triton.shapes import Tuning

#: More keys than this are sorted by torch: three bits of a word of the look-back are the status.
MOST_KEYS = 2**28


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
        "values": [lookup.values.data_ptr() for lookup in lookups],
        "offsets": [0 if lookup.offsets is None else lookup.offsets.data_ptr() for lookup in lookups],
        "weights": [0 if lookup.weights is None else lookup.weights.data_ptr() for lookup in lookups],
        "base": [bases[place] for place in places],
        "mean": [int(lookup.mean and lookup.offsets is not None) for lookup in lookups],
        "rows": [heights[place] for place in places],
    }
    never = (LOOKUP_FIELDS.index("program"), LOOKUP_FIELDS.index("start"))
    return pack_rows([rows[name] for name in LOOKUP_FIELDS], never)


class LookupBatch:
    """Some lookups in tables of a group; none of their memory is read here.

    Attributes:
        padding: the treatment of −1, see `sort.write_keys`.
        reported: whether `check` reads the error flag, see `device_flags.error_flag`.
        buffer: on the device, see `LOOKUP_FIELDS`.
        count: number of values.
        shift, steps: see `sort.place_of`.
        programs: of `sort.write_keys`.
    """

    def __init__(
        self,
        group: Group,
        lookups: Sequence[Lookup],
        tuning: Tuning,
        padding: str = "none",
        reported: bool = True,
    ) -> None:
        self.group, self.tuning, self.padding, self.reported = group, tuning, padding, reported
        self.lookups = [normalized(lookup) for lookup in lookups]
        pooled = [one.offsets.numel() for one in self.lookups if one.offsets is not None]
        counts = [one.values.numel() for one in self.lookups]
        begins = blocks(counts, tuning.values)
        self.buffer = to_device(lookup_buffer(group, self.lookups, begins), group.device)
        self.columns = columns_for(len(self.lookups))
        self.count = sum(counts)
        self.programs = begins[-1]
        self.shift = max(max(bags_of(lookup) for lookup in self.lookups) - 1, 1).bit_length()
        self.steps = max(pooled, default=0).bit_length()
        if self.steps > 30:
            raise ValueError(f"a lookup has fewer than 2**30 bags, not {max(pooled) - 1}")

    @property
    def bits(self) -> int:
        """The number of bits of the largest key."""
        return max(self.group.bases[-1] - 1, 1).bit_length()

    @property
    def narrow(self) -> bool:
        """Whether `radix` can sort the keys: at most 30 bits, and at most `MOST_KEYS` keys."""
        return self.bits <= 30 and self.count < MOST_KEYS

    @property
    def key_dtype(self) -> torch.dtype:
        """The narrowest dtype for the keys."""
        return torch.int32 if self.bits <= 31 else torch.int64

    @property
    def place_dtype(self) -> torch.dtype:
        """The narrowest dtype for the places, which have a lookup and a bag each."""
        return torch.int64 if self.place_bits > 31 else torch.int32

    @property
    def place_bits(self) -> int:
        """The number of bits of a place."""
        return (len(self.lookups) - 1).bit_length() + self.shift

    def new(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return memory on the device of the tables; by default one number for each value."""
        return torch.empty(shape or (self.count,), dtype=dtype, device=self.group.device)

    def new_scales(self) -> Tensor | None:
        """Return memory for scales, if there are any."""
        return self.new(torch.float32) if is_scaled(self.lookups) else None

    def write_keys(
        self,
        keys: Tensor,
        places: Tensor | None = None,
        scales: Tensor | None = None,
        widths: Sequence[int] = (0,),
        totals: Tensor | None = None,
        status: Tensor | None = None,
    ) -> None:
        """Launch `sort.write_keys`, with places, or for `radix` with the totals (passes, bins) and status."""
        sort.write_keys[(self.programs,)](
            self.buffer,
            error_flag(self.group.device, self.reported),
            keys,
            keys if places is None else places,
            keys if scales is None else scales,
            keys if totals is None else totals,
            keys if status is None else status,
            self.shift,
            self.steps,
            0 if status is None else status.numel(),
            LOOKUPS=self.columns,
            PLACES=places is not None,
            SCALED=scales is not None,
            PADDING=self.padding,
            PASSES=0 if totals is None else len(widths),
            BITS=widths[0],
            WIDE=widths.count(widths[0]),
            BLOCK=self.tuning.values,
            num_warps=8,
            maxnreg=sort.REGISTERS if widths[0] <= 8 and places is None else 2 * sort.REGISTERS,
        )
