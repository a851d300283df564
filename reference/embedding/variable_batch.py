"""A variable batch size: keys of a `KeyedJaggedTensor` differ in their bags, which rows of the output repeat.

``stride_per_key_per_rank`` gives the number of bags of each key, and ``inverse_indices`` the bag of its key
in each row of the output. So a bag that many rows of a batch share is sent, looked up and pooled once::

    output[b] = pooled[inverse_indices[key][b]]
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def has_variable_batch(features: Any) -> bool:
    """Return whether rows of the output are not the bags of a `KeyedJaggedTensor`, or keys differ in bags."""
    return features.inverse_indices_or_none() is not None or bool(features.variable_stride_per_key())


def bag_counts(features: Any) -> list[int]:
    """Return the number of bags of each key."""
    if features.variable_stride_per_key():
        return list(features.stride_per_key())
    return [features.stride()] * len(features.keys())


def bags_of_rows(features: Any, names: Sequence[str]) -> list[Tensor] | None:
    """Return the bag of each row of the joined output, for some keys; None if row b is bag b of each key.

    Args:
        features: a `KeyedJaggedTensor`.
        names: the key of each output; a key that is missing is not looked at.

    Raises:
        ValueError: names the key whose bags cannot be rows of one output.
    """
    if not has_variable_batch(features):
        return None
    counts = dict(zip(features.keys(), bag_counts(features), strict=True))
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        looked_up = {name: counts[name] for name in names if name in counts}
        if len(set(looked_up.values())) > 1:
            raise ValueError(
                f"features with a variable batch size need inverse_indices, because their keys differ in the "
                f"number of bags: {looked_up}"
            )
        return None
    keys, indices = inverse
    if indices.dtype not in (torch.int64, torch.int32) or indices.dim() != 2 or len(indices) != len(keys):
        raise ValueError(
            f"inverse_indices of features must be int64 or int32 of shape ({len(keys)} keys, B), not "
            f"{indices.dtype} of shape {tuple(indices.shape)}"
        )
    places = {key: place for place, key in enumerate(keys)}
    missing = sorted(set(names) - places.keys())
    if missing:
        raise ValueError(f"inverse_indices of features lack the keys {missing}")
    for name in dict.fromkeys(names):
        row, count = indices[places[name]], counts.get(name, 0)
        if name in counts and bool(((row < 0) | (row >= count)).any()):
            raise ValueError(
                f"inverse_indices of key {name!r} must be bags from 0 to {count - 1}, but are "
                f"{row.tolist()[:20]}"
            )
    return [indices[places[name]] for name in names]


def join(outputs: Sequence[Tensor], bags: Sequence[Tensor] | None = None) -> Tensor:
    """Return outputs beside each other, (B, sum of widths).

    Args:
        outputs: of each key (bags, D).
        bags: the bag of each row (B,), for each output; None if row b is bag b.
    """
    if bags is not None:  # the gradient of `embedding` is summed in the same order each time
        outputs = [functional.embedding(rows, output) for rows, output in zip(bags, outputs, strict=True)]
    return torch.cat(list(outputs), dim=1)
