"""The base class of wrappers: a keyed optimizer around another keyed optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.composition import Composition
from keyedopt.reference.keyed.foreign_members import check_keyed
from keyedopt.reference.keyed.groups import keyed_parameters


class OptimizerWrapper(Composition):
    """Wrap a keyed optimizer and behave like it; the base of clipping, warmup and the like.

    Parameters, state, groups and saved state are those of the wrapped optimizer. A subclass overrides
    `step`, and calls ``super().step(closure)`` to step the wrapped optimizer.

    Args:
        optimizer: the keyed optimizer to wrap. It may come from another library.

    Raises:
        ValueError: the optimizer is not a keyed optimizer.

    Source: torchrec.optim.keyed.OptimizerWrapper.

    >>> import torch
    >>> from keyedopt.reference import KeyedOptimizerWrapper, OptimizerWrapper
    >>> class Ascent(OptimizerWrapper):
    ...     def step(self, closure=None):
    ...         for param in self.params.values():
    ...             param.grad = -param.grad
    ...         return super().step(closure)
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, 0.5))
    >>> weight.grad = torch.ones(2)
    >>> Ascent(sgd).step()
    >>> weight.tolist()
    [1.5, 1.5]
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        check_keyed(optimizer)
        super().__init__()
        self._optimizer = optimizer

    def _parts(self) -> list[tuple[str, Any]]:
        return [("", self._optimizer)]

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """Groups of the wrapped optimizer."""
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the wrapped optimizer, which say whether groups are saved."""
        return getattr(self._optimizer, "defaults", self._own_defaults)

    def __repr__(self) -> str:
        return repr(self._optimizer)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer; returns what it returns."""
        return self._optimizer.step(closure=closure)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the wrapped optimizer; see `KeyedOptimizer.add_param_group`."""
        if self._own_params:  # the wrapped optimizer cannot check these keys
            keyed_parameters(param_group, self.params, self.param_groups)
        self._optimizer.add_param_group(param_group)

    def _save_parts(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def _portions(self, state_dict: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
        return [("", self._optimizer, state_dict)]
