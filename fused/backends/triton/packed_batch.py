"""Launches for a packed input; what does not change from step to step is computed once for a layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from keyedopt.fused.backends import memory
from keyedopt.fused.backends.interface import Table, Tables
from keyedopt.fused.backends.packed import PackedLayout, PackedLookups
from keyedopt.fused.backends.triton import launch, unpack
from keyedopt.fused.backends.triton.device_buffers import alignment, columns_for, known_on_device, pack_rows
from keyedopt.fused.backends.triton.device_flags import error_flag
from keyedopt.fused.backends.triton.grads import Grads, readable_one
from keyedopt.fused.backends.triton.groups import Group, split
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.layout import LOOKUP_FIELDS
from keyedopt.fused.backends.triton.lookup_batch import LookupBatch
from keyedopt.fused.backends.triton.prepare import Prepared, Runs, runs_of
from keyedopt.fused.backends.triton.shapes import Tuning
from keyedopt.fused.backends.triton.streams import side_stream


def group_of(tables: Sequence[Table], lookups: PackedLookups) -> Group:
    """Return the one group of the tables."""
    known = tables.cache.get(lookups.layout) if isinstance(tables, Tables) else None
    if known is not None and known.note_memory():
        return known  # type: ignore[no-any-return]
    ((group, _),) = split(tables, lookups)
    if isinstance(tables, Tables):
        tables.cache[lookups.layout] = group
    return group


def look_up(group: Group, lookups: PackedLookups, tuning: Tuning, training: bool) -> Tensor:
    """Return the joined output; if `training`, find the runs, see `side_stream`.

    ``lookups.prepared`` are then the group and the runs, for the update.
    """
    device, layout = group.device, lookups.layout
    batch = unpacked(group, lookups, tuning)
    if training and batch.count:
        read = [batch.buffer, lookups.values, lookups.offsets]
        read += [] if lookups.weights is None else [lookups.weights]
        with side_stream(device, read):
            runs = runs_of(batch)
            lookups.prepared = group, Prepared(runs, runs.filled(), 0)
    output = torch.empty(lookups.bags, layout.width, dtype=torch.float32, device=device)
    tables, weights_align = _weights(group, layout)
    outputs = joined_columns(group, layout, output)
    align = min(weights_align, alignment([output.data_ptr(), 4 * layout.unit], 16))
    programs = len(lookups) * -(-lookups.bags // group.shape.rows)
    buffers = (batch.buffer, tables, outputs)
    launch.run_pool(group, programs, buffers, batch.columns, align, batch.scaled)
    return output


def runs_and_grads(group: Group, lookups: PackedLookups, tuning: Tuning) -> tuple[Runs | None, Grads | None]:
    """Return the runs, made in the forward pass or here, and the gradients; None if nothing was looked up."""
    assert lookups.grad is not None
    if not lookups.values.numel():
        return None, None
    grads = joined_grads(group, lookups.layout, lookups.grad)
    prepared = lookups.prepared
    if prepared is not None and prepared[0] is group:
        return prepared[1].runs(), grads
    return runs_of(unpacked(group, lookups, tuning)), grads


def unpacked(group: Group, lookups: PackedLookups, tuning: Tuning) -> LookupBatch:
    """Split a packed input on the device."""
    layout, bags, count = lookups.layout, lookups.bags, lookups.values.numel()
    used, device, tuning = len(lookups), group.device, group.tuning(tuning)
    columns = columns_for(used)
    steps = (bags + 1).bit_length()
    if steps > 30:
        raise ValueError(f"a lookup has fewer than 2**30 bags, not {bags}")
    buffer = torch.empty(len(LOOKUP_FIELDS) * columns, dtype=torch.int64, device=device)
    fixed = known_on_device(("fixed", layout.number, group.number), device, lambda: _fixed(group, layout))
    rows = group.shape.rows
    start(
        unpack.unpack,
        1,
        (buffer, error_flag(device), fixed, lookups.offsets),
        (
            memory.address(lookups.values),
            *(0 if lookups.weights is None else memory.address(lookups.weights), count, bags, used),
        ),
        (columns, tuning.values, rows, memory.address(lookups.offsets) & 15),
        lambda: {"LOOKUPS": columns, "BLOCK": tuning.values, "ROWS": rows, "num_warps": 4, "maxnreg": 128},
    )
    scaled = lookups.weights is not None or layout.divides
    programs = count // tuning.values + used
    return LookupBatch(group, tuning, buffer, used, count, programs, bags, steps, scaled)


def joined_grads(group: Group, layout: PackedLayout, grad: Tensor) -> Grads:
    """Return the gradient of the joined output, as kernels read it."""
    grad = readable_one(grad)
    unit = alignment([grad.stride(0)], 8)
    align = alignment([grad.data_ptr(), layout.unit * grad.element_size()], 16)
    return Grads([grad], joined_columns(group, layout, grad, unit), (grad.dtype, align, unit))


def joined_columns(group: Group, layout: PackedLayout, joined: Tensor, unit: int | None = None) -> Tensor:
    """Return the columns of `GRAD_FIELDS` for the parts of a joined tensor (B, sum of widths)."""
    address, stride, size, unit = (
        joined.data_ptr(),
        joined.stride(0),
        joined.element_size(),
        unit or group.unit,
    )

    def numbers() -> Sequence[int]:
        strides = [stride // unit] * len(layout.columns)
        return pack_rows([[address + size * one.start for one in layout.columns], strides], begins=())

    return known_on_device(("joined", layout.number, address, stride, size, unit), group.device, numbers)


def _weights(group: Group, layout: PackedLayout) -> tuple[Tensor, int]:
    """Return address and width of the table of each lookup, and the alignment of the weights."""

    def numbers() -> Sequence[int]:
        places = [group.places[table] for table in layout.tables]
        weights = [memory.address(group.tables[place].weight) for place in places]
        return pack_rows([weights, [group.units[place] for place in places]])

    key = "weights", layout.number, group.known["memory"]
    return known_on_device(key, group.device, numbers, group.check), group.known["rows"][1]


def _fixed(group: Group, layout: PackedLayout) -> list[int]:
    places = [group.places[table] for table in layout.tables]
    bases, heights = group.bases, group.heights
    rows = [
        layout.keys,
        [bases[place] for place in places],
        [int(mean) for mean in layout.means],
        [heights[place] for place in places],
    ]
    return pack_rows(rows, begins=())
