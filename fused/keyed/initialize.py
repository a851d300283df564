"""`init_state`: the state of a first step, without the step.

A real step with zero gradients makes it, and all else that this step changes is put back. Weight decay is
off meanwhile: it would carry the parameters over into the moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.keyed.checks import check_entry, pieces
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.keyed.values import clone, show


def zero_gradients(params: Mapping[str, Tensor], sparse: Iterable[str]) -> None:
    """Give every parameter that is trained a gradient of zero; a sparse one for the keys in `sparse`."""
    for key, param in params.items():
        if param.requires_grad:
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse() if key in sparse else zeros


def initialize(optimizer: Any, sparse: Iterable[str]) -> None:
    """Leave zero gradients and complete state behind, and everything else as it was.

    `optimizer` is looked at for ``params``, ``state`` and ``param_groups``; its ``_bare_step`` is run.
    """
    grouped = (param for group in optimizer.param_groups for param in group["params"])
    params = {id(param): param for param in (*grouped, *optimizer.params.values())}
    options = [dict(group) for group in optimizer.param_groups]
    rates = [option for group in options for option in group.values() if isinstance(option, Tensor)]
    kept = [*(piece for param in params.values() for piece in pieces(param)), *(v.detach() for v in rates)]
    values = [tensor.clone() for tensor in kept]
    states = {param: clone(show(entry)) for param, entry in optimizer.state.items() if entry}

    zero_gradients(optimizer.params, sparse)
    for group in optimizer.param_groups:
        if "weight_decay" in group and isinstance(group, MutableMapping):
            group["weight_decay"] = 0.0
    try:
        optimizer._bare_step()
    finally:
        for group, had in zip(optimizer.param_groups, options, strict=True):
            if isinstance(group, MutableMapping):
                group.update(had)
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)
        restore = Load()
        for param, entry in optimizer.state.items():
            if param in states:
                check_entry(entry, states[param], (), restore)
            else:
                _forget_steps(entry)
        restore.run()


def _forget_steps(entry: MutableMapping[Any, Any]) -> None:
    for key, value in entry.items():
        if isinstance(value, MutableMapping):
            _forget_steps(value)
        elif key == "step":
            if isinstance(value, Tensor):
                value.detach().zero_()
            else:
                entry[key] = type(value)(0)
