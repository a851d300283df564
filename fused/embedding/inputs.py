"""The input of one forward pass: parsed once into columns, one entry for each feature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.native import parse_bags
from keyedopt.reference.embedding.inputs import (
    INTEGERS,
    by_feature,
    check_contents,
    parse_feature,
)
from keyedopt.reference.embedding.jagged import Features, Jagged
from keyedopt.reference.embedding.variable_batch import has_variable_batch
from keyedopt.reference.memory import check_memory


@dataclass(frozen=True, eq=False)
class Inputs:
    """The features of one forward pass; types, dtypes, shapes and devices are checked, contents are not.

    Every column has one entry for each feature, in the order of `names`. Entries may be views of one packed
    tensor of all features.

    Args:
        names: the features.
        values: (N,) int64 row numbers, contiguous.
        offsets: (B + 1,) int64, contiguous.
        weights: (N,) floating point; None if the collection is not weighted.
    """

    names: Sequence[str]
    values: Sequence[Tensor]
    offsets: Sequence[Tensor]
    weights: Sequence[Tensor | None] | None = None

    def has_no_bags(self) -> bool:
        """Return whether a feature has no bags, so that a backend may not look at its values."""
        return any(offsets.numel() < 2 for offsets in self.offsets)

    def on_cpu(self) -> bool:
        """Return whether all values are on the CPU."""
        return all(values.is_cpu for values in self.values)

    def check_contents(self, rows: Mapping[str, int]) -> None:
        """Check values and offsets; synchronizes once if all are valid.

        Args:
            rows: the number of rows of the smallest table of each feature.

        Raises:
            ValueError: names the feature and what is wrong with it.
            RuntimeError: memory has been freed, which some of torch's operators would read.
        """
        for tensor in (*self.values, *self.offsets):
            check_memory(tensor)
        if not self.on_cpu() and self._are_valid(rows):
            return
        for name, values, offsets in zip(self.names, self.values, self.offsets, strict=True):
            check_contents(name, Jagged(values, offsets), rows[name])

    def _are_valid(self, rows: Mapping[str, int]) -> bool:
        """Return whether the contents of all features are valid, with one synchronization for all of them."""
        device = self.values[0].device
        if any(values.device != device for values in self.values):
            return False
        if not all(offsets.numel() for offsets in self.offsets):
            return False
        counts = torch.tensor([values.numel() for values in self.values])
        lengths = torch.tensor([offsets.numel() for offsets in self.offsets])
        limits = torch.tensor([rows[name] for name in self.names])
        last = lengths.cumsum(0) - 1
        sizes = torch.stack([counts, limits, last - lengths + 1, last]).to(device, non_blocking=True)
        values, offsets = torch.cat(list(self.values)), torch.cat(list(self.offsets))
        limit = torch.repeat_interleave(sizes[1], sizes[0], output_size=values.numel())
        wrong = ((values < 0) | (values >= limit)).any()
        falls = offsets[1:] < offsets[:-1]
        falls[sizes[3, :-1]] = False  # between two features
        wrong |= falls.any() | (offsets[sizes[2]] != 0).any() | (offsets[sizes[3]] != sizes[0]).any()
        return not bool(wrong)


def parse_packed(
    features: Any, weighted: bool
) -> tuple[Sequence[str], Tensor, Tensor, Tensor | None, int] | None:
    """Return keys, and values, offsets, weights and bags of `PackedLookups`, of a `KeyedJaggedTensor`.

    None if it has to be split, as it has a variable batch size or no bags, or is malformed; contents are not
    checked.
    """
    if has_variable_batch(features):
        return None
    keys, bags, values, offsets = features.keys(), features.stride(), features.values(), features.offsets()
    weights = features.weights_or_none() if weighted else None
    sound = bags > 0 and offsets.dim() == values.dim() == 1 and offsets.numel() == len(keys) * bags + 1
    sound = sound and values.dtype in INTEGERS and offsets.dtype in INTEGERS
    if not sound or offsets.device != values.device or (weights is None) is weighted:
        return None
    if weights is not None:
        if not weights.is_floating_point() or weights.shape != values.shape or weights.requires_grad:
            return None
        weights = _contiguous(weights, torch.float32)
    return keys, _contiguous(values, torch.int64), _contiguous(offsets, torch.int64), weights, bags


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of a dtype; raise RuntimeError if a copy would read freed memory."""
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        check_memory(tensor)
    return tensor.to(dtype).contiguous()


def parse(features: Features, names: list[str], weighted: bool) -> Inputs:
    """Return the features that are looked up; memory is read only to convert dtypes and layouts.

    Args:
        features: the input of a forward pass; features of no table are ignored.
        names: the features of the tables.
        weighted: whether weights are required; otherwise they must be missing.

    Raises:
        ValueError: names the feature and what is wrong with it.
    """
    features = by_feature(features, weighted)
    if not weighted and type(features) is dict:
        parsed = parse_bags(features, names, (tuple, Jagged))
        if parsed and None not in parsed:
            values, offsets, _ = zip(*parsed, strict=True)
            return Inputs(names, values, offsets)
    found = [parse_feature(features, name, weighted) for name in names]
    return Inputs(
        names,
        [_contiguous(jagged.values, torch.int64) for jagged in found],
        [_contiguous(jagged.offsets, torch.int64) for jagged in found],
        [jagged.weights for jagged in found] if weighted else None,
    )
