"""Embedding modules: the gradient of a row, with weights, means, and tensors of any layout."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.device import as_tensor, tensor, zeros
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    ONE_TABLE,
    collection,
    jagged,
    lookups,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import INTERPRETED, _numbers

KINDS = [("EmbeddingBagCollection", name) for name in FUSED_OPTIMIZERS] + [("EmbeddingCollection", "Adagrad")]
WEIGHTS = {"f": [[0.5, 2.0, -1.0], [3.0]], "g": [[], [0.25, 1.5]], "h": [[1.0, -2.0], [0.5]]}


def with_gaps(features: Any, layout: str) -> Any:
    """Lay the tensors of features out with gaps, at an offset into their memory."""
    if layout == "dense":
        return features

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        held = torch.full((3 * len(tensor) + 1,), 1, dtype=tensor.dtype, device=tensor.device)
        held[1::3] = tensor
        return held[1::3]

    return {name: tuple(map(spread, parts)) for name, parts in features.items()}


@pytest.mark.clause("FUSED-088")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("EmbeddingBagCollection", "SUM"),
        ("EmbeddingBagCollection", "MEAN"),
        ("EmbeddingCollection", None),
    ],
    ids=["sum", "mean", "unpooled"],
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_gradient_of_rows(impl, kind, pooling, weighted, layout):
    """A row gets the gradient of its bag, times its weight, divided by the number of rows for MEAN."""
    module = collection(impl, options={"lr": 1.0}, kind=kind, pooling=pooling or "SUM", weighted=weighted)
    tables = tables_of(module)
    before = {name: exactly(table) for name, table in tables.items()}
    wanted = {name: table.clone() for name, table in before.items()}
    outputs = module(with_gaps(jagged(BAGS, WEIGHTS if weighted else None), layout))
    loss = zeros(())
    for seed, (feature, name) in enumerate((("f", "t"), ("g", "t"), ("h", "u"))):
        output = outputs[feature]
        grads = _numbers(output.shape[::-1], seed).t().to(output.device, output.dtype)
        if layout == "dense":
            grads = grads.contiguous()
        rows = []
        for bag, listed in enumerate(BAGS[feature]):
            for place, row in enumerate(listed):
                factor = WEIGHTS[feature][bag][place] if weighted else 1.0
                at = len(rows) if pooling is None else bag
                share = len(listed) if pooling == "MEAN" else 1
                wanted[name][row] -= factor / share * exactly(grads[at])
                rows.append(factor * before[name][row])
        if pooling is None:
            expect_close(output.detach(), torch.stack(rows), f"output of {feature}")
        loss = loss + (output * grads).sum()
    loss.backward()
    for name, table in tables.items():
        expect_near(table, wanted[name], f"table {name}")


@pytest.mark.clause("FUSED-047")
@pytest.mark.needs("EmbeddingCollection")
def test_gradient_of_unpooled_weights(impl):
    """Without pooling, the weights of lookups also receive their gradient."""
    module = collection(impl, kind="EmbeddingCollection", tables=ONE_TABLE, weighted=True)
    rows = tables_of(module)["t"].detach().double()[[0, 1, 1]]
    weights = tensor([0.5, 2.0, -1.0], requires_grad=True)
    output = module({"f": (tensor([0, 1, 1]), tensor([0, 2, 3]), weights)})["f"]
    grads = as_tensor(_numbers((3, 4), 5))
    (output * grads.to(output.dtype)).sum().backward()
    expect_close(weights.grad, (rows * grads).sum(dim=1), "gradient of the weights", ulps=64)


@pytest.mark.clause("FUSED-036")
@pytest.mark.needs("{kind}", "{optimizer}")
@pytest.mark.parametrize(("kind", "optimizer"), KINDS)
@pytest.mark.parametrize("times", [6] if INTERPRETED else [3, 1500])
def test_a_row_of_many(impl, kind, optimizer, times):
    """A row that is looked up many times is updated once, as with one lookup and the summed gradient."""
    tables = (("t", 300, 4, ("f",)),)
    options = {} if optimizer in ("SGD", "Adagrad", "SparseAdam") else {"weight_decay": 0.25}
    module, other = (collection(impl, optimizer, options, tables, kind) for _ in range(2))
    often = [7 if i % 3 else (i * 31) % 300 for i in range(3 * times // 2)] + [7, 299]
    for step in range(2):
        grads = (_numbers((len(often), 4), step) * 64).round() / 64  # sums of these are exact in float32
        rows, places = torch.tensor(often).unique(return_inverse=True)
        total = torch.zeros(len(rows), 4, dtype=torch.float64).index_add(0, places, grads)
        train_rows(module, often, grads)
        train_rows(other, rows.tolist(), total)
    expect_near(tables_of(module)["t"], tables_of(other)["t"], "the table")


@pytest.mark.clause("FUSED-084")
@pytest.mark.needs("{kind}", "EmbeddingBagCollection.any_width", "{optimizer}")
@pytest.mark.parametrize(("kind", "optimizer"), KINDS)
@pytest.mark.parametrize("copies", [11] if INTERPRETED else [11, 171])
def test_rows_of_copies(impl, kind, optimizer, copies):
    """A row that repeats three numbers, with a gradient that repeats, is updated to a row that repeats."""
    narrow, wide = (
        collection(impl, optimizer, None, [("t", 4, width, ("f",))], kind) for width in (3, 3 * copies)
    )
    with torch.no_grad():
        tables_of(wide)["t"].copy_(tables_of(narrow)["t"].repeat(1, copies))
    for step, rows in enumerate(([0, 2, 0], [2, 3])):
        grads = _numbers((len(rows), 3), step)
        train_rows(narrow, rows, grads)
        train_rows(wide, rows, grads.repeat(1, copies))
    wanted = tables_of(narrow)["t"].detach().double().repeat(1, copies)
    expect_near(tables_of(wide)["t"], wanted, "the wide table")


@pytest.mark.clause("FUSED-085")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_tables_of_one_module(impl, optimizer):
    """Tables of different rows, widths and features in one module train like separate modules."""
    tables = (("t", 6, 4, ("f", "g")), ("u", 4, 12, ("h",)), ("v", 5, 8, ("k",)))
    whole = collection(impl, optimizer, tables=tables)
    parts = [collection(impl, optimizer, tables=[table]) for table in tables]
    start = {name: table.detach().clone() for name, table in tables_of(whole).items()}
    for part in parts:
        for name, table in tables_of(part).items():
            table.detach().copy_(start[name])
    for bags in (
        {**BAGS, "k": [[4], [2, 2]]},
        {"f": [[5], []], "g": [[1], [0]], "h": [[], [2]], "k": [[0], []]},
    ):
        for modules in ([whole], parts):  # the parts in one backward pass, too
            outputs = {name: output for each in modules for name, output in each(jagged(bags)).items()}
            sum(
                (
                    outputs[one] * as_tensor(_numbers(outputs[one].shape, ord(one)), dtype=outputs[one].dtype)
                ).sum()
                for one in outputs
            ).backward()
    for part in parts:
        for name, table in tables_of(part).items():
            expect_near(tables_of(whole)[name], table, f"table {name}")
            state = (each.fused_optimizer.state_dict()["state"][f"{name}.weight"] for each in (whole, part))
            for (key, value), other in zip(next(state).items(), next(state).values(), strict=True):
                expect_near(value, other, key)


@pytest.mark.clause("FUSED-061")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "Adam", "LAMB", "LarsSGD"])
def test_rate_of_later_steps(impl, optimizer):
    """A learning rate that is set after a step is used by the next, like in a fresh module."""
    module = collection(impl, optimizer, tables=ONE_TABLE)
    train_rows(module, [0, 3], _numbers((2, 4), 1))
    module.fused_optimizer.param_groups[0]["lr"] = 0.5
    other = collection(impl, optimizer, {"lr": 0.5}, tables=ONE_TABLE)
    tables_of(other)["t"].detach().copy_(tables_of(module)["t"].detach())
    other.fused_optimizer.load_state_dict({"state": snapshot(module.fused_optimizer.state_dict()["state"])})
    for one in (module, other):
        train_rows(one, [0, 3], _numbers((2, 4), 7))
    expect_near(
        tables_of(module)["t"], tables_of(other)["t"], "the table after a step at another learning rate"
    )


@pytest.mark.clause("FUSED-062")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward")
def test_rate_applied_between_forward_and_backward(impl):
    """A learning rate that is applied after the forward pass is used by its backward pass."""
    module, other = collection(impl), collection(impl, options={"lr": 0.5})
    outputs = module(jagged(BAGS))
    apply_in_backward(impl, torch.optim.SGD, module.parameters(), {"lr": 0.5})
    for found in (outputs, other(jagged(BAGS))):
        sum(output.sum() for output in found.values()).backward()
    for name, table in tables_of(module).items():
        expect_near(table, tables_of(other)[name], f"table {name}")


@pytest.mark.clause("FUSED-062")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward")
@pytest.mark.parametrize("groups", [("t",), ("v",), ("t", "uv"), ("u", "tv"), ("v", "tu")], ids="-".join)
def test_rates_of_tables_between_forward_and_backward(impl, groups):
    """The backward pass uses a learning rate that a table got after the forward pass, for that table."""
    tables = [("t", 6, 4, ("f",)), ("u", 6, 4, ("g",)), ("v", 6, 4, ("h",))]
    module, other = (collection(impl, tables=tables) for _ in range(2))
    outputs = module(jagged(BAGS))
    for each in (module, other):
        for names, rate in zip(groups, (0.5, 0.25), strict=False):
            apply_in_backward(impl, torch.optim.SGD, [tables_of(each)[name] for name in names], {"lr": rate})
    for found in (outputs, other(jagged(BAGS))):
        sum(output.sum() for output in found.values()).backward()
    for name, table in tables_of(module).items():
        expect_near(table, tables_of(other)[name], f"table {name}")


@pytest.mark.clause("FUSED-047")
@pytest.mark.needs("{kind}", "{kind}.without_optimizer")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("how", ["plain", "eval"])
def test_gradient_of_weights_without_training(impl, kind, how):
    """Tables without an optimizer, and in evaluation, multiply by weights, which receive their gradient."""
    module = collection(impl, None if how == "plain" else "SGD", kind=kind, weighted=True)
    module.train(how == "plain")
    features = jagged(BAGS, WEIGHTS)
    for *_, weights in features.values():
        weights.requires_grad_()
    outputs, looked_up = module(features), {}
    for name, table in (("f", "t"), ("g", "t"), ("h", "u")):
        values, _, weights = features[name]
        rows = looked_up[name] = tables_of(module)[table].detach()[values]
        given = (rows * weights.detach()[:, None]).sum(dim=0)
        expect_near(outputs[name].detach().sum(dim=0), given, f"the sum of output {name}")
    sum(output.sum() for output in outputs.values()).backward()
    for name, rows in looked_up.items():
        expect_near(features[name][2].grad, rows.sum(dim=1), f"gradient of the weights of {name}")


@pytest.mark.clause("FUSED-047")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward")
def test_gradient_of_weights_in_several_groups(impl):
    """The weights of lookups in tables with groups of their own receive their gradient."""
    module = collection(impl, weighted=True)
    tables = snapshot(tables_of(module))
    apply_in_backward(impl, torch.optim.SGD, [tables_of(module)["u"]], {"lr": 0.5})
    features = jagged(BAGS, WEIGHTS)
    for *_, weights in features.values():
        weights.requires_grad_()
    outputs = module(features)
    sum(output.sum() for output in outputs.values()).backward()
    for name, table in (("f", "t"), ("g", "t"), ("h", "u")):
        values, _, weights = features[name]
        expect_near(weights.grad, tables[table][values].sum(dim=1), f"gradient of the weights of {name}")


@pytest.mark.clause("FUSED-047")
@pytest.mark.needs("EmbeddingBagCollection.frozen_tables")
@pytest.mark.parametrize(("name", "table"), [("f", "t"), ("g", "t"), ("h", "u")])
def test_gradient_of_the_weights_of_one_feature(impl, name, table):
    """The weights of one feature receive their gradient, whichever it is, also if all tables are frozen."""
    module = collection(impl, weighted=True)
    for one in tables_of(module).values():
        one.requires_grad_(False)
    features = jagged(BAGS, WEIGHTS)
    values, _, weights = features[name]
    weights.requires_grad_()
    outputs = module(features)
    sum(output.sum() for output in outputs.values()).backward()
    expect_near(weights.grad, tables_of(module)[table].detach()[values].sum(dim=1), "gradient of the weights")


@pytest.mark.clause("FUSED-042")
@pytest.mark.needs(
    "EmbeddingBagCollection", "EmbeddingBagCollection.frozen_tables", "apply_optimizer_in_backward"
)
@pytest.mark.parametrize("frozen", ["t", "u"])
def test_frozen_group(impl, frozen):
    """A frozen table keeps its bits beside one with options of its own, which is trained."""
    module = collection(impl)
    tables = {name: tables_of(module)[name] for name in ("t", "u")}
    apply_in_backward(impl, torch.optim.SGD, [tables["u"]], {"lr": 0.5})
    tables[frozen].requires_grad_(False)
    before = snapshot(tables)
    outputs = module(jagged(BAGS))
    sum(output.sum() for output in outputs.values()).backward()
    kept = [name for name, table in tables.items() if same_bits(table.detach(), before[name])]
    expect_equal(kept, [frozen], "tables that keep their bits")


@pytest.mark.clause("FUSED-087")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("part", ["values", "offsets", "weights"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_changed_features(impl, part, pooling):
    """Changing the features before the backward pass raises an error there, or has no effect."""
    module, other = (collection(impl, tables=ONE_TABLE, weighted=True, pooling=pooling) for _ in range(2))
    bags, weights = {"f": [[1, 4], [2]]}, {"f": [[0.5, 2.0], [3.0]]}
    before = tables_of(module)["t"].detach().clone()
    features, later = jagged(bags, weights), jagged({"f": [[3], [0, 5]]}, {"f": [[4.0], [8.0, 16.0]]})
    loss, wanted = (
        (each(one)["f"] * as_tensor(_numbers((2, 4), 3))).sum()
        for each, one in ((module, features), (other, jagged(bags, weights)))
    )
    number = ("values", "offsets", "weights").index(part)
    features["f"][number].copy_(later["f"][number])
    wanted.backward()
    try:
        loss.backward()
    except RuntimeError:
        expect_bits(tables_of(module)["t"].detach(), before, "the table, after an error")
        return
    expect_near(tables_of(module)["t"], tables_of(other)["t"], "the table")


@pytest.mark.clause("FUSED-087")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("part", ["values", "offsets", "weights", "all"])
def test_changed_features_of_other_dtypes(impl, part, kind):
    """The same holds for features in int32, with weights in float64, of the last of two tables."""
    module, other = (collection(impl, kind=kind, weighted=True) for _ in range(2))
    before = snapshot(tables_of(module))

    def features():
        made = jagged(BAGS, WEIGHTS)
        return {name: (one.int(), ends.int(), weight.double()) for name, (one, ends, weight) in made.items()}

    given = features()
    loss, wanted = lookups(module, given, 3), lookups(other, features(), 3)
    later = tensor([1, 2, 4]), tensor([0, 1, 3]), tensor([8.0, 16.0, -4.0])
    for number, name in enumerate(("values", "offsets", "weights")):
        if part in (name, "all"):
            given["h"][number].copy_(later[number])
    wanted.backward()
    try:
        loss.backward()
    except RuntimeError:
        expect_unchanged(before, tables_of(module), "the tables, after an error")
        return
    for name in ("t", "u"):
        expect_near(tables_of(module)[name], tables_of(other)[name], f"table {name}")
