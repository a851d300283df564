"""The backend of C++ kernels for the CPU: sort, sum and update in one call, on all cores.

Lookups are sorted by row (radix sort, on the bits that the table's rows need), the gradients of a row are
summed in registers straight from the gradient of the output, and row and state are updated in place. The
kernels are compiled for AVX-512, for AVX2 and for any machine; which are used is decided when they run.
Results do not depend on the number of threads, which is torch's.

The extension is built when keyedopt is installed, without torch's headers, where there is a C++ compiler;
without one `NativeBackend.missing` says so.
"""

import importlib
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import (
    ROW_STATE,
    Backend,
    Columns,
    Lookup,
    RowGradients,
    Step,
    Table,
    Tables,
)
from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.native.describe import (
    ALGORITHM_NUMBERS,
    describe_rule,
    described_tables,
    refused_table,
)
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.bulk import native as bulk
from keyedopt.fused.dense.state_memory import empty_output

_kernels: Any = None
_WHY = ""
try:
    _kernels = importlib.import_module("keyedopt.fused.backends.native._kernels")
except ImportError as error:
    _WHY = f"{error}"
if _kernels is not None and not hasattr(_kernels, "parse_tables"):
    _kernels, _WHY = None, "the extension is older than its sources"

#: The environment variable: ``plain``, ``avx2`` or ``avx512`` uses only those kernels.
INSTRUCTION_SET = "KEYEDOPT_INSTRUCTION_SET"

_INT64, _FLOAT32 = torch.int64, torch.float32
_CPU = torch.device("cpu")
#: Up to so many numbers, all outputs of a forward pass share one allocation, which is faster.
_TOGETHER = 1 << 14


