"""Embedding modules: lookups, and invalid features that raise an error before the lookup."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import tensor, the_device
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.late_errors import drop_pending_error, expect_lookup_error

WEIGHTS = {"f": [[0.5, 2.0, -1.0], [3.0]], "g": [[], [0.25, 1.5]], "h": [[1.0, -2.0], [0.5]]}
REFUSALS = (ValueError, IndexError, RuntimeError)


def pooled(table: torch.Tensor, bags: Any, weights: Any = None, mean: bool = False) -> torch.Tensor:
    """Pool rows bag by bag with Python numbers."""
    rows = []
    for number, bag in enumerate(bags):
        factors = [1.0] * len(bag) if weights is None else weights[number]
        count = len(bag) if mean and bag else 1
        columns = range(table.shape[1])
        rows.append(
            [
                sum(c * float(table[row, d]) for c, row in zip(factors, bag, strict=True)) / count
                for d in columns
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def invalid_feature(which: str) -> dict[str, Any]:
    """Make a feature with one invalid part."""
    values, offsets = jagged({"f": BAGS["f"]})["f"]
    bad = {
        "negative": lambda: (tensor([0, -1, 1, 2]), offsets),
        "too large": lambda: (tensor([0, 6, 1, 2]), offsets),
        "much too large": lambda: (tensor([0, 2**40, 1, 2]), offsets),
        "float values": lambda: (values.float(), offsets),
        "bool values": lambda: (values.bool(), offsets),
        "values in two dimensions": lambda: (values[None], offsets),
        "float offsets": lambda: (values, offsets.float()),
        "offsets in two dimensions": lambda: (values, offsets[:, None]),
        "falling offsets": lambda: (values, tensor([0, 5, 4])),
        "falling offsets within": lambda: (values, tensor([0, -1, 4])),
        "offsets past the end": lambda: (values, tensor([0, 3, 9])),
        "offsets before the end": lambda: (values, tensor([0, 3, 3])),
        "offsets not from 0": lambda: (values, tensor([1, 3, 4])),
        "no offsets": lambda: (values, offsets[:0]),
        "offsets of no bags": lambda: (values, offsets[:1]),
        "too large in a long bag": lambda: (tensor([*range(6)] * 2 + [6]), tensor([0, 3, 13])),
    }
    return {"f": bad[which]()}


SPOILED = [
    "negative",
    "too large",
    "much too large",
    "float values",
    "bool values",
    "values in two dimensions",
    "float offsets",
    "offsets in two dimensions",
    "falling offsets",
    "falling offsets within",
    "offsets past the end",
    "offsets before the end",
    "offsets not from 0",
    "no offsets",
    "offsets of no bags",
    "too large in a long bag",
]


@pytest.mark.clause("FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooling(impl, pooling, weighted):
    """A bag returns the sum of its rows, each times its weight, divided by their number for MEAN."""
    module = collection(impl, pooling=pooling, weighted=weighted)
    features = jagged(BAGS, WEIGHTS if weighted else None)
    outputs = module(dict(reversed(features.items())))  # features are matched by name, not by order
    tables = tables_of(module)
    for feature, table in (("f", "t"), ("g", "t"), ("h", "u")):
        factors = WEIGHTS[feature] if weighted else None
        wanted = pooled(tables[table].detach(), BAGS[feature], factors, mean=pooling == "MEAN")
        expect_close(outputs[feature], wanted, f"output of {feature}", ulps=16)


@pytest.mark.clause("FUSED-023")
@pytest.mark.needs("EmbeddingCollection")
def test_without_pooling(impl):
    """An EmbeddingCollection returns the row of each value, in the order of the values."""
    module = collection(impl, kind="EmbeddingCollection")
    outputs = module(jagged(BAGS))
    tables = tables_of(module)
    expect_bits(outputs["f"].detach(), tables["t"].detach()[[0, 1, 1, 2]], "rows of f")
    expect_bits(outputs["g"].detach(), tables["t"].detach()[[1, 5]], "rows of g")
    expect_bits(outputs["h"].detach(), tables["u"].detach()[[3, 3, 0]], "rows of h")


@pytest.mark.clause("FUSED-089")
@pytest.mark.needs("{kind}", "EmbeddingBagCollection.shared_features")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_a_feature_of_several_tables(impl, kind):
    """A feature of several tables has an output feature@table for each, which trains only it."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 5, 8, ("f",)))
    for weighted in (False, True):
        module = collection(impl, kind=kind, tables=tables, weighted=weighted)
        other = collection(impl, kind=kind, weighted=weighted)
        with torch.no_grad():
            tables_of(other)["u"].copy_(tables_of(module)["u"])
        bags, factors = ({"f": of["f"], "g": of["g"], "h": of["f"]} for of in (BAGS, WEIGHTS))
        outputs, wanted = (one(jagged(bags, factors if weighted else None)) for one in (module, other))
        expect_equal(set(outputs), {"f@t", "g", "f@u"}, "names of the outputs")
        pairs = (("f@t", "f"), ("g", "g"), ("f@u", "h"))
        for name, feature in pairs:
            expect_bits(outputs[name].detach(), wanted[feature].detach(), f"output {name}")
        for found, names in ((outputs, [name for name, _ in pairs]), (wanted, [name for _, name in pairs])):
            sum((index + 1.0) * found[name].sum() for index, name in enumerate(names)).backward()
        expect_unchanged(snapshot(tables_of(other)), tables_of(module), "the tables")
        ones = {"f": [[1.0]], "g": [[1.0]]} if weighted else None
        valid, too_large = (jagged({"f": [[row]], "g": [[0]]}, ones) for row in (4, 5))
        for order in (tables, tables[::-1]):  # row 5 is valid in t, and past the end of u
            module = collection(impl, kind=kind, tables=order, weighted=weighted)
            expect_lookup_error(module, too_large, valid, *REFUSALS, expected="an error for row 5 of 5")


