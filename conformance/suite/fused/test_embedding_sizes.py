"""Embedding modules: other sizes, many steps, and events between steps."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import arange, full, ones, tensor, the_device, zeros
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.inputs import INTERPRETED, parameter

#: More than a number of 16 bits counts; Triton's interpreter has time for fewer.
LOOKUPS = 1_400 if INTERPRETED else 70_000


def expect_sums(module: Any, rows: torch.Tensor, grads: torch.Tensor, before: torch.Tensor) -> None:
    """Expect descent with each row's summed gradients, to 1e-3 of their magnitudes, with lr = 0.125."""
    zeros = torch.zeros_like(before, dtype=torch.float64)
    total, sizes = (zeros.index_add(0, rows, each) for each in (grads.double(), grads.double().abs()))
    moved = before.double() - tables_of(module)["t"].detach().double()
    off = float(((moved - 0.125 * total).abs() / (0.125 * sizes + 1e-3)).max())
    expect(off <= 1e-3, "rows moved by their gradients, to 1e-3 of their sizes", f"an error of {off} of them")


@pytest.mark.clause("FUSED-036", "FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.any_width", "SGD")
@pytest.mark.parametrize("width", [1, 3, 64, 513, 1030])
def test_width(impl, width):
    """Tables of any width are looked up and updated completely."""
    module = collection(impl, tables=[("t", 5, width, ("f",))])
    before = tables_of(module)["t"].detach().clone()
    features = jagged({"f": [[1, 4, 1], [], [0]]})
    output = module(features)["f"]
    wanted = torch.stack([2 * before[1].double() + before[4], zeros(width), before[0].double()])
    expect_close(output.detach(), wanted, "the output", ulps=8)
    factor = parameter(3, width, seed=7).detach()
    (output * factor).sum().backward()
    rows = tensor([1, 4, 1, 0])
    expect_sums(module, rows, factor[torch.tensor([0, 0, 0, 2])], before)


@pytest.mark.clause("FUSED-036", "FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection", "SGD")
@pytest.mark.parametrize("rows", [3, 70_001])
@pytest.mark.parametrize("bags", [1, 7, LOOKUPS], ids=["one", "seven", "each"])
def test_many_lookups(impl, rows, bags):
    """Bags of any length and batches of any size are looked up and updated completely."""
    module = collection(impl, tables=[("t", rows, 4, ("f",))])
    before = tables_of(module)["t"].detach().clone()
    values = arange(LOOKUPS) * 7919 % rows
    length = LOOKUPS // bags
    offsets = arange(bags + 1) * length
    output = module({"f": (values, offsets)})["f"]
    wanted = before.double()[values].reshape(bags, length, 4).sum(1)
    off = float((output.detach().double() - wanted).abs().max()) / length
    expect(off <= 1e-3, "outputs to 1e-3 of the length of a bag", f"an error of {off} of it")
    factor = parameter(bags, 4, seed=7).detach() / 1024
    (output * factor).sum().backward()
    expect_sums(module, values, factor.repeat_interleave(length, 0), before)


@pytest.mark.clause("FUSED-035")
@pytest.mark.needs("EmbeddingBagCollection", "SGD")
def test_many_tables(impl):
    """Every table is updated, however many there are."""
    names = [f"t{index}" for index in range(70)]
    module = collection(impl, tables=[(name, 3, 4, (f"f{name}",)) for name in names])
    before = {name: table.detach().clone() for name, table in tables_of(module).items()}
    outputs = module(jagged({f"f{name}": [[1]] for name in names}))
    sum(output.sum() for output in outputs.values()).backward()
    for name, table in tables_of(module).items():
        wanted = before[name].double()
        wanted[1] -= 0.125
        expect_close(table.detach(), wanted, f"table {name}", ulps=8)


@pytest.mark.clause("FUSED-027")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
def test_training_goes_on_after_evaluation(impl, optimizer):
    """Lookups in eval mode and under no_grad do not affect later training."""
    module, other = (collection(impl, optimizer) for _ in range(2))
    features = jagged(BAGS)
    for one in (module, other):
        fit(one, features)
    module.eval()
    module(features)
    module.train()
    with torch.no_grad():
        module(features)
    for one in (module, other):
        fit(one, features, 2, seed=5)
    expect_unchanged(snapshot(tables_and_state(other)), tables_and_state(module), "tables and state")


