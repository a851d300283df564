"""Embedding modules: a KeyedJaggedTensor of torchrec gives what the same features in a mapping give."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.algorithms import need_dtype
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    TABLES,
    collection,
    jagged,
    tables_of,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.keyed_jagged import (
    JAGGED_FORMS,
    JAGGED_KEYS,
    KEYED_JAGGED,
    keyed_jagged_tensor,
    weighted_backward,
)
from keyedopt.conformance.suite.support.late_errors import expect_lookup_error

REFUSALS = (ValueError, IndexError, RuntimeError)
WEIGHTS = {"f": [[0.5, 2.0, -1.0], [3.0]], "g": [[], [0.25, 1.5]], "h": [[1.0, -2.0], [0.5]]}
#: The features of a second step.
LATER = {"f": [[5], []], "g": [[1, 1], [0, 2]], "h": [[], [4, 3]]}
LATER_WEIGHTS = {"f": [[2.0], []], "g": [[0.5, 1.0], [-1.0, 4.0]], "h": [[], [0.25, -0.5]]}
UNKNOWN: dict[str, Any] = {"unknown": [[7], [7, 8]]}


def batches(weighted: bool = False, more: Mapping[str, Any] = UNKNOWN) -> list[dict[str, Any]]:
    """Return the features of two steps."""
    return [
        jagged({**bags, **more}, {**weights, **more} if weighted else None)
        for bags, weights in ((BAGS, WEIGHTS), (LATER, LATER_WEIGHTS))
    ]


def expect_same(
    module: Any, other: Any, names: Sequence[str] = JAGGED_KEYS, form: str = "offsets", weighted: bool = False
) -> None:
    """Expect a module that gets KeyedJaggedTensors to train like another that gets mappings."""
    for step, features in enumerate(batches(weighted)):
        found, wanted = (
            module(keyed_jagged_tensor(features, form)),
            other({key: features[key] for key in JAGGED_KEYS}),
        )
        expect_equal(list(found.keys()), list(names), "keys of the output")
        widths = [wanted[name].shape[1] for name in names]
        expect_equal(list(found.length_per_key()), widths, "widths of the output")
        joined = torch.cat([wanted[name] for name in names], dim=1)
        expect_close(found.values().detach(), joined, "values of the output", ulps=16)
        weighted_backward(found, names, step)
        weighted_backward(wanted, names, step)
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("{kind}", KEYED_JAGGED)
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("tables", [TABLES, ONE_TABLE], ids=["several tables", "one table"])
def test_evaluation(impl, tables, kind):
    """In evaluation mode, outputs and the effect of a backward pass are the same as with a mapping."""
    found = []
    for form in ("keyed jagged", "mapping"):
        module = collection(impl, kind=kind, tables=tables).eval()
        given = batches()[0]
        outputs = module(keyed_jagged_tensor(given) if form == "keyed jagged" else given)
        rows = outputs["f"] if isinstance(outputs["f"], torch.Tensor) else outputs["f"].values()
        found.append((rows.detach(), outcome(rows.sum().backward), snapshot(tables_of(module))))
    expect_bits(found[0][0], found[1][0], "the output")
    expect_equal(found[0][1], found[1][1], "outcome of a backward pass")
    expect_unchanged(found[1][2], found[0][2], "the tables after it")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad", KEYED_JAGGED)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", JAGGED_FORMS)
def test_bags(impl, form, weighted):
    """With pooling, a KeyedJaggedTensor gives a KeyedTensor, and trains like a mapping."""
    for pooling in ("SUM", "MEAN"):
        made = (collection(impl, "Adagrad", pooling=pooling, weighted=weighted) for _ in range(2))
        expect_same(*made, form=form, weighted=weighted)


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
@pytest.mark.parametrize("wide", ["t", "u"])
def test_joined_tables_of_unlike_dtypes(impl, wide):
    """The joined output keeps the precision of a table in float64 beside one in float32."""
    need_dtype(impl, "EmbeddingBagCollection", "float64")
    tables = [(*table, "SUM", "float64" if table[0] == wide else "float32") for table in TABLES]
    module = collection(impl, tables=tables)
    found, outputs = module(keyed_jagged_tensor(jagged(BAGS))), module(jagged(BAGS))
    for name in ("f", "g", "h"):
        wanted = outputs[name].detach().double()
        expect_bits(found[name].detach().double(), wanted, f"output {name} of the KeyedTensor")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection.shared_features", KEYED_JAGGED)
def test_a_feature_of_several_tables(impl):
    """A key of several tables has an output for each of them."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 6, 8, ("f", "h")))
    made = (collection(impl, tables=tables) for _ in range(2))
    expect_same(*made, names=("f@t", "g", "f@u", "h"))


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs(
    "EmbeddingBagCollection.frozen_tables",
    "EmbeddingBagCollection.any_width",
    "apply_optimizer_in_backward",
    KEYED_JAGGED,
)
@pytest.mark.parametrize("how", ["two groups", "one frozen table"])
def test_tables_that_differ(impl, how):
    """Tables with two learning rates, and a frozen table beside another, train like those of a mapping."""
    made = [collection(impl) for _ in range(2)]
    for module in made:
        table = tables_of(module)["u"]
        if how == "two groups":
            apply_in_backward(impl, torch.optim.SGD, [table], {"lr": 0.5})
        else:
            table.requires_grad_(False)
    expect_same(*made)


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection.frozen_tables", KEYED_JAGGED)
@pytest.mark.parametrize("optimizer", ["Adagrad", None], ids=["tables", "parameters"])
def test_tables_that_are_frozen_later(impl, optimizer):
    """After a forward pass each table can be frozen and trained again, with and without an optimizer."""
    module, other = (collection(impl, optimizer) for _ in range(2))
    for frozen in ((), ("t",), ("u",), ("t", "u"), ()):
        for one in (module, other):
            for name, table in tables_of(one).items():
                table.requires_grad_(name not in frozen)
                table.grad = None
        outputs = module(keyed_jagged_tensor(jagged(BAGS))), other(jagged(BAGS))
        for found in outputs if len(frozen) < 2 else ():
            weighted_backward(found, JAGGED_KEYS, 0)
        for name, table in tables_of(other).items():
            mine = tables_of(module)[name]
            expect_near(mine, table, f"table {name} with {frozen or 'no table'} frozen")
            expect_equal(mine.grad is None, table.grad is None, f"no gradient of table {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward", KEYED_JAGGED)
