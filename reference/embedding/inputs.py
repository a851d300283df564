"""The input of a lookup: bags of row numbers by feature, checked before use."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.reference.embedding.jagged import Features, Jagged, as_jagged, is_keyed, split

INTEGERS = (torch.int64, torch.int32)


def check_features(
    features: Features, rows: Mapping[str, Sequence[int]], weighted: bool
) -> dict[str, Jagged]:
    """Return the features that are looked up, all of them checked.

    Args:
        features: the input of a forward pass; features of no table are ignored.
        rows: the row counts of the tables of each feature.
        weighted: whether weights are required; otherwise they must be missing.

    Raises:
        ValueError: names the feature and what is wrong with it.
        RuntimeError: the memory of a tensor was freed.
    """
    features = by_feature(features, weighted)
    checked = {name: parse_feature(features, name, weighted) for name in rows}
    for name, jagged in checked.items():
        check_contents(name, jagged, min(rows[name]))
    return checked


def by_feature(features: Features, weighted: bool) -> Mapping[str, Any]:
    """Return the input of a forward pass by feature; a `KeyedJaggedTensor` is split into views.

    Raises:
        ValueError: the input is neither a mapping nor a sound `KeyedJaggedTensor`.
    """
    if is_keyed(features):
        return split(features, weighted)
    if not isinstance(features, Mapping):
        raise ValueError(
            "features must be a KeyedJaggedTensor or a mapping from feature to (values, offsets), "
            f"not {type(features).__name__}"
        )
    return features


def parse_feature(features: Mapping[str, Any], name: str, weighted: bool) -> Jagged:
    """Return a feature with its types, dtypes, shapes and devices checked; the contents are not read.

    Raises:
        ValueError: names the feature and what is wrong with it.
    """
    if name not in features:
        raise ValueError(f"features has no {name!r}: give each feature of every table, if need be empty")
    given = as_jagged(features[name], weighted)
    if not isinstance(given, Sequence) or not 2 <= len(given) <= 3:
        raise ValueError(
            f"feature {name!r} must be (values, offsets) or (values, offsets, weights), not {given!r}"
        )
    jagged = Jagged(*given)
    for part, tensor in jagged._asdict().items():
        if not (isinstance(tensor, torch.Tensor) or (part == "weights" and tensor is None)):
            raise ValueError(f"{part} of feature {name!r} must be a tensor, not {type(tensor).__name__}")
    for part, tensor, shape in (("values", jagged.values, "(N,)"), ("offsets", jagged.offsets, "(B + 1,)")):
        if tensor.dtype not in INTEGERS:
            raise ValueError(f"{part} of feature {name!r} must be int64 or int32, not {tensor.dtype}")
        if tensor.dim() != 1 or tensor.layout is not torch.strided:
            raise ValueError(f"{part} of feature {name!r} must have shape {shape}, not {tuple(tensor.shape)}")
    for part, tensor in (("offsets", jagged.offsets), ("weights", jagged.weights)):
        if tensor is not None and tensor.device != jagged.values.device:
            raise ValueError(
                f"{part} of feature {name!r} must be on the device of its values, {jagged.values.device}, "
                f"not on {tensor.device}"
            )
    _check_weights(name, jagged, weighted)
    return jagged


def check_contents(name: str, jagged: Jagged, rows: int) -> None:
    """Check that values are row numbers below `rows`, and that offsets are bags of them.

    Raises:
        ValueError: names the feature and what is wrong with it.
        RuntimeError: the memory of a tensor was freed.
    """
    _check_memory(name, jagged)
    _check_values(name, jagged.values, rows)
    _check_offsets(name, jagged.offsets, jagged.values.numel())


def _check_memory(name: str, jagged: Jagged) -> None:
    for part, tensor in jagged._asdict().items():
        if tensor is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RuntimeError(  # as most of torch's operators do; others end the process
                f"the memory of the {part} of feature {name!r} was freed: free it after the backward pass"
            )


def _check_values(name: str, values: torch.Tensor, rows: int) -> None:
    wrong = values[(values < 0) | (values >= rows)]
    if wrong.numel():
        raise ValueError(
            f"values of feature {name!r} must be row numbers from 0 to {rows - 1}, but {wrong.numel()} "
            f"are not, the first of them {int(wrong[0])}"
        )


def _check_offsets(name: str, offsets: torch.Tensor, count: int) -> None:
    if not offsets.numel():
        raise ValueError(f"offsets of feature {name!r} must have shape (B + 1,), not {tuple(offsets.shape)}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != count:
        raise ValueError(
            f"offsets of feature {name!r} must go from 0 to the number of values, {count}, "
            f"not from {int(offsets[0])} to {int(offsets[-1])}"
        )
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"offsets of feature {name!r} must not fall, but are {offsets.tolist()[:20]}")


def _check_weights(name: str, jagged: Jagged, weighted: bool) -> None:
    weights = jagged.weights
    if (weights is not None) != weighted:
        text = (
            "must be given (is_weighted is True)" if weighted else "must not be given (is_weighted is False)"
        )
        raise ValueError(f"weights of feature {name!r} {text}")
    if weights is None:
        return
    if not weights.is_floating_point():
        raise ValueError(f"weights of feature {name!r} must be floating point, not {weights.dtype}")
    if weights.shape != jagged.values.shape:
        raise ValueError(
            f"weights of feature {name!r} must have the shape of its values, {tuple(jagged.values.shape)}, "
            f"not {tuple(weights.shape)}"
        )
