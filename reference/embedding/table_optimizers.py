"""Which optimizer a table has: the unfused one, whose rule, options and state the fused one uses."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from keyedopt.reference import optimizers
from keyedopt.reference.embedding.keys import convert
from keyedopt.reference.embedding.lookup import gradient_dtype
from keyedopt.reference.rowwise_adagrad import RowWiseAdagrad
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.sparse_adam import SparseAdam
from keyedopt.reference.window import Window

#: The class used for each of torch's optimizers: the same formula, on rows of a sparse gradient.
SUBSTITUTES: Mapping[type[optim.Optimizer], tuple[type[RuleOptimizer], Mapping[str, Any]]] = {
    optim.SGD: (optimizers.SGD, {}),
    optim.Adagrad: (optimizers.Adagrad, {}),
    optim.Adam: (optimizers.Adam, {}),
    optim.SparseAdam: (SparseAdam, {}),
    optim.AdamW: (optimizers.AdamW, {}),
}
#: The defaults of tables that are not those of the optimizer of other parameters. FBGEMM's kernels, and so
#: torchrec's fused tables, have one learning rate and one eps for all optimizers that they support.
TABLE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 1e-2},
    "Adam": {"lr": 1e-2},
    "Adagrad": {"eps": 1e-8},
    "RowWiseAdagrad": {"eps": 1e-8},
}


def table_defaults(optimizer_class: type[optim.Optimizer]) -> Mapping[str, Any]:
    """Return the defaults of tables with an optimizer of this class that differ from those of the class.

    A class that a user derives has its own defaults.
    """
    ours = optimizer_class.__module__.startswith("keyedopt.")
    return TABLE_DEFAULTS.get(optimizer_class.__name__, {}) if ours else {}


def make_optimizer(
    optimizer_class: type[optim.Optimizer],
    params: Sequence[torch.Tensor],
    kwargs: Mapping[str, Any],
    substitutes: Mapping[type[optim.Optimizer], tuple[type[Any], Mapping[str, Any]]] = SUBSTITUTES,
    base: type[optim.Optimizer] = RuleOptimizer,
    row_wise: type[optim.Optimizer] = RowWiseAdagrad,
) -> Any:
    """Return the unfused optimizer of some tables, which checks the arguments and makes the group.

    Arguments that are left out have the defaults of `TABLE_DEFAULTS`, then those of the class.

    Args:
        optimizer_class: a key of `substitutes`, torchrec's RowWiseAdagrad, or a subclass of `base`.
        params: of the group.
        kwargs: the arguments of the optimizer.
        substitutes: the class that has the formula of each of torch's optimizers, and its defaults.
        base: of the classes that have a formula for rows.
        row_wise: the class that has the formula of torchrec's RowWiseAdagrad.

    Raises:
        ValueError: the class or an argument is not supported.
    """
    known = {**substitutes, **_torchrecs(row_wise)}
    found, defaults = known.get(optimizer_class, (optimizer_class, {}))
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            "optimizer_type must be SGD, Adagrad, Adam, AdamW or SparseAdam of torch, RowWiseAdagrad of "
            f"torchrec, or one of keyedopt's optimizers, not {optimizer_class!r}"
        )
    if optimizer_class in known:
        kwargs = _known_to_tables(optimizer_class, found, kwargs)
    try:
        optimizer = found(list(params), **{**table_defaults(found), **defaults, **kwargs})
    except TypeError as error:
        raise ValueError(f"optimizer_kwargs: {error}") from error
    if optimizer.param_groups[0].get("dampening"):
        raise ValueError("dampening must be 0, because state is made before the first step")
    return optimizer


def _torchrecs(
    row_wise: type[optim.Optimizer],
) -> dict[type[optim.Optimizer], tuple[type[Any], Mapping[str, Any]]]:
    """Return torchrec's own class with a formula, and ours for it; nothing unless torchrec is imported."""
    upstream = getattr(sys.modules.get("torchrec.optim.rowwise_adagrad"), "RowWiseAdagrad", None)
    return {} if upstream is None else {upstream: (row_wise, {})}


def _known_to_tables(
    asked: type[optim.Optimizer], found: type[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments without options of torch's class that tables lack and that have their default."""
    accepted, of_tables = inspect.signature(asked).parameters, inspect.signature(found).parameters
    lacking = {name: accepted[name].default for name in kwargs if name in accepted and name not in of_tables}
    for name, default in lacking.items():
        if kwargs[name] != default:
            raise ValueError(
                f"optimizer_kwargs: tables do not support the option {name} of {_full_name(asked)}: "
                f"leave it out, got {kwargs[name]!r}"
            )
    return {name: value for name, value in kwargs.items() if name not in lacking}


def _full_name(optimizer_class: type[optim.Optimizer]) -> str:
    """Return the name of a class of torch or torchrec, as users import it."""
    library = "torch.optim" if optimizer_class.__module__.startswith("torch.") else "torchrec.optim"
    return f"{library}.{optimizer_class.__name__}"


def algorithm(optimizer: RuleOptimizer) -> str:
    """Return the name of the algorithm, as the table of keys has it."""
    return type(optimizer).__name__.removeprefix("Accumulate")


def initial_state(optimizer: RuleOptimizer, name: str, weight: torch.Tensor) -> dict[str, Any]:
    """Return the state of a table before its first step, by fused keys, in float32 at least."""
    group = optimizer.param_groups[0]
    wide = torch.empty_like(weight, dtype=gradient_dtype(weight.dtype), requires_grad=False)
    unfused = optimizer.initial_state(wide, group)
    decay = group.get("lr_decay", 0.0)
    state = convert(unfused, algorithm(optimizer), "unfused", "fused", name, lr_decay=decay)
    if group.get("use_accumulate"):
        state[f"{name}.window"] = Window(weight)
    return state