@pytest.mark.clause("FUSED-024")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("which", SPOILED)
def test_bad_features(impl, which):
    """Invalid features raise an error before any table is read or changed."""
    module = collection(impl, "Adagrad", tables=ONE_TABLE)
    before, valid = snapshot(tables_of(module))["t"], jagged({"f": BAGS["f"]})
    expect_lookup_error(module, invalid_feature(which), valid, *REFUSALS, expected=f"an error for {which}")
    fit(module, valid)
    moved = not torch.equal(tables_of(module)["t"].detach(), before)
    expect(moved, "a table that the next step trains", "the table before the step")


@pytest.mark.clause("FUSED-024")
@pytest.mark.needs("EmbeddingCollection")
@pytest.mark.parametrize("which", SPOILED)
def test_bad_features_without_pooling(impl, which):
    """Without pooling, too, invalid features raise an error before any table is read or changed."""
    module = collection(impl, tables=ONE_TABLE, kind="EmbeddingCollection")
    valid = jagged({"f": BAGS["f"]})
    expect_lookup_error(module, invalid_feature(which), valid, *REFUSALS, expected=f"an error for {which}")


AMONG_OTHERS = ["negative", "too large", "falling offsets"]


@pytest.mark.clause("FUSED-024")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize("which", AMONG_OTHERS)
@pytest.mark.parametrize("feature", ["g", "h"])
def test_bad_features_among_others(impl, feature, which):
    """An invalid feature raises an error at any position, also after valid ones."""
    module = collection(impl, "Adagrad")
    features = {**jagged(BAGS), feature: invalid_feature(which)["f"]}
    expect_lookup_error(
        module, features, jagged(BAGS), *REFUSALS, expected=f"an error for {which} in {feature}"
    )


@pytest.mark.clause("FUSED-025")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize("which", AMONG_OTHERS)
@pytest.mark.parametrize("feature", ["g", "h"])
def test_errors_name_the_feature_among_others(impl, feature, which):
    """The error for an invalid feature at any position is a ValueError that names the feature."""
    module = collection(impl, "Adagrad")
    features = {**jagged(BAGS), feature: invalid_feature(which)["f"]}
    expect_lookup_error(
        *(module, features, jagged(BAGS), ValueError),
        mentions=[f"'{feature}'"],
        expected=f"ValueError that names {feature}",
    )


