"""One step of an embedding module, after a backward pass: checked as a whole, then written."""

import functools
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Backend, Columns, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.backends.streams import capturing
from keyedopt.fused.embedding.backward import GroupLookups
from keyedopt.fused.embedding.table_groups import TableGroup
from keyedopt.fused.sparse.sparse_step import nonzero
from keyedopt.fused.sparse.window import Parts, Window
from keyedopt.reference.rules.options import Rows


@dataclass(eq=False)
class GroupUpdate:
    """The update of some tables of a group that have the same step count.

    Args:
        group: the tables.
        step: the formula and its numbers.
        backend: does the update.
        lookups: with gradients.
        sums: the gradients of the rows, if they are needed before the update; else None.
    """

    group: TableGroup
    step: Step
    backend: Backend
    lookups: Sequence[Lookup]
    sums: list[RowGradients] | None = None


@dataclass(eq=False)
class PlannedStep:
    """All updates of a step, complete before anything is written.

    Args:
        updates: of tables.
        unfinished: windows that are not full after this step, with rows, gradients, and a function that
            merges.
        full: windows that are empty after this step.
    """

    updates: list[GroupUpdate] = field(default_factory=list)
    unfinished: list[tuple[Window, Tensor, Tensor, Any]] = field(default_factory=list)
    full: list[Window] = field(default_factory=list)

    def gradients(self) -> list[Tensor]:
        """Return the known sums of the rows that will be updated, table by table."""
        return [one.grads for update in self.updates for one in update.sums or ()]

    def store_in_windows(self) -> None:
        """Store the gradients of unfinished windows."""
        for window, rows, grads, merge in self.unfinished:
            window.keep(rows, grads, merge)

    def apply(self) -> None:
        """Write everything; all errors were raised before."""
        self.store_in_windows()
        for update in self.updates:
            _write(update)
        for window in self.full:
            window.clear()


def plan_step(
    lookups: Iterable[GroupLookups], clips: Sequence[Any], seed: tuple[int, int] | None
) -> PlannedStep:
    """Check a step, and compute everything that must be known before anything is written.

    Args:
        lookups: of a backward pass, with their gradients.
        clips: applied to the gradients.
        seed: of stochastic rounding, and a number to add if steps are not counted; None rounds to nearest.

    Raises:
        RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set; nothing is changed.
        ValueError: an option is out of range; nothing is changed.
    """
    step = _checked_step(lookups, seed)
    for update in step.updates:
        _split_by_window(update, step)
        if clips or _needs_sums(update.group.options):
            update.sums = _chosen(update, _coalesced(update, update.lookups, _needs_row_count(update)))
    for clip in clips:
        clip.apply(step.gradients())
    return step


def plan_sums(lookups: Iterable[GroupLookups], deferred: Container[Tensor]) -> PlannedStep:
    """Check a step that is deferred: sum the gradients, and leave the rest to `plan_deferred`.

    Args:
        lookups: of a backward pass, with their gradients.
        deferred: weights that have deferred gradients, to which the sums will be added; their windows are
            full.

    Raises:
        RuntimeError, ValueError: as `plan_step`.
    """
    step = _checked_step(lookups, None)
    for update in step.updates:
        _split_by_window(update, step, deferred)
        update.sums = _coalesced(update, update.lookups, _needs_row_count(update))
    return step


def plan_deferred(lookups: Iterable[GroupLookups], seed: tuple[int, int] | None) -> PlannedStep:
    """Check the step of deferred gradients, distinct rows of each table; raises as `plan_step` does."""
    step = _checked_step(lookups, seed)
    for update in step.updates:
        known = [RowGradients(one.table, one.values, _grad_of(one)) for one in update.lookups]
        if _needs_row_count(update):
            known = [drop_padding(one) for one in known]
        _check_all_finite(update.group, known)
        update.sums = _chosen(update, known)
        step.full += _windows(update.group, {one.table for one in known}).values()
    return step


def row_sums(lookups: Iterable[GroupLookups]) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """Return the summed gradients of the rows of each table, by weight, without checks."""
    found = {}
    for group, listed in _by_group(lookups):
        for one in _every_table(listed, coalesce(group.backend, group.tables, listed, exact=True)):
            found[group.tables[one.table].weight] = one.rows, one.grads
    return found


def _grad_of(lookup: Lookup) -> Tensor:
    assert lookup.grad is not None
    return lookup.grad


def _checked_step(lookups: Iterable[GroupLookups], seed: tuple[int, int] | None) -> PlannedStep:
    """Check the options of all groups, and return a step without sums."""
    return PlannedStep(
        [update for group, found in _by_group(lookups) for update in _updates(group, found, seed)]
    )


