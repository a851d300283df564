"""`init_state`: create the state of the first step, without training.

A real step with zero gradients creates the state. All other changes of that step are undone: parameters,
options of groups, counters, and existing state. Options that add the parameters to the gradient are 0 during
the step, because the new moments would contain them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.shards import local_tensors
from keyedopt.reference.keyed.state import check_entry
from keyedopt.reference.keyed.values import clone, extract
from keyedopt.reference.window import Window

if TYPE_CHECKING:
    from keyedopt.reference.keyed.base import KeyedOptimizer

#: Options of decay: their multiple of the parameters is a part of the gradient.
_ADD_PARAMETERS = {"weight_decay", "l2_shrinkage"}


def initialize(optimizer: KeyedOptimizer, sparse: set[str]) -> None:
    """Create the state of all parameters, and zero gradients (sparse for the keys in `sparse`)."""
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    params = {id(param): param for param in (*grouped, *optimizer.params.values())}.values()
    pieces = [piece for param in params for piece in local_tensors(param)]
    values = [piece.clone() for piece in pieces]
    before = {param: clone(extract(entry)) for param, entry in optimizer.state.items() if entry}
    options = [dict(group) for group in optimizer.param_groups]
    tensors = {id(value): value.clone() for group in options for value in _tensors(group)}

    for key, param in optimizer.params.items():
        if param.requires_grad:
            zeros = torch.zeros_like(param)
            param.grad = sparse_rows(zeros) if key in sparse else zeros
    for group in optimizer.param_groups:
        if isinstance(group, MutableMapping):
            group.update(dict.fromkeys(_ADD_PARAMETERS & group.keys(), 0.0))
    try:
        optimizer._dummy_step()
    finally:
        for group, had in zip(optimizer.param_groups, options, strict=True):
            if isinstance(group, MutableMapping):
                group.update(had)
            for value in _tensors(had):
                value.detach().copy_(tensors[id(value)])
        for piece, value in zip(pieces, values, strict=True):
            piece.copy_(value)
        for param, entry in optimizer.state.items():
            had = before.get(param, {})
            old, new = (
                {key: entry[key] for key in entry if (key in had) is known} for known in (True, False)
            )
            pending = PendingLoad()
            check_entry(old, had, [], pending)
            pending.run()
            _reset_counters(new)
            entry.update({**old, **new})


def sparse_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the sparse layout of an embedding's: only rows are sparse."""
    return gradient.to_sparse(min(1, gradient.dim()))


def _tensors(group: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for key, value in group.items() if key != "params" and isinstance(value, torch.Tensor)]


def _reset_counters(entry: MutableMapping[Any, Any]) -> None:
    for key, value in entry.items():
        if isinstance(value, MutableMapping):
            _reset_counters(value)
        elif isinstance(value, Window):
            value.clear()
        elif key == "step":
            if isinstance(value, torch.Tensor):
                value.detach().zero_()
            else:
                entry[key] = type(value)(0)
