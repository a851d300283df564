"""Take a step only if all replicas agree to commit it.

A replica may fail during a step: a machine stops, or a connection breaks in an all-reduce. The gradients of
the other replicas are then invalid. A manager finds out. The wrapper notifies the manager when a step begins,
and asks it when the step ends; if the manager does not commit, the wrapped optimizer does not step.

The wrapper and the protocol of the manager are those of torchft (``torchft.optim``), so torchft's
``Manager``, or any object that follows the protocol below, can be used. Differences from torchft 0.2: every
hook works, copies work, and an optimizer that changes its parameters in the backward pass, before the
manager is asked, raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from keyedopt.reference.fused import fused_parameters
from keyedopt.reference.keyed.hooked import Hooked


class Manager(Protocol):
    """The protocol of an object that decides whether a step is committed."""

    def start_quorum(self) -> None:
        """Begin a step: find the replicas that take part, possibly in the background."""

    def should_commit(self) -> bool:
        """End the step: return whether all replicas that take part succeeded.

        The wrapper calls this once in each step. If this replica has fallen behind, the manager may load a
        checkpoint into model and optimizer first.
        """


class FaultTolerantOptimizer(Hooked):
    """Wrap an optimizer so that its step is taken if the manager commits, and skipped if not.

    ::

        optimizer.zero_grad()      # the manager starts a quorum; gradients are reset
        loss(model(batch)).backward()
        optimizer.step()           # asks the manager; the wrapped optimizer steps only if it commits

    State, groups, defaults and the format of the saved state are those of the wrapped optimizer. A step that
    is not committed changes neither parameters nor state nor gradients, nor the iteration of a schedule or
    the window of an accumulating optimizer inside. Make this the outermost wrapper, around schedules and
    around the combination of all optimizers of a model: the manager counts one step for each call of
    ``should_commit``.

    Args:
        manager: decides whether a step is committed.
        optim: any optimizer that changes nothing before its step.

    Raises:
        ValueError: the manager lacks a method, or `optim` is not an optimizer or updates parameters in the
            backward pass.

    Source: torchft.optim.OptimizerWrapper.

    >>> import torch
    >>> from keyedopt.reference import FaultTolerantOptimizer
    >>> class Refusing:  # torchft.Manager asks the other replicas
    ...     start_quorum = should_commit = lambda self: False
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = FaultTolerantOptimizer(Refusing(), torch.optim.SGD([weight], lr=0.5))
    >>> optimizer.zero_grad()
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.item()
    1.0
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        for name in ("start_quorum", "should_commit"):
            if not callable(getattr(manager, name, None)):
                raise ValueError(f"manager must have a method {name}, which {type(manager).__name__} has not")
        if not callable(getattr(optim, "step", None)) or not hasattr(optim, "param_groups"):
            raise ValueError(f"optim must be an optimizer, not {type(optim).__name__}")
        self.manager = manager
        self.optim = optim
        check_no_backward_updates(optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a quorum, then reset the gradients; call it before the forward pass."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ask the manager, and step the wrapped optimizer if it commits; call it after the backward pass.

        Raises:
            ValueError: a closure is given. A quorum covers one finished backward pass, but an optimizer may
                call a closure several times, after it has changed parameters.
        """
        if closure is not None:
            raise ValueError(
                "a closure cannot be committed or skipped as a whole: "
                "run forward and backward first, then call step() without it"
            )
        if self.manager.should_commit():
            self.optim.step()

    # Properties, because a load of a torch optimizer replaces its state and its groups.

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.optim.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Defaults of the wrapped optimizer."""
        return self.optim.defaults

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the wrapped optimizer.

        Raises:
            ValueError: the group is trained in the backward pass, or the wrapped optimizer raises it.
        """
        if isinstance(param_group, Mapping):
            _check_no_backward_optimizers(param_group.get("params", ()))
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        saved = self.optim.state_dict()
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Load into the wrapped optimizer."""
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            given = dict(state_dict)  # as in torch, hooks may change this shallow copy
            changed = before(self, given)
            state_dict = given if changed is None else changed
        self.optim.load_state_dict(state_dict)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # torch's method would change the defaults of the wrapped optimizer


def check_no_backward_updates(optim: Any) -> None:
    """Raise ValueError if an optimizer updates parameters in the backward pass: that cannot be undone."""
    if fused_parameters(optim):
        raise ValueError(
            "a fused optimizer updates its parameters in the backward pass, before the manager "
            "is asked, so its updates cannot be skipped: wrap the other optimizers only"
        )
    for group in optim.param_groups:
        _check_no_backward_optimizers(group.get("params", ()))


def _check_no_backward_optimizers(params: Any) -> None:
    listed = list(params.items()) if isinstance(params, Mapping) else params
    for item in listed if isinstance(listed, list | tuple) else [listed]:
        param = item[1] if isinstance(item, tuple) else item  # (key, parameter)
        if getattr(param, "_in_backward_optimizers", None):  # torch and torchrec use this attribute
            raise ValueError(
                "a parameter has an optimizer that is applied in the backward pass, before the "
                "manager is asked, so its updates cannot be skipped: exclude that parameter"
            )
