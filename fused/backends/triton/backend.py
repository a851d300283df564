"""The backend of kernels in Triton: the methods of the interface, over groups of tables."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from keyedopt.fused.backends.interface import ALGORITHMS, Backend, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.backends.streams import as_current, on_cuda
from keyedopt.fused.backends.triton import device_flags, launch, packed_batch
from keyedopt.fused.backends.triton.grads import Grads, pack_grads
from keyedopt.fused.backends.triton.groups import DTYPES, Group, bags_of, group_tables, split, unfit
from keyedopt.fused.backends.triton.prepare import Prepared, Runs, make_keys, make_runs, prepare
from keyedopt.fused.backends.triton.runs_check import wrong_runs
from keyedopt.fused.backends.triton.shapes import WIDEST, Tuning


def interpreted() -> bool:
    """Return whether Triton interprets kernels, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


class TritonBackend(Backend):
    """Kernels in Triton, for CUDA; in Triton's interpreter for the CPU too, slowly.

    Args:
        tuning: sizes of the work of a program; they change results only by rounding.
    """

    name = "triton"
    checks_lookups = True
    checks_offsets = True
    prepares = True
    pads_rows = True
    checked_devices = ("cuda",)
    kernel_names: Mapping[str, str] = {
        "sort": "write_keys, radix_pass or find_runs",
        "look_up": "pool",
        "coalesce": "sum_chunks, fold_chunks or collect",
        "update": "update",
    }

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or Tuning()
        self.long_run = (3 * self._tuning.chunk << self._tuning.fold) + 5

    @torch.no_grad()
    def wrong_sort(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> str:
        """Compare keys, places and runs with torch's; also of a table whose keys take three passes."""
        tall = Table(torch.empty(1 << 17, 1, dtype=tables[0].weight.dtype, device=tables[0].weight.device))
        far = replace(lookups[0], values=lookups[0].values * 409)  # below 300 · 409 < 2¹⁷
        for some, looked_up in ((tables, lookups), ([tall], [far])):
            for group, chosen in split(some, looked_up):
                with as_current(group.device):
                    wrong = wrong_runs(group, [looked_up[index] for index in chosen], self._tuning)
                if wrong:
                    return wrong
        return ""

    def missing(self) -> str:
        """Return why the backend cannot run on this machine; empty if it can."""
        if torch.cuda.is_available() or interpreted():
            return ""
        return "no CUDA device was found (TRITON_INTERPRET=1, set before the start, interprets on the CPU)"

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return why the step is not supported; empty if it is."""
        if step.algorithm not in ALGORITHMS:
            return f"algorithm {step.algorithm!r} is unknown"
        if step.algorithm == "ftrl":
            return f"the kernels do not have {step.algorithm!r}"
        if step.max_norm is not None and step.algorithm != "rowwise_adagrad":
            return f"the kernels have max_norm for rowwise_adagrad, not for {step.algorithm}"
        return next((why for table in tables if (why := _refused(table))), "")

    def counts_steps(self, device: torch.device) -> bool:
        """Return whether updates on this device count steps: on CUDA, not in the interpreter."""
        return on_cuda(device)

    @torch.no_grad()
    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup: (B, D) pooled, (N, D) not; in float32.

        Raises:
            ValueError: lookups of an earlier call were invalid, see `check`.
        """
        for device in _devices(tables):
            device_flags.check_arrived(device)
        outputs = []
        for lookup in lookups:
            weight = tables[lookup.table].weight
            shape = (bags_of(lookup), weight.shape[1])
            outputs.append(torch.empty(shape, dtype=torch.float32, device=weight.device))
        for group, chosen in split(tables, lookups):
            with as_current(group.device):
                given = [lookups[index] for index in chosen]
                launch.look_up(group, given, [outputs[index] for index in chosen])
        self._check_soon(tables)
        return outputs

    def look_up_packed(self, tables: Sequence[Table], lookups: PackedLookups, training: bool) -> Tensor:
        """Return the joined output; if `training`, also sort the lookups by row, see `side_stream`.

        Raises:
            ValueError: lookups of an earlier call were invalid, see `check`.
        """
        group = packed_batch.group_of(tables, lookups)
        device_flags.check_arrived(group.device)
        with as_current(group.device):
            output = packed_batch.look_up(group, lookups, self._tuning, training)
        if not (training and on_cuda(group.device)):  # else the update does
            device_flags.send_flag(group.device)
        return output

    def packs_tables(self, tables: Sequence[Table]) -> bool:
        """Return whether `look_up_packed` supports these tables."""
        return len(group_tables(tables, range(len(tables)))) == 1

    def check_offsets(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> None:
        """Check offsets that no lookup uses, as those without pooling."""
        for group, chosen in split(tables, lookups):
            with as_current(group.device):
                launch.check_offsets(group, [lookups[index] for index in chosen])
        self._check_soon(tables)

    def check(self, device: torch.device) -> None:
        """Synchronize, and raise what was wrong with lookups on a device since the last call.

        Invalid row numbers and offsets read no memory, and set the error flag of the device, which each call
        copies to the host without synchronizing. The first `look_up` after the flag has arrived raises the
        error, or this method. Until then no table, state or step count on the device is written.

        Raises:
            ValueError: says what was wrong.
        """
        device_flags.check(device)

    @torch.no_grad()
    def prepare(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Any]:
        """Sort the lookups by row; return for each the runs of its group, and its index in the group.

        Invalid lookups do not set the error flag here: `look_up` of the same lookups does. Only the
        update needs the sort, see `streams.side_stream`, so this is best called before `look_up`.
        """
        prepared: list[Any] = [None] * len(lookups)
        for group, chosen in split(tables, lookups):
            if any(lookups[index].values.numel() for index in chosen):
                with as_current(group.device):
                    made = prepare(group, [lookups[index] for index in chosen], self._tuning)
                for index, one in zip(chosen, made, strict=True):
                    prepared[index] = one
        return prepared

    @torch.no_grad()
    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row, in compensated float32. Synchronizes."""
        return self._coalesce(tables, lookups, exact=True)

    @torch.no_grad()
    def coalesce_padded(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Do what `coalesce` does without synchronizing; the results may end with padding rows."""
        return self._coalesce(tables, lookups, exact=False)

    def _coalesce(
        self, tables: Sequence[Table], lookups: Sequence[Lookup], *, exact: bool
    ) -> list[RowGradients]:
        found: list[RowGradients] = []
        packed = type(lookups) is PackedLookups
        padded = not packed and any(lookup.padding for lookup in lookups)
        for group, chosen in split(tables, lookups, padded):
            mine = lookups if packed else [lookups[index] for index in chosen]
            with as_current(group.device):
                runs, grads = self._runs(group, mine)
                if runs is not None and grads is not None:
                    found += launch.run_collect(
                        group, runs, grads, None if exact else _capacities(group, mine)
                    )
                    continue
            for number, table in zip(group.numbers, group.tables, strict=True):
                rows = torch.empty(0, dtype=torch.int64, device=group.device)
                found.append(RowGradients(number, rows, rows.new_empty(0, table.weight.shape[1]).float()))
        self._check_soon(tables)
        return sorted(found, key=lambda one: one.table)

    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it, once."""
        if type(lookups) is PackedLookups:
            groups: Sequence[tuple[Group, Any]] = [(packed_batch.group_of(tables, lookups), lookups)]
        else:
            groups = [(one, [lookups[index] for index in chosen]) for one, chosen in split(tables, lookups)]
        for group, mine in groups:
            with as_current(group.device):
                runs, grads = self._runs(group, mine)
                if runs is not None and grads is not None:
                    launch.run_update(group, runs, grads, step)
                    step = replace(step, counters=()) if step.counters else step
        launch.count_up(step.counters)  # if nothing was looked up
        for group, _ in groups:
            device_flags.send_flag(group.device)

    @torch.no_grad()
    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already."""
        lookups = [Lookup(one.table, one.rows, grad=one.grads) for one in gradients if len(one.rows)]
        for group, chosen in split(tables, lookups):
            grads = [grad for index in chosen if (grad := lookups[index].grad) is not None]
            with as_current(group.device):
                keys = make_keys(group, [lookups[index] for index in chosen], self._tuning)
                launch.run_update(group, keys, pack_grads(grads, group), step)
            step = replace(step, counters=())
        launch.count_up(step.counters)
        self._check_soon(tables)

    def _check_soon(self, tables: Sequence[Table]) -> None:
        """Send the error flag to the host, where the next `look_up` reads it; on the CPU, raise the error."""
        for device in _devices(tables):
            device_flags.send_flag(device)

    def _runs(self, group: Group, lookups: Sequence[Lookup]) -> tuple[Runs | None, Grads | None]:
        """Return the runs of lookups with a gradient, and the gradients; None if nothing was looked up."""
        if type(lookups) is PackedLookups:
            return packed_batch.runs_and_grads(group, lookups, self._tuning)
        lookups = [lookup for lookup in lookups if lookup.grad is not None]
        given = [one.prepared for one in lookups if isinstance(one.prepared, Prepared)]
        runs = None
        if given and len(given) == len(lookups) == given[0].found.lookups:
            first = given[0]
            same = all(one.found is first.found for one in given)
            if same and len({one.index for one in given}) == len(given):
                lookups = sorted(lookups, key=lambda one: one.prepared.index)
                runs = first.runs()
        if runs is None:
            lookups = [lookup for lookup in lookups if lookup.values.numel()]
            if not lookups:
                return None, None
            runs = make_runs(group, lookups, self._tuning)
        return runs, pack_grads([lookup.grad for lookup in lookups if lookup.grad is not None], group)


def _devices(tables: Iterable[Table]) -> set[torch.device]:
    return set(map(operator.attrgetter("weight.device"), tables))


def _capacities(group: Group, lookups: Sequence[Lookup]) -> list[int]:
    """Return the largest possible number of rows of each table in these lookups."""
    if type(lookups) is PackedLookups:
        return [min(lookups.values.numel(), most) for most in group.heights]
    values = dict.fromkeys(group.numbers, 0)
    for lookup in lookups:
        values[lookup.table] += lookup.values.numel()
    return [min(values[number], most) for number, most in zip(group.numbers, group.heights, strict=True)]


def _refused(table: Table) -> str:
    """Return why a table is not supported; empty if it is."""
    device, dtype = table.weight.device, table.weight.dtype
    if not on_cuda(device) and not (device.type == "cpu" and interpreted()):
        return f"tables must be on CUDA, not on {device}"
    if dtype not in DTYPES:
        return f"weights must be in {', '.join(str(one) for one in DTYPES)}, not in {dtype}"
    why = unfit(table)
    if why:
        return why
    if not 0 < table.weight.shape[1] <= WIDEST:
        return f"rows must have 1 to {WIDEST} elements, not {table.weight.shape[1]}"
    for place, tensor in enumerate(table.states):
        if tensor.dtype not in (DTYPES if place == 0 and tensor.ndim == 2 else (torch.float32,)):
            return f"states must be in float32, a momentum in half precision at least, not in {tensor.dtype}"
    return ""
