"""The optimizer of an embedding module: its update is done in the backward pass, by the unfused optimizer's rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from keyedopt.reference import optimizers
from keyedopt.reference._rule_optimizer import RuleOptimizer
from keyedopt.reference.embedding.keys import COUNTING, convert, live
from keyedopt.reference.embedding.lookup import gradient_dtype
from keyedopt.reference.window import Window
from keyedopt.reference.fused import BackwardClip, FusedOptimizer
from keyedopt.reference.rules import Rows, coalesce

#: What stands for torch's optimizers: the same formulas and defaults, on the rows of a sparse gradient.
STANDS_FOR: Mapping[type[optim.Optimizer], tuple[type[RuleOptimizer], Mapping[str, Any]]] = {
    optim.SGD: (optimizers.SGD, {}),
    optim.Adagrad: (optimizers.Adagrad, {}),
    optim.Adam: (optimizers.Adam, {"lr": 1e-3}),
    optim.AdamW: (optimizers.Adam, {"lr": 1e-3, "weight_decay": 1e-2, "decay": "decoupled"}),
}

#: The gradient of a table as a backward pass leaves it: row numbers (N,), with repetitions, and values (N, D).
Gradient = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Update:
    """What a step is about to write to a table."""

    weight: torch.Tensor
    rows: torch.Tensor
    grads: torch.Tensor
    targets: Sequence[torch.Tensor] = ()
    new: Sequence[torch.Tensor] = ()


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

    def step(self, closure: Any = None) -> Any:
        """Do nothing, for the backward pass has updated the tables; a closure is evaluated."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: the backward pass has used the gradients up."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: only the tables of the module have a backward pass that updates them.

        Raises:
            ValueError: always.
        """
        raise ValueError("the tables of an embedding module are its groups; optimize others elsewhere")

    def clip_in_backward(self, clip: BackwardClip, inside: Sequence[BackwardClip]) -> None:
        """Bound the gradient of every step from now on, after the bounds `inside` alone."""
        self._clips = [known for known in self._clips if known in inside] + [clip]

    # --- which optimizer --------------------------------------------------------------------------

    def use(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Mapping[str, torch.Tensor],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Optimize tables, by name, with an optimizer of this class; one group, one set of options.

        Raises:
            ValueError: the class, or an argument of it, cannot be; nothing is changed.
        """
        stands, defaults = STANDS_FOR.get(optimizer_class, (optimizer_class, {}))
        if not (isinstance(stands, type) and issubclass(stands, RuleOptimizer)):
            raise ValueError(
                f"optimizer_type must be one of torch's or ours that have a rule, not {optimizer_class!r}"
            )
        for weight in weights.values():
            if weight in self._plans:
                self._check_same(weight, stands)
        plan = stands(list(weights.values()), **{**defaults, **kwargs})
        group = plan.param_groups[0]
        if group.get("dampening"):
            raise ValueError(
                "dampening must be 0: its exception for the first step needs state made by that step"
            )
        self._leave(set(map(id, weights.values())))
        for name, weight in weights.items():
            self._plans[weight], self._names[weight] = plan, name
            self.params[f"{name}.weight"] = weight
            if weight not in self.state:
                self.state[weight] = self._initial(name, weight, plan, group)
        self.param_groups.append(group)

    def _check_same(self, weight: torch.Tensor, stands: type[RuleOptimizer]) -> None:
        have = type(self._plans[weight])
        if have is not stands:
            raise ValueError(
                f"table {self._names[weight]!r} was created with {have.__name__}, so optimizer_class must be "
                f"that, not {stands.__name__}: state of one is no state of another"
            )

    def _leave(self, leaving: set[int]) -> None:
        """Take tables out of the groups that they are in."""
        for group in self.param_groups:
            group["params"] = [weight for weight in group["params"] if id(weight) not in leaving]
        self.param_groups[:] = [group for group in self.param_groups if group["params"]]

    def _initial(self, name: str, weight: torch.Tensor, plan: RuleOptimizer, group: Any) -> dict[str, Any]:
        wide = torch.empty_like(weight, dtype=gradient_dtype(weight.dtype), requires_grad=False)
        unfused: dict[str, Any] = plan.initial_state(wide, group)
        decay = group.get("lr_decay", 0.0)
        state = convert(unfused, algorithm(plan), "unfused", "fused", name, lr_decay=decay)
        if group.get("use_accumulate"):
            state[f"{name}.window"] = Window(weight)
        return state

    # --- the update -------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, gradients: Sequence[tuple[torch.Tensor, Gradient]]) -> None:
        """Take a step with the gradients of one backward pass: all of it is computed before any is written.

        Args:
            gradients: tables, each once, and the gradient of each.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set.
            ValueError: an option has been set to what it cannot be.
        """
        waiting: list[tuple[Window, Gradient]] = []
        updates: list[_Update] = []
        for weight, (rows, grads) in gradients:
            group, window = self._group(weight), self._window(weight)
            self._check(weight, group)
            if group["error_if_nonfinite"] and not bool(grads.isfinite().all()):
                raise RuntimeError(
                    f"the gradient of table {self._names[weight]!r} is not finite, and error_if_nonfinite asks to refuse it"
                )
            if window is not None:
                if window.count + 1 < group["accumulate_step"]:
                    waiting.append((window, (rows, grads)))
                    continue
                rows, grads = window.with_(rows, grads)
            updates.append(_Update(weight, *_listed(weight, *coalesce(rows, grads), Rows(group["rows"]))))
        for clip in self._clips:
            clip.apply([update.grads for update in updates])
        for update in updates:
            self._compute(update)
        for window, gradient in waiting:
            window.add(*gradient)
        for update in updates:
            self._write(update)

    def _check(self, weight: torch.Tensor, group: Mapping[str, Any]) -> None:
        self._plans[weight].check_options(group)
        if group.get("lr_decay") and f"{self._names[weight]}.iter" not in self.state[weight]:
            raise ValueError(
                "lr_decay was 0 when the state was made, so there is no count of steps to decay by"
            )

    def _group(self, weight: torch.Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(weight is other for other in group["params"]):
                return group
        raise ValueError(f"table {self._names[weight]!r} is in no group any more")

    def _window(self, weight: torch.Tensor) -> Window | None:
        found: Window | None = self.state[weight].get(f"{self._names[weight]}.window")
        return found

    def _compute(self, update: _Update) -> None:
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

    def _write(self, update: _Update) -> None:
        for tensor, new in zip(update.targets, update.new, strict=True):
            tensor.index_copy_(0, update.rows, new)
        count = self.state[update.weight].get(f"{self._names[update.weight]}.iter")
        window = self._window(update.weight)
        if count is not None:
            count += 1
        if window is not None:
            window.clear()


def algorithm(plan: RuleOptimizer) -> str:
    """Return the name of the algorithm of an optimizer, as the table of keys has it."""
    return type(plan).__name__.removeprefix("Accumulate")


def _listed(weight: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, which: Rows) -> Gradient:
    """Return the rows that a step updates, and their gradients."""
    if which is Rows.ALL:
        every = grads.new_zeros(weight.shape)
        return torch.arange(len(weight), device=rows.device), every.index_copy_(0, rows, grads)
    if which is Rows.NONZERO:
        kept = (grads != 0).any(dim=1)
        return rows[kept], grads[kept]
    return rows, grads