@pytest.mark.clause("FUSED-042")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.frozen_tables", "SGD")
def test_a_table_that_was_frozen_trains_again(impl):
    """A table whose weight requires a gradient again is trained again, whichever table it is."""
    module = collection(impl)
    tables = {name: tables_of(module)[name] for name in ("t", "u")}
    for frozen in ("", "t", "u", "t", "", "u"):
        for name, table in tables.items():
            table.requires_grad_(name != frozen)
        before = snapshot(tables)
        fit(module, jagged(BAGS))
        kept = [name for name, table in tables.items() if same_bits(table.detach(), before[name])]
        expect_equal(kept, [frozen] if frozen else [], "tables that keep their bits")


#: Options of tables that are set in the groups, with other values than by default.
SET_IN_GROUPS = pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("Adam", "betas", (0.5, 0.75)),
        ("Adam", "eps", 0.125),
        ("Adam", "weight_decay", 0.25),
        ("PartialRowWiseAdam", "betas", (0.5, 0.75)),
        ("RowWiseAdagrad", "eps", 0.125),
        ("RowWiseAdagrad", "weight_decay", 0.25),
        ("Adagrad", "eps", 0.125),
        ("Adagrad", "lr_decay", 0.5),
        ("SGD", "momentum", 0.5),
        ("LarsSGD", "momentum", 0.5),
        ("Ftrl", "lr_power", -0.75),
        ("Ftrl", "beta", 0.5),
    ],
)


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.{option}")
@SET_IN_GROUPS
def test_options_set_in_a_group(impl, optimizer, option, value):
    """Changing an option that the groups show affects the next step, or raises an error."""
    value = tuple(value) if option == "betas" else value
    module = collection(impl, optimizer, tables=ONE_TABLE)
    other = collection(impl, optimizer, {option: value}, tables=ONE_TABLE)
    grads = [parameter(3, 4, seed=seed).detach() for seed in (3, 4)]
    try:
        for group in module.fused_optimizer.param_groups:
            if option not in group:
                return
            group[option] = value
        for grad in grads:
            train_rows(module, [0, 3, 5], grad)
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        expect_bits(
            tables_of(module)["t"].detach(), collection_start(impl, optimizer), "the table after an error"
        )
        return
    for grad in grads:
        train_rows(other, [0, 3, 5], grad)
    expect_close(tables_of(module)["t"].detach(), tables_of(other)["t"].detach().double(), "the table")


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.{option}")
@SET_IN_GROUPS
def test_options_set_after_a_step(impl, optimizer, option, value):
    """Changing an option after a step has an effect on the following steps, or raises an error."""
    module, other = (collection(impl, optimizer, tables=ONE_TABLE) for _ in range(2))
    for step in range(3):
        grad = parameter(3, 4, seed=step).detach()
        train_rows(other, [0, 3, 5], grad)
        try:
            for group in module.fused_optimizer.param_groups if step == 1 else ():
                if option not in group:
                    return
                group[option] = value
            train_rows(module, [0, 3, 5], grad)
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            expect(step > 0, "an error only after the change", f"one in step {step}")
            return
    same = same_bits(tables_of(module)["t"].detach(), tables_of(other)["t"].detach())
    expect(not same, f"another table with {option} = {value}", "the same")


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "AccumulateSGD")
def test_a_window_set_in_a_group(impl):
    """A length of the window that is set in the groups applies at once, or raises an error."""
    options = {"lr": 1.0, "use_accumulate": True, "accumulate_step": 8}
    module = collection(impl, "AccumulateSGD", options, tables=ONE_TABLE)
    before = tables_of(module)["t"].detach().clone()
    try:
        for step in range(6):
            for group in module.fused_optimizer.param_groups:
                if "accumulate_step" not in group:
                    return
                group["accumulate_step"] = 8 if step < 4 else 2
            train_rows(module, [3], ones(1, 4))
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        expect_bits(tables_of(module)["t"].detach(), before, "the table after an error")
        return
    expect_near(
        before[3] - tables_of(module)["t"].detach()[3], 5 * ones(4), "what the shorter window subtracted"
    )


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "AccumulateSGD")
@pytest.mark.parametrize("start", [True, False])
def test_accumulation_switched_in_a_group(impl, start):
    """Accumulation that is switched in the groups, on or off, is so in the next step, or raises an error."""
    options = {"lr": 1.0, "use_accumulate": start, "accumulate_step": 2}
    module = collection(impl, "AccumulateSGD", options, tables=ONE_TABLE)
    before = tables_of(module)["t"].detach().clone()
    try:
        for group in module.fused_optimizer.param_groups:
            if "use_accumulate" not in group:
                return
            group["use_accumulate"] = not start
        train_rows(module, [3], ones(1, 4))
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        expect_bits(tables_of(module)["t"].detach(), before, "the table after an error")
        return
    moved = before[3] - tables_of(module)["t"].detach()[3]
    expect_near(moved, ones(4) if start else torch.zeros(4), "what the first step subtracted")


