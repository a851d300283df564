"""A step that is taken only where all replicas agree that it counts.

The wrapper and what it asks of a manager are those of torchft, whose ``Manager`` can be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from keyedopt.fused.fused import fused_parameters
from keyedopt.fused.keyed.hooked import Hooked


class Manager(Protocol):
    """Whoever decides whether a step counts."""

    def start_quorum(self) -> None:
        """Begin a step: find out who takes part, perhaps in the background."""

    def should_commit(self) -> bool:
        """End a step, and tell whether it counts; asked once.

        It may first load a checkpoint into model and optimizer, where this replica has fallen behind.
        """


class FaultTolerantOptimizer(Hooked):
    """Step the wrapped optimizer if the manager commits, and do nothing at all if it does not.

    ::

        optimizer.zero_grad()      # a quorum is started, gradients are reset
        loss(model(batch)).backward()
        optimizer.step()           # the manager is asked

    State, groups, defaults and what is saved are the wrapped optimizer's. Put it around everything else,
    schedules and combinations included: the manager counts a step each time it is asked.

    Args:
        manager: decides whether a step counts.
        optim: any optimizer that changes nothing before its step.

    Raises:
        ValueError: no manager, no optimizer, or one that updates in the backward pass, which could not be
            taken back.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        for name in ("start_quorum", "should_commit"):
            if not callable(getattr(manager, name, None)):
                raise ValueError(f"manager must have a method {name}, which {type(manager).__name__} has not")
        if not (callable(getattr(optim, "step", None)) and hasattr(optim, "param_groups")):
            raise ValueError(f"optim must be an optimizer, not {type(optim).__name__}")
        self.manager = manager
        self.optim = optim
        if fused_parameters(optim):
            raise ValueError(
                "a fused optimizer updates its parameters in the backward pass, before the manager is "
                "asked, so its updates cannot be left out: wrap the other optimizers only"
            )
        for group in optim.param_groups:
            _refuse_in_backward(group.get("params", ()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a quorum, then reset the gradients; call it before the forward pass."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ask the manager, and step if it commits; call it after the backward pass.

        Raises:
            ValueError: there is a closure. A quorum is about one backward pass that is over; an optimizer
                may call a closure often, and move its parameters in between.
        """
        if closure is not None:
            raise ValueError(
                "a closure cannot be committed or left out as a whole: run forward and backward first, "
                "then call step() without it"
            )
        if self.manager.should_commit():
            self.optim.step()

    # Looked up at every use: a load replaces both in optimizers of torch.
    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the wrapped optimizer.

        Raises:
            ValueError: it is trained in the backward pass, or the optimizer refuses it.
        """
        if isinstance(param_group, Mapping):
            _refuse_in_backward(param_group.get("params", ()))
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped optimizer saves."""
        return self._save_with_hooks(self.optim.state_dict)

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the wrapped optimizer load."""
        if self._optimizer_load_state_dict_pre_hooks:
            state_dict = self._hooks_before_load(state_dict)
        self.optim.load_state_dict(state_dict)
        self._hooks_after_load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # torch's own writes into defaults, which are not ours


def _refuse_in_backward(params: Any) -> None:
    """Refuse parameters on which torch or torchrec have noted an optimizer of the backward pass."""
    if isinstance(params, Mapping):
        params = params.values()
    elif not isinstance(params, list | tuple):
        params = [params]
    for item in params:
        param = item[1] if isinstance(item, tuple) else item  # (key, parameter)
        if getattr(param, "_in_backward_optimizers", None):
            raise ValueError(
                "a parameter has an optimizer that is applied in the backward pass, before the manager "
                "is asked, so its updates cannot be left out: leave that parameter out"
            )