class NativeBackend(Backend):
    """The backend of C++ kernels, for the CPU.

    Args:
        instruction_set: ``"plain"``, ``"avx2"`` or ``"avx512"``; by default that of the environment variable
            `INSTRUCTION_SET`, or the best that the machine has.
        threads: how many to use; by default as many as torch.
    """

    name = "native"
    checks_lookups = True
    packs_any_keys = True

    def __init__(self, instruction_set: str | None = None, threads: int | None = None) -> None:
        self._set = os.environ.get(INSTRUCTION_SET, "") if instruction_set is None else instruction_set
        self._threads = threads

    @staticmethod
    def instruction_sets() -> list[str]:
        """Return the instruction sets that this machine supports, the best one first."""
        return list(_kernels.instruction_sets()) if _kernels else []

    def missing(self) -> str:
        """Return why the kernels cannot run; empty if they can."""
        if _kernels is None:
            return f"its C++ extension was not built ({_WHY}): install again with a C++17 compiler on PATH"
        if self._set and self._set not in self.instruction_sets():
            return (
                f"this machine does not support instruction set {self._set!r}, only {self.instruction_sets()}"
            )
        return ""

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return why tables or the step are not supported: device, dtype, layout or algorithm."""
        if step.algorithm not in ALGORITHM_NUMBERS:
            return f"the kernels do not have {step.algorithm!r}"
        if step.lr_power != -0.5:
            return f"the kernels have lr_power=-0.5, not {step.lr_power}"
        return next((why for why in map(refused_table, tables) if why), "")

    def kernels(self) -> str:
        """Return the instruction set and the number of threads."""
        return f"C++ kernels for {self._set or self.instruction_sets()[0]}, {self._count()} threads"

    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup, in float32.

        Raises:
            ValueError: a value is not a row of its table, or offsets do not go from 0 to the number of
                values.
        """
        if type(lookups) is Columns and type(tables) is Tables:
            outputs = _outputs(tables, lookups)
        else:
            outputs = []
            for one in lookups:
                (_, _, _, _, bags, *_), _ = _describe(tables, one)
                width = tables[one.table].weight.shape[1]
                outputs.append(torch.empty(bags, width, dtype=_FLOAT32, device=_CPU))
        self.look_up_into(tables, lookups, outputs)
        return outputs

    def look_up_into(
        self, tables: Sequence[Table], lookups: Sequence[Lookup], outputs: Sequence[Tensor]
    ) -> None:
        """Write the output of each lookup into memory in float32 whose rows may be apart.

        Raises:
            ValueError: as `look_up`.
        """
        if type(lookups) is Columns and type(tables) is Tables:
            columns = _columns(lookups, outputs)
            _kernels.look_up_rows(described_tables(tables, None, _kernels), columns, self._count(), self._set)
            return
        items, kept = [], []
        for lookup, out in zip(lookups, outputs, strict=True):
            item, parts = _describe(tables, lookup)
            items.append((*item, address(out), out.stride(0)))
            kept.append(parts)
        described = described_tables(tables, None, _kernels)
        _kernels.look_up_rows(described, items, self._count(), self._set)

    def packs_tables(self, tables: Sequence[Table]) -> bool:
        """Return whether `look_up_packed` looks these tables up: all that the kernels support."""
        return type(tables) is Tables

    def look_up_packed(self, tables: Sequence[Table], lookups: PackedLookups, training: bool) -> Tensor:
        """Return the joined output of a packed input, (B, width) float32.

        Raises:
            ValueError: as `look_up`.
        """
        assert type(tables) is Tables
        output = empty_output(lookups.bags, lookups.layout.width)
        described = described_tables(tables, None, _kernels)
        _kernels.look_up_rows(described, _packed(tables, lookups, output), self._count(), self._set)
        return output

    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row, in float32.

        Raises:
            ValueError: as `update`.
        """
        items: Any
        kept: list[Any] = []
        if type(lookups) is PackedLookups and type(tables) is Tables:
            items, looked_up = _packed_with_gradient(tables, lookups), set(lookups.tables)
        else:
            items, kept = _with_gradients(tables, lookups)
            looked_up = {lookup.table for lookup in lookups}
        described = described_tables(tables, None, _kernels)
        sorted_lookups, counts = _kernels.sort(described, items, self._count(), self._set)
        found = [_new_sums(tables, table, count) for table, count in counts]
        memory = [(one.rows.data_ptr(), one.grads.data_ptr()) for one in found]
        _kernels.sum(sorted_lookups, memory, self._count(), self._set)
        del kept
        without_values = looked_up - {table for table, _ in counts}
        return found + [_new_sums(tables, table, 0) for table in sorted(without_values)]

    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it, once.

        Raises:
            ValueError: a value is not a row of its table, offsets do not go from 0 to the number of values,
                or a tensor does not have the shape of the interface. Nothing is written.
        """
        items: Any
        kept: list[Any] = []
        if type(lookups) is PackedLookups and type(tables) is Tables:
            items = _packed_with_gradient(tables, lookups)
        elif type(lookups) is Columns and type(tables) is Tables and lookups.grads is not None:
            grads = [  # only the rows must be contiguous
                one if one.dtype is _FLOAT32 and one.stride(1) == 1 else _rows_of(one)
                for one in lookups.grads
            ]
            items = _columns(lookups, grads)
        else:
            items, kept = _with_gradients(tables, lookups)
        described = described_tables(tables, step, _kernels)
        _kernels.update(described, items, describe_rule(step), self._count(), self._set)
        del kept

    def update_listed(self, params: Sequence[Any], names: Sequence[str], step: Step) -> bool:
        """Update parameters by sparse gradients, with less Python than `update`, in the common case.

        Args:
            params: tuples of parameter, sparse gradient, and state by name.
            names: the state tensors, in the order of `ALGORITHMS`.
            step: the formula, without counts by row.

        Returns:
            Whether the update was done; if False, nothing is written.

        Raises:
            ValueError: as `update`.
        """
        if bulk is None or self.refuses((), step) or step.algorithm in ROW_STATE:
            return False
        grads = [grad for _, grad, _ in params]
        indices, values = [grad._indices() for grad in grads], [grad._values() for grad in grads]
        weights = [param for param, _, _ in params]
        states = [[state[name] for _, _, state in params] for name in names]
        described = bulk.listed(weights, states, indices, values)
        if described is None:
            return False
        described_tables, lookups = described
        self.update_described(described_tables, lookups, describe_rule(step))
        torch.autograd.graph.increment_version([*weights, *chain.from_iterable(states)])
        return True

    def update_described(self, tables: Any, lookups: Any, rule: tuple[Any, ...]) -> None:
        """Do what `update` does for described tables and lookups; the caller keeps the tensors alive.

        Raises:
            ValueError: as `update`.
        """
        _kernels.update(tables, lookups, rule, self._count(), self._set)

    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already.

        Raises:
            ValueError: rows are not distinct rows of the table in ascending order, or shapes do not fit;
                nothing is written.
        """
        items, kept = [], []
        for given in gradients:
            rows, grads = _as(given.rows, _INT64), _rows_of(given.grads)
            width = tables[given.table].weight.shape[1]
            if rows.dim() != 1 or grads.shape != (len(rows), width):
                raise ValueError(
                    f"gradients of {len(rows)} rows must be ({len(rows)}, {width}), not {tuple(grads.shape)}"
                )
            items.append((given.table, address(rows), address(grads), len(rows), grads.stride(0)))
            kept.append((rows, grads))
        described = described_tables(tables, step, _kernels)
        _kernels.update_rows(described, items, describe_rule(step), self._count(), self._set)
        del kept

    def _count(self) -> int:
        return self._threads or torch.get_num_threads()


def parse_bags(features: dict[str, Any], names: list[str], classes: tuple[type, ...]) -> list[Any] | None:
    """Return features in the common case, in a fraction of the time that Python takes.

    Args:
        features: by name.
        names: of the features to return.
        classes: the classes that a feature may have.

    Returns:
        For each name ``(values, offsets, None)`` if these are contiguous int64 vectors on the CPU, without
        weights, else None. None without the extension.
    """
    return None if _kernels is None else _kernels.simple_bags(features, names, classes, Tensor, _INT64)


def versions(*lists: list[Any] | None) -> int:
    """Return the sum of the versions of some tensors; None counts 0."""
    if _kernels is not None:
        return _kernels.versions(*lists)  # type: ignore[no-any-return]
    return sum(one._version for given in lists for one in given or () if one is not None)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this dtype, contiguous, on the CPU; itself in the common case."""
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", dtype).contiguous()