def _by_group(given: Iterable[GroupLookups]) -> list[GroupLookups]:
    found: dict[int, GroupLookups] = {}
    for group, lookups in given:
        before = found.get(id(group))
        found[id(group)] = (group, lookups if before is None else [*before[1], *lookups])
    return list(found.values())


def _tables_of(lookups: Sequence[Lookup]) -> set[int]:
    if type(lookups) is Columns or type(lookups) is PackedLookups:
        return set(lookups.tables)
    return {one.table for one in lookups}


def _updates(group: TableGroup, lookups: Sequence[Lookup], seed: tuple[int, int] | None) -> list[GroupUpdate]:
    """Check the options, and group the tables that have the same step count."""
    optimizer, options = group.optimizer, group.options
    assert optimizer is not None
    if not group.check_options():
        group.last = None
    if group.last is not None and seed is None:
        group.check_tables(group.last[0])
        return [GroupUpdate(group, *group.last, lookups)]
    by_count: dict[int, Sequence[Lookup]] = {}
    counts = group.counts(_tables_of(lookups))
    if len(set(counts.values())) == 1:
        by_count[next(iter(counts.values()))] = lookups
    else:
        for count in set(counts.values()):
            by_count[count] = [lookup for lookup in lookups if counts[lookup.table] == count]
    if seed is not None:
        seed = _seed_of(group, seed[0]), seed[1]
    updates = []
    for count, listed in by_count.items():
        counter = group.counter(next(iter(_tables_of(listed))))
        # A kernel reads a count on its device after `_write` has added 1.
        on_host = counter is None or counter.is_cpu or group.backend.needs_host_count
        number = count + 1 if on_host or counter is None else counter.reshape(())
        step = optimizer.make_step(options, number)
        if step.momentum and not group.tables[0].states:  # no buffer was made
            step = replace(step, momentum=0.0, nesterov=False)
        if seed is not None:
            if counter is None and capturing(group.device):
                raise RuntimeError(
                    "stochastic rounding without step counts cannot be captured in a CUDA graph: every "
                    "replay would draw the same"
                )
            step = replace(step, seed=seed[0])
        backend = group.backend_for(step)
        # Kernels that count steps add their count to the seed, which is the same at every replay of a graph.
        if seed is not None and (counter is None or not backend.counts_steps(group.device)):
            step = replace(step, seed=seed[0] + (seed[1] if counter is None else count))
        updates.append(GroupUpdate(group, step, backend, listed))
        group.check_tables(step)
        if not group.counted and seed is None:
            group.last = step, backend
    return updates


def _seed_of(group: TableGroup, seed: int) -> int:
    """Return a seed of its own for a group: backends number the tables of each group from 0 on."""
    return (seed + zlib.crc32(group.names[0].encode())) % (1 << 63)


def _needs_sums(options: Mapping[str, Any]) -> bool:
    rows = options.get("rows", Rows.GIVEN)
    return bool(options["error_if_nonfinite"]) or (rows is not Rows.GIVEN and Rows(rows) is not Rows.GIVEN)


def _windows(group: TableGroup, tables: Iterable[int]) -> dict[int, Window]:
    """Return the windows of tables, by table; none if their group does not accumulate now."""
    if not (group.has_windows and group.options["use_accumulate"]):
        return {}
    found = {table: group.states[table].get(f"{group.names[table]}.window") for table in tables}
    return {table: window for table, window in found.items() if window is not None}


def _split_by_window(update: GroupUpdate, step: PlannedStep, deferred: Container[Tensor] = ()) -> None:
    """Move gradients of unfinished windows out of the update; add the stored gradients of full windows."""
    group = update.group
    if not group.has_windows:
        return
    tables = _tables_of(update.lookups)
    windows = _windows(group, {table for table in tables if group.tables[table].weight not in deferred})
    if not windows:
        return
    steps = group.options["accumulate_step"]
    unfinished = {table for table, window in windows.items() if window.count + 1 < steps}
    for one in _coalesced(update, [lookup for lookup in update.lookups if lookup.table in unfinished]):
        merge = functools.partial(_merged, update, one.table)
        step.unfinished.append((windows[one.table], one.rows, one.grads, merge))
    left = [lookup for lookup in update.lookups if lookup.table not in unfinished]
    for table in sorted(windows.keys() - unfinished):
        left += [Lookup(table, rows, grad=grads) for rows, grads in windows[table].parts()]
        step.full.append(windows[table])
    update.lookups = left
    if left and isinstance(update.step.count, Tensor):  # that of a table whose window may be unfinished
        counter = group.counter(left[0].table)
        assert counter is not None
        update.step = replace(update.step, count=counter.reshape(()))


