"""Take a step only where all replicas agree that it counts.

Replicas that train together lose one another: a machine dies, a connection breaks in the middle of
an all-reduce, and the gradients at hand are worthless. A manager knows. It is told when a step begins
and asked when it ends; where it says no, the step has not happened.

The wrapper and what it asks of the manager are those of torchft (``torchft.optim``), so torchft's
``Manager`` can be given, and so can any object that follows the protocol below. What differs from
torchft 0.2: every hook works, a copy works, and what cannot be held back is refused: an optimizer
that has changed its parameters in the backward pass, before anyone was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from keyedopt.reference.fused import fused_parameters
from keyedopt.reference.keyed.hooked import Hooked


class Manager(Protocol):
    """Whoever decides whether a step counts."""

    def start_quorum(self) -> None:
        """Begin a step: find out who takes part, perhaps in the background."""

    def should_commit(self) -> bool:
        """End the step: tell whether everyone who takes part came through.

        It is asked once a step. It may load a checkpoint into model and optimizer first, where
        this replica has fallen behind.
        """


class FaultTolerantOptimizer(Hooked):
    """Wrap an optimizer so that its step is taken if the manager commits, and left out if not.

    ::

        optimizer.zero_grad()      # the manager starts a quorum; gradients are reset
        loss(model(batch)).backward()
        optimizer.step()           # the manager is asked; the wrapped optimizer steps, or nothing does

    Nothing else changes. State, groups and defaults are the wrapped optimizer's, and so are the
    keys and the format of what is saved. A step that is not committed touches neither parameters
    nor state nor gradients, so a schedule or a window of accumulated gradients inside stays where it
    is. Put it around everything else: around a schedule, and around the combination of all optimizers
    of a model, for the manager counts one step each time it is asked.

    Args:
        manager: decides whether a step counts.
        optim: any optimizer that changes nothing before its step.

    Raises:
        ValueError: no manager, no optimizer, or one that works in the backward pass.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        for name in ("start_quorum", "should_commit"):
            if not callable(getattr(manager, name, None)):
                raise ValueError(f"manager must have a method {name}, which {type(manager).__name__} has not")
        if not callable(getattr(optim, "step", None)) or not hasattr(optim, "param_groups"):
            raise ValueError(f"optim must be an optimizer, not {type(optim).__name__}")
        self.manager = manager
        self.optim = optim
        refuse_in_backward(optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a quorum, then reset the gradients; call it before the forward pass."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ask the manager, and step the wrapped optimizer if it commits; call it after the backward pass.

        Raises:
            ValueError: there is a closure. A quorum is about one backward pass that is over, and an
                optimizer may call a closure several times, with parameters that it has moved.
        """
        if closure is not None:
            raise ValueError(
                "a closure cannot be committed or left out as a whole: "
                "run forward and backward first, then call step() without it"
            )
        if self.manager.should_commit():
            self.optim.step()

    # Live views: a load replaces both in torch's optimizers.

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
            ValueError: the group is trained in the backward pass, or the optimizer refuses it.
        """
        if isinstance(param_group, Mapping):
            _refuse_hooked(param_group.get("params", ()))
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped optimizer saves."""
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        saved = self.optim.state_dict()
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the wrapped optimizer load."""
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            given = dict(state_dict)  # torch hands a shallow copy to the hooks, so that they may change it
            changed = before(self, given)
            state_dict = given if changed is None else changed
        self.optim.load_state_dict(state_dict)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # torch's own writes into the defaults, which are not ours


def refuse_in_backward(optim: Any) -> None:
    """Refuse an optimizer whose parameters change in the backward pass: that cannot be taken back."""
    if fused_parameters(optim):
        raise ValueError(
            "a fused optimizer updates its parameters in the backward pass, before the manager "
            "is asked, so its updates cannot be left out: wrap the other optimizers only"
        )
    for group in optim.param_groups:
        _refuse_hooked(group.get("params", ()))


def _refuse_hooked(params: Any) -> None:
    listed = list(params.items()) if isinstance(params, Mapping) else params
    for item in listed if isinstance(listed, list | tuple) else [listed]:
        param = item[1] if isinstance(item, tuple) else item  # (key, parameter)
        if getattr(param, "_in_backward_optimizers", None):  # where torch and torchrec note them
            raise ValueError(
                "a parameter has an optimizer that is applied in the backward pass, before the "
                "manager is asked, so its updates cannot be left out: leave that parameter out"
            )