def _rows_of(grads: Tensor) -> Tensor:
    """Return gradients in float32 with contiguous rows; the stride between rows may be anything."""
    if grads.dtype is not _FLOAT32 or not grads.is_cpu:
        grads = grads.to("cpu", _FLOAT32)
    if grads.dim() == 2 and (grads.stride(1) == 1 or grads.shape[1] == 1):
        return grads
    return grads.contiguous()


def _new_sums(tables: Sequence[Table], table: int, count: int) -> RowGradients:
    shape = count, tables[table].weight.shape[1]
    grads = torch.empty(shape, dtype=_FLOAT32, device=_CPU)
    return RowGradients(table, torch.empty(count, dtype=_INT64, device=_CPU), grads)


def _outputs(tables: Tables, lookups: Columns) -> list[Tensor]:
    """Return memory for the outputs, in float32 whatever torch's default dtype is."""
    if not len(lookups):
        return []
    widths = _widths(tables)
    if lookups.offsets is None:
        bags = [one.numel() for one in lookups.values]
    else:
        bags = [one.numel() - 1 for one in lookups.offsets]
        if min(bags) < 0:
            raise ValueError("offsets must have one number more than there are bags")
    new = partial(torch.empty, dtype=_FLOAT32, device=_CPU)
    first, alike = widths[lookups.tables[0]], min(bags) == max(bags) and min(widths) == max(widths)
    if alike and 0 < bags[0] * first * len(bags) <= _TOGETHER:
        whole = new(bags[0] * len(bags), first)
        return list(torch.unsafe_split(whole, bags[0]))  # one allocation, but no output is a view of another
    return [new(rows, widths[table]) for rows, table in zip(bags, lookups.tables, strict=True)]


