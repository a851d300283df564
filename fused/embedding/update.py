"""One step of an embedding module, after a backward pass: checked as a whole, then written."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import COUNTING_ON_HOST, counts_itself
from keyedopt.fused.backends.interface import Backend, Columns, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.streams import capturing
from keyedopt.fused.embedding.backward import Given
from keyedopt.fused.embedding.table_groups import Cluster
from keyedopt.fused.sparse.window import Parts, Window
from keyedopt.reference.rules.options import Rows


@dataclass(eq=False)
class Work:
    """What a step is about to do to some tables of a cluster that have had the same number of steps.

    Args:
        cluster: the tables.
        step: the formula and its numbers.
        backend: what will do it.
        lookups: what was looked up, with gradients.
        sums: the gradients of the rows, where they are needed before the update; else None.
    """

    cluster: Cluster
    step: Step
    backend: Backend
    lookups: Sequence[Lookup]
    sums: list[RowGradients] | None = None


@dataclass(eq=False)
class Plan:
    """All that a step will do, complete before any of it is done.

    Args:
        works: what will be done to tables.
        waiting: windows that are not full yet, with rows, gradients, and how they are merged.
        full: windows that will be empty after it.
    """

    works: list[Work] = field(default_factory=list)
    waiting: list[tuple[Window, Tensor, Tensor, Any]] = field(default_factory=list)
    full: list[Window] = field(default_factory=list)

    def gradients(self) -> list[Tensor]:
        """Return the sums of all rows that will be updated, table by table, as far as they are known."""
        return [one.grads for work in self.works for one in work.sums or ()]

    def keep(self) -> None:
        """Keep in windows what is not updated yet."""
        for window, rows, grads, merge in self.waiting:
            window.keep(rows, grads, merge)

    def carry_out(self) -> None:
        """Do it; nothing is refused any more."""
        self.keep()
        for work in self.works:
            _write(work)
        for window in self.full:
            window.clear()


def make_plan(given: Iterable[Given], clips: Sequence[Any], seed: tuple[int, int] | None) -> Plan:
    """Check a step, and compute what has to be known before anything is written.

    Args:
        given: the lookups of a backward pass, with their gradients.
        clips: bounds of the gradients.
        seed: of stochastic rounding, and what is added to it where steps are not counted; None rounds to
            nearest.

    Raises:
        RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set; nothing is changed.
        ValueError: an option has been set to what it cannot be; nothing is changed.
    """
    plan = Plan([work for cluster, found in _by_cluster(given) for work in _works(cluster, found, seed)])
    for work in plan.works:
        _wait(work, plan)
        if clips or _needs_sums(work.cluster.group):
            work.sums = _chosen(work, _coalesced(work, work.lookups, _waits(work)))
    for clip in clips:
        clip.apply(plan.gradients())
    return plan


def sum_up(given: Iterable[Given], joining: Collection[str]) -> Plan:
    """Check a step that is to be taken later: sum up the gradients, and leave the rest of it for `resume`.

    Args:
        given: the lookups of a backward pass, with their gradients.
        joining: tables whose gradients are added to some that wait, outside of their window.

    Raises:
        RuntimeError, ValueError: as `make_plan`.
    """
    plan = Plan([work for cluster, found in _by_cluster(given) for work in _works(cluster, found, None)])
    for work in plan.works:
        _wait(work, plan, joining)
        work.sums = _coalesced(work, work.lookups, _waits(work))
    return plan


def resume(given: Iterable[Given], seed: tuple[int, int] | None) -> Plan:
    """Plan the step of gradients that waited, distinct rows of each table; raises as `make_plan` does."""
    plan = Plan([work for cluster, found in _by_cluster(given) for work in _works(cluster, found, seed)])
    for work in plan.works:
        known = [RowGradients(one.table, one.values, _given(one)) for one in work.lookups]
        if _waits(work):
            known = [without_holes(one) for one in known]
        _check_all_finite(work.cluster, known)
        work.sums = _chosen(work, known)
        plan.full += _windows(work.cluster, {one.table for one in known}).values()
    return plan


def _given(lookup: Lookup) -> Tensor:
    assert lookup.grad is not None
    return lookup.grad


def _by_cluster(given: Iterable[Given]) -> list[Given]:
    found: dict[int, Given] = {}
    for cluster, lookups in given:
        before = found.get(id(cluster))
        found[id(cluster)] = (cluster, lookups if before is None else [*before[1], *lookups])
    return list(found.values())


def _tables_of(lookups: Sequence[Lookup]) -> set[int]:
    return set(lookups.tables) if type(lookups) is Columns else {one.table for one in lookups}


def _works(cluster: Cluster, lookups: Sequence[Lookup], seed: tuple[int, int] | None) -> list[Work]:
    """Check the options, and put together the tables that take the same step."""
    plan, group = cluster.plan, cluster.group
    assert plan is not None
    if not cluster.check_options():
        cluster.last = None
    if cluster.last is not None and seed is None:
        return [Work(cluster, *cluster.last, lookups)]
    by_count: dict[int, Sequence[Lookup]] = {}
    counts = cluster.counts(_tables_of(lookups))
    if len(set(counts.values())) == 1:
        by_count[next(iter(counts.values()))] = lookups
    else:
        for count in set(counts.values()):
            by_count[count] = [lookup for lookup in lookups if counts[lookup.table] == count]
    works = []
    for count, listed in by_count.items():
        counter = cluster.counter(listed.tables[0] if type(listed) is Columns else listed[0].table)
        # On a device the count is read there: by then it has been counted up, see `_write`.
        on_host = counter is None or counter.is_cpu or cluster.backend.name in COUNTING_ON_HOST
        number = count + 1 if on_host or counter is None else counter.reshape(())
        step = plan.make_step(group, number)
        if step.momentum and not cluster.tables[0].states:  # no buffer was made
            step = replace(step, momentum=0.0, nesterov=False)
        if seed is not None:
            if counter is None and capturing(cluster.device):
                raise RuntimeError(
                    "stochastic rounding cannot be captured in a CUDA graph where steps are not counted: "
                    "every replay would draw the same"
                )
            step = replace(step, seed=seed[0])
        backend = cluster.backend_for(step)
        # Who counts on the device draws by that count: the seed is the same at every replay of a graph.
        if seed is not None and (counter is None or not counts_itself(backend, cluster.device)):
            step = replace(step, seed=seed[0] + (seed[1] if counter is None else count))
        works.append(Work(cluster, step, backend, listed))
        if not cluster.counted and seed is None:
            cluster.last = step, backend
    return works


def _needs_sums(group: Mapping[str, Any]) -> bool:
    rows = group.get("rows", Rows.GIVEN)
    return bool(group["error_if_nonfinite"]) or Rows(rows) is not Rows.GIVEN


def _windows(cluster: Cluster, tables: Iterable[int]) -> dict[int, Window]:
    found = {table: cluster.states[table].get(f"{cluster.names[table]}.window") for table in tables}
    return {table: window for table, window in found.items() if window is not None}


def _wait(work: Work, plan: Plan, joining: Collection[str] = ()) -> None:
    """Take out of the work what has to wait for its window; to the rest, add what waits."""
    cluster = work.cluster
    if not cluster.waits:
        return
    tables = _tables_of(work.lookups)
    if joining:
        tables = {table for table in tables if cluster.names[table] not in joining}
    windows = _windows(cluster, tables)
    if not windows:
        return
    steps = cluster.group["accumulate_step"]
    waiting = {table for table, window in windows.items() if window.count + 1 < steps}
    for one in _coalesced(work, [lookup for lookup in work.lookups if lookup.table in waiting]):
        merge = functools.partial(_merged, work, one.table)
        plan.waiting.append((windows[one.table], one.rows, one.grads, merge))
    left = [lookup for lookup in work.lookups if lookup.table not in waiting]
    for table in sorted(windows.keys() - waiting):
        left += [Lookup(table, rows, grad=grads) for rows, grads in windows[table].parts()]
        plan.full.append(windows[table])
    work.lookups = left


def _waits(work: Work) -> bool:
    """Whether it has to be known how many rows there are, so that a device is waited for."""
    group = work.cluster.group
    counted = group["error_if_nonfinite"] or Rows(group.get("rows", Rows.GIVEN)) is Rows.NONZERO
    return counted or not hasattr(work.backend, "coalesce_with_holes")


def without_holes(given: RowGradients) -> RowGradients:
    """Return the rows that are some; waits for a device."""
    if not len(given.rows) or int(given.rows[-1]) >= 0:
        return given
    some = given.rows >= 0
    return RowGradients(given.table, given.rows[some], given.grads[some])


def coalesce(
    backend: Backend, tables: Sequence[Table], lookups: Sequence[Lookup], exact: bool
) -> list[RowGradients]:
    """Sum the gradients of every row; not `exact`, with holes where the backend would have to wait."""
    known: Any = backend
    if exact or not hasattr(known, "coalesce_with_holes"):
        return backend.coalesce(tables, [_whole(one) if one.holes else one for one in lookups])
    found: list[RowGradients] = known.coalesce_with_holes(tables, lookups)
    return found


def _whole(lookup: Lookup) -> Lookup:
    some = without_holes(RowGradients(lookup.table, lookup.values, _given(lookup)))
    return replace(lookup, values=some.rows, grad=some.grads, holes=False)


def _coalesced(work: Work, lookups: Sequence[Lookup], exact: bool = True) -> list[RowGradients]:
    """Return the sums of each table that was looked up, also of one in which nothing was; checked."""
    cluster = work.cluster
    sums = coalesce(work.backend, cluster.tables, lookups, exact) if lookups else []
    _check_all_finite(cluster, sums)
    found = {one.table for one in sums}
    for lookup in lookups:
        if lookup.table not in found and lookup.grad is not None:
            found.add(lookup.table)
            sums.append(RowGradients(lookup.table, lookup.values[:0], lookup.grad[:0]))
    return sums


def _merged(work: Work, table: int, parts: Parts) -> tuple[Tensor, Tensor]:
    given = [Lookup(table, rows, grad=grads) for rows, grads in parts]
    (sums,) = work.backend.coalesce(work.cluster.tables, given)
    return sums.rows, sums.grads


def _chosen(work: Work, sums: list[RowGradients]) -> list[RowGradients]:
    """Return the rows that a step updates, and their gradients."""
    which = Rows(work.cluster.group.get("rows", Rows.GIVEN))
    if which is Rows.GIVEN:
        return sums
    chosen = []
    for one in sums:
        if which is Rows.ALL:
            weight = work.cluster.tables[one.table].weight
            rows = torch.where(one.rows < 0, len(weight), one.rows)  # holes get a row of their own
            spread = one.grads.new_zeros(len(weight) + 1, weight.shape[1]).index_copy_(0, rows, one.grads)
            every = spread[:-1]
            chosen.append(RowGradients(one.table, torch.arange(len(weight), device=one.rows.device), every))
        else:
            kept = one.grads.any(dim=1)
            chosen.append(RowGradients(one.table, one.rows[kept], one.grads[kept]))
    return chosen


def _check_all_finite(cluster: Cluster, sums: Iterable[RowGradients]) -> None:
    for one in sums if cluster.group["error_if_nonfinite"] else ():
        if not bool(one.grads.isfinite().all()):
            name = cluster.names[one.table]
            raise RuntimeError(f"the gradient of table {name!r} is not finite: error_if_nonfinite refuses it")


def _write(work: Work) -> None:
    cluster = work.cluster
    tables = sorted(_tables_of(work.lookups) if work.sums is None else {one.table for one in work.sums})
    if not tables:
        return
    step, counters = work.step, cluster.count_up(tables, work.backend)
    if counters:
        step = replace(step, counters=counters)
    if work.sums is None:
        lookups = work.lookups
        if cluster.backend is not work.backend:
            lookups = [replace(one, prepared=None) for one in lookups]
        work.backend.update(cluster.tables, lookups, step)
    else:
        work.backend.update_rows(cluster.tables, work.sums, step)
    # Kernels write behind autograd's back: who has saved a table must not go backward by what it holds now.
    torch.autograd.graph.increment_version(cluster.written(tables))
