"""Embedding modules: a variable batch size gives what the expanded features give in a mapping."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.algorithms import need_dtype
from keyedopt.conformance.suite.support.assertions import (
    expect_bits,
    expect_close,
    expect_equal,
)
from keyedopt.conformance.suite.support.embedding import collection, jagged, tables_of
from keyedopt.conformance.suite.support.keyed_jagged import (
    KEYED_JAGGED,
    keyed_jagged_tensor,
    weighted_backward,
    with_inverse_indices,
)
from keyedopt.conformance.suite.support.late_errors import expect_lookup_error

#: The bags of each key; of two keys in one table, and of another number each.
UNLIKE_BAGS: dict[str, Any] = {"f": [[0, 1, 1], [2]], "g": [[1, 5]], "h": [[3, 3], [], [0, 4]]}
WEIGHTS: dict[str, Any] = {
    "f": [[0.5, 2.0, -1.0], [3.0]],
    "g": [[0.25, 1.5]],
    "h": [[1.0, -2.0], [], [0.5, 4.0]],
}
#: The bag of each of four rows: bags repeat, in any order, and one is in no row.
ROWS = {"f": [1, 0, 0, 1], "g": [0, 0, 0, 0], "h": [2, 1, 2, 2]}
#: The same number of bags for each key, so that only the rows differ.
ALIKE: dict[str, Any] = {"f": [[0, 1], [2]], "g": [[1], [5, 1]], "h": [[3], [0]]}


def variable(
    bags: Mapping[str, Any],
    rows: Mapping[str, Sequence[int]] | None,
    weights: Mapping[str, Any] | None = None,
    keys: Sequence[str] = ("f", "g", "h"),
) -> Any:
    """Return bags as a KeyedJaggedTensor; `rows` are its inverse indices, in the order of their own keys."""
    features = jagged(bags, weights)
    plain = keyed_jagged_tensor({key: features[key] for key in keys}, "offsets", keys)
    return with_inverse_indices(plain, [len(bags[key]) for key in keys], rows)


def expanded(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs to each row instead of what belongs to each bag."""
    return {key: [each[place] for place in ROWS[key]] for key, each in of.items()}