@pytest.mark.parametrize("name", ["t", "u"])
def test_a_rate_between_forward_and_backward(impl, name):
    """The backward pass uses a learning rate that one table got after the forward pass, for it only."""
    module, other = (collection(impl) for _ in range(2))
    outputs = module(keyed_jagged_tensor(jagged(BAGS))), other(jagged(BAGS))
    for each, found in zip((module, other), outputs, strict=True):
        apply_in_backward(impl, torch.optim.SGD, [tables_of(each)[name]], {"lr": 0.5})
        weighted_backward(found, JAGGED_KEYS, 0)
    for key, table in tables_of(other).items():
        expect_near(tables_of(module)[key], table, f"table {key}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_the_order_of_keys_changes(impl):
    """Each forward pass finds its features by the keys of its input, whatever order earlier inputs had."""
    module, other = (collection(impl) for _ in range(2))
    features, later = batches()
    for form in ("offsets", "permuted keys", "unknown key", "permuted keys", "offsets"):
        for given in (features, later):
            found = module(keyed_jagged_tensor(given, form))
            wanted = other({key: given[key] for key in JAGGED_KEYS})
            for key in JAGGED_KEYS:
                expect_close(found[key].detach(), wanted[key].detach(), f"output {key}", ulps=16)
            weighted_backward(found, JAGGED_KEYS, 0)
            weighted_backward(wanted, JAGGED_KEYS, 0)


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", "AccumulateSGD", "SGD", KEYED_JAGGED)
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_windows(impl, pooling):
    """A window of weighted KeyedJaggedTensors makes the update of one backward pass through all of them."""
    options = {"use_accumulate": True, "accumulate_step": 2}
    module = collection(impl, "AccumulateSGD", options, pooling=pooling, weighted=True)
    other = collection(impl, "SGD", pooling=pooling, weighted=True)
    for _ in range(2):
        wanted = torch.zeros(())
        for features in batches(weighted=True):
            module(keyed_jagged_tensor(features)).values().sum().backward()
            wanted = wanted + sum(
                one.sum() for one in other({key: features[key] for key in JAGGED_KEYS}).values()
            )
        wanted.backward()
        for name, table in tables_of(other).items():
            expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_a_subclass(impl):
    """An input of a class that inherits from KeyedJaggedTensor is looked up as one of KeyedJaggedTensor."""
    module = collection(impl)
    given = keyed_jagged_tensor(jagged(BAGS))
    wanted = module(given).values().detach()
    given.__class__ = type("Inherits", (type(given),), {"__module__": __name__})
    expect_bits(module(given).values().detach(), wanted, "the output for an instance of a subclass")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_without_an_optimizer(impl):
    """Tables without an optimizer receive the gradients of a mapping."""
    module, other = (collection(impl, None) for _ in range(2))
    expect_same(module, other)
    for one, wanted in zip(module.parameters(), other.parameters(), strict=True):
        expect_near(one.grad.to_dense(), wanted.grad.to_dense(), "the gradient")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
def test_ignored_weights(impl):
    """A module that is not weighted ignores the weights of a KeyedJaggedTensor."""
    module, other = (collection(impl) for _ in range(2))
    for step, (given, plain) in enumerate(zip(batches(weighted=True), batches(), strict=True)):
        for each, features in ((module, given), (other, plain)):
            weighted_backward(each(keyed_jagged_tensor(features)), JAGGED_KEYS, step)
    expect_unchanged(snapshot(tables_of(other)), tables_of(module), "the tables")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
@pytest.mark.parametrize("of", ["float16", "float32", "float64"])
@pytest.mark.parametrize("trained", [False, True])
def test_weights_of_every_dtype(impl, of, trained):
    """Weights of every dtype multiply the rows, and receive their gradient if they require it."""
    features, wanted = (
        {
            name: (values, offsets, weights.to(getattr(torch, of)).requires_grad_(trained))
            for name, (values, offsets, weights) in batches(weighted=True)[0].items()
        }
        for _ in range(2)
    )
    module, other = (collection(impl, weighted=True) for _ in range(2))
    weighted_backward(module(keyed_jagged_tensor(features)), JAGGED_KEYS, 0)
    weighted_backward(other({key: wanted[key] for key in JAGGED_KEYS}), JAGGED_KEYS, 0)
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")
    for key in JAGGED_KEYS if trained else ():
        expect_near(features[key][2].grad, wanted[key][2].grad, f"gradient of the weights of {key}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingCollection", KEYED_JAGGED)
@pytest.mark.parametrize("form", JAGGED_FORMS)
def test_without_pooling(impl, form):
    """Without pooling, a KeyedJaggedTensor gives a JaggedTensor for each output, with the bags of its key."""
    module, other = (collection(impl, kind="EmbeddingCollection") for _ in range(2))
    for step, features in enumerate(batches()):
        found, wanted = (
            module(keyed_jagged_tensor(features, form)),
            other({key: features[key] for key in JAGGED_KEYS}),
        )
        expect_equal(sorted(found), sorted(JAGGED_KEYS), "names of the outputs")
        for key in JAGGED_KEYS:
            expect_bits(found[key].values().detach(), wanted[key].detach(), f"rows of {key}")
            expect_equal(found[key].lengths().tolist(), features[key][1].diff().tolist(), f"bags of {key}")
        weighted_backward({key: found[key].values() for key in JAGGED_KEYS}, JAGGED_KEYS, step)
        weighted_backward(wanted, JAGGED_KEYS, step)
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingCollection", KEYED_JAGGED)
@pytest.mark.parametrize("form", JAGGED_FORMS)
@pytest.mark.parametrize("beside", [False, True], ids=["rows", "rows and row numbers"])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_without_pooling(impl, weighted, beside, form):
    """Without pooling a JaggedTensor has the rows and bags of its key, and the row numbers if asked."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 5, 4, ("f", "h")))
    more = {"need_indices": True} if beside else {}
    module, other = (
        collection(impl, kind="EmbeddingCollection", tables=tables, weighted=weighted, **one)
        for one in (more, {})
    )
    features = jagged(
        {"f": [[0, 1, 1], [2]], "g": [[], [1, 5]], "h": [[3, 3], [0]], **UNKNOWN},
        {**WEIGHTS, **UNKNOWN} if weighted else None,
    )
    for training in (True, False):
        module.train(training)
        found = module(keyed_jagged_tensor(features, form))
        wanted = other({key: features[key] for key in JAGGED_KEYS})
        expect_equal(sorted(found), sorted(wanted), "names of the outputs")
        for name, rows in wanted.items():
            values, ends, *_ = features[name.partition("@")[0]]
            expect_bits(found[name].values().detach(), rows.detach(), f"rows of {name}")
            expect_equal(found[name].offsets().tolist(), ends.tolist(), f"offsets of {name}")
            expect_equal(found[name].lengths().tolist(), ends.diff().tolist(), f"lengths of {name}")
            numbers = found[name].weights_or_none()
            if beside:
                expect(numbers is not None, f"row numbers of {name}", "none")
                expect_equal(numbers.tolist(), values.tolist(), f"row numbers of {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad", KEYED_JAGGED)
@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("values", {8: 5}),  # a row of t that u does not have
        ("values", {4: -1}),
        ("offsets", {2: 7}),  # past the end of the next key
        ("offsets", {5: 5}),
        ("offsets", {0: 1}),
        ("offsets", {6: 8}),
        ("weights", None),
        ("keys", None),
    ],
)
def test_bad_features(impl, part, changes):
    """An invalid KeyedJaggedTensor raises an error before any table is read or changed."""
    module = collection(impl, "Adagrad", weighted=True)
    good = keyed_jagged_tensor(batches(weighted=True)[0])
    fields = {name: getattr(good, name)() for name in ("keys", "values", "weights", "offsets")}
    if changes is None:
        fields[part] = ["f", "g", "k"] if part == "keys" else None
    for place, value in (changes or {}).items():
        fields[part] = fields[part].clone()
        fields[part][place] = value
    bad = type(good)(stride=2, **fields)
    expect_lookup_error(module, bad, good, *REFUSALS, expected=f"an error for {part}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("EmbeddingBagCollection", KEYED_JAGGED)
@pytest.mark.parametrize("part", ["values", "offsets", "weights"])
def test_changed_features(impl, part):
    """Changing a KeyedJaggedTensor before the backward pass raises an error there, or has no effect."""
    module, other = (collection(impl, weighted=True) for _ in range(2))
    before = snapshot(tables_of(module))
    features = keyed_jagged_tensor(batches(weighted=True)[0])
    outputs, wanted = module(features), other(keyed_jagged_tensor(batches(weighted=True)[0]))
    getattr(features, part)().copy_(
        {
            "values": tensor([1, 0, 0, 3, 4, 2, 1, 2, 4]),
            "offsets": tensor([0, 1, 4, 5, 6, 6, 9]),
            "weights": tensor([2.0, 0.5, 4.0, 8.0, 0.25, 1.0, 3.0, 0.125, 16.0]),
        }[part]
    )
    weighted_backward(wanted, JAGGED_KEYS, 0)
    try:
        weighted_backward(outputs, JAGGED_KEYS, 0)
    except RuntimeError:
        expect_unchanged(before, tables_of(module), "the tables, after an error")
        return
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-095")
@pytest.mark.needs("{kind}", KEYED_JAGGED)
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("part", ["values", "offsets", "weights"])
def test_changed_features_of_other_dtypes(impl, part, kind):
    """The same holds for a KeyedJaggedTensor in int32, with weights in float64, of modules of any kind."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 5, 4, ("h",)))
    module, other = (collection(impl, kind=kind, tables=tables, weighted=True) for _ in range(2))
    before = snapshot(tables_of(module))
    features, given = (
        keyed_jagged_tensor(
            {key: (*parts[:2], parts[2].double()) for key, parts in batches(weighted=True)[0].items()},
            "int32",
        )
        for _ in range(2)
    )
    losses = []
    for each, one in ((module, features), (other, given)):
        outputs = each(one)
        rows = [outputs[key] if kind == "EmbeddingBagCollection" else outputs[key].values() for key in "fgh"]
        losses.append(sum((place + 1) * row.sum() for place, row in enumerate(rows)))
    changed = getattr(features, part)()
    later = {"values": [1, 0, 0, 3, 4, 2, 1, 2, 4], "offsets": [0, 1, 4, 5, 6, 6, 9]}
    changed.copy_(tensor(later.get(part, [2.0, 0.5, 4.0, 8.0, 0.25, 1.0, 3.0, 0.125, 16.0])))
    losses[1].backward()
    try:
        losses[0].backward()
    except RuntimeError:
        expect_unchanged(before, tables_of(module), "the tables, after an error")
        return
    for name in ("t", "u"):
        expect_near(tables_of(module)[name], tables_of(other)[name], f"table {name}")
