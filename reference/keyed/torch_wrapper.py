"""A keyed optimizer around any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import optim

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.groups import check_construction


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Wrap a torch optimizer, and give its parameters keys.

    Args:
        params: the parameters by key.
        optim_factory: returns the optimizer of the parameters in its argument. It is called once.
        pass_params_dict: call the factory with the mapping, not with a list of the parameters.

    Raises:
        ValueError: a parameter has two keys, or the new optimizer has state of another parameter.

    Source: torchrec.optim.keyed.KeyedOptimizerWrapper.

    >>> import torch
    >>> from keyedopt.reference import KeyedOptimizerWrapper
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> adagrad = lambda params: torch.optim.Adagrad(params, lr=0.5)
    >>> optimizer = KeyedOptimizerWrapper({"weight": weight}, adagrad)
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
        # Schedulers read the defaults, for example to see whether there is a momentum.
        self.defaults = {**getattr(self._optimizer, "defaults", {}), "_save_param_groups": False}
        check_construction(self.params, self.state)

    # Properties, because a torch optimizer replaces both in a load and when it is unpickled.
    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """State of the torch optimizer, by parameter."""
        return self._optimizer.state

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """Groups of the torch optimizer."""
        return self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the torch optimizer, and return its loss."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients to zero, or to None if `set_to_none`."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def _dummy_step(self) -> None:
        # A dummy step fires no hooks, neither ours nor those of the torch optimizer.
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
        """Pass a step count to the torch optimizer if it has this method.

        Args:
            step: the number of steps that were taken, at least 0.
        """
        if hasattr(self._optimizer, "set_optimizer_step"):
            self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass hyper-parameters, `params_dict`, to the torch optimizer if it has this method."""
        if hasattr(self._optimizer, "update_hyper_parameters"):
            self._optimizer.update_hyper_parameters(params_dict)

    def scratch_buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the working memory of the torch optimizer that is not state."""
        if hasattr(self._optimizer, "scratch_buffers"):
            return tuple(self._optimizer.scratch_buffers())
        return ()
