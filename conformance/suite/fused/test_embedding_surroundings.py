"""Embedding modules: evaluation between training steps, compiled models, deferred initialization."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.device import tensor, the_device
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    TABLES,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.in_backward import COMPILED, apply_in_backward
from keyedopt.conformance.suite.support.inputs import INTERPRETED

#: One feature of two bags, with a duplicate.
BAG = {"f": [[0, 3, 3], [5]]}

#: Three tables of equal width with one feature each.
THREE_TABLES = (("t", 6, 4, ("f",)), ("u", 6, 4, ("g",)), ("v", 6, 4, ("h",)))


def unlike_poolings(*poolings):
    """Return tables with these poolings."""
    return [(*table, pooling) for table, pooling in zip(TABLES, poolings, strict=True)]


@pytest.mark.clause("FUSED-027")
@pytest.mark.needs("{kind}", "Adagrad")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("way", ["inference_mode"] if INTERPRETED else ["eval", "no_grad", "inference_mode"])
def test_reading_in_between(impl, kind, way):
    """Lookups before training, before a backward pass and after it do not affect training."""
    module, other = (collection(impl, "Adagrad", tables=ONE_TABLE, kind=kind) for _ in range(2))
    modes = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

    def read():
        module.train(way != "eval")
        with modes[way]():  # the features are built in inference mode, too
            output = module(jagged(BAG))["f"]
        expect_bits(output.detach().clone(), other(jagged(BAG))["f"].detach(), "what is read")
        module.train()

    read()
    for seed in range(2):
        loss = lookups(module, jagged(BAG), seed)
        read()
        loss.backward()
        fit(other, jagged(BAG), seed=seed)
    read()
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state of the module that was read")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-092")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad")
@pytest.mark.parametrize("what", COMPILED)
def test_compiled(impl, what):
    """A compiled model, and a compiled step with its backward pass, train as without compiling.

    The learning rate changes after the first step; after the second, a load brings back the state and the
    learning rate of the first.
    """
    module, other = (collection(impl, "Adagrad", tables=ONE_TABLE) for _ in range(2))

    def loss(model, features, scale):
        return (model(features)["f"] * scale).sum()

    def step(model, features, scale):
        value = loss(model, features, scale)
        value.backward()
        return value.detach()

    compiled = torch.compile(loss if what == "model" else step, backend="eager")
    saved = {}
    for number, scale in enumerate((tensor(2.0), tensor(-3.0), tensor(0.5))):
        for tables in (module, other):
            optimizer = tables.fused_optimizer
            if number == 1:
                saved[tables] = copy.deepcopy(optimizer.state_dict())
                optimizer.param_groups[0]["lr"] = 0.25
            if number == 2:
                optimizer.load_state_dict(saved[tables])
        seen = compiled(module, jagged(BAG), scale)
        if what == "model":
            seen.backward()
        expect_bits(seen.detach(), step(other, jagged(BAG), scale), "the loss")
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state of the compiled model")
    if what == "model":
        for model, tables in ((compiled, module), (loss, other)):
            seen = model(tables.eval(), jagged(BAG), tensor(2.0))
            if seen.requires_grad:
                seen.backward()
        before = snapshot(tables_and_state(other))
        expect_unchanged(before, tables_and_state(module), "tables and state after evaluation")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-092")
@pytest.mark.needs("EmbeddingBagCollection", "Adam")
def test_compiled_with_a_table_outside_the_loss(impl):
    """A compiled model leaves a table that its loss does not use as it is, also the moments and counts."""
    module = collection(impl, "Adam")

    def outputs(features):
        return list(module(features).values())

    compiled = torch.compile(outputs, backend="eager")
    first, *_, last = compiled(jagged(BAGS))
    (first.sum() + last.sum()).backward()
    before = snapshot(tables_and_state(module))
    *_, last = compiled(jagged(BAGS))
    last.sum().backward()
    after = tables_and_state(module)
    for part, key in (("tables", "t"), ("state", "t.weight")):
        expect_unchanged(before[part][key], after[part][key], f"{part} of the table outside the loss")
    expect(not same_bits(after["tables"]["u"].detach(), before["tables"]["u"]), "the other updated", "not")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-101")
@pytest.mark.needs("{kind}", "Adam")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_compiled_into_one_graph(impl, kind):
    """A model in one graph trains and evaluates as without compiling; a second forward pass counts, too."""
    tables = unlike_poolings("SUM", "MEAN") if kind == "EmbeddingBagCollection" else TABLES
    module, other = (collection(impl, "Adam", tables=tables, kind=kind) for _ in range(2))

    def loss(tables, features):
        found = [*tables(features).values(), *tables(features).values()]
        # Gradients are small integers: their sums are exact in any order.
        return sum((place + 1) * output.sum() for place, output in enumerate(found))

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for _ in range(2):
        for each, tables in ((compiled, module), (loss, other)):
            each(tables, jagged(BAGS)).backward()
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state of the compiled model")
    module.eval()
    seen = compiled(module, jagged(BAGS)).detach()
    expect_bits(seen, loss(other, jagged(BAGS)).detach(), "the loss in evaluation")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-101")
@pytest.mark.needs("EmbeddingBagCollection.frozen_tables", "apply_optimizer_in_backward")
@pytest.mark.parametrize("how", ["groups", "frozen", "weighted"])
def test_compiled_tables_that_differ(impl, how):
    """Tables of two groups, a frozen table, and weights of lookups train in one graph as without it."""
    module, other = (collection(impl, tables=THREE_TABLES, weighted=how == "weighted") for _ in range(2))
    for each in (module, other):
        middle = tables_of(each)["u"]
        if how == "groups":
            apply_in_backward(impl, torch.optim.SGD, [middle], {"lr": 0.5})
        else:
            middle.requires_grad_(how != "frozen")
    weights = {"f": [[0.5, 2.0, -1.0], [4.0]], "g": [[], [-0.5, 8.0]], "h": [[2.0, 0.25], [-4.0]]}
    features = jagged(BAGS, weights if how == "weighted" else None)

    def loss(tables, features):
        return sum((place + 1) * one.sum() for place, one in enumerate(tables(features).values()))

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for _ in range(2):
        expected = loss(other, features)
        seen = compiled(module, features)
        expect_bits(seen.detach(), expected.detach(), "the loss")
        expected.backward()
        seen.backward()
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state of the compiled model")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-101")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad")
def test_exported(impl):
    """An exported module gives the outputs of the module, also for features that it was not exported with."""
    sizes = {name: ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}) for name in BAGS}
    for poolings in (("SUM", "MEAN"), ("MEAN", "SUM")):
        module = collection(impl, "Adagrad", tables=unlike_poolings(*poolings)).eval()
        given = (jagged(BAGS),)
        program = torch.export.export(module, given, dynamic_shapes=(sizes,), strict=False).module()
        for bags in (BAGS, {"f": [[5, 0, 4], []], "g": [[3], [2]], "h": [[], [4, 1]]}):
            seen, expected = program(jagged(bags)), module(jagged(bags))
            for name, output in expected.items():
                expect_bits(seen[name].detach(), output.detach(), f"output {name} of the exported module")


@pytest.mark.clause("FUSED-100")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "LAMB", "Ftrl"])
def test_deferred_initialization(impl, optimizer):
    """Tables from the device "meta" have initial state after `to_empty`, and train as tables made at once."""
    expect_deferred(impl, optimizer, {})


@pytest.mark.clause("FUSED-100")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.initial_accumulator_value")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "Ftrl"])
def test_deferred_sums(impl, optimizer):
    """The sums of tables from the device "meta" begin at initial_accumulator_value."""
    expect_deferred(impl, optimizer, {"initial_accumulator_value": 0.25})


@pytest.mark.clause("FUSED-100")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.{option}")
@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("SGD", "momentum", 0.5),
        ("RowWiseAdagrad", "lr_decay", 0.5),
        ("Adam", "bias_correction", "per_row"),
        ("AccumulateSGD", "accumulate_step", 2),
        ("AccumulateAdam", "accumulate_step", 2),
        ("AccumulateRowWiseAdagrad", "accumulate_step", 4),
    ],
)
def test_deferred_states(impl, optimizer, option, value):
    """Momentum, counts and windows of tables from the device "meta" are those of tables made at once."""
    accumulating = {"use_accumulate": True} if option == "accumulate_step" else {}
    expect_deferred(impl, optimizer, {option: value, **accumulating})


@pytest.mark.clause("FUSED-100", "FUSED-096")
@pytest.mark.plain_only("tables on meta have no values")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.optimizer_state_dtypes")
@pytest.mark.parametrize("optimizer", ["SGD", "LarsSGD", "Adam", "PartialRowWiseAdam"])
@pytest.mark.parametrize("momentum", ["float16", "bfloat16"])
def test_deferred_momentum_in_half_precision(impl, momentum, optimizer):
    """The momentum of tables from the device "meta" has the dtype of optimizer_state_dtypes."""
    options = {"momentum": 0.9} if "SGD" in optimizer else {}
    dtypes = {"optimizer_state_dtypes": {"momentum1": getattr(torch, momentum)}}
    module = expect_deferred(impl, optimizer, options | dtypes)
    for key, entry in module.fused_optimizer.state_dict()["state"].items():
        found = [one.dtype for name, one in entry.items() if name.endswith(".momentum1")]
        expect_equal(found, [getattr(torch, momentum)], f"dtype of the momentum of {key}")


@pytest.mark.clause("FUSED-100")
@pytest.mark.plain_only("it gives each of two tables a group")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward")
def test_deferred_groups(impl):
    """Tables of two groups from the device "meta" begin with the state of their own group."""
    own = {"lr": 0.25, "initial_accumulator_value": 0.5}
    expect_deferred(impl, "Adagrad", {"lr": 0.5, "initial_accumulator_value": 0.25}, own)


def expect_deferred(impl, optimizer, options, own=None):
    """Return a module that was made on "meta"; fail unless it equals and trains as one that was made at once.

    With the options `own` each table has a group: t with the options, u with these.
    """
    first = None if own else optimizer
    other = collection(impl, first, options)
    module = collection(impl, first, options, device="meta")
    for each in (module, other) if own else ():
        for weight, one in zip(each.parameters(), (options, own), strict=True):
            apply_in_backward(impl, getattr(torch.optim, optimizer), [weight], one)
    assert all(table.is_meta for table in tables_of(module).values()), "tables on meta have no memory"
    module.to_empty(device=the_device())
    with torch.no_grad():
        for name, table in tables_of(module).items():
            table.copy_(tables_of(other)[name])
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state after to_empty")
    for steps in (2, 1):  # the last window of two is not full
        fit(module, jagged(BAGS), steps=steps)
        fit(other, jagged(BAGS), steps=steps)
        before = snapshot(tables_and_state(other))
        expect_unchanged(before, tables_and_state(module), "tables and state after training")
    return module


@pytest.mark.clause("FUSED-022", "FUSED-036")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad")
@pytest.mark.parametrize("place", range(3), ids=["values", "offsets", "weights"])
def test_features_with_strides(impl, place):
    """Values, offsets or weights in a column of a larger tensor give the same lookups and updates."""
    given = jagged(BAG, {"f": [[0.5, 2.0, -1.0], [3.0]]})["f"]
    column = torch.stack([given[place], torch.zeros_like(given[place])], dim=1)[:, 0]
    strided = {"f": (*given[:place], column, *given[place + 1 :])}
    module, other = (collection(impl, "Adagrad", tables=ONE_TABLE, weighted=True) for _ in range(2))
    expect_bits(module(strided)["f"].detach(), other({"f": given})["f"].detach(), "output")
    fit(module, strided)
    fit(other, {"f": given})
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state of the module")