def _needs_row_count(update: GroupUpdate) -> bool:
    """Return whether the row count is needed on the host, which synchronizes."""
    options = update.group.options
    counted = options["error_if_nonfinite"] or Rows(options.get("rows", Rows.GIVEN)) is Rows.NONZERO
    return counted or not update.backend.pads_rows


def drop_padding(given: RowGradients) -> RowGradients:
    """Drop padding rows (index -1). Synchronizes."""
    if not len(given.rows) or int(given.rows[-1]) >= 0:
        return given
    real = given.rows >= 0
    return RowGradients(given.table, given.rows[real], given.grads[real])


def coalesce(
    backend: Backend, tables: Sequence[Table], lookups: Sequence[Lookup], exact: bool
) -> list[RowGradients]:
    """Sum the gradients of every row; if not `exact`, with padding rows instead of synchronizing."""
    if exact or not backend.pads_rows:
        return backend.coalesce(tables, [_without_padding(one) if one.padding else one for one in lookups])
    return backend.coalesce_padded(tables, lookups)


def _without_padding(lookup: Lookup) -> Lookup:
    real = drop_padding(RowGradients(lookup.table, lookup.values, _grad_of(lookup)))
    return replace(lookup, values=real.rows, grad=real.grads, padding=False)


def _coalesced(update: GroupUpdate, lookups: Sequence[Lookup], exact: bool = True) -> list[RowGradients]:
    """Return the checked sums of each table that was looked up, also of tables without values."""
    group = update.group
    sums = coalesce(update.backend, group.tables, lookups, exact) if lookups else []
    _check_all_finite(group, sums)
    return _every_table(lookups, sums)


def _every_table(lookups: Sequence[Lookup], sums: list[RowGradients]) -> list[RowGradients]:
    """Return the sums with an empty one for each table whose lookups have no values."""
    found = {one.table for one in sums}
    if found >= _tables_of(lookups):
        return sums
    for lookup in lookups:
        if lookup.table not in found and lookup.grad is not None:
            found.add(lookup.table)
            sums.append(RowGradients(lookup.table, lookup.values[:0], lookup.grad[:0]))
    return sums


def _merged(update: GroupUpdate, table: int, parts: Parts) -> tuple[Tensor, Tensor]:
    given = [Lookup(table, rows, grad=grads) for rows, grads in parts]
    (sums,) = update.backend.coalesce(update.group.tables, given)
    return sums.rows, sums.grads


def _chosen(update: GroupUpdate, sums: list[RowGradients]) -> list[RowGradients]:
    """Return the rows that a step updates, and their gradients."""
    which = Rows(update.group.options.get("rows", Rows.GIVEN))
    if which is Rows.GIVEN:
        return sums
    chosen = []
    for one in sums:
        if which is Rows.ALL:
            weight = update.group.tables[one.table].weight
            rows = torch.where(one.rows < 0, len(weight), one.rows)  # padding goes to an extra row
            spread = one.grads.new_zeros(len(weight) + 1, weight.shape[1]).index_copy_(0, rows, one.grads)
            every = spread[:-1]
            chosen.append(RowGradients(one.table, torch.arange(len(weight), device=one.rows.device), every))
        else:
            chosen.append(nonzero(one))
    return chosen


def _check_all_finite(group: TableGroup, sums: Iterable[RowGradients]) -> None:
    for one in sums if group.options["error_if_nonfinite"] else ():
        if not bool(one.grads.isfinite().all()):
            name = group.names[one.table]
            raise RuntimeError(f"the gradient of table {name!r} is not finite: error_if_nonfinite refuses it")


def _write(update: GroupUpdate) -> None:
    group = update.group
    tables = sorted(_tables_of(update.lookups) if update.sums is None else {one.table for one in update.sums})
    if not tables:
        return
    step, counters = update.step, group.count_step(tables, update.backend)
    if counters:
        step = replace(step, counters=counters)
    if update.sums is None:
        lookups = update.lookups
        if group.backend is not update.backend:  # which may not support packed lookups
            lookups = [replace(one, prepared=None) for one in lookups]
        update.backend.update(group.tables, lookups, step)
    else:
        update.backend.update_rows(group.tables, update.sums, step)
    # Kernels bypass autograd: a graph that saved a table must not go backward with the new values.
    torch.autograd.graph.increment_version(group.written_tensors(tables))
