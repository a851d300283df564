"""A wrapper that sets the learning rate of each iteration.

`WarmupPolicy` has the formulas. The constructor sets the learning rate of iteration 0,
because a fused backward pass comes before the first step. Each step sets the learning rate of the next
iteration, and a load that of the loaded iteration.

Differences from torchrec 1.8:

- The state exists from the start, keeps its tensor, and is saved in any composition.
- `init_state` does not advance the schedule.
- The stages and the mapping of parameters that the caller passed are not modified.
- The stage is computed from the iteration.
- A learning rate that is a tensor is filled in place.
- Invalid arguments raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.wrapper import OptimizerWrapper
from keyedopt.reference.schedule import WarmupPolicy, WarmupStage, multiplier, stage_of
from keyedopt.reference.stages import validated

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]


class WarmupOptimizer(OptimizerWrapper):
    """Set the learning rate of each iteration from a schedule in stages.

    The learning rate of iteration i is ``lr · multiplier(stages, i)``; see `WarmupPolicy`.

    The state ``{"warmup": tensor([iteration, stage])}`` (int64) is saved and loaded under
    ``param_name``: the number of steps taken, and the number of stages that have ended.

    Args:
        optimizer: the keyed optimizer to wrap.
        stages: the stages, in order; they are copied.
        lr: the learning rate that the stages multiply, at least 0 and finite.
        lr_param: the option to set, in every group of the wrapped optimizer.
        param_name: the key of the state, and of an empty parameter to which the state belongs.

    Raises:
        ValueError: a stage or the learning rate is invalid, or ``param_name`` is the key of a parameter.

    Source: torchrec.optim.warmup.WarmupOptimizer.

    >>> import torch
    >>> from keyedopt.reference import KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, 0.1))
    >>> ramp = WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)
    >>> optimizer = WarmupOptimizer(sgd, [ramp], lr=0.5)
    >>> for _ in range(3):
    ...     print(optimizer.param_groups[0]["lr"])
    ...     optimizer.step()
    0.0
    0.125
    0.25
    >>> optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist()
    [3, 0]
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Iterable[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._stages = validated(stages)
        self._lr = _learning_rate(lr)
        self._lr_param = lr_param
        self._param_name = param_name
        if param_name in optimizer.params:
            raise ValueError(f"param_name {param_name!r} is the key of a parameter already: name another one")
        param = torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        self._own_params[param_name] = param
        self._own_state[param] = {"warmup": torch.zeros(2, dtype=torch.int64, device="cpu")}
        self._move_to(0)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, then set the learning rate of the next iteration."""
        result = super().step(closure)
        self._move_to(self._iteration() + 1)
        return result

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the wrapped optimizer, with the learning rate of this iteration."""
        super().add_param_group(param_group)
        self._move_to(self._iteration())

    def post_load_state_dict(self) -> None:
        """Set the learning rate of the iteration in the state."""
        super().post_load_state_dict()
        self._move_to(self._iteration())

    def _check_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        pending = super()._check_load(state_dict)
        iteration = int(state_dict["state"][self._param_name]["warmup"][0])
        if iteration < 0:
            raise ValueError(
                f'Different iteration for the path of ["{self._param_name}", "warmup"]: '
                f"expected 0 or more, got {iteration}"
            )
        return pending

    def _progress(self) -> torch.Tensor:
        progress: torch.Tensor = self._own_state[self._own_params[self._param_name]]["warmup"]
        return progress

    def _iteration(self) -> int:
        return int(self._progress()[0])

    def _move_to(self, iteration: int) -> None:
        """Set the learning rate of an iteration in every group, and the state."""
        learning_rate = self._lr * multiplier(self._stages, iteration)
        progress = self._progress()
        progress[0], progress[1] = iteration, stage_of(self._stages, iteration)
        for group in self.param_groups:
            current = group.get(self._lr_param)
            if isinstance(current, torch.Tensor):
                current.detach().fill_(learning_rate)  # a captured or compiled step reads this tensor
            else:
                group[self._lr_param] = learning_rate  # type: ignore[index]  # a dict at run time


def _learning_rate(lr: Any) -> float:
    try:
        learning_rate = float(lr)
    except (TypeError, ValueError):
        learning_rate = math.nan
    if not 0.0 <= learning_rate < math.inf or isinstance(lr, str):
        raise ValueError(f"lr must be a finite number of at least 0, not {lr!r}")
    return learning_rate
