"""The input and output of torchrec's models: a `KeyedJaggedTensor`, and one joined output."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KeyedJaggedTensor:
    """The methods of torchrec's class that tables use, for measurements without torchrec.

    Args:
        keys: the features.
        values: the row numbers of all features, one feature after the other.
        offsets: of the bags of all features, one feature after the other.
    """

    def __init__(self, keys: list[str], values: Tensor, offsets: Tensor) -> None:
        self._keys, self._values, self._offsets = keys, values, offsets

    def keys(self) -> list[str]:
        """Return the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the row numbers."""
        return self._values

    def offsets(self) -> Tensor:
        """Return the offsets, one more than there are bags."""
        return self._offsets

    def stride(self) -> int:
        """Return the number of bags of each feature."""
        return (self._offsets.numel() - 1) // len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Return False: each feature has the same number of bags."""
        return False

    def inverse_indices_or_none(self) -> None:
        """Return None: bags are not repeated."""

    def weights_or_none(self) -> None:
        """Return None: the lookups have no weights."""


class KeyedTensor:
    """The class of the output for a `KeyedJaggedTensor` of this module."""

    def __init__(self, keys: list[str], lengths: list[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = keys, lengths, values

    def values(self) -> Tensor:
        """Return the joined output, (B, sum of widths)."""
        return self._values


def concatenated(offsets: Sequence[Tensor]) -> Tensor:
    """Return the offsets of the concatenated values, from the offsets of each feature.

    >>> concatenated([torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])])
    tensor([0, 2, 3, 4, 4])
    """
    parts = [offsets[0][:1]]
    for part in offsets:
        parts.append(part[1:] + parts[-1][-1])
    return torch.cat(parts)


def keyed_jagged_tensor(lookups: Sequence[tuple[int, Tensor, Tensor]]) -> Any:
    """Return lookups as a `KeyedJaggedTensor` with keys ``f0``, ``f1``, …; torchrec's, if it is installed.

    Args:
        lookups: the number of rows, the indices and the offsets of each table.
    """
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as Class
    except ImportError:
        Class = KeyedJaggedTensor  # noqa: N806 - a class
    keys = [f"f{number}" for number in range(len(lookups))]
    values = torch.cat([values for _, values, _ in lookups])
    return Class(keys, values, offsets=concatenated([offsets for _, _, offsets in lookups]))
