"""The input of a lookup: tuples of tensors, or torchrec's jagged tensors, without an import of torchrec.

A `KeyedJaggedTensor` and a `JaggedTensor` are recognized by their methods. The classes of the output are
those that the module of the input defines: torchrec's for torchrec's input.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from keyedopt.reference.embedding.variable_batch import bag_counts


class Jagged(NamedTuple):
    """The bags of one feature; any tuple of these is one, with or without the weights.

    Args:
        values: the row numbers of all bags, shape (N,), int64 or int32.
        offsets: bag b is ``values[offsets[b]:offsets[b + 1]]``: shape (B + 1,), from 0 to N, never falling.
        weights: by what each row is multiplied before it is pooled, shape (N,), floating point.

    >>> import torch
    >>> from keyedopt.reference import Jagged
    >>> two_bags = Jagged(values=torch.tensor([3, 14, 3]), offsets=torch.tensor([0, 2, 3]))
    >>> [bag.tolist() for bag in two_bags.values.tensor_split(two_bags.offsets[1:-1])]
    [[3, 14], [3]]
    """

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None = None


#: The input of a forward pass: a `Jagged` or a `JaggedTensor` for each feature, or a `KeyedJaggedTensor`.
Features = Mapping[str, Jagged | Sequence[Any]] | Any

_JAGGED = ("values", "offsets", "weights_or_none")
_KEYED = ("keys", "stride", "variable_stride_per_key", "inverse_indices_or_none", *_JAGGED)


def is_keyed(features: Any) -> bool:
    """Return whether this is a `KeyedJaggedTensor`."""
    return _has_methods(type(features), _KEYED)  # type: ignore[arg-type]  # a class is hashable


@lru_cache(maxsize=256)
def _has_methods(cls: type, names: tuple[str, ...]) -> bool:
    return all(callable(getattr(cls, name, None)) for name in names)


def as_jagged(given: Any, weighted: bool) -> Any:
    """Return a `JaggedTensor` as a `Jagged`, with its weights if `weighted`; anything else as it is."""
    if not _has_methods(type(given), _JAGGED):  # type: ignore[arg-type]  # a class is hashable
        return given
    return Jagged(given.values(), given.offsets(), given.weights_or_none() if weighted else None)


def split(features: Any, weighted: bool) -> dict[str, Jagged]:
    """Return the features of a `KeyedJaggedTensor`, as views of its values.

    Args:
        features: the bags of F keys, which may differ in number.
        weighted: whether its weights are used; as in torchrec they are ignored otherwise.

    Raises:
        ValueError: offsets are not those of the bags of all keys.
    """
    weights = features.weights_or_none() if weighted else None
    keys, bags = list(features.keys()), bag_counts(features)
    return split_packed(keys, bags, features.values(), features.offsets(), weights)


def split_packed(
    keys: Sequence[str],
    counts: Sequence[int],
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
) -> dict[str, Jagged]:
    """Return the features of a packed input, as views of its values.

    Args:
        keys: the F features.
        counts: the number of bags of each.
        values: (N,) of all features.
        offsets: (sum of counts + 1,) of all bags.
        weights: (N,), or None.

    Raises:
        ValueError: offsets are not those of the bags of all keys.
    """
    places = list(accumulate(counts, initial=0))
    if offsets.dim() != 1 or offsets.numel() != places[-1] + 1:
        raise ValueError(
            f"offsets of features must have shape ({places[-1]} bags of {len(keys)} keys + 1,), "
            f"not {tuple(offsets.shape)}"
        )
    # Not `offset_per_key()`, which the caller may have given and nobody has compared with the offsets.
    begins = offsets[torch.tensor(places, device=offsets.device)].tolist()
    if begins != sorted(begins) or begins[0] != 0 or begins[-1] != values.numel():
        raise ValueError(
            f"offsets of features must rise from 0 to the number of values, {values.numel()}, "
            f"but the keys begin and end at {begins[:20]}"
        )
    of_keys = [
        offsets[first : last + 1] - begin
        for (first, last), begin in zip(pairwise(places), begins[:-1], strict=True)
    ]
    return {
        key: Jagged(values[begin:end], bags, None if weights is None else weights[begin:end])
        for key, begin, end, bags in zip(keys, begins, begins[1:], of_keys, strict=False)
    }


def keyed_tensor(features: Any, widths: Mapping[str, int], joined: torch.Tensor) -> Any:
    """Return the `KeyedTensor` of outputs.

    Args:
        features: the input.
        widths: of each output, by name.
        joined: all outputs beside each other, (B, sum of widths).
    """
    return _beside(features, "KeyedTensor")(list(widths), list(widths.values()), joined)


def jagged_tensors(
    features: Any,
    outputs: Mapping[str, torch.Tensor],
    bags: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Return a `JaggedTensor` for each output (N, D), with the offsets of its bags.

    With `indices` the row numbers (N,) are its weights, as torchrec's collections return them.
    """
    jagged_tensor = _beside(features, "JaggedTensor")
    rows: Sequence[torch.Tensor | None] = [None] * len(bags) if indices is None else indices
    return {
        name: jagged_tensor(values, weights, lengths=offsets.diff(), offsets=offsets)
        for (name, values), weights, offsets in zip(outputs.items(), rows, bags, strict=True)
    }


def _beside(features: Any, name: str) -> Any:
    """Return the class of this name in the module that defines the class of the features, or a base of it."""
    for base in type(features).__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if found is not None:
            return found
    raise ValueError(
        f"no {name} beside {type(features).__name__} in {type(features).__module__}: give features as a "
        "mapping from feature to (values, offsets), which returns a mapping"
    )
