"""Keys for any optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import optim

from keyedopt.fused.keyed.base import FLAG, KeyedOptimizer, check_one_to_one


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer that is an optimizer of torch inside.

    Args:
        params: parameters by key.
        optim_factory: makes the optimizer from the list of parameters; called once, not kept.
        pass_params_dict: give it the mapping instead.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = KeyedOptimizerWrapper({"weight": weight}, lambda params: optim.Adagrad(params, lr=0.5))
    >>> weight.grad = torch.tensor([2.0, 0.0])
    >>> optimizer.step()
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
        check_one_to_one(self.params, {})
        given: Any = dict(params) if pass_params_dict else list(params.values())
        self._optimizer = optim_factory(given)
        # Schedulers look for momentum in the defaults.
        self.defaults = {**getattr(self._optimizer, "defaults", {}), FLAG: False}
        check_one_to_one(self.params, self.state)

    # Looked up at every use: optimizers of torch replace both when they are loaded.
    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The state of the optimizer inside, by parameter."""
        return self._optimizer.state

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer inside."""
        return self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer inside and return what it returns."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set gradients to zero, or with `set_to_none` to None."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def _bare_step(self) -> None:
        # Hooks of the optimizer inside do not belong to a step that is none either.
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        inside = vars(self._optimizer)
        hooks = {name: inside[name] for name in names if name in inside}
        inside.update({name: {} for name in hooks})
        try:
            super()._bare_step()
        finally:
            inside.update(hooks)

    def _append_group(self, params: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        named = any("param_names" in group for group in self.param_groups)
        given = list(params.items() if named else params.values())
        try:
            self._optimizer.add_param_group({"params": given, **options})
        except TypeError as error:
            raise ValueError(str(error)) from error

    def set_optimizer_step(self, step: int) -> None:
        """Hand a step count to an optimizer that takes one."""
        if hasattr(self._optimizer, "set_optimizer_step"):
            self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Hand options to an optimizer that takes them."""
        if hasattr(self._optimizer, "update_hyper_parameters"):
            self._optimizer.update_hyper_parameters(params_dict)

    def scratch_buffers(self) -> tuple[torch.Tensor, ...]:
        """List memory of the optimizer that is no state."""
        listed = getattr(self._optimizer, "scratch_buffers", tuple)
        return tuple(listed())
