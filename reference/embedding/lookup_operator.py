"""The operator ``look_up`` of the reference, with its gradients, in plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.embedding.config import PoolingType
from keyedopt.reference.embedding.inputs import check_contents
from keyedopt.reference.embedding.jagged import Jagged
from keyedopt.reference.embedding.lookup import gather, pool, rows_gradient
from keyedopt.reference.embedding.operators import MODULES, NAMESPACE, define


def _read(call: Any, leaves: Any, tables: Any, names: Any, *rest: Any) -> list[Tensor]:
    """Check all features, and only then look them up."""
    values, offsets, weights, places, features, means, pools, number = rest
    module = MODULES.get(number)
    if leaves and module is not None:
        module.check_replication()
    for index, name in enumerate(names):
        limit = min(len(tables[place]) for place, one in zip(places, features, strict=True) if one == index)
        check_contents(name, Jagged(values[index], offsets[index]), limit)
    found = []
    for place, feature, mean in zip(places, features, means, strict=True):
        rows = gather(tables[place].detach(), None, values[feature])
        scale = weights[feature] if weights else None
        if pools:
            kind = PoolingType.MEAN if mean else PoolingType.SUM
            found.append(pool(rows, offsets[feature], scale, kind))
        else:
            found.append(rows if scale is None else rows * scale.to(rows.dtype)[:, None])
    return found


def _differentiate(shapes: Any, values: Any, offsets: Any, weights: Any, *rest: Any) -> list[Tensor | None]:
    """Return the gradient of the stand-in of each table, which is sparse: a row for each lookup."""
    places, features, means, pools, _, grads = rest
    listed: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for place, feature, mean, grad in zip(places, features, means, grads, strict=True):
        if grad is not None:
            scale = weights[feature] if weights else None
            rows = rows_gradient(
                grad, offsets[feature] if pools else None, scale, mean, values[feature].shape[0]
            )
            listed.setdefault(place, []).append((values[feature], rows))
    found: list[Tensor | None] = []
    for place, shape in enumerate(shapes):
        parts = listed.get(place)
        if parts is None:
            found.append(None)
            continue
        indices, rows = (torch.cat(each) for each in zip(*parts, strict=True))
        found.append(_SPARSE(indices, rows, shape))
    return found


def _sparse(indices: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(indices[None].long(), rows.clone(), list(shape), check_invariants=False)


_sparse_operator = torch.library.custom_op(
    f"{NAMESPACE}::sparse_gradient",
    _sparse,
    mutates_args=(),
    schema="(Tensor indices, Tensor rows, SymInt[] shape) -> Tensor",
)


@_sparse_operator.register_fake
def _(indices: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    # A compiler cannot trace a sparse tensor whose number of rows depends on data: it sees one without rows.
    none = indices[:0].long().new_empty(1, 0)
    return torch.sparse_coo_tensor(none, rows.new_empty(0, shape[1]), list(shape), check_invariants=False)


_SPARSE = getattr(torch.ops, NAMESPACE).sparse_gradient.default
#: Looks features up in tables of the reference.
LOOK_UP = define(NAMESPACE, _read, _differentiate)
