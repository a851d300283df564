"""Helpers for cases of embedding modules whose input is torchrec's KeyedJaggedTensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import as_tensor
from keyedopt.conformance.suite.support.inputs import _numbers

KEYED_JAGGED = "EmbeddingBagCollection.keyed_jagged_tensors"
JAGGED_KEYS = ("f", "g", "h")


def in_a_column(given: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a column of a larger tensor."""
    return torch.stack([given, torch.zeros_like(given)], dim=1)[:, 0]


#: Keys in order, the argument that delimits the bags, and what is done to values and the argument.
JAGGED_FORMS: dict[str, tuple[Sequence[str], str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "lengths": (JAGGED_KEYS, "lengths", torch.clone),
    "offsets": (JAGGED_KEYS, "offsets", torch.clone),
    "int32": (JAGGED_KEYS, "offsets", torch.Tensor.int),
    "strided": (JAGGED_KEYS, "offsets", in_a_column),
    "permuted keys": (("h", "f", "g"), "offsets", torch.clone),
    "unknown key": (("f", "unknown", "h", "g"), "offsets", torch.clone),
}


def has_keyed_jagged_tensors(impl: Any) -> bool:
    """Return whether the target accepts a KeyedJaggedTensor, and torchrec can be imported to make it."""
    try:
        import torchrec.sparse.jagged_tensor  # noqa: F401
    except ImportError:
        return False
    return not impl.lacks(KEYED_JAGGED)


def keyed_jagged_tensor(features: Mapping[str, Any], form: str = "offsets", order: Sequence[str] = ()) -> Any:
    """Return the features of a mapping as a KeyedJaggedTensor, in the order of its form or in this one.

    Raises:
        CannotRun: torchrec is not installed, so the case is unsupported.
    """
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except ImportError as error:
        raise CannotRun(f"torchrec cannot be imported: {error}") from None
    keys, delimiter, changed = JAGGED_FORMS[form]
    keys = order or keys
    values, offsets, *weights = zip(*(features[key] for key in keys), strict=True)
    places = torch.cat([each.diff() for each in offsets])
    if delimiter == "offsets":
        places = functional.pad(places.cumsum(0), (1, 0))
    given = {delimiter: changed(places), "weights": torch.cat(weights[0]) if weights else None}
    return KeyedJaggedTensor(list(keys), changed(torch.cat(values)), **given)


def with_inverse_indices(
    features: Any, counts: Sequence[int], rows: Mapping[str, Sequence[int]] | None
) -> Any:
    """Return a KeyedJaggedTensor whose keys have these numbers of bags.

    Args:
        features: a KeyedJaggedTensor with offsets.
        counts: of the bags of each key.
        rows: the bag of each row of the output, for each key, in any order of keys; None for no inverse
            indices.
    """
    inverse = None if rows is None else (list(rows), as_tensor([list(one) for one in rows.values()]).long())
    return type(features)(
        list(features.keys()),
        features.values(),
        features.weights_or_none(),
        offsets=features.offsets(),
        stride_per_key_per_rank=None if len(set(counts)) == 1 else [[count] for count in counts],
        inverse_indices=inverse,
    )


def weighted_backward(outputs: Any, names: Sequence[str], step: int) -> None:
    """Compute gradients of a loss with a different gradient for each output and step."""
    losses = []
    for place, name in enumerate(names):
        factors = as_tensor(_numbers(outputs[name].shape, 7 * step + place), dtype=outputs[name].dtype)
        losses.append((outputs[name] * factors).sum())
    torch.stack(losses).sum().backward()
