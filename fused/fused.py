"""Bases of the optimizers that update their parameters in the backward pass, and how they are recognized."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from typing import Any

from torch import optim

from keyedopt.fused.keyed import KeyedOptimizer
from keyedopt.reference.fused import FusedOptimizerModule

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"]


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose update is done when `step` is called: the backward pass has done it.

    Args:
        params: parameters (tensors or `ShardedTensor`) by key.
        state: state by parameter.
        param_groups: the groups.
    """

    @abc.abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Do what the backward pass has left of a step, if anything."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do what is left to reset, if anything: the gradients are used up."""

    def __repr__(self) -> str:
        return optim.Optimizer.__repr__(self)  # the groups with their options


class EmptyFusedOptimizer(FusedOptimizer):
    """A fused optimizer of nothing, for a module without anything to train.

    >>> EmptyFusedOptimizer().state_dict()
    {'state': {}}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> Any:
        """Do nothing, and leave the closure alone."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: nobody would train the parameters of the group.

        Raises:
            ValueError: always.
        """
        raise ValueError("EmptyFusedOptimizer has no parameters and trains none; add the group elsewhere")


def is_fused(optimizer: Any) -> bool:
    """Whether an optimizer, also one of another library, has the base of fused ones, by its name."""
    kind: Any = type(optimizer)
    return _is_fused(kind)


@functools.cache
def _is_fused(kind: type) -> bool:
    return any(base.__name__ == FusedOptimizer.__name__ for base in kind.__mro__)


def leaves(optimizer: Any) -> Iterator[Any]:
    """Run through what is inside of wrappers and combinations, by the names that upstream has too."""
    inner = getattr(optimizer, "_optimizer", None)
    if is_fused(optimizer):
        yield optimizer
    elif isinstance(getattr(optimizer, "optimizers", None), list):
        for _, part in optimizer.optimizers:
            yield from leaves(part)
    elif isinstance(inner, optim.Optimizer):
        yield from leaves(inner)
    else:
        yield optimizer


def fused_parameters(optimizer: Any) -> set[int]:
    """Return the ids of the parameters that fused optimizers have, however deep."""
    fused = (leaf for leaf in leaves(optimizer) if is_fused(leaf))
    return {id(param) for leaf in fused for group in leaf.param_groups for param in group["params"]}
