"""What the cases of replicas share: a manager that follows a script, an outer optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support import adam


class ScriptedManager:
    """A manager for a fault-tolerant optimizer: it commits as it is told, and notes what it is asked.

    ``commits`` are its answers, one a step, and yes after the last one. ``events`` holds a
    ``"quorum"`` for each quorum that was started, and a ``"commit"`` for each time it was asked.
    """

    def __init__(self, commits: Sequence[bool] = ()) -> None:
        self.commits = list(commits)
        self.events: list[str] = []

    def start_quorum(self) -> None:
        """Note that a step begins."""
        self.events.append("quorum")

    def should_commit(self) -> bool:
        """Note the question, and give the next answer."""
        self.events.append("commit")
        return self.commits.pop(0) if self.commits else True


class Outer(torch.optim.Optimizer):
    """A global optimizer like DiLoCo: momentum on how far the parameters came since the last global step.

    ``counts`` notes the number of local steps at each global step. State is made at once if ``eager``,
    else by the first global step, or by `step`, which does nothing more; ``numbers`` keeps its step
    count as a Python number; ``stateless`` only shrinks the parameters and keeps nothing.
    """

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
        """Keep what torch would leave out of a copy."""
        return self.__dict__.copy()

    def step(self, closure: Any = None) -> Any:
        """Make the state that is not there yet."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self._stateless and not self.state[param]:
                    self.state[param] = {
                        "anchor": param.detach().clone(),
                        "momentum": torch.zeros_like(param, requires_grad=False),
                        "step": 0 if self._numbers else torch.zeros(()),
                    }

    @torch.no_grad()
    def global_step(self, count: torch.Tensor, closure: Any = None) -> None:
        """Move the parameters from where they were at the last global step."""
        if self.fail:
            raise RuntimeError("the regions cannot be reached")
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
