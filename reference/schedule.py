"""Learning-rate schedules in stages, as a pure function of the iteration.

A schedule is a list of stages. Iterations count from 0 at the start of training; a new stage does not
restart the count. Stage ``s`` lasts up to and including iteration ``stages[s].max_iters``; after the last
stage the multiplier is 1. At iteration ``i`` the learning rate is::

    lr × multiplier(stages, i),   multiplier = shape(i) × lr_scale

`WarmupPolicy` has the formulas of shape(i).

Differences from torchrec 1.8: every policy is defined at every iteration (in torchrec INVSQRT divides by
zero at iteration 0, POLY becomes negative or complex after ``decay_iters``, and INTERPOLATE extrapolates
before its start); stages are validated and never modified; and TRANSFORMER, a policy of torchrec's
development branch, is included.
"""

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum, unique


@unique
class WarmupPolicy(Enum):
    """The shape of one stage: how its multiplier depends on the iteration i.

    - NONE: 1
    - CONSTANT: value
    - LINEAR: value + (1 − value) · i / max_iters
    - INTERPOLATE: value + (end_value − value) · (i − start) / (max_iters − start) from
      start = start_interpolating_iters on; value before it
    - POLY: (1 − i / decay_iters) ^ value; 0 from decay_iters on
    - STEP: value ^ ⌊i / decay_iters⌋
    - INVSQRT: 1 / √max(i, 1)
    - COSINE_ANNEALING_WARM_RESTARTS: value + (1 − value) · ½ (1 + cos(π · (i mod p) / p)), p = sgdr_period
      (SGDR, arXiv:1608.03983, without growing p)
    - TRANSFORMER: min(s^−½, s · warmup_steps^−3/2), s = i + 1 ("Attention is all you need", arXiv:1706.03762)

    ``decay_iters`` ≤ 0 means ``max_iters``, and 1 for STEP.

    >>> from keyedopt.reference import WarmupPolicy, WarmupStage
    >>> from keyedopt.reference.schedule import multiplier
    >>> stages = [WarmupStage(WarmupPolicy.INVSQRT, max_iters=20)]
    >>> [multiplier(stages, iteration) for iteration in (1, 4, 16)]
    [1.0, 0.5, 0.25]
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"
    TRANSFORMER = "transformer"


@dataclasses.dataclass
class WarmupStage:
    """One stage of a schedule.

    Args:
        policy: the shape.
        max_iters: the last iteration of the stage, counted from the start of training: at least 1, and above
            that of the stage before it.
        value: the first multiplier of LINEAR and INTERPOLATE, the multiplier of CONSTANT, the exponent of
            POLY, the base of STEP, the lowest multiplier of COSINE_ANNEALING_WARM_RESTARTS: any number with
            which the multiplier is finite.
        lr_scale: factor of the whole stage, any finite number.
        decay_iters: length of POLY's decay and of one step of STEP, any integer: see `WarmupPolicy`.
        sgdr_period: iterations between two restarts of COSINE_ANNEALING_WARM_RESTARTS, at least 1.
        start_interpolating_iters: the iteration from which INTERPOLATE changes, below ``max_iters``.
        end_value: the multiplier of INTERPOLATE at ``max_iters``, any finite number.
        warmup_steps: the step s at which TRANSFORMER peaks, at least 1.

    `WarmupOptimizer` checks the stages.

    Source: torchrec.optim.warmup.WarmupStage.

    >>> from keyedopt.reference import WarmupPolicy, WarmupStage
    >>> from keyedopt.reference.schedule import multiplier
    >>> ramp = WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.0)
    >>> decay = WarmupStage(WarmupPolicy.POLY, max_iters=8, value=1.0)
    >>> [multiplier([ramp, decay], iteration) for iteration in (0, 1, 2, 4, 8, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 1.0]
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None
    warmup_steps: int = 1


def multiplier(stages: Sequence[WarmupStage], iteration: int) -> float:
    """Return the factor of the learning rate at an iteration.

    >>> ramp = [WarmupStage(WarmupPolicy.LINEAR, 4, 0.0), WarmupStage(WarmupPolicy.STEP, 6, 0.5)]
    >>> [multiplier(ramp, i) for i in range(8)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.03125, 0.015625, 1.0]
    """
    index = stage_of(stages, iteration)
    return 1.0 if index == len(stages) else shape(stages[index], iteration) * stages[index].lr_scale


def stage_of(stages: Sequence[WarmupStage], iteration: int) -> int:
    """Return the index of the stage at an iteration; ``len(stages)`` after the last stage.

    >>> [stage_of([WarmupStage(max_iters=1), WarmupStage(max_iters=3)], i) for i in range(5)]
    [0, 0, 1, 1, 2]
    """
    if iteration < 0:
        raise ValueError(f"iteration must be at least 0, not {iteration}")
    for index, stage in enumerate(stages):
        if iteration <= stage.max_iters:
            return index
    return len(stages)


def shape(stage: WarmupStage, i: int) -> float:
    """Return the multiplier of one stage at an iteration, without ``lr_scale``."""
    policy, value = stage.policy, stage.value
    decay = stage.decay_iters
    if decay <= 0:
        decay = 1 if policy is WarmupPolicy.STEP else stage.max_iters
    if policy is WarmupPolicy.CONSTANT:
        return value
    if policy is WarmupPolicy.LINEAR:
        return value + (1.0 - value) * i / stage.max_iters
    if policy is WarmupPolicy.INTERPOLATE:
        start, end = stage.start_interpolating_iters, stage.end_value
        assert start is not None  # checked by `validated`
        assert end is not None
        if i <= start:
            return value
        return value + (end - value) * (i - start) / (stage.max_iters - start)
    if policy is WarmupPolicy.POLY:
        return math.pow(max(0.0, 1.0 - i / decay), value)
    if policy is WarmupPolicy.STEP:
        return math.pow(value, i // decay)
    if policy is WarmupPolicy.INVSQRT:
        return 1.0 / math.sqrt(max(i, 1))
    if policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
        phase = (i % stage.sgdr_period) / stage.sgdr_period
        return value + (1.0 - value) * 0.5 * (1.0 + math.cos(math.pi * phase))
    if policy is WarmupPolicy.TRANSFORMER:
        return min(math.pow(i + 1, -0.5), (i + 1) * math.pow(stage.warmup_steps, -1.5))
    return 1.0
