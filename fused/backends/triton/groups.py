"""The tables of one launch, and the constants of kernels that follow from them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl

from keyedopt.fused.backends.interface import Columns, Lookup, Table, Tables, misfit
from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.backends.triton.device_buffers import alignment, columns_for, known_on_device, pack_rows
from keyedopt.fused.backends.triton.shapes import Shape, Tuning, shape_for
from keyedopt.fused.bulk import places
from keyedopt.reference.memory import check_memory

#: The most linear rows of a launch, unless one table has more: `radix` sorts row numbers of 30 bits.
MOST_ROWS = 2**30
#: The key of the groups in `Tables.cache`, and how many are stored there.
CACHE, MOST_CACHED = "triton", 64
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


_NUMBERS = itertools.count()


@lru_cache(maxsize=4096)
def number_of(fixed: tuple[object, ...]) -> int:
    """Return a number for these properties, and no others."""
    return next(_NUMBERS)


@dataclass(frozen=True, eq=False)
class Group:
    """Tables of one device and dtype, with states of the same kinds, whatever their widths.

    Args:
        tables: the tables.
        numbers: the index of each table among the tables of the call.
        gap: 1 to reserve a linear row for padding after the rows of each table, else 0.
    """

    tables: tuple[Table, ...]
    numbers: tuple[int, ...]
    gap: int = 0

    @cached_property
    def number(self) -> int:
        """A number that other groups have only if all but the memory of their tables is the same."""
        one = self.tables[0]
        dtypes = tuple(state.dtype for state in (one.weight, *one.states))
        kinds = (*self.kinds, dtypes, one.row_counter is None)
        return number_of((*kinds, self.gap, self.numbers, tuple(self.heights), tuple(self.widths)))

    @cached_property
    def known(self) -> dict[str, Any]:
        """Results of the last step that the next may use again, by name."""
        return {}

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        counters = [one.row_counter for one in self.tables if one.row_counter is not None]
        return [tensor for one in self.tables for tensor in (one.weight, *one.states)] + counters

    @cached_property
    def device(self) -> torch.device:
        """The device of all tables."""
        return self.tables[0].weight.device

    @cached_property
    def bases(self) -> list[int]:
        """The first linear row of each table, and the number of rows of all of them."""
        bases = [0]
        for height in self.heights:
            bases.append(bases[-1] + height + self.gap)
        return bases

    @cached_property
    def widths(self) -> list[int]:
        """The width of each table."""
        return [one.weight.shape[1] for one in self.tables]

    @cached_property
    def heights(self) -> list[int]:
        """The number of rows of each table."""
        return [one.weight.shape[0] for one in self.tables]

    @cached_property
    def places(self) -> dict[int, int]:
        """The index of each table in the group, by its number."""
        return {number: place for place, number in enumerate(self.numbers)}

    @cached_property
    def unit(self) -> int:
        """The largest power of two, up to 8, that divides every width."""
        return alignment(self.widths, 8)

    @cached_property
    def units(self) -> list[int]:
        """The width of each table in units."""
        return [width // self.unit for width in self.widths]

    @cached_property
    def shape(self) -> Shape:
        """The tile that holds the rows of every table."""
        size = self.tables[0].weight.element_size()
        return shape_for(max(self.widths), size, aligned=self.unit * size >= 16)

    @cached_property
    def columns(self) -> int:
        """The number of columns of the buffer of the tables."""
        return columns_for(len(self.tables))

    @cached_property
    def weight_dtype(self) -> tl.dtype:
        """The dtype of the weights."""
        return DTYPES[self.tables[0].weight.dtype]

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each of two states: "full", "row" or "none"."""
        states = self.tables[0].states
        found = [
            "full" if state.ndim == 2 and state.shape[1:] == self.tables[0].weight.shape[1:] else "row"
            for state in states
        ]
        return [*found, "none", "none"][:2]

    def buffer(self) -> tuple[torch.Tensor, int, int]:
        """Return the buffer of the tables, and the alignment in bytes of weights and of states."""
        key = ("tables", self.known["memory"])
        rows, row_align, align = self.known["rows"]
        buffer = known_on_device(key, self.device, lambda: pack_rows(rows), self.check)
        return buffer, row_align, align

    @cached_property
    def tile(self) -> dict[str, int]:
        """The constants of kernels for the tile of a program, with the options of the launch."""
        rows, width, warps = self.shape.rows, self.shape.width, self.shape.warps
        registers = self.shape.registers
        return {
            "UNIT": self.unit,
            "ROWS": rows,
            "WIDTH": width,
            "num_warps": warps,
            "maxnreg": registers,
        }

    def _rows(self) -> tuple[list[list[int]], int, int]:
        """Return the rows of the buffer of the tables, and the alignment of weights and of states."""
        kinds = self.kinds
        weights = [address(one.weight) for one in self.tables]
        counters = [0 if one.row_counter is None else address(one.row_counter) for one in self.tables]
        states = [
            [address(one.states[k]) if k < len(one.states) else 0 for one in self.tables] for k in (0, 1)
        ]
        row_align = alignment(weights, 16)
        align = alignment([at for k in (0, 1) if kinds[k] == "full" for at in states[k]], 16)
        rows = [
            self.bases[:-1],
            self.units,
            weights,
            *states,
            counters,
        ]
        return rows, row_align, align

    def note_memory(self) -> bool:
        """Note where the tables are, once in a call; return whether they are where they were before.

        ``known["memory"]`` is a number that only these tables at these addresses have.
        """
        found = places(self._tensors)
        if self.known.get("places") == found:
            return True
        memory = number_of((self.number, found))
        self.known.update(places=found, memory=memory, rows=self._rows())
        return False

    def tuning(self, given: Tuning) -> Tuning:
        """Return the sizes for the tile of the group."""
        known = self.known.get("tuning")
        if known is None or known[0] is not given:
            known = self.known["tuning"] = given, given.for_shape(self.shape)
        return known[1]

    def check(self) -> None:
        """Check that states fit their tables, and that all are contiguous; called when addresses change.

        Raises:
            ValueError: says which tensor is wrong.
            RuntimeError: the memory of a tensor has been freed.
        """
        for one, height, width in zip(self.tables, self.heights, self.widths, strict=True):
            why = unfit(one)
            if not why and one.weight.shape != (height, width):
                why = f"a table of {(height, width)} has become one of {tuple(one.weight.shape)}"
            if why:
                raise ValueError(why)
        for tensor in self._tensors:
            check_memory(tensor)