def collection_start(impl: Any, optimizer: str) -> torch.Tensor:
    """Return the initial values of the only table."""
    return tables_of(collection(impl, optimizer, tables=ONE_TABLE))["t"].detach()


@pytest.mark.clause("FUSED-068")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adam", "PartialRowWiseAdam"])
@pytest.mark.parametrize("count", [99, 300, 9999])
def test_late_steps(impl, optimizer, count):
    """A loaded step count continues from its value, and with it the bias correction."""
    module = collection(impl, optimizer, {"betas": (0.75, 0.9999)}, tables=ONE_TABLE)
    saved = snapshot(module.fused_optimizer.state_dict())
    saved["state"]["t.weight"]["t.iter"].fill_(count)
    module.fused_optimizer.load_state_dict(saved)
    before = tables_of(module)["t"].detach()[2].double().clone()
    train_rows(module, [2], full((1, 4), 2.0))
    m, v = 0.25 * 2.0 / (1 - 0.75 ** (count + 1)), 1e-4 * 4.0 / (1 - 0.9999 ** (count + 1))
    moved = before - tables_of(module)["t"].detach()[2].double()
    off = float((moved / (0.125 * m / v**0.5) - 1).abs().max())
    expect(off < 1e-3, f"a step of {0.125 * m / v**0.5} to three digits", moved.tolist())
    seen = int(module.fused_optimizer.state_dict()["state"]["t.weight"]["t.iter"])
    expect_equal(seen, count + 1, "count of steps")


@pytest.mark.clause("FUSED-035")
@pytest.mark.needs("EmbeddingBagCollection", "SGD")
def test_two_backward_passes_through_one_forward(impl):
    """Each backward pass through a retained graph is an update."""
    module = collection(impl, tables=ONE_TABLE)
    before = tables_of(module)["t"].detach().double().clone()
    loss = module(jagged({"f": [[1, 4, 1]]}))["f"].sum()
    for count in (1, 2):
        loss.backward(retain_graph=count == 1)
        wanted = before.clone()
        wanted[1] -= count * 0.25
        wanted[4] -= count * 0.125
        expect_close(tables_of(module)["t"].detach(), wanted, f"the table after {count} passes", ulps=8)


@pytest.mark.clause("FUSED-090")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.initial_values", "SGD")
@pytest.mark.parametrize("bounds", [(), (-3.0, -2.0), (-1.0, 0.0), (0.0, 0.5)])
def test_initial_values(impl, bounds):
    """Without init_fn initial values are uniform between their bounds, by default ±√(1/rows)."""
    given = dict(zip(("weight_init_min", "weight_init_max"), bounds, strict=False))
    configs = [
        impl.EmbeddingBagConfig(num_embeddings=64, embedding_dim=16, name=name, feature_names=[name], **given)
        for name in ("t", "u")
    ]
    tables = tables_of(
        impl.EmbeddingBagCollection(configs, *unwrapped(impl.SGD, {"lr": 0.125}), device=the_device())
    )
    low, high = bounds or (-0.125, 0.125)
    for name, table in tables.items():
        places = (table.detach() - low) / (high - low)
        counts = places.flatten().histc(4, 0.0, 1.0)  # a value outside the bounds is in no quarter
        even = float(counts.sum()) == 1024 and bool((counts > 128).all())
        expect(
            even, f"1024 values of {name} from {low} to {high}, a quarter in each quarter", counts.tolist()
        )
    expect(not same_bits(tables["t"], tables["u"]), "other values in each table", "the same ones")


