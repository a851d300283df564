"""Embedding modules: non-finite gradients, empty bags, copies, autocast and failures in the backward pass."""

import copy
import pickle
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
from keyedopt.conformance.suite.support.device import arange, full, ones, tensor, the_device
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.inputs import INTERPRETED


@pytest.mark.clause("FUSED-043")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}.error_if_nonfinite")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_error_if_nonfinite(impl, optimizer, bad):
    """With error_if_nonfinite a non-finite gradient raises an error, and no table changes."""
    module = collection(impl, optimizer, {"error_if_nonfinite": True})
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    outputs = module(jagged(BAGS))
    scale = torch.ones_like(outputs["h"])
    scale[0, 0] = float(bad)
    loss = outputs["f"].sum() + (outputs["h"] * scale).sum()
    expect_raises(
        loss.backward, RuntimeError, ValueError, mentions=["finite"], expected="an error for the gradient"
    )
    expect_unchanged(before, tables_and_state(module), "the module")
    fit(module, jagged(BAGS))
    expect(
        not torch.equal(tables_of(module)["t"].detach(), before["tables"]["t"]),
        "training continues",
        "no update",
    )


@pytest.mark.clause("FUSED-043")
@pytest.mark.needs("EmbeddingBagCollection", "AccumulateSGD", "AccumulateSGD.error_if_nonfinite")
@pytest.mark.parametrize("feature", ["f", "h"])
def test_error_if_nonfinite_within_a_window(impl, feature):
    """A non-finite gradient of one table leaves the windows of all tables as they were."""
    window = {"use_accumulate": True, "accumulate_step": 3}
    module = collection(impl, "AccumulateSGD", {"error_if_nonfinite": True, **window})
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    outputs = module(jagged(BAGS))
    scales = {name: float("inf") if name == feature else 1.0 for name in outputs}
    loss = torch.stack([(output * scales[name]).sum() for name, output in outputs.items()]).sum()
    expect_raises(loss.backward, RuntimeError, ValueError, expected="an error for the gradient")
    expect_unchanged(before, tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-043")
@pytest.mark.needs("EmbeddingBagCollection", "SGD", "SGD.error_if_nonfinite")
def test_error_if_a_sum_overflows(impl):
    """Finite gradients whose sum overflows float32 raise an error, or give finite weights."""
    module = collection(impl, options={"lr": 2.0**-10, "error_if_nonfinite": True}, tables=ONE_TABLE)
    before = snapshot(tables_and_state(module))
    try:
        train_rows(module, [1, 0, 1], [[3e38] * 4, [1.0] * 4, [3e38] * 4])
    except (RuntimeError, ValueError):
        expect_unchanged(before, tables_and_state(module), "the module")
    table = tables_of(module)["t"].detach()
    expect(bool(table.isfinite().all()), "an error, or finite weights", table)


@pytest.mark.clause("FUSED-044")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_does_not_spread(impl, optimizer, bad):
    """A non-finite gradient does not change the update of any row but its own."""
    tables = (("t", 6, 4, ("f",)), ("u", 5, 4, ("h",)))
    module, other = collection(impl, optimizer, tables=tables), collection(impl, optimizer, tables=tables)
    bags = {"f": [[0], [1]], "h": [[3], [2]]}
    for each, value in ((module, float(bad)), (other, 1.0)):
        outputs = each(jagged(bags))
        scale = torch.ones_like(outputs["f"])
        scale[0, 1] = value
        ((outputs["f"] * scale).sum() + outputs["h"].sum()).backward()
    for name, rows in (("t", [1, 2, 3, 4, 5]), ("u", [0, 1, 2, 3, 4])):
        seen, wanted = (tables_of(each)[name].detach()[rows] for each in (module, other))
        expect_bits(seen, wanted, f"the other rows of {name}")


@pytest.mark.clause("FUSED-045")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "Adam"])
def test_nonfinite(impl, optimizer):
    """Observe what an infinite gradient does to its own row."""
    module = collection(impl, optimizer, tables=ONE_TABLE)

    def train() -> str:
        train_rows(module, [0, 1], [[1.0, float("inf"), 1.0, 1.0], [1.0] * 4])
        row = tables_of(module)["t"].detach()[0]
        return " ".join("finite" if torch.isfinite(value) else str(float(value)) for value in row)

    return outcome(train)


@pytest.mark.clause("FUSED-046")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "SGD", "Adam"])
def test_empty_bags(impl, optimizer):
    """A batch of empty bags changes no row and no state."""
    module = collection(impl, optimizer)
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    fit(module, jagged({name: [[], []] for name in BAGS}))
    expect_unchanged(before["tables"], tables_of(module), "the tables")


@pytest.mark.clause("FUSED-047")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_gradient_of_weights(impl, pooling):
    """The weights of lookups receive their gradient, computed with the rows as they were looked up."""
    module = collection(impl, tables=ONE_TABLE, weighted=True, pooling=pooling)
    before = tables_of(module)["t"].detach().clone()
    values, offsets = tensor([0, 1, 1]), tensor([0, 2, 3])
    weights = tensor([0.5, 2.0, -1.0], requires_grad=True)
    output = module({"f": (values, offsets, weights)})["f"]
    grads = tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 1.0, -1.0, 2.0]])
    (output * grads).sum().backward()
    counts = tensor([2.0, 2.0, 1.0]) if pooling == "MEAN" else ones(3)
    wanted = (before[values] * grads[[0, 0, 1]]).sum(dim=1) / counts
    expect_close(weights.grad, wanted.double(), "gradient of the weights", ulps=32)