@pytest.mark.clause("FUSED-025")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.needs("EmbeddingBagCollection.shared_features")
@pytest.mark.parametrize("sizes", [(6, 5), (5, 6)], ids=str)
def test_errors_name_a_feature_of_two_tables(impl, sizes):
    """A row that only one of a feature's tables has is a ValueError that names the feature."""
    tables = [(name, rows, 4, ("f",)) for name, rows in zip("tu", sizes, strict=True)]
    module = collection(impl, tables=tables)
    bad, good = (jagged({"f": [[row]]}) for row in (5, 4))
    expect_lookup_error(module, bad, good, ValueError, mentions=["'f'"], expected="ValueError that names f")


@pytest.mark.clause("FUSED-025")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize("which", SPOILED)
def test_errors_name_the_feature(impl, which):
    """The error for invalid features is a ValueError that names the feature and its invalid part."""
    module = collection(impl, tables=ONE_TABLE)
    part = "offsets" if "offsets" in which else "values"
    expect_lookup_error(
        *(module, invalid_feature(which), jagged({"f": BAGS["f"]}), ValueError),
        mentions=["'f'", part],
        expected="ValueError that names f",
    )


@pytest.mark.clause("FUSED-026")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize(
    "which",
    [
        *("missing", "no mapping", "no tuple", "no tensor"),
        *("weights lack", "weights short", "weights int", "weights one", "weights column"),
    ],
)
def test_misused_features(impl, which):
    """A missing feature, parts that are not tensors, and weights of the wrong size raise a ValueError."""
    module = collection(impl, weighted=which.startswith("weights"))
    features = jagged(BAGS, WEIGHTS if which.startswith("weights") else None)
    values, offsets, *weights = features["f"]
    if which == "missing":
        del features["f"]
    else:
        features["f"] = {
            "no mapping": None,
            "no tuple": values,
            "no tensor": ([0, 1], offsets),
            "weights lack": (values, offsets),
            "weights short": (values, offsets, weights[0][:2] if weights else None),
            "weights int": (values, offsets, values),
            "weights one": (values, offsets, weights[0][:1] if weights else None),
            "weights column": (values, offsets, weights[0][:, None] if weights else None),
        }[which]
    given = list(features.values()) if which == "no mapping" else features
    mentions = [] if which == "no mapping" else ["'f'"]
    expect_raises(lambda: module(given), ValueError, mentions=mentions, expected=f"ValueError for {which}")


@pytest.mark.clause("FUSED-026")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
def test_weights_not_asked_for(impl):
    """Weights for an unweighted module raise ValueError."""
    module = collection(impl)
    given = jagged(BAGS, WEIGHTS)
    expect_raises(lambda: module(given), ValueError, mentions=["weights"], expected="ValueError for weights")


