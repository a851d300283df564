"""A keyed optimizer around any optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import optim

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.groups import check_construction


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Give the parameters of a torch optimizer keys.

    Args:
        params: the parameters by key.
        optim_factory: makes the optimizer; called once and not kept.
        pass_params_dict: give the factory the mapping, not a list of the parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = KeyedOptimizerWrapper({"weight": weight}, lambda params: optim.Adagrad(params, lr=0.5))
    >>> weight.grad = torch.tensor([2.0, 0.0])
    >>> optimizer.step()
    >>> weight.tolist()
    [0.5, 1.0]
    >>> optimizer.state_dict()["state"]["weight"]["sum"].tolist()
    [4.0, 0.0]
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        optim_factory: Callable[[Any], optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self.params = dict(params)
        check_construction(self.params, {})
        given: Any = dict(params) if pass_params_dict else list(params.values())
        self._optimizer = optim_factory(given)
        # Schedulers look here to find out whether there is momentum to cycle.
        self.defaults = {**getattr(self._optimizer, "defaults", {}), "_save_param_groups": False}
        check_construction(self.params, self.state)

    # Live views: torch's optimizers replace both when they load or are unpickled.
    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """State of the torch optimizer, by parameter."""
        return self._optimizer.state

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """Groups of the torch optimizer."""
        return self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the torch optimizer; returns its loss."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients, or drop them with `set_to_none`."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def _dummy_step(self) -> None:
        # The torch optimizer's own hooks are no more meant for it than ours are.
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        hooks = {name: getattr(self._optimizer, name, {}) for name in names}
        try:
            for name in names:
                setattr(self._optimizer, name, {})
            super()._dummy_step()
        finally:
            for name in names:
                setattr(self._optimizer, name, hooks[name])

    def _append_group(self, params: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        named = any("param_names" in group for group in self._optimizer.param_groups)
        given = list(params.items()) if named else list(params.values())
        try:
            self._optimizer.add_param_group({"params": given, **options})
        except TypeError as error:
            raise ValueError(str(error)) from error
        self.params.update(params)

    def set_optimizer_step(self, step: int) -> None:
        """Pass a step count on, where the optimizer takes one."""
        if hasattr(self._optimizer, "set_optimizer_step"):
            self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass hyper-parameters on, where the optimizer takes them."""
        if hasattr(self._optimizer, "update_hyper_parameters"):
            self._optimizer.update_hyper_parameters(params_dict)

    def scratch_buffers(self) -> tuple[torch.Tensor, ...]:
        """List the optimizer's working memory that is not state, where it has any."""
        if hasattr(self._optimizer, "scratch_buffers"):
            return tuple(self._optimizer.scratch_buffers())
        return ()
