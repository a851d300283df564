"""The optimizer of an embedding module: it updates in the backward pass, by the unfused one's rule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from keyedopt.reference.backward_clip import BackwardClip
from keyedopt.reference.embedding.backward import Gradients
from keyedopt.reference.embedding.deferred_gradients import Held, Sum
from keyedopt.reference.embedding.keys import COUNTING, live
from keyedopt.reference.embedding.table_optimizers import algorithm, initial_state, make_plan, rule_class
from keyedopt.reference.embedding.update import Update, listed
from keyedopt.reference.fused import FusedOptimizer
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.rules import Rows, coalesce
from keyedopt.reference.window import Window


class EmbeddingFusedOptimizer(FusedOptimizer):
    """The keyed optimizer of the tables of an embedding module; the module's backward pass calls `update`.

    Parameters are named ``<table>.weight``, states ``<table>.momentum1``, ``<table>.exp_avg_sq``, …, as
    `keyedopt.reference.embedding.keys` lists. State is there from the start, in float32 at least. Every
    option of a group, the rate first of all, is read when the backward pass runs.
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])
        self._plans: dict[torch.Tensor, RuleOptimizer] = {}
        self._names: dict[torch.Tensor, str] = {}
        self._clips: list[BackwardClip] = []
        #: Gradients that wait for `step`; see `hold`.
        self.held = Held()

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure, and do the update that is held, if any; the backward pass does all others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.release()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the gradients that are held, if any: else the backward pass has used them up."""
        self.held.drop()

    def _dummy_step(self) -> None:
        """Do nothing in `init_state`: the state is there, and what is held waits for its step."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: only the tables of the module have a backward pass that updates them.

        Raises:
            ValueError: always.
        """
        raise ValueError("the groups of an embedding module are of its tables; optimize others elsewhere")

    def clip_in_backward(self, clip: BackwardClip, inside: Sequence[BackwardClip]) -> None:
        """Bound the gradient of every step from now on, after those bounds alone that are in `inside`."""
        self._clips = [known for known in self._clips if known in inside] + [clip]
        self.held.keep(inside)

    def hold(self, clip: BackwardClip, inside: Sequence[BackwardClip]) -> None:
        """Have updates wait for `step`, as long as there is this bound, which is one of other gradients too.

        Until then gradients are to tables what ``.grad`` is to dense parameters: backward passes add to it,
        `step` uses it up, `zero_grad` drops it.
        """
        self._clips = [known for known in self._clips if known in inside]
        self.held.keep(inside)
        self.held.ask(clip)

    def use(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Mapping[str, torch.Tensor],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Optimize tables, by name, with an optimizer of this class: one group, one set of options.

        Raises:
            ValueError: the class, or an argument of it, cannot be; nothing is changed.
        """
        for name, weight in weights.items():
            had, wanted = type(self._plans.get(weight)), rule_class(optimizer_class)[0]
            if weight in self._plans and had is not wanted:
                raise ValueError(
                    f"table {name!r} was created with {had.__name__}, so optimizer_class must be that, not "
                    f"{wanted.__name__}: state of one is no state of another"
                )
        plan = make_plan(optimizer_class, weights, kwargs)
        state = {weight: initial_state(plan, name, weight) for name, weight in weights.items()}
        for weight, entry in state.items():
            if weight in self.state and self.state[weight].keys() != entry.keys():
                have = list(self.state[weight])
                raise ValueError(f"optimizer_kwargs must go with the state that there is, {have}")
        for group in self.param_groups:  # a table is in one group
            group["params"] = [one for one in group["params"] if one not in state]
        self.param_groups[:] = [group for group in self.param_groups if group["params"]]
        for name, weight in weights.items():
            self._plans[weight], self._names[weight] = plan, name
            self.params[f"{name}.weight"] = weight
            self.state.setdefault(weight, state[weight])
        self.param_groups.append(plan.param_groups[0])

    def follow(self) -> None:
        """Move the state to where the tables are."""
        for weight, entry in self.state.items():
            for value in entry.values():
                if isinstance(value, Window):
                    value.to(weight.device)
                else:
                    value.data = value.data.to(weight.device)

    # --- the update -------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, gradients: Gradients) -> None:
        """Take a step with the gradients of one backward pass; all of it is computed before any is written.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set.
            ValueError: an option has been set to what it cannot be.
        """
        if not self.held.wanted():
            self.release()  # of one that was held for somebody who is gone
        waiting: list[tuple[Window, torch.Tensor, torch.Tensor]] = []
        sums: list[Sum] = []
        for weight, (rows, grads) in gradients:
            group = self._checked_group(weight, grads)
            window = self.state[weight].get(f"{self._names[weight]}.window")
            if weight in self.held.sums:
                had_rows, had_grads = self.held.sums[weight]
                rows = torch.cat([had_rows.to(rows), rows])
                grads = torch.cat([had_grads.to(grads), grads])
            elif window is not None and window.count + 1 < group["accumulate_step"]:
                waiting.append((window, rows, grads))
                continue
            elif window is not None:
                rows, grads = window.with_(rows, grads)
            sums.append((weight, coalesce(rows, grads)))
            self._check_finite(weight, sums[-1][1][1])  # a sum may overflow
        if self.held.wanted():
            self.held.put(sums, self._clips)
        else:
            self._take(sums, self._clips)
        for window, rows, grads in waiting:
            window.add(rows, grads)

    @torch.no_grad()
    def release(self) -> None:
        """Do the update that is held, if there is one, with the options that are set now; see `update`."""
        if self.held.sums:
            self._take(self.held.bounded(), ())
            self.held.drop()

    def _take(self, sums: Sequence[Sum], clips: Sequence[BackwardClip]) -> None:
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

    def _group(self, weight: torch.Tensor) -> Mapping[str, Any]:
        return next(group for group in self.param_groups if any(weight is one for one in group["params"]))

    def _checked_group(self, weight: torch.Tensor, grads: torch.Tensor) -> Mapping[str, Any]:
        name = self._names[weight]
        group = self._group(weight)
        self._plans[weight].check_options(group)
        for option, key in (("lr_decay", "iter"), ("momentum", "momentum1")):
            if group.get(option) and f"{name}.{key}" not in self.state[weight]:
                raise ValueError(f"{option} was 0 when the state was made, so there is no {key} for it")
        self._check_finite(weight, grads)
        return group

    def _check_finite(self, weight: torch.Tensor, grads: torch.Tensor) -> None:
        if self._group(weight)["error_if_nonfinite"] and not bool(grads.isfinite().all()):
            name = self._names[weight]
            raise RuntimeError(f"the gradient of table {name!r} is not finite: error_if_nonfinite refuses it")

    def _compute(self, update: Update) -> None:
        """Apply the unfused optimizer's rule, with its options for this step, to copies of the rows."""
        name, plan = self._names[update.weight], self._plans[update.weight]
        entry = self.state[update.weight]
        state = live(entry, algorithm(plan), name)
        if algorithm(plan) in COUNTING:
            state.setdefault("step", entry.get(f"{name}.iter", torch.zeros(1))[0] + 1)
        rule, names = plan.rule(self._group(update.weight), state, False)
        update.targets = [update.weight.detach(), *(state[key] for key in names)]
        old = [tensor[update.rows] for tensor in update.targets]
        update.new = rule(old[0], update.grads, *old[1:])

    def _write(self, update: Update) -> None:
        for tensor, new in zip(update.targets, update.new, strict=True):
            tensor.index_copy_(0, update.rows, new)
        name, entry = self._names[update.weight], self.state[update.weight]
        if f"{name}.iter" in entry:
            entry[f"{name}.iter"] += 1
        if f"{name}.window" in entry:
            entry[f"{name}.window"].clear()