@pytest.mark.clause("FUSED-027")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("way", ["eval", "no_grad"])
def test_reading_changes_nothing(impl, way):
    """In eval mode and under no_grad, lookups are the same and change no table, state or count."""
    module = collection(impl, "Adagrad")
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    trained = module(jagged(BAGS))["f"].detach()
    if way == "eval":
        module.eval()
    with torch.set_grad_enabled(way == "eval"):
        expect_bits(module(jagged(BAGS))["f"].detach(), trained, "output")
    expect_unchanged(before, tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-027")
@pytest.mark.needs("EmbeddingBagCollection", "Adam")
def test_reading_does_not_count(impl):
    """Forward passes without a backward pass do not affect Adam's bias correction."""
    module, other = collection(impl, "Adam"), collection(impl, "Adam")
    with torch.no_grad():
        for _ in range(3):
            module(jagged(BAGS))
    module(jagged(BAGS))
    for each in (module, other):
        fit(each, jagged(BAGS), steps=2)
    expect_unchanged(
        snapshot(tables_and_state(other)), tables_and_state(module), "the module that was read in between"
    )


@pytest.mark.clause("FUSED-028")
@pytest.mark.needs("EmbeddingBagCollection")
def test_backward_through_eval(impl):
    """Observe what a backward pass through a forward pass in eval mode does to the tables."""
    module = collection(impl)
    before = snapshot(tables_of(module))
    module.eval()

    def train() -> str:
        lookups(module, jagged(BAGS)).backward()
        same = all(torch.equal(before[name], table.detach()) for name, table in tables_of(module).items())
        return "tables unchanged" if same else "tables updated"

    return outcome(train)


@pytest.mark.clause("FUSED-029")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("good", [True, False])
def test_inputs_are_left_alone(impl, good):
    """The caller's tensors are not modified, also if they are invalid."""
    module = collection(impl, tables=ONE_TABLE)
    features = jagged({"f": BAGS["f"]}) if good else invalid_feature("too large")
    before = snapshot(features)
    try:
        lookups(module, features).backward()
    except REFUSALS:
        expect(not good, "no error for good features", "an error")
    finally:
        if not good:
            drop_pending_error(module, jagged({"f": BAGS["f"]}))
    expect_unchanged(before, {name: list(parts) for name, parts in features.items()}, "the features")


@pytest.mark.clause("FUSED-030")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("values", ["int32", "int64"])
@pytest.mark.parametrize("offsets", ["int32", "int64"])
def test_integer_dtypes(impl, values, offsets):
    """Values and offsets of int32 and int64, in any combination, give the same lookups and updates."""
    module, other = collection(impl), collection(impl)
    features = jagged(BAGS)
    given = {
        name: (parts[0].to(getattr(torch, values)), parts[1].to(getattr(torch, offsets)))
        for name, parts in features.items()
    }
    expect_bits(module(given)["f"].detach(), other(features)["f"].detach(), "output")
    fit(module, given)
    fit(other, features)
    expect_unchanged(snapshot(tables_and_state(other)), tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-031")
@pytest.mark.needs("EmbeddingBagCollection")
def test_output_dtype(impl, dtype):
    """Observe which dtype the output has for each table dtype."""
    return outcome(lambda: str(collection(impl, dtype=dtype)(jagged(BAGS))["f"].dtype))


@pytest.mark.clause("FUSED-033")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_embeddings", 0),
        ("num_embeddings", -1),
        ("num_embeddings", 2.5),
        ("embedding_dim", 0),
        ("embedding_dim", True),
        ("name", ""),
        ("name", "a.b"),
        ("feature_names", []),
        ("feature_names", ["f", "f"]),
        ("data_type", "int64"),
        ("pooling", "SUM"),
    ],
)
def test_bad_tables(impl, name, value):
    """An invalid table raises a ValueError that names the field."""
    fields: dict[str, Any] = {"num_embeddings": 4, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    fields[name] = torch.int64 if value == "int64" else value

    def make() -> None:
        configs = [impl.EmbeddingBagConfig(**fields)]
        impl.EmbeddingBagCollection(configs, *unwrapped(impl.SGD, {"lr": 0.1}), device=the_device())

    expect_raises(make, ValueError, mentions=[name], expected=f"ValueError for {name}={value!r}")


@pytest.mark.clause("FUSED-033")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize("tables", [[], [["t", 4, 4, ["f"]], ["t", 5, 4, ["g"]]]])
def test_bad_lists_of_tables(impl, tables):
    """An empty list of tables, and two tables of unlike size with one name, raise ValueError."""
    expect_raises(lambda: collection(impl, tables=tables), ValueError, expected="ValueError")


@pytest.mark.clause("FUSED-034")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.checks_options")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"lr": -0.1}),
        ("SGD", {"lr": float("nan")}),
        ("Adagrad", {"eps": -1e-8}),
        ("RowWiseAdagrad", {"weight_decay": -0.1}),
        ("Adam", {"betas": (0.9, 1.0)}),
        ("Adam", {"eps": float("inf")}),
        ("LAMB", {"lr": float("inf")}),
    ],
)
def test_bad_options(impl, optimizer, options):
    """An option of the optimizer that is out of range raises a ValueError that names the option."""
    (name,) = options
    expect_raises(
        lambda: collection(impl, optimizer, options),
        ValueError,
        mentions=[name],
        expected=f"ValueError for {name}",
    )


@pytest.mark.clause("FUSED-034")
@pytest.mark.needs("EmbeddingBagCollection", "SGD.checks_options")
@pytest.mark.parametrize("wrong", ["LBFGS", "unknown option"])
def test_bad_optimizer(impl, wrong):
    """An optimizer class that cannot be fused, and an unknown option, raise ValueError."""
    config = impl.EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name="t", feature_names=["f"])
    chosen, options = (
        (torch.optim.LBFGS, {}) if wrong == "LBFGS" else unwrapped(impl.SGD, {"lr": 0.1, "speed": 3})
    )
    expect_raises(
        lambda: impl.EmbeddingBagCollection([config], chosen, options, device=the_device()),
        ValueError,
        expected="ValueError",
    )
