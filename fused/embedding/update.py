"""One step of an embedding module, after a backward pass: checked as a whole, then written."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Backend, Lookup, RowGradients, Step
from keyedopt.fused.embedding.backward import Given
from keyedopt.fused.embedding.clusters import Cluster
from keyedopt.fused.window import Parts, Window
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
    lookups: list[Lookup]
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

    def carry_out(self) -> None:
        """Do it; nothing is refused any more."""
        for window, rows, grads, merge in self.waiting:
            window.keep(rows, grads, merge)
        for work in self.works:
            _write(work)
        for window in self.full:
            window.clear()


def make_plan(given: Iterable[Given], clips: Sequence[Any], seed: int | None, sums: bool) -> Plan:
    """Check a step, and compute what has to be known before anything is written.

    Args:
        given: the lookups of a backward pass, with their gradients.
        clips: bounds of the gradients.
        seed: of stochastic rounding; None rounds to nearest.
        sums: whether the gradients of rows are wanted before the update.

    Raises:
        RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set; nothing is changed.
        ValueError: an option has been set to what it cannot be; nothing is changed.
    """
    plan = Plan([work for cluster, found in _by_cluster(given) for work in _works(cluster, found, seed)])
    for work in plan.works:
        _wait(work, plan)
        if sums or clips or _needs_sums(work.cluster.group):
            _sum(work)
    for clip in clips:
        clip.apply(plan.gradients())
    return plan


def _by_cluster(given: Iterable[Given]) -> list[tuple[Cluster, list[Lookup]]]:
    found: dict[int, tuple[Cluster, list[Lookup]]] = {}
    for cluster, lookups in given:
        if id(cluster) in found:
            found[id(cluster)][1].extend(lookups)
        else:
            found[id(cluster)] = (cluster, list(lookups))
    return list(found.values())


def _works(cluster: Cluster, lookups: list[Lookup], seed: int | None) -> list[Work]:
    """Check the options, and put together the tables that take the same step."""
    plan, group = cluster.plan, cluster.group
    assert plan is not None
    lr = group["lr"]
    remote = isinstance(lr, Tensor) and lr.device.type != "cpu"  # to check it would synchronize
    plan.check_options({**group, "lr": 0.0} if remote else group)
    if group.get("lr_decay") and cluster.counter(0) is None:
        raise ValueError("lr_decay was 0 when the state was made, so there is no count to decay by")
    by_count: dict[int, list[Lookup]] = {}
    counts = {table: cluster.count(table) for table in {lookup.table for lookup in lookups}}
    if len(set(counts.values())) == 1:
        by_count[next(iter(counts.values()))] = lookups
    else:
        for lookup in lookups:
            by_count.setdefault(counts[lookup.table], []).append(lookup)
    works = []
    for count, listed in by_count.items():
        counter = cluster.counter(listed[0].table)
        # On a device the count is read there: by then it has been counted up, see `_write`.
        number = count + 1 if counter is None or counter.device.type == "cpu" else counter.reshape(())
        step = plan.make_step(group, number)
        if step.momentum and not cluster.tables[0].states:  # no buffer was made
            step = replace(step, momentum=0.0, nesterov=False)
        if seed is not None:
            step = replace(step, seed=seed)
        works.append(Work(cluster, step, cluster.backend_for(step), listed))
    return works


def _needs_sums(group: Mapping[str, Any]) -> bool:
    rows = group.get("rows", Rows.GIVEN)
    return bool(group["error_if_nonfinite"]) or Rows(rows) is not Rows.GIVEN


def _wait(work: Work, plan: Plan) -> None:
    """Take out of the work what has to wait for its window; to the rest, add what waits."""
    cluster = work.cluster
    tables = {lookup.table for lookup in work.lookups}
    found = {table: cluster.states[table].get(f"{cluster.names[table]}.window") for table in tables}
    windows = {table: window for table, window in found.items() if window is not None}
    if not windows:
        return
    steps = cluster.group["accumulate_step"]
    waiting = {table for table, window in windows.items() if window.count + 1 < steps}
    for one in _coalesced(work, [lookup for lookup in work.lookups if lookup.table in waiting]):
        merge = functools.partial(_merged, work, one.table)
        plan.waiting.append((windows[one.table], one.rows, one.grads, merge))
    work.lookups = [lookup for lookup in work.lookups if lookup.table not in waiting]
    for table in sorted(windows.keys() - waiting):
        work.lookups += [Lookup(table, rows, grad=grads) for rows, grads in windows[table].parts()]
        plan.full.append(windows[table])


def _coalesced(work: Work, lookups: list[Lookup]) -> list[RowGradients]:
    """Return the sums of each table that was looked up, also of one in which nothing was; checked."""
    cluster = work.cluster
    sums = work.backend.coalesce(cluster.tables, lookups) if lookups else []
    if cluster.group["error_if_nonfinite"]:
        for one in sums:
            _check_finite(cluster.names[one.table], one.grads)
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


def _sum(work: Work) -> None:
    """Sum the gradients of each row that is updated."""
    which = Rows(work.cluster.group.get("rows", Rows.GIVEN))
    work.sums = []
    for one in _coalesced(work, work.lookups):
        weight = work.cluster.tables[one.table].weight
        work.sums.append(RowGradients(one.table, *_chosen(weight, one.rows, one.grads, which)))


def _chosen(weight: Tensor, rows: Tensor, grads: Tensor, which: Rows) -> tuple[Tensor, Tensor]:
    """Return the rows that a step updates, and their gradients."""
    if which is Rows.ALL:
        every = grads.new_zeros(weight.shape)
        return torch.arange(len(weight), device=rows.device), every.index_copy_(0, rows, grads)
    if which is Rows.NONZERO:
        kept = grads.any(dim=1)
        return rows[kept], grads[kept]
    return rows, grads


def _check_finite(name: str, grads: Tensor) -> None:
    if not bool(grads.isfinite().all()):
        raise RuntimeError(f"the gradient of table {name!r} is not finite: error_if_nonfinite refuses it")


def _write(work: Work) -> None:
    cluster = work.cluster
    listed = work.lookups if work.sums is None else work.sums
    tables = sorted({one.table for one in listed})
    if not tables:
        return
    cluster.count_up(tables)
    if work.sums is None:
        prepared = cluster.backend is work.backend
        lookups = work.lookups if prepared else [replace(one, prepared=None) for one in work.lookups]
        work.backend.update(cluster.tables, lookups, work.step)
    else:
        work.backend.update_rows(cluster.tables, work.sums, work.step)
