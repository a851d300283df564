"""Which optimizer a table has, what its state is called, and how that starts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from keyedopt.fused.backends.interface import ALGORITHMS, Table
from keyedopt.fused.embedding.memory import empty
from keyedopt.fused.optimizers import SGD, Adagrad, Adam
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.fused.sparse.window import Window
from keyedopt.fused.sparse_adam import SparseAdam

#: What stands for torch's optimizers: the same formulas and defaults, on the rows that are looked up.
STANDS_FOR: Mapping[type[optim.Optimizer], tuple[type[optim.Optimizer], Mapping[str, Any]]] = {
    optim.SGD: (SGD, {}),
    optim.Adagrad: (Adagrad, {}),
    optim.Adam: (Adam, {}),
    optim.SparseAdam: (SparseAdam, {}),
    optim.AdamW: (Adam, {"weight_decay": 1e-2, "decay": "decoupled"}),
}
#: The algorithms with one number a row, and in which of their states.
ROWWISE = {"rowwise_adagrad": 0, "partial_rowwise_adam": 1, "partial_rowwise_lamb": 1}
#: The algorithms no rate of which depends on a count of steps.
UNCOUNTED = ("sgd", "lars_sgd")


def optimizer_class(given: type[optim.Optimizer]) -> tuple[type[RuleOptimizer], Mapping[str, Any]]:
    """Return the class that has the algorithm, and what its defaults are to be.

    Raises:
        ValueError: there is none.
    """
    stands, defaults = STANDS_FOR.get(given, (given, {}))
    if not (isinstance(stands, type) and issubclass(stands, RuleOptimizer)):
        raise ValueError(
            "optimizer_type must be SGD, Adagrad, Adam, AdamW or SparseAdam of torch, or one of keyedopt's "
            f"optimizers, not {given!r}"
        )
    return stands, defaults


def make_plan(given: type[optim.Optimizer], kwargs: Mapping[str, Any]) -> RuleOptimizer:
    """Make the optimizer that checks the options and says what a step is; its own parameter has no rows.

    Raises:
        ValueError: the class, or an argument of it, cannot be.
    """
    stands, defaults = optimizer_class(given)
    try:
        plan: RuleOptimizer = stands([nn.Parameter(torch.empty(0, 1))], **{**defaults, **kwargs})
    except TypeError as error:
        raise ValueError(f"optimizer_kwargs: {error}") from error
    if plan.param_groups[0].get("dampening"):
        raise ValueError("dampening must be 0, because state is made before the first step")
    return plan


def state_keys(plan: RuleOptimizer, table: str) -> list[str]:
    """Return the keys of the state tensors of a table, in the order in which backends take them.

    As in torchrec the first is ``<table>.momentum1``, and the others have the names of the algorithm.
    """
    names: tuple[str, ...] = ALGORITHMS[plan.algorithm]
    if plan.algorithm == "sgd" and plan.param_groups[0]["momentum"]:
        names = ("momentum_buffer",)
    return [f"{table}.momentum1" if index == 0 else f"{table}.{name}" for index, name in enumerate(names)]


def initial_state(plan: RuleOptimizer, table: str, weight: Tensor) -> dict[str, Any]:
    """Return the state of a table before its first step, by key, in float32 at least."""
    group = plan.param_groups[0]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    start = group.get("initial_accumulator_value", 0.0)
    state: dict[str, Any] = {}
    for index, key in enumerate(state_keys(plan, table)):
        rowwise = ROWWISE.get(plan.algorithm) == index
        shape = weight.shape[:1] if rowwise else weight.shape
        state[key] = empty(shape, dtype, weight.device).fill_(float(start))
    if group.get("bias_correction") == "per_row":
        state[f"{table}.row_counter"] = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    elif plan.algorithm not in UNCOUNTED and ("adagrad" not in plan.algorithm or group["lr_decay"]):
        state[f"{table}.iter"] = torch.zeros(1, dtype=torch.int64, device=weight.device)
    if group.get("use_accumulate"):
        state[f"{table}.window"] = Window(weight, dtype)
    return state


def as_table(name: str, weight: Tensor, state: Mapping[str, Any]) -> Table:
    """Return a table as backends take it; whether SGD has a buffer was decided when the state was made."""
    order = ("momentum1", "exp_avg_sq")
    states = tuple(state[f"{name}.{key}"] for key in order if f"{name}.{key}" in state)
    return Table(weight, states, state.get(f"{name}.row_counter"))
