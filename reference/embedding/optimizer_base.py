"""The optimizer of an embedding module without its updates: tables, options, clips, deferred gradients."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import optim

from keyedopt.reference.backward_clip import BackwardClip
from keyedopt.reference.embedding.deferred_gradients import DeferredGradients
from keyedopt.reference.embedding.hyper_parameters import changed_options, check_step, set_options
from keyedopt.reference.embedding.replicas import Replicas
from keyedopt.reference.embedding.state_dtypes import narrowed, split_dtypes
from keyedopt.reference.embedding.state_forms import StateForms
from keyedopt.reference.embedding.table_optimizers import algorithm


class EmbeddingOptimizerBase(StateForms, abc.ABC):
    """The part of a fused optimizer of tables that does no arithmetic; a subclass is a `FusedOptimizer` too.

    Parameters are named ``<table>.weight``, states ``<table>.momentum1``, ``<table>.exp_avg_sq``, …, as
    `keyedopt.reference.embedding.keys` lists. State exists from the start, in float32 at least. Every option
    of a group, for example the learning rate, is read when the backward pass runs.
    """

    #: The gradients that are deferred to `step`; see `defer_updates`.
    deferred: DeferredGradients
    #: The ranks that have replicas of the tables; None if this rank has the only one.
    replicas: Replicas | None

    def __init__(self) -> None:
        super().__init__({}, {}, [])  # type: ignore[call-arg]  # of the fused optimizer that a subclass is
        self._table_optimizers = {}
        self._names = {}
        self._clips: list[BackwardClip] = []
        self.deferred = DeferredGradients()
        self.replicas = None

    @abc.abstractmethod
    def apply_deferred(self) -> None:
        """Apply the update that was deferred, if there is one, with the options that are set now."""

    @abc.abstractmethod
    def _make_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[torch.Tensor],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return an unfused optimizer with one group, or raise a ValueError."""

    @abc.abstractmethod
    def _initial_state(self, optimizer: Any, name: str, weight: torch.Tensor) -> dict[str, Any]:
        """Return the state of a table before its first step, by key."""

    @abc.abstractmethod
    def _check_supported(
        self, optimizer: Any, weights: Mapping[str, torch.Tensor], states: Mapping[torch.Tensor, Any]
    ) -> None:
        """Raise a ValueError if these tables cannot be updated by this optimizer."""

    def __call__(self) -> Self:
        """Return this optimizer: ``fused_optimizer`` is a method of torchrec's fused embedding modules."""
        return self

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure, and apply the deferred update, if any; the backward pass does all others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.apply_deferred()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the deferred gradients, if any: the backward pass has used all others."""
        self.deferred.clear()

    def _dummy_step(self) -> None:  # of `init_state`
        """Do nothing: state exists, and a deferred update is left to its step."""

    def add_param_group(self, param_group: Any) -> None:
        """Raise a ValueError: only the tables of the module have a backward pass that updates them.

        Raises:
            ValueError: always.
        """
        raise ValueError("the groups of an embedding module are of its tables; optimize others elsewhere")

    def set_optimizer_step(self, step: int) -> None:
        """Set the step count of all tables that count steps: the next step is number `step` + 1.

        Bias corrections and `lr_decay` follow the count. Counts of rows do not change.

        Raises:
            ValueError: `step` is not a whole number of at least 0; nothing is changed.
        """
        check_step(step)
        for weight, name in self._names.items():
            counter = self.state[weight].get(f"{name}.iter")
            if counter is not None:
                self._set_count(counter, step)

    def _set_count(self, counter: torch.Tensor, step: int) -> None:
        """Set the step count of a table."""
        counter.fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set options in all groups: ``lr``, ``eps``, ``beta1``, ``beta2``, ``weight_decay`` or any other.

        Raises:
            ValueError: the optimizer of a table does not have an option, or a value is out of range; nothing
                is changed.
        """
        changed = [
            (group, changed_options(group, params_dict, self._table_optimizers[group["params"][0]]))
            for group in self.param_groups
        ]
        for group, new in changed:
            set_options(group, new)

    def clip_in_backward(self, clip: BackwardClip, inside: Sequence[BackwardClip]) -> None:
        """Clip the gradients of every later step.

        Args:
            clip: its ``apply`` is called with the gradients of all tables, each row once, to change in place.
            inside: the earlier clips that stay in force, and are applied after `clip`, as the wrappers inside
                clip after the outer one; all others are dropped.
        """
        self._clips = [clip, *(known for known in self._clips if known in inside)]
        self.deferred.retain_requests(inside)

    def defer_updates(self, clip: BackwardClip, inside: Sequence[BackwardClip]) -> None:
        """Defer updates to `step` while a joint norm covers gradients outside this module.

        Deferred gradients are to tables what ``.grad`` is to dense parameters: backward passes add to them,
        `step` uses them, and `zero_grad` drops them.

        Args:
            clip: updates are deferred as long as this clip exists; only a weak reference to it is kept.
            inside: the earlier clips that stay in force; all others are dropped.
        """
        self._clips = [known for known in self._clips if known in inside]
        self.deferred.retain_requests(inside)
        self.deferred.request(clip)

    def use(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Mapping[str, torch.Tensor],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Optimize tables, by name, with an optimizer of this class: one group, one set of options.

        Raises:
            ValueError: the class or an argument is not supported; nothing is changed.
        """
        kwargs, dtypes = split_dtypes(kwargs)
        optimizer = self._make_optimizer(optimizer_class, list(weights.values()), kwargs)
        for name, weight in weights.items():
            had, wanted = type(self._table_optimizers.get(weight)), type(optimizer)
            if weight in self._table_optimizers and had is not wanted:
                raise ValueError(
                    f"table {name!r} was created with {had.__name__}, so optimizer_class must be that, not "
                    f"{wanted.__name__}, which has other state"
                )
        state = {
            weight: narrowed(self._initial_state(optimizer, name, weight), name, algorithm(optimizer), dtypes)
            for name, weight in weights.items()
        }
        for weight, entry in state.items():
            known = self.state.get(weight, entry)
            if known.keys() != entry.keys() or (dtypes and _dtypes(known) != _dtypes(entry)):
                raise ValueError(f"optimizer_kwargs must go with the existing state, {_dtypes(known)}")
            state[weight] = known
        self._check_supported(optimizer, weights, state)
        for group in self.param_groups:  # a table is in one group
            group["params"] = [param for param in group["params"] if param not in state]
        self.param_groups[:] = [group for group in self.param_groups if group["params"]]
        for name, weight in weights.items():
            self._table_optimizers[weight], self._names[weight] = optimizer, name
            self.params[f"{name}.weight"] = weight
            self.state.setdefault(weight, state[weight])
        self.param_groups.append(optimizer.param_groups[0])

    def move_state(self, moved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Move the state to the devices of the tables; state on the device "meta" begins anew.

        Args:
            moved: for each table the parameter that it is now: torch makes a new one for a device that is
                registered from outside of torch.
        """
        self.deferred.replaced(moved)
        for by_table in (self.state, self._table_optimizers, self._names):
            entries = [(moved[weight], entry) for weight, entry in by_table.items()]
            by_table.clear()
            by_table.update(entries)
        self.params.update({name: moved[weight] for name, weight in self.params.items()})
        for group in self.param_groups:
            group["params"] = [moved[weight] for weight in group["params"]]
        for weight, entry in self.state.items():
            if not weight.is_meta and any(getattr(value, "is_meta", False) for value in entry.values()):
                begun = self._initial_state(self._table_optimizers[weight], self._names[weight], weight)
                for key in entry.keys() & begun.keys():
                    same = isinstance(entry[key], torch.Tensor)
                    entry[key] = begun[key].to(entry[key].dtype) if same else begun[key]
            for key, value in entry.items():
                if not isinstance(value, torch.Tensor):
                    value.to(weight.device)
                elif torch._has_compatible_shallow_copy_type(value, weight):
                    value.data = value.data.to(weight.device)  # whoever has the tensor sees it move
                else:
                    entry[key] = value.to(weight.device)


def _dtypes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtype of each state; None for one that is no tensor."""
    return {key: getattr(value, "dtype", None) for key, value in entry.items()}
