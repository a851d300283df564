"""Which optimizer a table has: the unfused one, whose rule, options and state the fused one uses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from keyedopt.reference import optimizers
from keyedopt.reference.embedding.keys import convert
from keyedopt.reference.embedding.lookup import gradient_dtype
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.sparse_adam import SparseAdam
from keyedopt.reference.window import Window

#: What stands for torch's optimizers: the same formulas and defaults, on the rows of a sparse gradient.
STANDS_FOR: Mapping[type[optim.Optimizer], tuple[type[RuleOptimizer], Mapping[str, Any]]] = {
    optim.SGD: (optimizers.SGD, {}),
    optim.Adagrad: (optimizers.Adagrad, {}),
    optim.Adam: (optimizers.Adam, {}),
    optim.SparseAdam: (SparseAdam, {}),
    optim.AdamW: (optimizers.Adam, {"weight_decay": 1e-2, "decay": "decoupled"}),
}


def rule_class(optimizer_class: type[optim.Optimizer]) -> tuple[type[RuleOptimizer], Mapping[str, Any]]:
    """Return the class that has the rule, and what its defaults are to be.

    Raises:
        ValueError: there is none.
    """
    stands, defaults = STANDS_FOR.get(optimizer_class, (optimizer_class, {}))
    if not (isinstance(stands, type) and issubclass(stands, RuleOptimizer)):
        raise ValueError(
            "optimizer_type must be SGD, Adagrad, Adam, AdamW or SparseAdam of torch, or one of keyedopt's "
            f"optimizers, not {optimizer_class!r}"
        )
    return stands, defaults


def make_plan(
    optimizer_class: type[optim.Optimizer], weights: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any]
) -> RuleOptimizer:
    """Make the unfused optimizer of some tables, which checks the arguments and makes the group.

    Raises:
        ValueError: the class, or an argument of it, cannot be.
    """
    stands, defaults = rule_class(optimizer_class)
    try:
        plan = stands(list(weights.values()), **{**defaults, **kwargs})
    except TypeError as error:
        raise ValueError(f"optimizer_kwargs: {error}") from error
    if plan.param_groups[0].get("dampening"):
        raise ValueError("dampening must be 0, because state is made before the first step")
    return plan


def algorithm(plan: RuleOptimizer) -> str:
    """Return the name of the algorithm, as the table of keys has it."""
    return type(plan).__name__.removeprefix("Accumulate")


def initial_state(plan: RuleOptimizer, name: str, weight: torch.Tensor) -> dict[str, Any]:
    """Return the state of a table before its first step, by fused keys, in float32 at least."""
    group = plan.param_groups[0]
    wide = torch.empty_like(weight, dtype=gradient_dtype(weight.dtype), requires_grad=False)
    unfused = plan.initial_state(wide, group)
    decay = group.get("lr_decay", 0.0)
    state = convert(unfused, algorithm(plan), "unfused", "fused", name, lr_decay=decay)
    if group.get("use_accumulate"):
        state[f"{name}.window"] = Window(weight)
    return state
