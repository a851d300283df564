"""Lookups of all features in one tensor of values and one of offsets, as a `KeyedJaggedTensor` has them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, overload

from torch import Tensor

from keyedopt.fused.backends.interface import Lookup

_NUMBERS = count()


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The lookups of every packed input: one for each key, in the order of the outputs.

    Args:
        tables, means: of each lookup, as in `Lookup`.
        keys: the index of the key of each lookup among the keys of the input.
        columns: of each output in the joined output.
        key_count: of the input.
        number: unlike that of any other layout.
    """

    tables: tuple[int, ...]
    means: tuple[bool, ...]
    keys: tuple[int, ...]
    columns: tuple[slice, ...]
    key_count: int
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @cached_property
    def width(self) -> int:
        """The width of the joined output."""
        return int(max(one.stop for one in self.columns))

    @cached_property
    def divides(self) -> bool:
        """Whether any output is divided by the lengths of its bags."""
        return any(self.means)

    @cached_property
    def unit(self) -> int:
        """The greatest common divisor of the first columns of all outputs and 16."""
        return math.gcd(16, *(one.start for one in self.columns))


class PackedLookups(Sequence[Lookup]):
    """The lookups of a packed input, with one joined output.

    To read a lookup splits the input, which synchronizes.

    Args:
        layout: of the lookups.
        values: (N,) int64, contiguous, as the others.
        offsets: (F · B + 1,) int64, of the B bags of each of F keys, one key after the other.
        weights: (N,) float32, or None.
        bags: B.
        grad: of the joined output, (B, width).
        prepared: for use by the backend.
    """

    __slots__ = ("_parts", "bags", "grad", "layout", "offsets", "prepared", "values", "weights")

    def __init__(
        self,
        layout: PackedLayout,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bags: int,
        grad: Tensor | None = None,
        prepared: Any = None,
    ) -> None:
        self.layout, self.values, self.offsets, self.weights = layout, values, offsets, weights
        self.bags, self.grad, self.prepared = bags, grad, prepared
        self._parts: list[Lookup] | None = None

    @property
    def tables(self) -> tuple[int, ...]:
        """The table of each lookup."""
        return self.layout.tables

    def with_grad(self, grad: Tensor) -> "PackedLookups":
        """Return the same lookups with the gradient of the joined output."""
        return PackedLookups(
            self.layout, self.values, self.offsets, self.weights, self.bags, grad, self.prepared
        )

    def __len__(self) -> int:
        """Return the number of lookups."""
        return len(self.layout.tables)

    @overload
    def __getitem__(self, place: int) -> Lookup: ...
    @overload
    def __getitem__(self, place: slice) -> list[Lookup]: ...
    def __getitem__(self, place: int | slice) -> Lookup | list[Lookup]:
        """Return one lookup, or a list of lookups. Synchronizes."""
        if self._parts is None:
            self._parts = self._split()
        return self._parts[place]

    def _split(self) -> list[Lookup]:
        layout, bags = self.layout, self.bags
        edges = self.offsets[::bags].tolist()
        found = []
        for table, mean, key, columns in zip(
            layout.tables, layout.means, layout.keys, layout.columns, strict=True
        ):
            begin, end = edges[key], edges[key + 1]
            found.append(
                Lookup(
                    table,
                    self.values[begin:end],
                    self.offsets[key * bags : (key + 1) * bags + 1] - begin,
                    None if self.weights is None else self.weights[begin:end],
                    mean,
                    None if self.grad is None else self.grad[:, columns],
                )
            )
        return found
