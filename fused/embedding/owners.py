"""Which module trains a weight in its own backward pass."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, optim
from torch.utils.weak import WeakIdKeyDictionary


class Owner(Protocol):
    """A module that trains some of its weights in its own backward pass."""

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Train these weights with an optimizer of this class, or raise a ValueError and change nothing."""

    def trains(self, weight: Tensor) -> bool:
        """Whether a weight has an optimizer by now."""


_OWNERS: Any = WeakIdKeyDictionary()  # neither side keeps the other alive


def claim(owner: Owner, weights: Sequence[Tensor]) -> None:
    """Note who trains these weights."""
    for weight in weights:
        _OWNERS[weight] = weakref.ref(owner)


def owner_of(weight: Tensor) -> Owner | None:
    """Return who trains a weight in its own backward pass, if anyone does."""
    known = _OWNERS.get(weight)
    owner: Owner | None = known() if known is not None else None
    return owner
