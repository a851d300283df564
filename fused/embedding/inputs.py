"""What is looked up, checked before memory is touched: bags of row numbers by feature."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.native import plain_bags
from keyedopt.reference.embedding.inputs import Features, Jagged

INTEGERS = (torch.int64, torch.int32)


#: Values, offsets and weights of a feature.
Bags = tuple[Tensor, Tensor, Tensor | None]


def check_features(features: Features, rows: Mapping[str, int], weighted: bool) -> dict[str, Bags]:
    """Return what is looked up, with int64 row numbers and offsets, contiguous; no memory has been read.

    Args:
        features: what the user gives; others than those looked up are ignored.
        rows: for each feature that is looked up, the number of rows of its smallest table.
        weighted: whether weights have to be there; otherwise they must not be.

    Raises:
        ValueError: names the feature and what is wrong with it.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            f"features must be a mapping from feature to (values, offsets), not {type(features).__name__}"
        )
    checked = {}
    if not weighted and type(features) is dict:
        quick = plain_bags(features, list(rows), (tuple, Jagged))
        if quick and None not in quick:
            return dict(zip(rows, quick, strict=True))
    for name in rows:
        given = features.get(name)
        if given is None:
            raise ValueError(f"features has no {name!r}: give each feature of every table, if need be empty")
        checked[name] = _quickly(given, weighted) or _taken(name, given, weighted)
    return checked


def check_bags(checked: Mapping[str, Bags], rows: Mapping[str, int]) -> None:
    """Refuse row numbers that are none, and offsets that are no bags, for which memory has to be read.

    Raises:
        ValueError: names the feature and what is wrong with it.
    """
    if any(values.device.type != "cpu" for values, _, _ in checked.values()) and _sound(checked, rows):
        return
    for name, (values, offsets, _) in checked.items():
        _check_offsets(name, offsets, values.numel())
        _check_values(name, values, rows[name])


def _quickly(given: Any, weighted: bool) -> Bags | None:
    """Return a feature that is as most are; None for one that has to be looked at."""
    if weighted or type(given) not in (tuple, Jagged) or len(given) < 2:
        return None
    values, offsets = given[0], given[1]
    if type(values) is not Tensor or type(offsets) is not Tensor or (len(given) > 2 and given[2] is not None):
        return None
    if values.dtype is not torch.int64 or offsets.dtype is not torch.int64 or len(given) > 3:
        return None
    if values.dim() != 1 or offsets.dim() != 1 or values.device != offsets.device:
        return None
    if not (values.is_contiguous() and offsets.is_contiguous()):  # which a sparse layout cannot answer
        return None
    return values, offsets, None


def _taken(name: str, given: Any, weighted: bool) -> Bags:
    """Check the parts of a feature as far as their memory need not be read."""
    if not isinstance(given, Sequence) or not 2 <= len(given) <= 3:
        raise ValueError(
            f"feature {name!r} must be (values, offsets) or (values, offsets, weights), "
            f"not a {type(given).__name__}"
        )
    values, offsets = given[0], given[1]
    weights = given[2] if len(given) == 3 else None
    for part, tensor in (("values", values), ("offsets", offsets)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{part} of feature {name!r} must be a tensor, not a {type(tensor).__name__}")
        if tensor.dtype not in INTEGERS:
            raise ValueError(f"{part} of feature {name!r} must be int64 or int32, not {tensor.dtype}")
        if tensor.dim() != 1 or tensor.layout is not torch.strided:
            raise ValueError(f"{part} of feature {name!r} must be a vector, not {tuple(tensor.shape)}")
    if values.device != offsets.device:
        raise ValueError(
            f"offsets of feature {name!r} must be on the device of its values, {values.device}, "
            f"not on {offsets.device}"
        )
    if (weights is not None) != weighted:
        must = "must be given (is_weighted is True)" if weighted else "must not be given"
        raise ValueError(f"weights of feature {name!r} {must}")
    if weights is not None:
        _check_weights(name, weights, values)
    return values.long().contiguous(), offsets.long().contiguous(), weights


def _check_weights(name: str, weights: Any, values: Tensor) -> None:
    where = f"weights of feature {name!r}"
    if not isinstance(weights, Tensor):
        raise ValueError(f"{where} must be a tensor, not a {type(weights).__name__}")
    if not weights.is_floating_point():
        raise ValueError(f"{where} must be floating point, not {weights.dtype}")
    if weights.shape != values.shape or weights.device != values.device:
        raise ValueError(
            f"{where} must be like its values, {tuple(values.shape)} on {values.device}, "
            f"not {tuple(weights.shape)} on {weights.device}"
        )


def _sound(checked: Mapping[str, Bags], rows: Mapping[str, int]) -> bool:
    """Whether all features are as they have to be: one question to a device, not some for each feature."""
    bags = list(checked.values())
    device = bags[0][0].device
    if any(values.device != device or not offsets.numel() for values, offsets, _ in bags):
        return False
    counts = torch.tensor([values.numel() for values, _, _ in bags])
    lengths = torch.tensor([offsets.numel() for _, offsets, _ in bags])
    limits = torch.tensor([rows[name] for name in checked])
    last = lengths.cumsum(0) - 1
    known = torch.stack([counts, limits, last - lengths + 1, last]).to(device, non_blocking=True)
    values, offsets = torch.cat([one[0] for one in bags]), torch.cat([one[1] for one in bags])
    most = torch.repeat_interleave(known[1], known[0], output_size=values.numel())
    wrong = ((values < 0) | (values >= most)).any()
    falls = offsets[1:] < offsets[:-1]
    falls[known[3, :-1]] = False  # from one feature to the next
    wrong |= falls.any() | (offsets[known[2]] != 0).any() | (offsets[known[3]] != known[0]).any()
    return not bool(wrong)


def _check_values(name: str, values: Tensor, rows: int) -> None:
    if not values.numel():
        return
    least, most = (int(bound) for bound in torch.aminmax(values))
    if least < 0 or most >= rows:
        wrong = values[(values < 0) | (values >= rows)]
        raise ValueError(
            f"values of feature {name!r} must be row numbers from 0 to {rows - 1}, but {wrong.numel()} "
            f"are not, the first of them {int(wrong[0])}"
        )


def _check_offsets(name: str, offsets: Tensor, count: int) -> None:
    if not offsets.numel():
        raise ValueError(f"offsets of feature {name!r} must have shape (B + 1,), not (0,)")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != count:
        raise ValueError(
            f"offsets of feature {name!r} must go from 0 to the number of values, {count}, "
            f"not from {first} to {last}"
        )
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"offsets of feature {name!r} must not fall")
