"""The optimizer of an embedding module: it updates in the backward pass, by the unfused one's rule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from keyedopt.reference.backward_clip import BackwardClip
from keyedopt.reference.embedding.backward import Gradients
from keyedopt.reference.embedding.deferred_gradients import Sum
from keyedopt.reference.embedding.keys import COUNTING, live
from keyedopt.reference.embedding.optimizer_base import EmbeddingOptimizerBase
from keyedopt.reference.embedding.table_optimizers import algorithm, initial_state, make_optimizer
from keyedopt.reference.embedding.update import Update, listed
from keyedopt.reference.fused import FusedOptimizer
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.rules import Rows, coalesce
from keyedopt.reference.window import Window


class EmbeddingFusedOptimizer(EmbeddingOptimizerBase, FusedOptimizer):
    """The keyed optimizer of the tables of an embedding module; the module's backward pass calls `update`.

    Names, state and options are those of `EmbeddingOptimizerBase`.
    """

    def _make_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[torch.Tensor],
        kwargs: Mapping[str, Any],
    ) -> RuleOptimizer:
        optimizer: RuleOptimizer = make_optimizer(optimizer_class, weights, kwargs)
        return optimizer

    def _initial_state(self, optimizer: RuleOptimizer, name: str, weight: torch.Tensor) -> dict[str, Any]:
        return initial_state(optimizer, name, weight)

    def _check_supported(self, optimizer: Any, weights: Any, states: Any) -> None:
        """Do nothing: plain torch updates every table."""

    @torch.no_grad()
    def update(self, gradients: Gradients) -> None:
        """Take a step with the gradients of one backward pass; nothing is written before all is computed.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set.
            ValueError: an option is out of range.
        """
        if not self.deferred.requested():
            self.apply_deferred()  # deferred for a clip that no longer exists
        unfinished: list[tuple[Window, torch.Tensor, torch.Tensor]] = []
        sums: list[Sum] = []
        if self.replicas is not None:
            coalesced = {weight: coalesce(*rows_and_grads) for weight, rows_and_grads in gradients}
            gradients = list(self.replicas.exchange(list(self.params.values()), coalesced).items())
        for weight, (rows, grads) in gradients:
            group = self._checked_group(weight, grads)
            window = self._window(weight, group)
            if weight in self.deferred.sums:
                had_rows, had_grads = self.deferred.sums[weight]
                rows = torch.cat([had_rows.to(rows), rows])
                grads = torch.cat([had_grads.to(grads), grads])
            elif window is not None and window.count + 1 < group["accumulate_step"]:
                unfinished.append((window, rows, grads))
                continue
            elif window is not None:
                rows, grads = window.with_batch(rows, grads)
            sums.append((weight, coalesce(rows, grads)))
            self._check_finite(weight, sums[-1][1][1])  # a sum may overflow
        if self.deferred.requested():
            self.deferred.add(sums, self._clips)
        else:
            self._apply_update(sums, self._clips)
        for window, rows, grads in unfinished:
            window.add(rows, grads)

    @torch.no_grad()
    def apply_deferred(self) -> None:
        """Apply the update that was deferred, if there is one, with the options that are set now."""
        if self.deferred.sums:
            self._apply_update(self.deferred.clipped(), ())
            self.deferred.clear()

    def _apply_update(self, sums: Sequence[Sum], clips: Sequence[BackwardClip]) -> None:
        """Update the rows of some tables by their gradients, all or nothing."""
        updates = []
        for weight, (rows, grads) in sums:
            which = Rows(self._checked_group(weight, grads)["rows"])
            updates.append(Update(weight, *listed(weight, rows, grads, which)))
        for clip in clips:
            clip.apply([update.grads for update in updates])
        for update in updates:
            self._compute(update)
        for update in updates:
            self._write(update)

    def _checked_group(self, weight: torch.Tensor, grads: torch.Tensor) -> Mapping[str, Any]:
        name = self._names[weight]
        group = self._group(weight)
        self._table_optimizers[weight].check_options(group)
        for option, key in (("lr_decay", "iter"), ("momentum", "momentum1")):
            if group.get(option) and f"{name}.{key}" not in self.state[weight]:
                raise ValueError(f"{option} was 0 when the state was made, so there is no {key} for it")
        if group.get("use_accumulate") and f"{name}.window" not in self.state[weight]:
            raise ValueError("use_accumulate was False when the tables were made: make a module with True")
        for key, value in self.state[weight].items():
            fits = weight.shape, weight.shape[:1]
            if key != f"{name}.iter" and isinstance(value, torch.Tensor) and value.shape not in fits:
                raise ValueError(
                    f"the state {key!r} is {tuple(value.shape)}, which does not fit its table "
                    f"{tuple(weight.shape)}: a table of another size needs a new module"
                )
        self._check_finite(weight, grads)
        return group

    def _window(self, weight: torch.Tensor, group: Mapping[str, Any]) -> Window | None:
        """Return the window of a table, if its group accumulates now."""
        key = f"{self._names[weight]}.window"
        return self.state[weight].get(key) if group.get("use_accumulate") else None

    def _check_finite(self, weight: torch.Tensor, grads: torch.Tensor) -> None:
        if self._group(weight)["error_if_nonfinite"] and not bool(grads.isfinite().all()):
            name = self._names[weight]
            raise RuntimeError(f"the gradient of table {name!r} is not finite: error_if_nonfinite refuses it")

    def _compute(self, update: Update) -> None:
        """Apply the unfused optimizer's rule, with its options for this step, to copies of the rows."""
        name, optimizer = self._names[update.weight], self._table_optimizers[update.weight]
        entry = self.state[update.weight]
        state = live(entry, algorithm(optimizer), name)
        if algorithm(optimizer) in COUNTING:
            state.setdefault("step", entry.get(f"{name}.iter", torch.zeros(1))[0] + 1)
        rule, names = optimizer.rule(self._group(update.weight), state, False)
        update.targets = [update.weight.detach(), *(state[key] for key in names)]
        old = [tensor[update.rows] for tensor in update.targets]
        update.new = rule(old[0], update.grads, *old[1:])

    def _write(self, update: Update) -> None:
        for tensor, new in zip(update.targets, update.new, strict=True):
            tensor.index_copy_(0, update.rows, new)
        name, entry = self._names[update.weight], self.state[update.weight]
        if f"{name}.iter" in entry:
            entry[f"{name}.iter"] += 1
        window = self._window(update.weight, self._group(update.weight))
        if window is not None:
            window.clear()
