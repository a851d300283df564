"""Tables that one call of a backend can take together: one optimizer group, one device, one dtype."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from keyedopt.fused.backends import choose, counts_itself
from keyedopt.fused.backends.interface import Backend, Step, Table, Tables
from keyedopt.fused.embedding.table_optimizers import as_table
from keyedopt.fused.rule_optimizer import RuleOptimizer

#: Classes of options that stay what they are.
FIXED = (float, int, str, type(None))

#: What a table without an optimizer is looked up for.
READ = Step("sgd", lr=0.0)


#: Counts of steps as they were last known, with the version of the tensor; neither keeps the other alive.
_KNOWN: Any = WeakIdKeyDictionary()


def note_count(counter: Tensor, count: int) -> tuple[int, int]:
    """Keep what is in a count, so that no step has to wait for its device."""
    known = _KNOWN[counter] = (counter._version, count)
    return known


@dataclass(eq=False)
class Cluster:
    """Some tables as a backend takes them.

    Args:
        names: of the tables.
        tables: their weights and states, live.
        plan: their optimizer; None for tables without one.
        group: its options, live.
        states: all state of each table by key, live.
        backend: what looks them up, and, as long as the options allow it, updates them.
        wanted: the name of the backend that was asked for.
    """

    names: list[str]
    tables: Tables
    plan: RuleOptimizer | None
    group: Mapping[str, Any]
    states: list[Mapping[str, Any]]
    backend: Backend
    wanted: str
    _chosen: dict[Any, Backend] = field(default_factory=dict)
    _read: dict[int, tuple[int, int]] = field(default_factory=dict)
    _options: list[Any] = field(default_factory=list)
    last: tuple[Step, Backend] | None = None  # of a step without a count, as long as options are the same

    def backend_for(self, step: Step) -> Backend:
        """Return what can do a step; asked once for the same options, whatever rate and count are."""
        options = (step.weight_decay, step.decay, step.momentum, step.dampening, step.nesterov, step.eps)
        more = (step.betas, step.lr_decay, step.max_norm, step.maximize, step.eta, step.eps_placement)
        key = (options, more, step.seed is None, isinstance(step.lr, Tensor))
        if key not in self._chosen:
            self._chosen[key] = choose(self.wanted, self.tables, step)
        return self._chosen[key]

    def check_options(self) -> bool:
        """Refuse options out of range; those that are the same objects as last time have been checked.

        Returns:
            Whether they are the same.

        Raises:
            ValueError: names the option.
        """
        options = list(self.group.values())
        if len(options) == len(self._options) and all(map(is_, options, self._options)):
            return True
        assert self.plan is not None
        lr = self.group["lr"]
        remote = isinstance(lr, Tensor) and lr.device.type != "cpu"  # to check it would synchronize
        self.plan.check_options({**self.group, "lr": 0.0} if remote else self.group)
        if self.group.get("lr_decay") and not self.counted:
            raise ValueError("lr_decay was 0 when the state was made, so there is no count to decay by")
        if self.group.get("momentum") and not self._state:
            raise ValueError("momentum was 0 when the state was made, so there is no sum for it")
        fixed = all(key == "params" or isinstance(one, FIXED) for key, one in self.group.items())
        self._options = options if fixed else []
        return False

    def __post_init__(self) -> None:
        self.device = self.tables[0].weight.device
        self.dtype = self.tables[0].weight.dtype
        self.counted = any(
            f"{name}.iter" in state for name, state in zip(self.names, self.states, strict=True)
        )
        self._weights = [(name, table.weight) for name, table in zip(self.names, self.tables, strict=True)]
        self._state = [
            (state, f"{name}.{key}", tensor)
            for name, table, state in zip(self.names, self.tables, self.states, strict=True)
            for key, tensor in zip(("momentum1", "exp_avg_sq", "row_counter"), in_order(table), strict=False)
            if tensor is not None
        ]
        self._written = [one for table in self.tables for one in _tensors(table)]
        #: Whether gradients are accumulated over several steps.
        self.waits = any(
            f"{name}.window" in state for name, state in zip(self.names, self.states, strict=True)
        )

    def counts(self, indices: Iterable[int]) -> dict[int, int]:
        """Return how many steps each of these tables has had."""
        if not self.counted:
            return dict.fromkeys(indices, 0)
        return {index: self.count(index) for index in indices}

    def counter(self, index: int) -> Tensor | None:
        """Return the count of steps of a table, (1,), where its algorithm has one."""
        return self.states[index].get(f"{self.names[index]}.iter") if self.counted else None

    def count(self, index: int) -> int:
        """Return how many steps a table has had; from another device it is read only when it was changed."""
        counter = self.counter(index) if self.counted else None
        if counter is None:
            return 0
        known = self._read.get(index)
        if known is None or known[0] != counter._version:
            known = _KNOWN.get(counter)  # as it was made or loaded
        if known is None or known[0] != counter._version:
            known = note_count(counter, int(counter))
        self._read[index] = known
        return known[1]

    def forget(self) -> None:
        """Forget what the counts of steps are: on the device they are others."""
        self._read.clear()
        for index in range(len(self.names)):
            counter = self.counter(index)
            if counter is not None:
                _KNOWN.pop(counter, None)

    def count_up(self, indices: Sequence[int], backend: Backend) -> tuple[Tensor, ...]:
        """Count a step of these tables; return the counts that the update by this backend is to count up."""
        if not self.counted:
            return ()
        counted = [(index, self.count(index), self.counter(index)) for index in indices]
        counters = [counter for _, _, counter in counted if counter is not None]
        left = counters if counts_itself(backend, self.device) else []
        if left:
            torch.autograd.graph.increment_version(left)
        elif counters:
            torch._foreach_add_(counters, 1)
        for index, before, counter in counted:
            if counter is not None and counter.is_cpu:
                self._read[index] = (counter._version, before + 1)
            elif counter is not None:  # what is put together anew must not read it either
                self._read[index] = note_count(counter, before + 1)
        return tuple(left)

    def written(self, indices: Sequence[int]) -> list[Tensor]:
        """Return all that an update of these tables writes, but for counts of steps."""
        if len(indices) == len(self.tables):
            return self._written
        return [one for index in indices for one in _tensors(self.tables[index])]

    def stays(self) -> bool:
        """Whether the tables are where they were, in the dtype that they had."""
        weights = [table.weight for table in self.tables]
        return all(one.device == self.device and one.dtype is self.dtype for one in weights)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether weights and states are still those that the tables have."""
        return all(weights[name] is weight for name, weight in self._weights) and all(
            state[key] is tensor for state, key, tensor in self._state
        )


