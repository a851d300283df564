"""The optimizer of an embedding module: it updates in the backward pass, with the backend of each table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, optim

from keyedopt.fused.bulk.bulk_fill import NATIVE
from keyedopt.fused.embedding import update
from keyedopt.fused.embedding.backward import Given
from keyedopt.fused.embedding.deferred_gradients import Held
from keyedopt.fused.embedding.table_groups import Cluster, make_clusters, note_count
from keyedopt.fused.embedding.table_optimizers import initial_state, make_plan, optimizer_class
from keyedopt.fused.fused import FusedOptimizer
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.fused.sparse.window import Window
from keyedopt.reference.keyed.bulk import Bulk


class EmbeddingFusedOptimizer(FusedOptimizer):
    """The keyed optimizer of the tables of an embedding module; the module's backward pass calls `update`.

    Parameters are named ``<table>.weight``, states ``<table>.momentum1``, ``<table>.exp_avg_sq``, counts
    ``<table>.iter`` (1,) or ``<table>.row_counter`` (R,), as in torchrec and in `keyedopt.reference`. State
    is there from the start, in float32 at least. Every option of a group, the rate first of all, is read
    when the backward pass runs.

    Args:
        backend: the name of a backend, or ``"auto"``.
        rounding_seed: of stochastic rounding of tables in half precision; None rounds to nearest. What is
            drawn depends on it and on the steps of a table, ``<table>.iter``, so that a run that is resumed
            goes on bit for bit; where an algorithm does not count its steps, on `rounding_steps`.
    """

    bulk: ClassVar[Bulk] = NATIVE

    def __init__(self, backend: str = "auto", rounding_seed: int | None = None) -> None:
        super().__init__({}, {}, [])
        self.backend = backend
        self._rounding_seed = rounding_seed
        #: How many updates this object has done. Tables without ``<table>.iter`` are rounded by it: those of
        #: SGD, LARS and Adagrads without `lr_decay`, and those that count steps by row. Like the state of
        #: torch's generators it is no part of a checkpoint, whose keys are torchrec's: keep it beside one,
        #: and set it, to go on bit for bit; from zero on, the draws are those of the first steps again.
        self.rounding_steps = 0
        self._plans: dict[str, RuleOptimizer] = {}
        self._weights: dict[str, Tensor] = {}
        self._clips: list[Any] = []
        self._held = Held()

    def step(self, closure: Any = None) -> Any:
        """Do the update that is held, if there is one: else the backward pass has done it.

        Returns:
            What the closure does, which is evaluated before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.release()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop gradients that are held, if there are any: else the backward pass has used them up."""
        self._held.drop()

    def _dummy_step(self) -> None:
        """Do nothing in `init_state`: the state is there, and an update that is held waits for its step."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: only the tables of the module have a backward pass that updates them.

        Raises:
            ValueError: always.
        """
        raise ValueError("the groups of an embedding module are of its tables; optimize others elsewhere")

    def clip_in_backward(self, clip: Any, inside: Sequence[Any]) -> None:
        """Bound the gradient of every step from now on, after those bounds alone that are in `inside`.

        Args:
            clip: its ``apply`` is given the gradients of all tables, each row once, to change in place.
            inside: bounds that were asked for before, and hold on.
        """
        self._keep(inside)
        self._clips.append(clip)

    def hold(self, clip: Any, inside: Sequence[Any]) -> None:
        """Have updates wait for `step`, from the next backward pass on, as long as there is this bound.

        So a norm can be bounded that is known only after the backward pass, as that of these and of other
        gradients together: what is held is scaled in place before the step. It is to a table what ``.grad``
        is to a dense parameter: backward passes add to it, `step` uses it up, and `zero_grad` drops it.

        Args:
            clip: who asks for it; only a weak reference to it is kept.
            inside: bounds that were asked for before, and hold on.
        """
        self._keep(inside)
        self._held.ask(clip)

    def _keep(self, inside: Sequence[Any]) -> None:
        self._clips = [known for known in self._clips if any(known is one for one in inside)]
        self._held.keep(inside)

    @property
    def held(self) -> Any:
        """The gradients that wait for `step`, as a clipping optimizer sees them."""
        return SimpleNamespace(clip=self.clip_held, gradients=self.held_gradients)

    def clip_held(self, clip: Any) -> None:
        """Apply a bound to the gradients that are held; `release` applies those that have not been."""
        self._held.clip(clip)

    def held_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return weights, and their gradients that are held, (U, D), each row once, to change in place."""
        return [(self._weights[name], grads) for name, grads in self._held.gradients()]

    @torch.no_grad()
    def release(self) -> None:
        """Do the update that is held, if there is one, with the options and on the device of now.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set; nothing is changed.
            ValueError: an option has been set to what it cannot be; nothing is changed.
        """
        if not self._held:
            return
        given = self._held.given(self._weights)
        stays = all(cluster.stays() for cluster, _ in given)
        plan = update.resume(self._current(given) if stays else self._anew(given), self._seed())
        self._held.drop()
        self.rounding_steps += 1
        plan.carry_out()

    def use(
        self, given: type[optim.Optimizer], weights: Mapping[str, Tensor], kwargs: Mapping[str, Any]
    ) -> None:
        """Optimize tables, by name, with an optimizer of this class: one group, one set of options.

        Raises:
            ValueError: the class, or an argument of it, cannot be, or the backend cannot do it; nothing is
                changed.
            RuntimeError: the backend is not there; nothing is changed.
        """
        wanted = optimizer_class(given)[0]
        for name in weights:
            had = type(self._plans.get(name))
            if name in self._plans and had is not wanted:
                raise ValueError(
                    f"table {name!r} was created with {had.__name__}, so optimizer_class must be that, not "
                    f"{wanted.__name__}: state of one is no state of another"
                )
        plan = make_plan(given, kwargs)
        group = plan.param_groups[0]
        states = {}
        for name, weight in weights.items():
            states[name] = initial_state(plan, name, weight)
            have = self.state.get(weight)
            if have is not None and have.keys() != states[name].keys():
                raise ValueError(f"optimizer_kwargs must go with the state that there is, {list(have)}")
        plans = {name: (plan, group, states[name]) for name in weights}
        make_clusters(weights, plans, self.backend)  # refuses here what it would refuse later
        chosen = list(weights.values())
        for other in self.param_groups:  # a table is in one group
            other["params"] = [one for one in other["params"] if not any(one is new for new in chosen)]
        self.param_groups[:] = [other for other in self.param_groups if other["params"]]
        for name, weight in weights.items():
            self._plans[name], self._weights[name] = plan, weight
            self.params[f"{name}.weight"] = weight
            self.state.setdefault(weight, states[name])
            if f"{name}.iter" in self.state[weight] and self.state[weight] is states[name]:
                note_count(states[name][f"{name}.iter"], 0)
        group["params"] = chosen
        self.param_groups.append(group)

    def trains(self, name: str) -> bool:
        """Whether a table has an optimizer by now."""
        return name in self._plans

    def clusters(self, weights: Mapping[str, Tensor]) -> list[Cluster]:
        """Put the tables of the module together as backends take them, as they are now."""
        plans = {}
        for name, plan in self._plans.items():
            weight = self._weights[name]
            plans[name] = (plan, self.group_of(weight), self.state[weight])
        return make_clusters(weights, plans, self.backend)

    def group_of(self, weight: Tensor) -> Mapping[str, Any]:
        """Return the options of a table."""
        return next(group for group in self.param_groups if any(weight is one for one in group["params"]))

    def follow(self) -> None:
        """Move the state to where the tables are."""
        for weight, entry in self.state.items():
            for value in entry.values():
                if isinstance(value, Window):
                    value.to(weight.device)
                else:
                    value.data = value.data.to(weight.device)

    @torch.no_grad()
    def update(self, given: Sequence[Given]) -> None:
        """Take a step with the gradients of one backward pass; all of it is checked before any is written.

        Raises:
            RuntimeError: a gradient is not finite and ``error_if_nonfinite`` is set.
            ValueError: an option has been set to what it cannot be.
        """
        if self._held.wanted():
            plan = update.sum_up(self._current(given), self._held.names())
            self._held.add(plan, self._clips)
            plan.keep()
            return
        self.release()  # who had it held is gone
        plan = update.make_plan(self._current(given), self._clips, self._seed())
        self.rounding_steps += 1
        plan.carry_out()

    def _seed(self) -> tuple[int, int] | None:
        return None if self._rounding_seed is None else (self._rounding_seed, self.rounding_steps)

    def post_load_state_dict(self) -> None:
        """Read the counts of steps that were loaded, for a step must not wait for a device."""
        super().post_load_state_dict()
        for entry in self.state.values():
            for key, value in entry.items():
                if key.endswith(".iter") and isinstance(value, Tensor):
                    note_count(value, int(value))

    def _current(self, given: Sequence[Given]) -> Sequence[Given]:
        """Put lookups whose tables have got another group since the forward into clusters as they are now."""
        if all(any(cluster.group is group for group in self.param_groups) for cluster, _ in given):
            return given
        return self._anew(given)

    def _anew(self, given: Sequence[Given]) -> Sequence[Given]:
        places = {
            name: (cluster, index)
            for cluster in self.clusters(self._weights)
            for index, name in enumerate(cluster.names)
        }
        moved = [(places[cluster.names[one.table]], one) for cluster, listed in given for one in listed]
        return [(to, [replace(one, table=index, prepared=None)]) for (to, index), one in moved]
