"""Steps with dense gradients on the CPU, in the kernels of `fused.bulk`: many tensors in one call."""

import math
import os
from collections.abc import Mapping, Sequence
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
#: Why the kernels do not run.
NOT_BUILT = "the C++ extension is not built; install keyedopt again where a C++ compiler is"
REFUSED = "the C++ kernels need contiguous float32 tensors on the CPU that do not share memory"


@dataclass(frozen=True)
class Clip:
    """How a step clips gradients as it reads them: ``min(max(factor · g, -limit), limit)``."""

    factor: float = 1.0
    limit: float = math.inf


UNCLIPPED = Clip()


@dataclass(frozen=True)
class Group:
    """Parameters that share one step.

    Args:
        step: the formula and its options.
        params: the parameters.
        grads: their gradients.
        states: a list of tensors for each state, in the order of `interface.ALGORITHMS`.
        counts: the step counts of the parameters, float32 tensors with one element, which the step
            increments; None if `step.count` is the count of all.
    """

    step: Step
    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    counts: list[Tensor] | None = None


def extension() -> Any:
    """Return the functions of `fused.bulk`, or None if it is not built."""
    return native


def update(groups: Sequence[Group], clip: Clip) -> bool:
    """Update the parameters of all groups and return True, or write nothing and return False.

    The kernels require contiguous float32 tensors on the CPU that do not overlap. Gradients do not change.
    """
    if native is None or not run([_describe(group, clip) for group in groups]):
        return False
    for group in groups:
        torch.autograd.graph.increment_version(chain(group.params, *group.states, group.counts or ()))
    return True


def run(described: list[tuple[Any, ...]]) -> bool:
    """Run the kernels on (options, params, grads, states, counts) of each group; return whether they ran."""
    return bool(native.step(described, torch.get_num_threads(), os.environ.get(INSTRUCTION_SET, "")))


def describe_options(
    algorithm: str, options: Mapping[str, Any], lr: float, clip: Clip = UNCLIPPED, first: bool = False
) -> tuple[Any, ...]:
    """Return options, named as in `Step`, as arguments of the kernels; a missing option has no effect."""
    get, decay = options.get, options["decay"]
    return (
        *(ALGORITHMS[algorithm], options["maximize"], decay == "decoupled", get("nesterov", False), first),
        *(clip.factor, clip.limit, lr, *get("betas", (0.9, 0.999)), get("eps", 0.0)),
        0.0 if decay == "none" else options["weight_decay"],
        *(get("momentum", 0.0), get("dampening", 0.0), get("lr_decay", 0.0)),
    )


def _describe(group: Group, clip: Clip) -> tuple[Any, ...]:
    step = group.step
    lr: Any = step.lr
    options = describe_options(step.algorithm, vars(step), lr, clip, step.first)
    counts: Any = float(step.count) if group.counts is None else group.counts
    return options, group.params, group.grads, group.states, counts
