"""Embedding modules: the precision in which rows of each table dtype are pooled, summed and updated."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
)
from keyedopt.conformance.suite.support.device import as_tensor, on_host, tensor
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.inputs import INTERPRETED, _numbers
from keyedopt.conformance.suite.support.measured import Measuring, measure_error
from keyedopt.conformance.suite.support.rounding_draws import expect_own_draws

#: Optimizers whose first state is a mean of gradients or of steps.
WITH_MOMENTUM = ("SGD", "LarsSGD", "Adam", "SparseAdam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB")
#: What rounding in float32, whose unit is 2⁻¹³ of float16's, may add in eight steps, in float16's units.
SINGLE = 2**-8
#: More than the 11 bits of float16 can count; in Triton's interpreter, than the 8 of bfloat16.
MANY = 300 if INTERPRETED else 4096


@pytest.mark.clause("FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("pooling", ["MEAN"] if INTERPRETED else ["SUM", "MEAN"])
def test_long_bags(impl, dtype, pooling):
    """A bag of many rows is summed in float32 or wider, whatever the dtype of the table."""
    module = collection(impl, tables=ONE_TABLE, dtype=dtype, pooling=pooling)
    with torch.no_grad():
        tables_of(module)["t"].fill_(1.0)
        seen = module(jagged({"f": [[2] * MANY]}))["f"]
    expect_equal(seen.tolist(), [[1.0 if pooling == "MEAN" else MANY] * 4], f"{MANY} rows of ones, pooled")


def expect_weighted_rows(module: Any, table: torch.Tensor, pooling: str) -> None:
    """Expect a bag of weighted rows to be within a few ULP of float32."""
    weights = [1 / 3, -1 / 7, 5 / 3]
    seen = module(jagged({"f": [[0, 3, 5]]}, {"f": [weights]}))["f"].detach()
    rows = exactly(table)[[0, 3, 5]]
    wanted = (rows * torch.tensor(weights)[:, None].double()).sum(0, keepdim=True)
    # Six roundings, of terms that are at most a few times larger than their sum; half precision: 2**13 ULP.
    expect_close(seen, wanted / 3 if pooling == "MEAN" else wanted, "the output", ulps=16)


@pytest.mark.clause("FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_weighted_rows(impl, pooling, dtype):
    """Rows are multiplied by their weights in float32 or wider, whatever the dtype of the table."""
    module = collection(impl, tables=ONE_TABLE, dtype=dtype, pooling=pooling, weighted=True)
    expect_weighted_rows(module, tables_of(module)["t"], pooling)


@pytest.mark.clause("FUSED-022")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.initial_values")
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_weighted_rows_without_an_optimizer(impl, pooling, dtype):
    """The same holds for tables without an optimizer."""
    module = collection(impl, None, tables=ONE_TABLE, dtype=dtype, pooling=pooling, weighted=True)
    expect_weighted_rows(module, next(iter(module.parameters())), pooling)


@pytest.mark.clause("FUSED-022", "FUSED-023")
@pytest.mark.needs("EmbeddingCollection")
@pytest.mark.parametrize("of", ["float32", "float64"])
def test_weighted_rows_without_pooling(impl, of, dtype):
    """Without pooling, too, rows are multiplied by their weights in float32 or wider, in every table."""
    module = collection(impl, kind="EmbeddingCollection", dtype=dtype, weighted=True)
    factors = torch.tensor([1 / 3, -1 / 7, 5 / 3, 1 / 9], dtype=getattr(torch, of))
    features = jagged(BAGS, BAGS)
    features = {
        name: (values, ends, as_tensor(factors[: len(values)]))
        for name, (values, ends, _) in features.items()
    }
    outputs = module(features)
    for name, table in (("f", "t"), ("g", "t"), ("h", "u")):
        values, _, weights = features[name]
        wanted = exactly(tables_of(module)[table])[on_host(values)] * exactly(weights)[:, None]
        # Two roundings, of the weight and of the product; half precision: 2**13 ULP.
        expect_close(outputs[name].detach(), wanted, f"output {name}", ulps=4)


@pytest.mark.clause("FUSED-088")
@pytest.mark.needs("{kind}", "Adagrad")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_gradients_of_weighted_rows(impl, kind, dtype):
    """Gradients are multiplied by the weights in float32 or wider, as the sums of squares show."""
    module = collection(impl, "Adagrad", kind=kind, tables=ONE_TABLE, dtype=dtype, weighted=True)
    weights = [1 / 3, -1 / 7, 5 / 3]
    bags = {"f": [[0], [3], [5]]}
    outputs = module(jagged(bags, {"f": [[one] for one in weights]}))["f"]
    (outputs * 3.0).sum().backward()
    entry = module.fused_optimizer.state_dict()["state"]["t.weight"]["t.momentum1"]
    wanted = (torch.tensor(weights).double() * 3.0).square()[:, None].expand(-1, 4)
    expect_close(entry.detach()[[0, 3, 5]], wanted, "the sum of squares", ulps=16)


@pytest.mark.clause("FUSED-027")
@pytest.mark.needs("EmbeddingBagCollection")
def test_reading(impl, dtype):
    """Outputs without grad mode, and in eval mode, have the bits and the dtype of a training step."""
    module = collection(impl, dtype=dtype)
    trained = module(jagged(BAGS))
    with torch.no_grad():
        read = module(jagged(BAGS))
    evaluated = module.eval()(jagged(BAGS))
    for name, output in trained.items():
        expect_bits(read[name], output.detach(), f"{name} without grad mode")
        expect_bits(evaluated[name].detach(), output.detach(), f"{name} in eval mode")


@pytest.mark.clause("FUSED-049")
@pytest.mark.needs("EmbeddingBagCollection")
def test_sums(impl, dtype):
    """One large and many small gradients of a row are summed in float32 or wider."""
    module = collection(impl, tables=ONE_TABLE, dtype=dtype, options={"lr": 0.25})
    with torch.no_grad():
        tables_of(module)["t"].fill_(1.0)
    train_rows(module, [2] * (MANY + 1), tensor([1.0] + [2.0**-12] * MANY)[:, None].expand(-1, 4))
    wanted = torch.tensor([0.75 - MANY * 2.0**-14] * 4, dtype=torch.float64)
    expect_close(tables_of(module)["t"].detach()[2], wanted, "the row", ulps=1)


@pytest.mark.clause("FUSED-086")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam"])
def test_state(impl, optimizer, dtype):
    """State of half-precision tables neither underflows nor overflows: steps have the expected length."""
    module = collection(impl, optimizer, {"eps": 1e-10}, tables=ONE_TABLE, dtype=dtype)
    table = tables_of(module)["t"]
    with torch.no_grad():
        table.fill_(1.0)
    for _ in range(2):
        train_rows(module, [1, 4], tensor([2.0**-13, -(2.0**10)])[:, None].expand(-1, 4))
    moved = 0.125 * (1 + 2**-0.5) if "Adagrad" in optimizer else 0.25
    wanted = torch.ones(6, 4, dtype=torch.float64)
    wanted[1], wanted[4] = 1 - moved, 1 + moved
    if table.dtype.itemsize == 2:
        expect_close(table.detach(), wanted, "the table", ulps=2)
    else:
        expect_near(table, wanted, "the table")


@pytest.mark.clause("FUSED-086")
@pytest.mark.needs("EmbeddingBagCollection")
def test_rounding(impl, dtype):
    """A written number is the nearest in the dtype, or one of its two neighbours at random."""
    width = 128 if INTERPRETED else 512
    module = collection(impl, tables=[("t", 8, width, ("f",))], dtype=dtype)
    table = tables_of(module)["t"]
    before = table.detach().cpu().double().clone()
    grads = (
        _numbers((8, width), 5) * 128
    ).round() / 128  # exact in every dtype, and so are an eighth of them
    train_rows(module, range(8), grads)
    exact = before - 0.125 * grads
    unit = torch.finfo(table.dtype).eps * torch.exp2(exact.abs().clamp(min=2.0**-10).log2().floor())
    errors = (table.detach().cpu().double() - exact) / unit
    off = float((errors * exact.sign()).mean())  # negative if numbers are truncated
    expect(abs(off) <= 0.1, "a mean error of at most 0.1 ULP", off)
    expect(float(errors.abs().max()) <= 1.5, "errors of at most 1.5 ULP", float(errors.abs().max()))


@pytest.mark.clause("FUSED-086")
@pytest.mark.plain_only("it compares two tables")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.rounding_seed", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_draws_of_several_steps(impl, optimizer, dtype):
    """Steps, tables and rows draw numbers of their own, and the same seed draws the same numbers."""
    expect_own_draws(impl, optimizer, dtype)


@pytest.mark.clause("FUSED-096")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.optimizer_state_dtypes")
@pytest.mark.parametrize("momentum", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", WITH_MOMENTUM)
def test_momentum(impl, optimizer, momentum):
    """Momentum is stored in half precision, and training stays near training with momentum in float32."""
    half, options = getattr(torch, momentum), {"momentum": 0.9} if "SGD" in optimizer else {}
    plain = collection(impl, optimizer, options, ONE_TABLE)
    module = collection(impl, optimizer, options | {"optimizer_state_dtypes": {"momentum1": half}}, ONE_TABLE)
    start, largest = exactly(tables_of(plain)["t"]), torch.zeros(6, 4, dtype=torch.float64)
    with Measuring({"errors": []}) as measuring:
        for step in range(1, 9):
            for one in (plain, module):
                fit(one, jagged({"f": BAGS["f"]}), seed=step)
            stored, exact = (_momentum(one) for one in (module, plain))
            expect_equal(stored.dtype, half, "the dtype of momentum1")
            largest = torch.maximum(largest, exactly(exact).abs())
            entry = {"quantity": "momentum1", "dtype": momentum, "steps": step}
            # Each step rounds by half a unit, and nine tenths of an error stay in the next step.
            budget = 0.5 * (1 - 0.9**step) / (1 - 0.9) + SINGLE
            measure_error(measuring, stored, exactly(exact), budget, "the momentum", before=largest, **entry)
        moved = (exactly(tables_of(plain)["t"]) - start).abs().max()
        off = (exactly(tables_of(module)["t"]) - exactly(tables_of(plain)["t"])).abs().max()
        entry = {"quantity": "table", "dtype": momentum, "steps": 8, "unit": "of its change"}
        budget *= torch.finfo(half).eps  # a step is at most as far off, of its length, as its momentum
        measuring.record["errors"].append(entry | {"error": float(off / moved), "budget": budget})
        with measuring.expecting():
            expect(
                float(off / moved) <= budget, f"a table within {budget:.2g} of its change", float(off / moved)
            )
    return measuring.record


@pytest.mark.clause("FUSED-096")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.optimizer_state_dtypes")
@pytest.mark.parametrize(
    ("optimizer", "state", "stored"),
    [
        ("SGD", "momentum1", "float16"),
        ("Adagrad", "momentum1", "bfloat16"),
        ("RowWiseAdagrad", "momentum1", "bfloat16"),
        ("Adam", "exp_avg_sq", "float16"),
        ("Adam", "momentum1", "int8"),
        ("Adam", "momentum", "float16"),
    ],
)
def test_other_states(impl, optimizer, state, stored):
    """A state that half precision cannot store, another dtype and an unknown name raise an error."""
    if optimizer == "Adam":
        collection(impl, optimizer, {"optimizer_state_dtypes": {"momentum1": torch.float16}}, ONE_TABLE)
    options = {"optimizer_state_dtypes": {state: getattr(torch, stored)}}
    expect_raises(
        lambda: collection(impl, optimizer, options, ONE_TABLE),
        ValueError,
        TypeError,
        expected=f"an error for {state} of {optimizer} in {stored}",
    )


def _momentum(module):
    return module.fused_optimizer.state_dict()["state"]["t.weight"]["t.momentum1"]
