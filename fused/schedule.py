"""Schedules in stages: checked once, and from then on a pure function of the iteration.

The formulas are those of `keyedopt.reference.schedule`; the rate is ``lr × multiplier(iteration)``.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

from keyedopt.reference.schedule import WarmupPolicy, WarmupStage


class Schedule:
    """Stages that have been checked and copied.

    Raises:
        ValueError: a stage is malformed, or does not end after the one before it, or has no finite
            multiplier where it begins or ends.

    >>> ramp = Schedule([WarmupStage(WarmupPolicy.LINEAR, 4, 0.0), WarmupStage(WarmupPolicy.STEP, 6, 0.5)])
    >>> [ramp.multiplier(i) for i in range(8)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.03125, 0.015625, 1.0]
    """

    def __init__(self, stages: Iterable[WarmupStage]) -> None:
        if not isinstance(stages, Iterable):
            raise ValueError(f"stages must be a list of WarmupStage, not {stages!r}")
        self._stages: list[WarmupStage] = []
        self._ends: list[int] = []
        for stage in stages:
            begin = self._ends[-1] + 1 if self._ends else 0
            if not isinstance(stage, WarmupStage):
                raise ValueError(f"stages must hold WarmupStage, not {stage!r}")
            stage = _checked(stage, begin)
            self._stages.append(stage)
            self._ends.append(stage.max_iters)

    def stage(self, iteration: int) -> int:
        """Return the number of stages that are over: a stage holds up to and with its `max_iters`."""
        if iteration < 0:
            raise ValueError(f"a schedule begins at iteration 0, there is no iteration {iteration}")
        return bisect.bisect_left(self._ends, iteration)

    def multiplier(self, iteration: int) -> float:
        """Return what multiplies the rate; 1 after the last stage."""
        number = self.stage(iteration)
        if number == len(self._stages):
            return 1.0
        return shape(self._stages[number], iteration) * self._stages[number].lr_scale


def shape(stage: WarmupStage, i: int) -> float:
    """Return the multiplier of a stage at an iteration, `lr_scale` left out."""
    value = stage.value
    match stage.policy:
        case WarmupPolicy.CONSTANT:
            return value
        case WarmupPolicy.LINEAR:
            return value + (1.0 - value) * i / stage.max_iters
        case WarmupPolicy.INTERPOLATE:
            start: Any = stage.start_interpolating_iters
            end: Any = stage.end_value
            return value if i <= start else value + (end - value) * (i - start) / (stage.max_iters - start)
        case WarmupPolicy.POLY:
            length = stage.decay_iters if stage.decay_iters > 0 else stage.max_iters
            return math.pow(max(0.0, 1.0 - i / length), value)
        case WarmupPolicy.STEP:
            return math.pow(value, i // max(stage.decay_iters, 1))
        case WarmupPolicy.INVSQRT:
            return 1.0 / math.sqrt(max(i, 1))
        case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            turn = math.pi * ((i % stage.sgdr_period) / stage.sgdr_period)
            return value + (1.0 - value) * 0.5 * (1.0 + math.cos(turn))
        case WarmupPolicy.TRANSFORMER:
            return min(math.pow(i + 1, -0.5), (i + 1) * math.pow(stage.warmup_steps, -1.5))
        case _:
            return 1.0


def _checked(given: WarmupStage, begin: int) -> WarmupStage:
    """Return a copy of a stage that begins at an iteration, if it is sound."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"{what}, in {given}")

    policy = given.policy
    need(isinstance(policy, WarmupPolicy), f"policy must be a WarmupPolicy, not {policy!r}")
    whole, real = ["max_iters", "decay_iters", "sgdr_period", "warmup_steps"], ["value", "lr_scale"]
    if policy is WarmupPolicy.INTERPOLATE:
        whole.append("start_interpolating_iters")
        real.append("end_value")
    counts: dict[str, Any] = {}
    for name in whole:
        number = getattr(given, name)
        need(hasattr(number, "__index__") and not isinstance(number, bool), f"{name} must be an integer")
        try:
            counts[name] = operator.index(number)
        except TypeError:  # a tensor has an index if it holds one integer
            need(False, f"{name} must be an integer, not {number!r}")
    for name in real:
        need(isinstance(getattr(given, name), Real), f"{name} must be a number, not {getattr(given, name)!r}")
    stage = dataclasses.replace(given, **counts)
    last = max(begin - 1, 0)
    need(stage.max_iters > last, f"max_iters must be greater than that of the stage before it ({last})")
    if policy is WarmupPolicy.INTERPOLATE:
        early = counts["start_interpolating_iters"] < stage.max_iters
        need(early, "start_interpolating_iters must be less than max_iters")
    need(
        policy is not WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS or stage.sgdr_period > 0,
        "sgdr_period must be positive",
    )
    need(policy is not WarmupPolicy.TRANSFORMER or stage.warmup_steps > 0, "warmup_steps must be positive")
    for i in (begin, stage.max_iters):
        try:
            finite = math.isfinite(shape(stage, i) * stage.lr_scale)
        except ArithmeticError:
            finite = False
        except ValueError:  # the power of a negative number
            finite = False
        need(finite, f"the multiplier is not finite at iteration {i}")
    return stage
