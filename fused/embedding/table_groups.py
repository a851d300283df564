"""Tables that one call of a backend takes together: one parameter group, one device, one dtype."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from keyedopt.fused.backends import choose, described, explain
from keyedopt.fused.backends.interface import Backend, Step, Table, Tables, misfit
from keyedopt.fused.bulk import places
from keyedopt.fused.embedding.table_optimizers import STATE_KEYS, as_table
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference.memory import check_memory

#: Types of options that cannot be changed in place.
IMMUTABLE = (float, int, str, type(None))

#: The step for which the backend of tables without an optimizer is chosen; these tables are only read.
READ = Step("sgd", lr=0.0)

#: The last known step counts, with the version of the tensor; neither keeps the other alive.
_KNOWN_COUNTS: Any = WeakIdKeyDictionary()


def remember_count(counter: Tensor, count: int) -> tuple[int, int]:
    """Store the value of a step count on the host, so that no step has to synchronize to read the count."""
    known = _KNOWN_COUNTS[counter] = (counter._version, count)
    return known


@dataclass(eq=False)
class TableGroup:
    """Some tables as a backend takes them.

    Args:
        names: of the tables.
        tables: their weights and states, live.
        optimizer: of the tables; None for tables without one.
        options: its parameter group, live.
        states: all state of each table by key, live.
        backend: looks the tables up, and updates them as long as the backend supports the options.
        requested_backend: the name that the user gave.

    Attributes:
        device, dtype: of the weights.
        counted: whether any table has a step count.
        has_windows: whether gradients can be accumulated over several steps.
        last: the step of the last update, and its backend, if the step depends on no count; valid as long as
            the options are the same.
    """

    names: list[str]
    tables: Tables
    optimizer: RuleOptimizer | None
    options: Mapping[str, Any]
    states: list[Mapping[str, Any]]
    backend: Backend
    requested_backend: str
    _chosen: dict[Any, Backend] = field(default_factory=dict)
    _known_counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _checked_options: list[Any] = field(default_factory=list)
    last: tuple[Step, Backend] | None = None

    def backend_for(self, step: Step) -> Backend:
        """Return the backend for a step; chosen once for all learning rates and counts."""
        options = (step.weight_decay, step.decay, step.momentum, step.dampening, step.nesterov, step.eps)
        more = (step.betas, step.lr_decay, step.max_norm, step.maximize, step.eta, step.eps_placement)
        key = (options, more, step.lr_power, step.seed is None, isinstance(step.lr, Tensor))
        if key not in self._chosen:
            self._chosen[key] = choose(self.requested_backend, self.tables, step)
        return self._chosen[key]

    def explain(self) -> str:
        """Return which backend and kernels run for the tables, and why no other backend does."""
        step = READ if self.optimizer is None else self.optimizer.make_step({**self.options, "lr": 1.0}, 1)
        backend = self.backend_for(step)
        what = step.algorithm if self.optimizer else "no optimizer"
        first = f"{', '.join(self.names)} ({self.dtype}, {self.device}): {what} by {described(backend)}"
        others = explain(backend, self.tables, step)
        return "\n".join([first, *(f"  not {name!r}: {why}" for name, why in others.items())])

    def check_options(self) -> bool:
        """Check the options, unless they are the same objects as at the last call.

        Returns:
            Whether they are the same objects.

        Raises:
            ValueError: names the option that is out of range.
        """
        options = list(self.options.values())
        if len(options) == len(self._checked_options) and all(map(is_, options, self._checked_options)):
            return True
        assert self.optimizer is not None
        lr = self.options["lr"]
        remote = isinstance(lr, Tensor) and lr.device.type != "cpu"  # to check it would synchronize
        self.optimizer.check_options({**self.options, "lr": 1.0} if remote else self.options)
        if self.options.get("lr_decay") and not self.counted:
            raise ValueError("lr_decay was 0 when the state was made, so there is no step count for it")
        if self.options.get("momentum") and not self._state:
            raise ValueError("momentum was 0 when the state was made, so there is no momentum1 for it")
        if self.options.get("use_accumulate") and not self.has_windows:
            raise ValueError("use_accumulate was False when the tables were made: make a module with True")
        fixed = all(key == "params" or isinstance(one, IMMUTABLE) for key, one in self.options.items())
        self._checked_options = options if fixed else []
        return False

    def __post_init__(self) -> None:
        self._checked_memory: Hashable = None
        self._params = self.options.get("params")  # another list after `set_optimizer`
        self.device = self.tables[0].weight.device
        self.dtype = self.tables[0].weight.dtype
        self.counted = any(
            f"{name}.iter" in state for name, state in zip(self.names, self.states, strict=True)
        )
        state = [
            (state, f"{name}.{key}", tensor)
            for name, table, state in zip(self.names, self.tables, self.states, strict=True)
            for key, tensor in zip(_present(name, state), table.tensors[1:], strict=True)
        ]
        self._state = [list(each) for each in zip(*state, strict=True)]
        self._written = [one for table in self.tables for one in table.tensors]
        self.has_windows = any(
            f"{name}.window" in state for name, state in zip(self.names, self.states, strict=True)
        )

    def check_tables(self, step: Step) -> None:
        """Check shapes and memory of all weights and states, if one has moved since the last check.

        Kernels get addresses, and are called only after this check of the whole step.

        Raises:
            ValueError: a weight or state has another shape than its table had.
            RuntimeError: the memory of a tensor has been freed.
        """
        memory = places(self._written)
        if memory == self._checked_memory:
            return
        for name, table in zip(self.names, self.tables, strict=True):
            why = misfit(table, step.algorithm)
            if why:
                raise ValueError(f"table {name!r}: {why}")
            for tensor in table.tensors:
                check_memory(tensor)
        self._checked_memory = memory

    def counts(self, indices: Iterable[int]) -> dict[int, int]:
        """Return the step count of each of these tables."""
        if not self.counted:
            return dict.fromkeys(indices, 0)
        return {index: self.count(index) for index in indices}

    def counter(self, index: int) -> Tensor | None:
        """Return the step counter of a table, (1,); None if its algorithm has none."""
        return self.states[index].get(f"{self.names[index]}.iter") if self.counted else None

    def count(self, index: int) -> int:
        """Return the step count of a table; a counter on a device is read only if others changed it."""
        counter = self.counter(index) if self.counted else None
        if counter is None:
            return 0
        known = self._known_counts.get(index)
        if known is None or known[0] != counter._version:
            known = _KNOWN_COUNTS.get(counter)  # set when the counter was made or loaded
        if known is None or known[0] != counter._version:
            known = remember_count(counter, int(counter))
        self._known_counts[index] = known
        return known[1]

    def forget_counts(self) -> None:
        """Drop the known step counts: the counters on the device differ after suppressed updates."""
        self._known_counts.clear()
        for index in range(len(self.names)):
            counter = self.counter(index)
            if counter is not None:
                _KNOWN_COUNTS.pop(counter, None)

    def count_step(self, indices: Sequence[int], backend: Backend) -> tuple[Tensor, ...]:
        """Add 1 to the step counts of tables; return the counters to which the update must add 1."""
        if not self.counted:
            return ()
        counted = [(index, self.count(index), self.counter(index)) for index in indices]
        counters = [counter for _, _, counter in counted if counter is not None]
        by_update = counters if backend.counts_steps(self.device) else []
        if by_update:
            torch.autograd.graph.increment_version(by_update)
        elif counters:
            torch._foreach_add_(counters, 1)
        for index, before, counter in counted:
            if counter is not None and counter.is_cpu:
                self._known_counts[index] = (counter._version, before + 1)
            elif counter is not None:  # known to a group that is made later, too
                self._known_counts[index] = remember_count(counter, before + 1)
        return tuple(by_update)

    def written_tensors(self, indices: Sequence[int]) -> list[Tensor]:
        """Return all tensors that an update of these tables writes, except step counts."""
        if len(indices) == len(self.tables):
            return self._written
        return [one for index in indices for one in self.tables[index].tensors]

    def is_in_place(self) -> bool:
        """Return whether device and dtype of the weights are unchanged."""
        weights = [table.weight for table in self.tables]
        return all(one.device == self.device and one.dtype is self.dtype for one in weights)

    def is_current(self, param_groups: Sequence[object]) -> bool:
        """Return whether the parameter group is among these, with the same tables and objects of state."""
        if self.optimizer is not None and (
            id(self.options) not in map(id, param_groups) or self.options["params"] is not self._params
        ):
            return False
        if not self._state:
            return True
        states, keys, tensors = self._state
        return all(map(is_, map(getitem, states, keys), tensors))


def _present(name: str, state: Mapping[str, Any]) -> list[str]:
    """Return the keys of the tensors of a table after its name, in the order of `Table.tensors`."""
    return [key for key in (*STATE_KEYS, "row_counter") if f"{name}.{key}" in state]


def make_table_groups(
    weights: Mapping[str, Tensor],
    optimizers: Mapping[str, tuple[RuleOptimizer, Mapping[str, Any], Mapping[str, Any]]],
    requested_backend: str,
) -> list[TableGroup]:
    """Group tables by parameter group, device and dtype.

    Args:
        weights: by name.
        optimizers: optimizer, parameter group and state of each table that has them, by name.
        requested_backend: the name of a backend, or ``"auto"``.

    Raises:
        ValueError: the backend does not support a table or its optimizer.
        RuntimeError: the backend cannot run here.
    """
    by_kind: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        options_id = id(optimizers[name][1]) if name in optimizers else None
        by_kind.setdefault((options_id, weight.device, weight.dtype), []).append(name)
    groups = []
    for names in by_kind.values():
        optimizer, options, _ = optimizers.get(names[0], (None, {}, {}))
        states = [optimizers[name][2] if name in optimizers else {} for name in names]
        if optimizer is None:
            tables = [Table(weights[name]) for name in names]
            step = READ
        else:
            pairs = zip(names, states, strict=True)
            tables = [as_table(name, weights[name], state) for name, state in pairs]
            step = optimizer.make_step({**options, "lr": 1.0}, 1)
        backend = choose(requested_backend, tables, step)
        groups.append(
            TableGroup(names, Tables(tables), optimizer, options, states, backend, requested_backend)
        )
    return groups
