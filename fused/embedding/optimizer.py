"""The optimizer of an embedding module: it updates in the backward pass, with the backend of each table."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, optim

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.bulk.bulk_fill import NATIVE
from keyedopt.fused.embedding import update
from keyedopt.fused.embedding.backward import GroupLookups
from keyedopt.fused.embedding.deferred_gradients import GroupedGradients
from keyedopt.fused.embedding.feature_layout import FeatureLayout
from keyedopt.fused.embedding.table_groups import TableGroup, make_table_groups, remember_count
from keyedopt.fused.embedding.table_optimizers import initial_state, make_optimizer
from keyedopt.fused.fused import FusedOptimizer
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference.embedding.optimizer_base import EmbeddingOptimizerBase
from keyedopt.reference.embedding.replicas import Replicas
from keyedopt.reference.keyed.bulk import Bulk


class EmbeddingFusedOptimizer(EmbeddingOptimizerBase, FusedOptimizer):
    """The keyed optimizer of the tables of an embedding module; the module's backward pass calls `update`.

    Names, state and options are those of `EmbeddingOptimizerBase`.

    Args:
        backend: the name of a backend, or ``"auto"``.
        rounding_seed: of stochastic rounding of tables in half precision, an integer in [0, 2⁶³); None rounds
            to nearest. The draws depend on the seed and on the step count of a table, ``<table>.iter``, so
            that a resumed run continues bit for bit; if an algorithm does not count its steps, the draws
            depend on `rounding_steps`.

    Raises:
        ValueError: the seed is out of range.
    """

    bulk: ClassVar[Bulk] = NATIVE

    def __init__(self, backend: str = "auto", rounding_seed: int | None = None) -> None:
        super().__init__()
        if rounding_seed is not None:
            integer = isinstance(rounding_seed, int) and not isinstance(rounding_seed, bool)
            if not integer or not 0 <= rounding_seed < 1 << 63:
                raise ValueError(f"rounding_seed must be an integer in [0, 2**63), not {rounding_seed!r}")
        self.backend = backend
        self._rounding_seed = rounding_seed
        #: The number of updates of this object. Tables without ``<table>.iter`` are rounded by it: those of
        #: SGD, LARS and Adagrads without `lr_decay`, and those that count steps by row. Like the state of
        #: torch's generators it is not part of a checkpoint, whose keys are torchrec's: save it with a
        #: checkpoint, and restore it, to continue bit for bit; from 0 on, the draws of the first steps are
        #: repeated.
        self.rounding_steps = 0
        self.deferred: GroupedGradients = GroupedGradients()
        #: The present lookups of the module; None before the first.
        self.layout: weakref.ref[FeatureLayout] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `KeyedOptimizer` does, after the check of lookups, which suppress updates.

        Raises:
            ValueError: earlier lookups were invalid.
        """
        layout = None if self.layout is None else self.layout()
        if layout is not None:
            layout.check()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layout": None}

    def _dummy_step(self) -> None:
        """Do nothing in `init_state`: the state exists, and a deferred update is applied by `step` only."""

    def _make_optimizer(
        self, optimizer_class: type[optim.Optimizer], weights: Sequence[Tensor], kwargs: Mapping[str, Any]
    ) -> RuleOptimizer:
        optimizer = make_optimizer(optimizer_class, kwargs)
        optimizer.param_groups[0]["params"] = list(weights)
        return optimizer

    def _initial_state(self, optimizer: RuleOptimizer, name: str, weight: Tensor) -> dict[str, Any]:
        state = initial_state(optimizer, name, weight)
        if f"{name}.iter" in state:
            remember_count(state[f"{name}.iter"], 0)
        return state

    def _check_supported(
        self, optimizer: RuleOptimizer, weights: Mapping[str, Tensor], states: Mapping[Tensor, Any]
    ) -> None:
        group = optimizer.param_groups[0]
        optimizers = {name: (optimizer, group, states[weight]) for name, weight in weights.items()}
        make_table_groups(weights, optimizers, self.backend)

    def explain(self) -> str:
        """Return which backend and kernels run for which tables, and why no other backend does."""
        groups = self.table_groups({name: weight for weight, name in self._names.items()})
        return "\n".join(group.explain() for group in groups)

    def table_groups(self, weights: Mapping[str, Tensor]) -> list[TableGroup]:
        """Group the tables of the module as backends take them now."""
        optimizers = {
            self._names[weight]: (optimizer, self._group(weight), self.state[weight])
            for weight, optimizer in self._table_optimizers.items()
        }
        return make_table_groups(weights, optimizers, self.backend)

    def update(self, lookups: Sequence[GroupLookups]) -> None:
        """Take a step with the gradients of one backward pass; nothing is written before all is checked.

        The caller disables gradients (`torch.no_grad`).

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set.
            ValueError: an option is out of range.
        """
        if self.replicas is not None:
            lookups = self._exchanged(self.replicas, lookups)
        if self.deferred.requested():
            step = update.plan_sums(self._regroup_if_changed(lookups), self.deferred.sums)
            self.deferred.add_planned(step, self._clips)
            step.store_in_windows()
            return
        if self.deferred.sums:  # deferred for a clip that no longer exists
            self.apply_deferred()
        step = update.plan_step(self._regroup_if_changed(lookups), self._clips, self._seed())
        self.rounding_steps += 1
        step.apply()

    def _exchanged(self, replicas: Replicas, lookups: Sequence[GroupLookups]) -> Sequence[GroupLookups]:
        """Return the gradients of all replicas, as lookups of rows."""
        sums = update.row_sums(self._regroup_if_changed(lookups))
        places = self._places()
        found = []
        for weight, (rows, grads) in replicas.exchange(list(self.params.values()), sums).items():
            group, table = places[self._names[weight]]
            found.append((group, [Lookup(table, rows, grad=grads)]))
        return found

    @torch.no_grad()
    def apply_deferred(self) -> None:
        """Apply the update that was deferred, if there is one, with the present options and devices.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set; nothing is changed.
            ValueError: an option is out of range; nothing is changed.
        """
        if not self.deferred.sums:
            return
        lookups: Sequence[GroupLookups] = self.deferred.lookups()
        in_place = all(group.is_in_place() and self._has(group) for group, _ in lookups)
        lookups = self._regroup_if_changed(lookups) if in_place else self._regroup(lookups)
        step = update.plan_deferred(lookups, self._seed())
        self.deferred.clear()
        self.rounding_steps += 1
        step.apply()

    def _has(self, group: TableGroup) -> bool:
        """Return whether the tables of a group are still those of the module, which may have moved."""
        return all(table.weight in self.state for table in group.tables)

    def _seed(self) -> tuple[int, int] | None:
        return None if self._rounding_seed is None else (self._rounding_seed, self.rounding_steps)

    def post_load_state_dict(self) -> None:
        """Read the step counts that were loaded, so that no step has to synchronize to read them."""
        super().post_load_state_dict()
        for entry in self.state.values():
            for key, value in entry.items():
                if key.endswith(".iter") and isinstance(value, Tensor):
                    remember_count(value, int(value))

    def _set_count(self, counter: Tensor, step: int) -> None:
        super()._set_count(counter, step)
        remember_count(counter, step)

    def _regroup_if_changed(self, lookups: Sequence[GroupLookups]) -> Sequence[GroupLookups]:
        """Regroup lookups whose tables changed parameter group or state since the forward pass."""
        same = all(group.is_current(self.param_groups) for group, _ in lookups)
        return lookups if same else self._regroup(lookups)

    def _regroup(self, lookups: Sequence[GroupLookups]) -> Sequence[GroupLookups]:
        """Return lookups in the present table groups."""
        places = self._places()
        found = []
        for old, listed in lookups:
            for lookup in listed:
                group, table = places[old.names[lookup.table]]
                found.append((group, [replace(lookup, table=table, prepared=None)]))
        return found

    def _places(self) -> dict[str, tuple[TableGroup, int]]:
        """Return the present group of each table, by name, and the index in it."""
        groups = self.table_groups({name: weight for weight, name in self._names.items()})
        return {name: (group, index) for group in groups for index, name in enumerate(group.names)}