def expect_same(module: Any, other: Any, names: Sequence[str], features: Any, wanted: Any) -> None:
    """Expect a module to train with bags and their rows like another with expanded features."""
    for step in range(2):
        found, outputs = module(features), other(wanted)
        expect_equal(list(found.keys()), list(names), "keys of the output")
        joined = torch.cat([outputs[name].float() for name in names], dim=1)
        expect_close(found.values().detach().float(), joined, "values of the output", ulps=16)
        weighted_backward(found, names, step)
        weighted_backward(outputs, names, step)
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad", KEYED_JAGGED)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("keys", ["fgh", "hfg"])
def test_bags(impl, weighted, keys):
    """Pooled bags are repeated in the rows of the output, and get the sum of the gradients of these rows."""
    features = variable(UNLIKE_BAGS, ROWS, WEIGHTS if weighted else None, tuple(keys))
    wanted = jagged(expanded(UNLIKE_BAGS), expanded(WEIGHTS) if weighted else None)
    for pooling in ("SUM", "MEAN"):
        made = (collection(impl, "Adagrad", pooling=pooling, weighted=weighted) for _ in range(2))
        expect_same(*made, ("f", "g", "h"), features, wanted)


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection.shared_features", KEYED_JAGGED)
def test_a_feature_of_several_tables(impl):
    """Each output of a key has the rows of its key, whose inverse indices have another order."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 6, 8, ("f", "h")))
    rows = {key: ROWS[key] for key in ("h", "g", "f")}
    made = (collection(impl, tables=tables) for _ in range(2))
    expect_same(*made, ("f@t", "g", "f@u", "h"), variable(UNLIKE_BAGS, rows), jagged(expanded(UNLIKE_BAGS)))


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_tables_of_unlike_dtypes(impl):
    """Outputs are in the order of the tables, also if the first and the last have the same dtype."""
    need_dtype(impl, "EmbeddingBagCollection", "float64")
    dtypes = {"f": "float32", "g": "float64", "h": "float32"}
    tables = [
        (f"table_{key}", 6, width, (key,), "SUM", dtypes[key])
        for key, width in zip("fgh", (4, 8, 4), strict=True)
    ]
    made = (collection(impl, tables=tables) for _ in range(2))
    expect_same(*made, ("f", "g", "h"), variable(UNLIKE_BAGS, ROWS), jagged(expanded(UNLIKE_BAGS)))


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_without_an_optimizer(impl):
    """Tables without an optimizer receive the gradients of the expanded features."""
    module, other = (collection(impl, None) for _ in range(2))
    expect_same(module, other, ("f", "g", "h"), variable(UNLIKE_BAGS, ROWS), jagged(expanded(UNLIKE_BAGS)))
    for one, wanted in zip(module.parameters(), other.parameters(), strict=True):
        expect_near(one.grad.to_dense(), wanted.grad.to_dense(), "the gradient")


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
@pytest.mark.parametrize("inverse", [False, True])
def test_keys_with_as_many_bags(impl, inverse):
    """If keys have as many bags, inverse indices are followed, and without them rows are bags."""
    rows = {"f": [1, 0, 1], "g": [0, 0, 1], "h": [1, 1, 0]} if inverse else None
    each = rows or dict.fromkeys(ALIKE, (0, 1))
    wanted = jagged({key: [ALIKE[key][place] for place in places] for key, places in each.items()})
    module, other = (collection(impl) for _ in range(2))
    expect_same(module, other, ("f", "g", "h"), variable(ALIKE, rows), wanted)


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingCollection", KEYED_JAGGED)
def test_without_pooling(impl):
    """Without pooling, the JaggedTensor of a key has the bags of the key, each once."""
    module, other = (collection(impl, kind="EmbeddingCollection") for _ in range(2))
    found, wanted = module(variable(UNLIKE_BAGS, ROWS)), other(jagged(UNLIKE_BAGS))
    for key in UNLIKE_BAGS:
        expect_bits(found[key].values().detach(), wanted[key].detach(), f"rows of {key}")
        expect_equal(found[key].lengths().tolist(), [len(bag) for bag in UNLIKE_BAGS[key]], f"bags of {key}")
    weighted_backward({key: found[key].values() for key in UNLIKE_BAGS}, list(UNLIKE_BAGS), 0)
    weighted_backward(wanted, list(UNLIKE_BAGS), 0)
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")


#: Inverse indices that name no bag, or not those of each key.
BAD: dict[str, Any] = {
    "past the last bag": {**ROWS, "g": [0, 0, 1, 0]},
    "negative": {**ROWS, "h": [2, -1, 2, 2]},
    "a missing key": {"f": ROWS["f"], "h": ROWS["h"]},
    "no inverse indices": None,
}


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad", KEYED_JAGGED)
@pytest.mark.parametrize("what", BAD)
def test_bad_rows(impl, what):
    """Inverse indices that name no bag of their key, or lack a key, raise an error, and nothing changes."""
    module = collection(impl, "Adagrad")
    bad, valid = (variable(UNLIKE_BAGS, rows) for rows in (BAD[what], ROWS))
    kinds = (ValueError, IndexError, RuntimeError, KeyError)
    expect_lookup_error(module, bad, valid, *kinds, expected=f"an error for {what}")


@pytest.mark.clause("FUSED-102")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad", KEYED_JAGGED)
def test_one_key_with_more_bags(impl):
    """Without inverse indices one key that has more bags than all others raises an error, too."""
    module = collection(impl, "Adagrad")
    bad, valid = variable({**ALIKE, "h": UNLIKE_BAGS["h"]}, None), variable(UNLIKE_BAGS, ROWS)
    kinds = (ValueError, IndexError, RuntimeError, KeyError)
    expect_lookup_error(module, bad, valid, *kinds, expected="an error for the bags of h")