def _widths(tables: Tables) -> list[int]:
    widths: list[int] | None = tables.cache.get("widths")
    if widths is None:
        widths = tables.cache["widths"] = [table.weight.shape[1] for table in tables]
    return widths


def _columns(lookups: Columns, rows: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return checked lookups as the kernels take them, with their outputs or gradients."""
    weights = lookups.weights
    if weights is not None:
        weights = [None if one is None else _as(one, _FLOAT32) for one in weights]
    return lookups.tables, lookups.values, lookups.offsets, weights, lookups.means, rows


def _packed(tables: Tables, lookups: PackedLookups, rows: Tensor) -> tuple[Any, ...]:
    """Return a packed input as the kernels take it, with its output or gradient."""
    layout = lookups.layout
    known = tables.cache.get(layout)
    if known is None:
        begins = tuple(one.start for one in layout.columns)
        known = tables.cache[layout] = _kernels.cache_layout(
            layout.tables, layout.means, layout.keys, begins, layout.key_count, layout.width
        )
    return known, lookups.values, lookups.offsets, lookups.weights, lookups.bags, rows


def _packed_with_gradient(tables: Tables, lookups: PackedLookups) -> tuple[Any, ...]:
    """Return a packed input with the gradient of its output, and keep the gradient in memory.

    Raises:
        ValueError: there is no gradient, or it does not have the shape of the output.
    """
    if lookups.grad is None:
        raise ValueError("a lookup has no gradient to sum")
    shape = lookups.bags, lookups.layout.width
    if lookups.grad.shape != shape:
        raise ValueError(f"the gradient of a packed input must be {shape}, not {tuple(lookups.grad.shape)}")
    return _packed(tables, lookups, _rows_of(lookups.grad))


def _describe(tables: Sequence[Table], lookup: Lookup) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return a lookup as the kernels take it, without its rows, and the tensors that must stay alive."""
    if not 0 <= lookup.table < len(tables):
        raise ValueError(f"a lookup is of table {lookup.table}, but there are only {len(tables)} tables")
    values, offsets, weights = _as(lookup.values, _INT64), lookup.offsets, lookup.weights
    count = bags = values.numel()
    begin = factors = 0
    if offsets is not None:
        offsets = _as(offsets, _INT64)
        bags, begin = offsets.numel() - 1, address(offsets)
        if bags < 0:
            raise ValueError("offsets must have one number more than there are bags")
    if weights is not None:
        weights = _as(weights, _FLOAT32)
        factors = address(weights)
        if weights.numel() != count:
            raise ValueError(f"weights must be one for each of {count} values, not {tuple(weights.shape)}")
    item = lookup.table, address(values), count, begin, bags, factors, lookup.mean
    return item, (values, offsets, weights)


def _with_gradients(
    tables: Sequence[Table], lookups: Sequence[Lookup]
) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return lookups with their gradients as the kernels take them, and the tensors that must stay alive."""
    items: list[tuple[Any, ...]] = []
    kept: list[Any] = []
    for lookup in lookups:
        item, parts = _describe(tables, lookup)
        if lookup.grad is None:
            raise ValueError("a lookup has no gradient to sum")
        grad = _rows_of(lookup.grad)
        shape = (item[4], tables[lookup.table].weight.shape[1])
        if grad.shape != shape:
            raise ValueError(f"a gradient must be {shape}, not {tuple(grad.shape)}")
        items.append((*item, address(grad), grad.stride(0)))
        kept.append((parts, grad))
    return items, kept