def _tensors(table: Table) -> list[Tensor]:
    return [table.weight, *table.states, *([] if table.row_counter is None else [table.row_counter])]


def in_order(table: Table) -> tuple[Tensor | None, ...]:
    """Return both states and the counter of a table, None for those that it does not have."""
    first, second = (*table.states, None, None)[:2]
    return first, second, table.row_counter


def make_clusters(
    weights: Mapping[str, Tensor],
    plans: Mapping[str, tuple[RuleOptimizer, Mapping[str, Any], Mapping[str, Any]]],
    wanted: str,
) -> list[Cluster]:
    """Put tables together.

    Args:
        weights: by name.
        plans: optimizer, group and state of those that have one, by name.
        wanted: the name of a backend, or ``"auto"``.

    Raises:
        ValueError: the backend cannot do this.
        RuntimeError: it is missing.
    """
    together: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        which = id(plans[name][1]) if name in plans else None
        together.setdefault((which, weight.device, weight.dtype), []).append(name)
    clusters = []
    for names in together.values():
        plan, group, _ = plans.get(names[0], (None, {}, {}))
        states = [plans[name][2] if name in plans else {} for name in names]
        if plan is None:
            tables = [Table(weights[name]) for name in names]
            step = READ
        else:
            pairs = zip(names, states, strict=True)
            tables = [as_table(name, weights[name], state) for name, state in pairs]
            step = plan.make_step({**group, "lr": 0.0}, 1)
        backend = choose(wanted, tables, step)
        clusters.append(Cluster(names, Tables(tables), plan, group, states, backend, wanted))
    return clusters
