"""Validate the stages of a schedule before training starts."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable

from keyedopt.reference.schedule import WarmupPolicy, WarmupStage, shape


def validated(stages: Iterable[WarmupStage]) -> tuple[WarmupStage, ...]:
    """Return copies of the stages, in order.

    Raises:
        ValueError: a stage is malformed, does not end after the previous stage, or has a multiplier that
            is not finite at its first or last iteration.
    """
    if not isinstance(stages, Iterable):
        raise ValueError(f"stages must be a list of WarmupStage, not {stages!r}")
    copies: list[WarmupStage] = []
    for stage in stages:
        begin = copies[-1].max_iters + 1 if copies else 0
        if not isinstance(stage, WarmupStage):
            raise ValueError(f"stages must contain only WarmupStage, not {stage!r}")
        copies.append(dataclasses.replace(stage))
        _check(copies[-1], begin)
    return tuple(copies)


def _check(stage: WarmupStage, begin: int) -> None:
    """Check one stage that starts at iteration `begin`, and replace its integers by ints of Python."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"{what}, in {stage}")

    policy = stage.policy
    need(isinstance(policy, WarmupPolicy), f"policy must be a WarmupPolicy, not {policy!r}")
    interpolate = policy is WarmupPolicy.INTERPOLATE
    for name in ("max_iters", "decay_iters", "sgdr_period", "warmup_steps"):
        setattr(stage, name, _integer(stage, name))
    for name in ("value", "lr_scale", *(["end_value"] if interpolate else [])):
        number = getattr(stage, name)
        need(isinstance(number, numbers.Real), f"{name} must be a number, not {number!r}")
    need(
        stage.max_iters >= max(begin, 1),
        f"max_iters must be greater than that of the stage before it ({max(begin - 1, 0)})",
    )
    if interpolate:
        start = stage.start_interpolating_iters = _integer(stage, "start_interpolating_iters")
        need(start < stage.max_iters, "start_interpolating_iters must be less than max_iters")
    if policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
        need(stage.sgdr_period > 0, "sgdr_period must be positive")
    if policy is WarmupPolicy.TRANSFORMER:
        need(stage.warmup_steps > 0, "warmup_steps must be positive")
    for i in (begin, stage.max_iters):
        try:
            finite = math.isfinite(shape(stage, i) * stage.lr_scale)
        except (OverflowError, ZeroDivisionError, ValueError):
            finite = False
        need(finite, f"the multiplier is not finite at iteration {i}")


def _integer(stage: WarmupStage, name: str) -> int:
    number = getattr(stage, name)
    try:
        if isinstance(number, bool):
            raise TypeError("a bool is not a count")
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {number!r}, in {stage}") from None