@pytest.mark.clause("FUSED-048")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, optimizer, how):
    """A deep or pickled copy of a module trains like the original, and the two are independent."""
    module = collection(impl, optimizer)
    fit(module, jagged(BAGS), steps=2)
    other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    before = snapshot(tables_and_state(module))
    fit(other, jagged(BAGS), steps=2, seed=5)
    expect_unchanged(before, tables_and_state(module), "the original, while the copy was trained")
    fit(module, jagged(BAGS), steps=2, seed=5)
    expect_unchanged(snapshot(tables_and_state(module)), tables_and_state(other), "the copy")


@pytest.mark.clause("FUSED-049")
@pytest.mark.needs("EmbeddingBagCollection")
def test_half_tables(impl):
    """Gradients of tables in half precision are summed in float32: small gradients are not lost."""
    module = collection(impl, tables=ONE_TABLE, dtype="float16", options={"lr": 2.0**13})
    with torch.no_grad():
        tables_of(module)["t"].fill_(1.0)
    train_rows(
        module, [2] * 4096, full((4096, 4), 2.0**-26)
    )  # each of these gradients underflows to 0 in float16
    wanted = torch.tensor([0.5] * 4, dtype=torch.float64)
    expect_close(tables_of(module)["t"].detach()[2], wanted, "the row after 4096 small gradients", ulps=1)


@pytest.mark.clause("FUSED-050")
@pytest.mark.needs("EmbeddingBagCollection")
def test_autograd_grad(impl):
    """Observe what torch.autograd.grad for another input does to the tables of a module in the graph."""
    module = collection(impl)
    factor = ones((), requires_grad=True)
    before = snapshot(tables_of(module))

    def differentiate() -> str:
        torch.autograd.grad(module(jagged(BAGS))["f"].sum() * factor, factor)
        same = all(torch.equal(before[name], table.detach()) for name, table in tables_of(module).items())
        return "tables unchanged" if same else "tables updated"

    return outcome(differentiate)


@pytest.mark.clause("FUSED-053")
@pytest.mark.needs("EmbeddingBagCollection")
def test_autocast(impl):
    """Under torch.autocast lookups and updates are the same as without."""
    module, other = collection(impl), collection(impl)
    with torch.autocast(the_device().type, dtype=torch.bfloat16):
        output = module(jagged(BAGS))["f"]
    expect_bits(output.detach(), other(jagged(BAGS))["f"].detach(), "output")
    output.sum().backward()
    other(jagged(BAGS))["f"].sum().backward()
    expect_bits(tables_of(module)["t"].detach(), tables_of(other)["t"].detach(), "the table")


@pytest.mark.clause("FUSED-054")
@pytest.mark.needs("EmbeddingBagCollection")
def test_scaled_loss(impl):
    """Observe whether a loss that GradScaler scales gives a scaled update."""
    module, other = collection(impl, tables=ONE_TABLE), collection(impl, tables=ONE_TABLE)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=4.0)
    train_rows(other, [1], [[1.0] * 4])

    def train() -> str:
        scaler.scale(module(jagged({"f": [[1]]}))["f"].sum()).backward()
        same = torch.equal(tables_of(module)["t"].detach(), tables_of(other)["t"].detach())
        return "update not scaled" if same else "update scaled"

    return outcome(train)


@pytest.mark.clause("FUSED-055")
@pytest.mark.needs("EmbeddingBagCollection")
def test_refused_backward(impl):
    """A backward pass that fails before it reaches the tables leaves no gradient for the next one."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise RuntimeError("elsewhere")

    module, other = collection(impl), collection(impl)
    broken = Failing.apply(module(jagged(BAGS))["f"]).sum()
    loss = broken + module(jagged(BAGS))["h"].sum()  # later in the graph, so earlier in the backward pass
    expect_raises(loss.backward, RuntimeError, mentions=["elsewhere"], expected="the error from elsewhere")
    before = snapshot(tables_of(module)["t"])
    expect_bits(before, tables_of(other)["t"].detach(), "the table that was not reached")
    with torch.no_grad():
        for name, table in tables_of(other).items():
            table.copy_(tables_of(module)[name])
    fit(module, jagged(BAGS))
    fit(other, jagged(BAGS))
    expect_unchanged(snapshot(tables_of(other)), tables_of(module), "the tables after the next step")
    expect_equal(len(tables_of(module)), 2, "number of tables")


@pytest.mark.clause("FUSED-080")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("count", [100, 10_000] if INTERPRETED else [100, 10_000, 1_000_000])
def test_precision_of_sums(impl, count):
    """Observe the error of the sum of many gradients of one row, relative to their magnitudes."""
    module = collection(impl, options={"lr": 1.0}, tables=(("t", 2, 4, ("f",)),))
    with torch.no_grad():
        tables_of(module)["t"].zero_()
    grads = (arange(1, count + 1, dtype=torch.float64) * 0.6180339887498949 % 1).float()
    features = {"f": (ones(count, dtype=torch.int64), arange(count + 1))}
    (module(features)["f"] * grads[:, None]).sum().backward()
    total = float(grads.double().sum())
    error = abs(float(-tables_of(module)["t"].detach()[1, 0].double()) - total) / total
    return {"error": float(f"{error:.2e}")}