def unfit(table: Table) -> str:
    """Return why the kernels do not support a table; empty if they do."""
    why = misfit(table)
    counter = () if table.row_counter is None else (table.row_counter,)
    if not why and any(not one.is_contiguous() for one in (table.weight, *table.states, *counter)):
        return "tables and states must be contiguous"
    return why


def group_tables(tables: Sequence[Table], used: Sequence[int], gap: int = 0) -> list[Group]:
    """Put the tables that are used into groups."""
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for number in sorted(set(used)):
        one = tables[number]
        kinds = tuple((state.ndim, state.dtype) for state in one.states)
        kind = (one.weight.device, one.weight.dtype, kinds, one.row_counter is None)
        by_kind.setdefault(kind, []).append(number)
    groups = []
    for numbers in by_kind.values():
        part: list[int] = []
        rows = 0
        for number in numbers:
            height = tables[number].weight.shape[0] + gap
            if part and rows + height > MOST_ROWS:
                groups.append(Group(tuple(tables[one] for one in part), tuple(part), gap))
                part, rows = [], 0
            part.append(number)
            rows += height
        groups.append(Group(tuple(tables[one] for one in part), tuple(part), gap))
    return groups


def split(
    tables: Sequence[Table], lookups: Sequence[Lookup], padding: bool = False
) -> list[tuple[Group, list[int]]]:
    """Return the groups of the tables that are looked up, and the indices of the lookups of each.

    Groups of `Tables` are made once for the same lookups, unless weights get another shape.
    """
    used = tuple(
        lookups.tables if isinstance(lookups, Columns | PackedLookups) else [one.table for one in lookups]
    )
    cache = tables.cache.setdefault(CACHE, {}) if isinstance(tables, Tables) else {}
    shapes = [one.weight.shape for one in tables]
    known = cache.get((used, padding))
    if known is not None and known[0] == shapes:
        groups: list[tuple[Group, list[int]]] = known[1]
        for group, _ in groups:
            group.note_memory()
        return groups
    made = group_tables(tables, used, int(padding))
    groups = [(group, [index for index, table in enumerate(used) if table in group.places]) for group in made]
    for group in made:
        group.note_memory()
    if len(cache) >= MOST_CACHED:
        cache.clear()
    cache[used, padding] = shapes, groups
    return groups


def bags_of(lookup: Lookup) -> int:
    """Return the number of rows of the output of a lookup."""
    return lookup.values.numel() if lookup.offsets is None else lookup.offsets.numel() - 1


def blocks(counts: Sequence[int], size: int) -> list[int]:
    """Return the first program of each count when a program does `size`, and the number of programs.

    >>> blocks([5, 0, 4], 4)
    [0, 2, 2, 3]
    """
    begins = [0]
    for count in counts:
        begins.append(begins[-1] - -count // size)
    return begins
