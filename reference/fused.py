"""Bases of optimizers whose weight update happens in the backward pass.

Such an optimizer is seen by the trainer like any other: it has parameters, state and groups under
keys. Only its ``step`` has nothing left to do, because the update is done when it is called.
"""

import abc
from collections.abc import Iterator
from typing import Any

from torch import optim

from keyedopt.reference.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """Keyed optimizer that updates its parameters in the backward pass: ``step`` is a no-op.

    Args:
        params: parameter (a tensor or `ShardedTensor`) by key.
        state: state by parameter, as in `torch.optim.Optimizer`.
        param_groups: groups of parameters with their options.

    A subclass says what is left for ``step`` and ``zero_grad``, for example to pass the learning
    rate that is set now to the kernels.
    """

    @abc.abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Do what is left of a step after the backward pass, usually nothing."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do what is left to reset, usually nothing: the backward pass has used the gradients up."""

    def __repr__(self) -> str:
        # The options of the groups, as torch shows them.
        return optim.Optimizer.__repr__(self)


class EmptyFusedOptimizer(FusedOptimizer):
    """Fused optimizer without parameters, for a module that has nothing to train.

    >>> EmptyFusedOptimizer().state_dict()
    {'state': {}}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> Any:
        """Do nothing; a closure is not called."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: ``step`` would leave the parameters of the group untrained for ever.

        Raises:
            ValueError: always.
        """
        raise ValueError("EmptyFusedOptimizer has no parameters and trains none; add the group elsewhere")


class FusedOptimizerModule(abc.ABC):
    """Mixin for a module that updates its weights in the backward pass."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the module's weights, for its state, groups and learning rate."""


def fused_parameters(optimizer: Any) -> set[int]:
    """Return the ids of the parameters that belong to fused optimizers, in any nesting.

    A fused optimizer is recognized by the name of its base, so that those of other libraries are.
    """
    return {
        id(param)
        for leaf in _leaves(optimizer)
        if _is_fused(leaf)
        for group in leaf.param_groups
        for param in group["params"]
    }


def _is_fused(optimizer: Any) -> bool:
    return any(base.__name__ == FusedOptimizer.__name__ for base in type(optimizer).__mro__)


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yield what is inside wrappers and combinations; both attributes are upstream's too."""
    inner = getattr(optimizer, "_optimizer", None)
    if _is_fused(optimizer):
        yield optimizer
    elif isinstance(getattr(optimizer, "optimizers", None), list):
        for _, part in optimizer.optimizers:
            yield from _leaves(part)
    elif isinstance(inner, optim.Optimizer):
        yield from _leaves(inner)
    else:
        yield optimizer
