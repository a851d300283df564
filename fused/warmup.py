"""The wrapper that sets the learning rate of each iteration.

The rate of iteration 0 is set by the constructor (a fused backward comes before the first step), that of
the next iteration after each step, that of the loaded iteration by a load. It is written where it has
changed only: on the GPU, a rate in a tensor costs a launch each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keyedopt.fused.keyed import KeyedOptimizer, OptimizerWrapper
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.schedule import Schedule
from keyedopt.reference.schedule import WarmupPolicy, WarmupStage

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]


class WarmupOptimizer(OptimizerWrapper):
    """Set a learning rate by a schedule in stages.

    The state is ``{"warmup": tensor([iteration, stage])}``, int64, under the key `param_name`.

    Args:
        optimizer: the keyed optimizer to wrap.
        stages: the stages, in order; copied.
        lr: the rate that they multiply.
        lr_param: the option to set in every group.
        param_name: the key of the state, and of an empty parameter that it belongs to.

    Raises:
        ValueError: this is no schedule or no rate, or `param_name` is the key of a parameter.

    >>> from keyedopt.fused.keyed import KeyedOptimizerWrapper
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, 0.1))
    >>> optimizer = WarmupOptimizer(sgd, [WarmupStage(WarmupPolicy.LINEAR, 4, value=0.0)], lr=0.5)
    >>> optimizer.step()
    >>> optimizer.param_groups[0]["lr"]
    0.125
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
        self._schedule = Schedule(stages)
        self._lr = _rate(lr)
        self._lr_param = lr_param
        self._filled: dict[int, tuple[int, float]] = {}  # of rates in tensors: version, and what was written
        self._param_name = param_name
        if param_name in optimizer.params:
            raise ValueError(f"param_name {param_name!r} is the key of a parameter already: name another one")
        param = torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        self._own_params[param_name] = param
        self._own_state[param] = {"warmup": torch.zeros(2, dtype=torch.int64, device="cpu")}
        self._move_to(0)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, then set the rate of the next iteration."""
        result = super().step(closure)
        self._move_to(self._iteration() + 1)
        return result

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the wrapped optimizer, and give it the rate of this iteration."""
        super().add_param_group(param_group)
        self._move_to(self._iteration())

    def post_load_state_dict(self) -> None:
        """Set the rate of the iteration that was loaded."""
        super().post_load_state_dict()
        self._move_to(self._iteration())

    def _check(self, state_dict: Mapping[str, Any]) -> Load:
        load = super()._check(state_dict)
        iteration = int(state_dict["state"][self._param_name]["warmup"][0])
        if iteration < 0:
            place = f'["{self._param_name}", "warmup"]'
            raise ValueError(
                f"Different iteration for the path of {place}: expected 0 or more, got {iteration}"
            )
        return load

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_filled": {}}  # by identity, which a copy does not have

    def _progress(self) -> torch.Tensor:
        progress: torch.Tensor = self._own_state[self._own_params[self._param_name]]["warmup"]
        return progress

    def _iteration(self) -> int:
        return int(self._progress()[0])

    def _move_to(self, iteration: int) -> None:
        rate = self._lr * self._schedule.multiplier(iteration)
        progress = self._progress()
        progress[0], progress[1] = iteration, self._schedule.stage(iteration)
        for group in self.param_groups:
            held: Any = group.get(self._lr_param)
            if isinstance(held, torch.Tensor):  # a captured or compiled step reads this very tensor
                if self._filled.get(id(held)) != (held._version, rate):
                    held.detach().fill_(rate)
                    self._filled[id(held)] = held._version, rate
            elif type(held) is not float or held != rate:
                group[self._lr_param] = rate  # type: ignore[index]  # in fact a dict


def _rate(lr: Any) -> float:
    try:
        rate = math.nan if isinstance(lr, str) else float(lr)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0.0 <= rate < math.inf:
        raise ValueError(f"lr must be a finite number of at least 0, not {lr!r}")
    return rate
