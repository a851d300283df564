"""Helpers for cases of replicas: a manager that follows a script, optimizers, saved contents."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect_unchanged, snapshot
from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.inputs import _listed, adam, train, values

LOCAL_COUNTER = "__semisync_local_step_counter__"
GLOBAL_COUNTER = "__semisync_global_step_counter__"


class ScriptedManager:
    """A manager for a fault-tolerant optimizer that commits according to a script and records calls.

    ``commits`` are its answers, one per step; after the last one it commits every step. ``events`` contains a
    ``"quorum"`` for each started quorum and a ``"commit"`` for each call of ``should_commit``.
    """

    def __init__(self, commits: Sequence[bool] = ()) -> None:
        self.commits = list(commits)
        self.events: list[str] = []

    def start_quorum(self) -> None:
        """Record the start of a step."""
        self.events.append("quorum")

    def should_commit(self) -> bool:
        """Record the call, and return the next answer."""
        self.events.append("commit")
        return self.commits.pop(0) if self.commits else True


def torch_optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    """Make a torch optimizer by name, for the parameters of a mapping or a list."""
    if kind == "SGD":
        return torch.optim.SGD(_listed(params), lr=0.1, momentum=0.9)
    return getattr(torch.optim, kind)(_listed(params), lr=0.1)


def saved_contents(optimizer: Any) -> Any:
    """Clone everything that an optimizer saves: state and groups."""
    return snapshot(optimizer.state_dict())


class Outer(torch.optim.Optimizer):
    """A global optimizer like DiLoCo: momentum on the parameters' change since the last global step.

    ``counts`` records the number of local steps at each global step. With ``eager`` the constructor creates
    the state; otherwise the first global step or `step` creates it, and `step` does nothing else. With
    ``numbers`` its step count is a Python number; with ``stateless`` it only shrinks the parameters and has
    no state. A global step evaluates its closure if ``evaluates`` is set.
    """

    evaluates = False

    def __init__(
        self,
        params: Any,
        lr: float = 0.5,
        momentum: float = 0.5,
        eager: bool = True,
        numbers: bool = False,
        stateless: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.counts: list[int] = []
        self.gradients: list[Any] = []
        self.fail = False
        self._numbers, self._stateless = numbers, stateless
        if eager:
            self.step()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the attributes that torch would exclude from a copy."""
        return self.__dict__.copy()

    def step(self, closure: Any = None) -> Any:
        """Create missing state."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self._stateless and not self.state[param]:
                    self.state[param] = {
                        "anchor": param.detach().clone(),
                        "momentum": torch.zeros_like(param, requires_grad=False),
                        "step": 0 if self._numbers else zeros(()),
                    }

    @torch.no_grad()
    def global_step(self, count: torch.Tensor, closure: Any = None) -> None:
        """Move the parameters, starting from their values at the last global step."""
        if self.fail:
            raise RuntimeError("the regions cannot be reached")
        if self.evaluates:
            with torch.enable_grad():
                closure()
        self.counts.append(int(count))
        self.step()
        for group in self.param_groups:
            for param in group["params"]:
                self.gradients.append(param.grad)
                if self._stateless:
                    param.mul_(1 - group["lr"] / 4)
                    continue
                entry = self.state[param]
                entry["momentum"].mul_(group["momentum"]).add_(entry["anchor"] - param)
                param.copy_(entry["anchor"] - group["lr"] * entry["momentum"])
                entry["anchor"].copy_(param)
                entry["step"] += 1


def semisync(
    impl: Any,
    params: Mapping[str, Any],
    every: int = 3,
    local: Any = None,
    outer_params: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **outer_options: Any,
) -> tuple[Any, Any, Outer]:
    """Make a semi-synchronous optimizer of Adam, or ``local``, and `Outer`; return all three."""
    made: list[Outer] = []

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed, **outer_options))
        return made[0]

    local = local or adam(impl, params)
    outer = impl.KeyedOptimizerWrapper(params if outer_params is None else outer_params, factory)
    listed = [*(params if outer_params is None else outer_params).values()]
    whole = impl.SemisyncOptimizer(listed, local, outer, num_local_steps=every, **(options or {}))
    return whole, local, made[0]


def copy_weights(params: Any, others: Any) -> None:
    """Copy the weights of one model to another."""
    for key, param in params.items():
        others[key].data.copy_(param.data)


def expect_alike(one: Any, params: Any, other: Any, others: Any, steps: int) -> None:
    """Expect two optimizers to continue equally, bit by bit, including their saved state."""
    for step in range(steps):
        train(one, params, 1, seed=50 + step)
        train(other, others, 1, seed=50 + step)
        expect_unchanged(values(params), values(others), f"parameters {step + 1} steps later")
    expect_unchanged(snapshot(one.state_dict()), other.state_dict(), "state")
