"""Steps on dense parameters of the CPU by `fused.bulk`: many tensors in one call, in one pass over memory."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.backends.native import INSTRUCTION_SET
from keyedopt.fused.bulk import native

#: The numbers of the algorithms in ``bulk/dense.h``.
ALGORITHMS = {"sgd": 0, "adagrad": 1, "adam": 2}


@dataclass(frozen=True)
class Clip:
    """What a step makes of gradients as it reads them: ``min(max(factor · g, -limit), limit)``."""

    factor: float = 1.0
    limit: float = math.inf


@dataclass(frozen=True)
class Group:
    """Parameters of one step, their gradients, and lists of their states in the order of the algorithm.

    `counts` are tensors of one float32 each, of the steps before this one, which are counted up; or None, if
    the step itself says it.
    """

    step: Step
    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    counts: list[Tensor] | None = None


def extension() -> Any:
    """Return the functions of `fused.bulk`, or None where it is not built."""
    return native


def update(groups: Sequence[Group], clip: Clip) -> bool:
    """Do a step, of all groups or, where one tensor is unusual, of none; return whether it is done.

    Usual is float32 on the CPU, contiguous, and in memory of its own. Gradients are left as they are.
    """
    if native is None:
        return False
    described = [_describe(group, clip) for group in groups]
    if not native.step(described, torch.get_num_threads(), os.environ.get(INSTRUCTION_SET, "")):
        return False
    for group in groups:
        torch.autograd.graph.increment_version(chain(group.params, *group.states, group.counts or ()))
    return True


def _describe(group: Group, clip: Clip) -> tuple[Any, ...]:
    step = group.step
    options = (
        *(ALGORITHMS[step.algorithm], step.maximize, step.decay == "decoupled", step.nesterov, step.first),
        *(clip.factor, clip.limit, step.lr, *step.betas, step.eps),
        0.0 if step.decay == "none" else step.weight_decay,
        *(step.momentum, step.dampening, step.lr_decay),
    )
    counts: Any = float(step.count) if group.counts is None else group.counts
    return options, group.params, group.grads, group.states, counts
