"""Sound keyed optimizers that are unlike the reference in all that documents leave free.

Views are read-only and made anew at each look; groups of a combination are a collection that has no places;
a state dict is ordered, backwards; zero gradients are new tensors; steps return nothing; errors are of kinds
of their own.
"""

from collections import OrderedDict
from collections.abc import Collection
from types import MappingProxyType
from typing import Any

import torch

from keyedopt import reference

GradientClipping, WarmupPolicy, WarmupStage = (
    reference.GradientClipping, reference.WarmupPolicy, reference.WarmupStage
)  # fmt: skip


class RefusedError(ValueError):
    """What cannot be."""


class Groups(Collection):
    """Groups that can be gone through and counted, and no more: what the documents promise."""

    def __init__(self, groups: Any) -> None:
        self._groups = tuple(groups)

    def __iter__(self) -> Any:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: Any) -> bool:
        return any(one is group for one in self._groups)


def backwards(tree: Any) -> Any:
    """Order a mapping the other way round, at all depths."""
    if not isinstance(tree, dict):
        return tree
    return OrderedDict((name, backwards(value)) for name, value in reversed(list(tree.items())))


class Free:
    """What the kinds of keyed optimizers share."""

    __slots__ = ()

    def _save(self) -> Any:
        saved = backwards(super()._save())  # type: ignore[misc]
        if "param_groups" in saved:
            saved["param_groups"].sort(key=lambda group: sorted(group["params"]), reverse=True)
        return saved

    def _prepare_load(self, state_dict: Any) -> Any:
        try:
            return super()._prepare_load(state_dict)  # type: ignore[misc]
        except ValueError as error:
            raise RefusedError(f"This does not fit. {error}") from None

    def step(self, closure: Any = None) -> Any:
        super().step(closure)  # type: ignore[misc]

    def __repr__(self) -> str:
        return "keyed"


class KeyedOptimizer(Free, reference.KeyedOptimizer):
    def step(self, closure: Any = None) -> Any:
        return reference.KeyedOptimizer.step(self, closure)


class KeyedOptimizerWrapper(Free, reference.KeyedOptimizerWrapper):
    @property
    def state(self) -> Any:
        return MappingProxyType(self._optimizer.state)

    def zero_grad(self, set_to_none: bool = False) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)


class Views(Free):
    @property
    def param_groups(self) -> Any:
        return list(super().param_groups)  # type: ignore[misc]

    @property
    def state(self) -> Any:
        return MappingProxyType(dict(super().state))  # type: ignore[misc]

    @property
    def params(self) -> Any:
        return MappingProxyType(dict(super().params))  # type: ignore[misc]


class CombinedOptimizer(Views, reference.CombinedOptimizer):
    @property
    def param_groups(self) -> Any:
        return Groups(super().param_groups)

    @property
    def optimizers(self) -> Any:
        return list(self._optims)


class OptimizerWrapper(Views, reference.OptimizerWrapper):
    pass


class GradientClippingOptimizer(Views, reference.GradientClippingOptimizer):
    pass


class WarmupOptimizer(Views, reference.WarmupOptimizer):
    pass
