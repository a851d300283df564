"""Base classes of optimizers that update weights in the backward pass.

A trainer treats such an optimizer like any other: it has parameters, state and groups under keys. Its
``step`` has nothing left to do, because the backward pass has already updated the weights.
"""

import abc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import optim
from torch.utils.weak import WeakIdKeyDictionary

from keyedopt.reference.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """Keyed optimizer that updates its parameters in the backward pass: ``step`` is a no-op.

    Args:
        params: parameter (a tensor or `ShardedTensor`) by key.
        state: state by parameter, as in `torch.optim.Optimizer`.
        param_groups: groups of parameters with their options.

    A subclass defines what is left for ``step`` and ``zero_grad``, for example to pass the current learning
    rate to the kernels.

    Source: torchrec.optim.fused.FusedOptimizer.

    >>> import torch
    >>> from keyedopt.reference import EmbeddingBagCollection, EmbeddingBagConfig, FusedOptimizer
    >>> table = EmbeddingBagConfig(3, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> bags = EmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.5})
    >>> bags.fused_optimizer.param_groups[0]["lr"] = 0.25  # of the next backward pass
    >>> bags({"f": (torch.tensor([1]), torch.tensor([0, 1]))})["f"].sum().backward()
    >>> isinstance(bags.fused_optimizer, FusedOptimizer), bags.embedding_bags["t"].weight.tolist()
    (True, [[1.0], [0.75], [1.0]])
    """

    @abc.abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Do what the backward pass has not done, usually nothing."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Reset what the backward pass has not reset, usually nothing: no gradients are left."""

    def __repr__(self) -> str:
        # As torch: with the options of the groups.
        return optim.Optimizer.__repr__(self)


class EmptyFusedOptimizer(FusedOptimizer):
    """Fused optimizer without parameters, for a module without trainable weights.

    >>> from keyedopt.reference import EmptyFusedOptimizer
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
        """Raise ValueError: ``step`` would never train the parameters of the group.

        Raises:
            ValueError: always.
        """
        raise ValueError("EmptyFusedOptimizer has no parameters and trains none; add the group elsewhere")


class FusedOptimizerModule(abc.ABC):
    """Mixin for a module that updates its weights in the backward pass.

    >>> from keyedopt.reference import EmptyFusedOptimizer, FusedOptimizerModule
    >>> class Frozen(FusedOptimizerModule):
    ...     fused_optimizer = EmptyFusedOptimizer()
    >>> Frozen().fused_optimizer.state_dict()
    {'state': {}}
    """

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the module's weights, with their state, groups and learning rate."""


class Owner(Protocol):
    """The protocol of a module that trains its weights in its own backward pass."""

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[torch.Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Train these weights with an optimizer of this class, or raise ValueError and change nothing."""

    def trains(self, weight: torch.Tensor) -> bool:
        """Return whether a weight has an optimizer."""


_owners: Any = WeakIdKeyDictionary()  # weight -> weak reference to its owner


def own(module: Owner, weights: Sequence[torch.Tensor]) -> None:
    """Register a module as the owner that trains these weights in its own backward pass."""
    for weight in weights:
        _owners[weight] = weakref.ref(module)


def disown(weights: Iterable[torch.Tensor]) -> None:
    """Forget the owner of these weights; torch cannot swap a tensor that has a weak reference."""
    for weight in weights:
        _owners.pop(weight, None)


def owner_of(param: torch.Tensor) -> Owner | None:
    """Return the module that trains this weight in its own backward pass, or None."""
    reference = _owners.get(param)
    owner: Owner | None = None if reference is None else reference()
    return owner


def fused_parameters(optimizer: Any) -> set[int]:
    """Return the ids of the parameters that belong to fused optimizers, in any nesting.

    A fused optimizer of any library is recognized by the name of its base class.
    """
    return {
        id(param)
        for leaf in leaves(optimizer)
        if _is_fused(leaf)
        for group in leaf.param_groups
        for param in group["params"]
    }


def _is_fused(optimizer: Any) -> bool:
    return any(base.__name__ == FusedOptimizer.__name__ for base in type(optimizer).__mro__)


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers inside wrappers and combinations, also those of upstream (same attributes)."""
    inner = getattr(optimizer, "_optimizer", None)
    if _is_fused(optimizer):
        yield optimizer
    elif isinstance(getattr(optimizer, "optimizers", None), list):
        for _, part in optimizer.optimizers:
            yield from leaves(part)
    elif isinstance(inner, optim.Optimizer):
        yield from leaves(inner)
    else:
        yield optimizer