@pytest.mark.clause("FUSED-090")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.initial_values", "SGD")
@pytest.mark.parametrize("bound", [0.0, -0.25])
def test_initial_values_with_equal_bounds(impl, bound):
    """Equal bounds are the value of every element."""
    config = impl.EmbeddingBagConfig(
        num_embeddings=4,
        embedding_dim=2,
        name="t",
        feature_names=["t"],
        weight_init_min=bound,
        weight_init_max=bound,
    )
    module = impl.EmbeddingBagCollection([config], *unwrapped(impl.SGD, {"lr": 0.125}), device=the_device())
    expect_bits(tables_of(module)["t"].detach(), full((4, 2), bound), "the table")


@pytest.mark.clause("FUSED-091")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.converted_tables", "SGD")
def test_converted_module(impl, dtype):
    """A module that is converted after a lookup continues like one that was made in that dtype."""
    module, fresh = collection(impl), collection(impl, dtype=dtype)
    lookups(module, jagged(BAGS))
    looked_up = module.to(getattr(torch, dtype))
    with torch.no_grad():
        for name, table in tables_of(fresh).items():
            table.copy_(tables_of(looked_up)[name])
    before = snapshot(tables_of(fresh))
    for seed in (1, 2):
        outputs, others = looked_up(jagged(BAGS)), fresh(jagged(BAGS))
        for name, output in outputs.items():
            expect_equal(output.dtype, others[name].dtype, f"dtype of {name}")
            expect_bits(output.detach(), others[name].detach(), f"output {name}")
        fit(looked_up, jagged(BAGS), seed=seed)
        fit(fresh, jagged(BAGS), seed=seed)
    for name, table in tables_of(looked_up).items():
        expect_equal(table.dtype, getattr(torch, dtype), f"dtype of {name}")
        expect_bits(table.detach(), tables_of(fresh)[name].detach(), f"table {name}")
        expect(not same_bits(table.detach(), before[name]), f"{name} trained", "a table unchanged")


@pytest.mark.clause("FUSED-091")
@pytest.mark.needs("EmbeddingBagCollection.converted_tables", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_converted_before_the_backward(impl, kind, optimizer, dtype):
    """A backward pass after a conversion updates the tables by their gradients, or raises an error."""
    module, fresh = (collection(impl, optimizer, {"lr": 0.5}, kind=kind) for _ in range(2))
    loss = lookups(module, jagged(BAGS))
    for each in (module, fresh):
        each.to(getattr(torch, dtype))
    before = snapshot(tables_of(module))
    try:
        loss.backward()
    except (RuntimeError, ValueError, TypeError):
        expect_unchanged(before, tables_of(module), "tables after an error")
        return
    fit(fresh, jagged(BAGS))
    for name in ("t", "u"):
        seen, wanted = tables_of(module)[name].detach(), tables_of(fresh)[name].detach()
        error = float((seen.double() - wanted.double()).abs().max())
        bound = 2e-6 if seen.dtype.itemsize > 2 else 2 * torch.finfo(seen.dtype).eps
        expect(error <= bound, f"table {name} within {bound:.2g}", f"an error of {error}")


@pytest.mark.clause("FUSED-032")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.empty_batches")
def test_no_bags(impl):
    """A batch without bags returns outputs without rows, and its backward pass changes no row."""
    module = collection(impl, "Adagrad")
    before = snapshot(tables_of(module))
    empty: dict[str, Any] = {name: [] for name in BAGS}
    outputs = module(jagged(empty))
    expect_equal(tuple(outputs["f"].shape), (0, 4), "shape of the output")
    fit(module, jagged(empty))
    expect_unchanged(before, tables_of(module), "the tables")


@pytest.mark.clause("FUSED-032")
@pytest.mark.needs(
    "EmbeddingBagCollection", "EmbeddingBagCollection.empty_batches", "EmbeddingBagCollection.unlike_batches"
)
@pytest.mark.parametrize("feature", ["f", "g"])
@pytest.mark.parametrize("used", [["f", "g"], ["f", "g", "h"]])
def test_no_bags_of_one_feature(impl, feature, used):
    """A feature without bags changes no row; the other features train as usual."""
    module, other = (collection(impl, "Adagrad") for _ in range(2))
    features = jagged({**BAGS, feature: []})
    outputs, wanted = module(features), other(jagged(BAGS))
    expect_equal(tuple(outputs[feature].shape), (0, 4), "shape of the output")
    for found, names in ((outputs, used), (wanted, [name for name in used if name != feature])):
        torch.stack([found[name].square().sum() for name in names]).sum().backward()
    for name, table in tables_of(other).items():
        expect_close(tables_of(module)[name].detach(), table.detach(), f"table {name}")
