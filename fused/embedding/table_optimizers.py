"""The optimizers of tables, the keys of their states, and the initial states."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from keyedopt.fused.backends.interface import ALGORITHMS, ROW_STATE, Table
from keyedopt.fused.dense.state_memory import empty
from keyedopt.fused.optimizers import SGD, Adagrad, Adam, AdamW
from keyedopt.fused.rowwise_adagrad import RowWiseAdagrad
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.fused.sparse.window import Window
from keyedopt.fused.sparse_adam import SparseAdam
from keyedopt.reference.embedding import table_optimizers

#: The class used for each of torch's optimizers: the same formula, on the rows that are looked up.
SUBSTITUTES: Mapping[type[optim.Optimizer], tuple[type[optim.Optimizer], Mapping[str, Any]]] = {
    optim.SGD: (SGD, {}),
    optim.Adagrad: (Adagrad, {}),
    optim.Adam: (Adam, {}),
    optim.SparseAdam: (SparseAdam, {}),
    optim.AdamW: (AdamW, {}),
}
#: The algorithms whose learning rate does not depend on a step count.
UNCOUNTED = ("sgd", "lars_sgd", "ftrl")
#: The keys of state tensors, after the name of the table, in the order in which backends take them.
STATE_KEYS = ("momentum1", "exp_avg_sq", "linear")


def make_optimizer(given: type[optim.Optimizer], kwargs: Mapping[str, Any]) -> RuleOptimizer:
    """Return the optimizer that checks options and makes steps; its own parameter has no rows.

    Raises:
        ValueError: the class or an argument is not supported.
    """
    params = [nn.Parameter(torch.empty(0, 1))]
    optimizer: RuleOptimizer = table_optimizers.make_optimizer(
        given, params, kwargs, SUBSTITUTES, RuleOptimizer, RowWiseAdagrad
    )
    return optimizer


def state_keys(optimizer: RuleOptimizer, table: str) -> list[str]:
    """Return the keys of the state tensors of a table, in the order in which backends take them.

    As in torchrec the first is ``<table>.momentum1``, and the others have the names of the algorithm.
    """
    names: tuple[str, ...] = ALGORITHMS[optimizer.algorithm]
    if optimizer.algorithm == "sgd" and optimizer.param_groups[0]["momentum"]:
        names = ("momentum_buffer",)
    return [f"{table}.momentum1" if index == 0 else f"{table}.{name}" for index, name in enumerate(names)]


def initial_state(optimizer: RuleOptimizer, table: str, weight: Tensor) -> dict[str, Any]:
    """Return the state of a table before its first step, by key, in float32 at least."""
    group = optimizer.param_groups[0]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    start = group.get("initial_accumulator_value", 0.0)
    state: dict[str, Any] = {}
    for index, key in enumerate(state_keys(optimizer, table)):
        rowwise = ROW_STATE.get(optimizer.algorithm) == index
        shape = weight.shape[:1] if rowwise else weight.shape
        state[key] = empty(shape, dtype, weight.device).fill_(0.0 if index else float(start))
    if group.get("bias_correction") == "per_row":
        state[f"{table}.row_counter"] = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    elif optimizer.algorithm not in UNCOUNTED and ("adagrad" not in optimizer.algorithm or group["lr_decay"]):
        state[f"{table}.iter"] = torch.zeros(1, dtype=torch.int64, device=weight.device)
    if group.get("use_accumulate"):
        state[f"{table}.window"] = Window(weight, dtype)
    return state


def as_table(name: str, weight: Tensor, state: Mapping[str, Any]) -> Table:
    """Return a table as backends take it. SGD has a momentum buffer if its state was made with one."""
    states = tuple(state[f"{name}.{key}"] for key in STATE_KEYS if f"{name}.{key}" in state)
    return Table(weight, states, state.get(f"{name}.row_counter"))
