"""Embedding modules: which rows an update changes, with which gradient and by which formula."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.algorithms import expect_same_way
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.described import DEFAULTS
from keyedopt.conformance.suite.support.device import arange, tensor, the_device
from keyedopt.conformance.suite.support.draws import Steps, measure_trajectory
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.measured import Measuring
from keyedopt.conformance.suite.support.options import FROM_ZERO, zero_and_tiny
from keyedopt.conformance.suite.support.trajectories import TRAJECTORIES, corrected_beta


def trajectories(*kinds: str) -> dict[str, Any]:
    """Select golden trajectories of these kinds, or all, as arguments of ``parametrize``."""
    chosen = {
        name: (made["algorithm"], made)
        for name, made in TRAJECTORIES.items()
        if not {"dampening", "amsgrad"} & {*made["options"]}
        and (not kinds or name.partition("-")[2] in kinds)
    }
    return {"argnames": "optimizer, made", "argvalues": list(chosen.values()), "ids": list(chosen)}


def follow(
    impl: Any, optimizer: str, made: Any, dtype: str, steps: int, beta2: float | None = None
) -> dict[str, Any]:
    """Train along a golden trajectory; expect the table within its budget, and return the errors.

    With `beta2` the formula is judged; see `measure_golden`.
    """
    # The state of a table has its own dtype; other cases test its names.
    after = {t: {"weight": exact["weight"]} for t, exact in made["after"].items()}
    made = {**made, "after": after, "steps": made["steps"][:steps]}

    def train(start: Any, steps: Steps, kind: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
        config = impl.EmbeddingBagConfig(
            num_embeddings=len(start),
            embedding_dim=start.shape[1],
            name="t",
            feature_names=["f"],
            data_type=kind,
            init_fn=lambda table: table.detach().copy_(start),
        )
        eps = {name: one for name, one in DEFAULTS.get(optimizer, {}).items() if name == "eps"}
        made_with = getattr(impl, optimizer), {**eps, **made["options"]}  # tables may have another default
        module = impl.EmbeddingBagCollection([config], *made_with, device=the_device())
        for rows, grads in steps:
            train_rows(module, rows or list(range(len(start))), grads)
            yield {"weight": tables_of(module)["t"]}

    with Measuring({"errors": []}) as measuring:
        measure_trajectory(measuring, made, dtype, train, beta2)
    return measuring.record


def summed_gradients(rows: list[int], grads: list[list[float]]) -> dict[int, list[float]]:
    """Add up the gradients of each row with Python numbers."""
    total: dict[int, list[float]] = {}
    for row, grad in zip(rows, grads, strict=True):
        total[row] = [a + b for a, b in zip(total.get(row, [0.0] * len(grad)), grad, strict=True)]
    return total


def first_step(optimizer: str, weight: list[float], grad: list[float], lr: float, eps: float) -> list[float]:
    """Take the first step of a rule for one row with Python numbers."""
    if optimizer == "SGD":
        return [w - lr * g for w, g in zip(weight, grad, strict=True)]
    square = [g * g for g in grad]
    if optimizer == "RowWiseAdagrad":
        square = [sum(square) / len(square)] * len(square)
    return [w - lr * g / (s**0.5 + eps) for w, g, s in zip(weight, grad, square, strict=True)]


@pytest.mark.clause("FUSED-035")
@pytest.mark.needs("EmbeddingBagCollection")
def test_backward_updates(impl):
    """The backward pass updates the tables; it leaves no gradient and needs no step."""
    module = collection(impl)
    before = snapshot(tables_of(module))
    fit(module, jagged(BAGS))
    for name, table in tables_of(module).items():
        expect(not torch.equal(before[name], table.detach()), f"table {name} updated", table)
        expect(table.grad is None, f"no gradient left on {name}", table.grad)
    for param in module.parameters():
        expect(param.grad is None, "no gradient left on the parameters", param.grad)


@pytest.mark.clause("FUSED-036")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_once_a_row(impl, optimizer):
    """A row that is looked up several times is updated once, with the sum of its gradients."""
    module = collection(
        impl, optimizer, {"lr": 0.25, "eps": 1e-8} if optimizer != "SGD" else {"lr": 0.25}, ONE_TABLE
    )
    table = tables_of(module)["t"]
    before = table.detach().double().tolist()
    rows = [1, 4, 1, 1]
    grads = [[1.0, -2.0, 0.5, 3.0], [0.25, 1.0, -1.0, 2.0], [2.0, 1.0, -0.25, 1.0], [-0.5, 4.0, 1.5, -1.0]]
    train_rows(module, rows, grads)
    for row, grad in summed_gradients(rows, grads).items():
        wanted = torch.tensor(first_step(optimizer, before[row], grad, 0.25, 1e-8), dtype=torch.float64)
        expect_close(table.detach()[row], wanted, f"row {row} after one step with the sum", ulps=4)


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.any_width", "{optimizer}")
@pytest.mark.parametrize(**trajectories())
def test_golden(impl, optimizer, made):
    """Every algorithm, with every option, follows its golden trajectory in float64 to 1e-12."""
    follow(impl, optimizer, made, "float64", steps=6)


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.any_width", "SGD.momentum")
def test_dampening(impl):
    """Dampening, from the second step on, follows the golden trajectory, or raises an error."""
    try:
        follow(impl, "SGD", TRAJECTORIES["SGD-dampening"], "float64", steps=6)
    except ValueError as error:
        expect("dampening" in str(error), "an error that names dampening", str(error))


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.any_width", "{optimizer}")
@pytest.mark.parametrize(**trajectories("plain", "sparse"))
def test_golden_precision(impl, optimizer, made):
    """In float32 the error is at most twice the worst of 64 orders of the formula, or 2 ULP."""
    return follow(impl, optimizer, made, "float32", steps=24)


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.any_width", "{optimizer}")
@pytest.mark.parametrize(**trajectories())
def test_golden_in_float32(impl, optimizer, made):
    """In float32, too, every option follows its golden trajectory: no order of roundings errs more."""
    follow(impl, optimizer, made, "float32", steps=6, beta2=corrected_beta(optimizer, made))


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.maximize")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_maximize(impl, optimizer):
    """In float32, maximize gives the same result as the negated gradient."""
    up = collection(impl, optimizer, {"maximize": True}, ONE_TABLE)
    down = collection(impl, optimizer, tables=ONE_TABLE)
    start = snapshot(tables_of(down)["t"])
    for step in range(3):
        grads = arange(16.0).reshape(4, 4) / 8 - 1 + step
        train_rows(up, [1, 4, 1, 5], grads)
        train_rows(down, [1, 4, 1, 5], -grads)
    expect_same_way(tables_of(up)["t"], tables_of(down)["t"], start, "the table")


@pytest.mark.clause("FUSED-037")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["LAMB", "PartialRowWiseLAMB", "LarsSGD"])
def test_extreme_rows(impl, optimizer):
    """A row whose squares underflow or overflow float32 gives the same result as one of another scale."""
    module, other = (collection(impl, optimizer, tables=ONE_TABLE) for _ in range(2))
    table, plain = tables_of(module)["t"], tables_of(other)["t"]
    start = snapshot(plain)
    scale = tensor([[1.0], [2.0**-80], [2.0**80], [2.0**-80], [2.0**80], [1.0]])
    with torch.no_grad():
        table.mul_(scale)
    for step in range(3):
        grads = arange(24.0).reshape(6, 4) / 8 - 1 + step
        for each in (module, other):
            train_rows(each, range(6), grads)
    expect_same_way(table.detach() / scale, plain, start, "the table, by its scale,")


@pytest.mark.clause("FUSED-038")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_other_rows(impl, optimizer):
    """Rows that are not looked up, and their state, keep their bits."""
    expect_other_rows_unchanged(collection(impl, optimizer))


@pytest.mark.clause("FUSED-038")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.{option}")
@pytest.mark.parametrize(
    ("optimizer", "option", "options"),
    [
        ("SGD", "momentum", {"momentum": 0.5}),
        ("LarsSGD", "momentum", {"momentum": 0.5}),
        ("RowWiseAdagrad", "decay", {"weight_decay": 0.25, "decay": "decoupled"}),
        ("RowWiseAdagrad", "decay", {"weight_decay": 0.25, "decay": "l2"}),
        ("RowWiseAdagrad", "max_norm", {"max_norm": 0.5}),
        ("PartialRowWiseAdam", "max_norm", {"max_norm": 0.5}),
        ("PartialRowWiseLAMB", "max_norm", {"max_norm": 0.5}),
        ("Adam", "decay", {"weight_decay": 0.25, "decay": "decoupled"}),
        ("LAMB", "decay", {"weight_decay": 0.25, "decay": "decoupled"}),
        ("PartialRowWiseAdam", "bias_correction", {"bias_correction": "per_row"}),
    ],
)
def test_other_rows_with_options(impl, optimizer, option, options):
    """Decay, max_norm and momentum do not change rows that are not looked up, or their state."""
    expect_other_rows_unchanged(collection(impl, optimizer, options))


@pytest.mark.clause("FUSED-105")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.{option}")
@pytest.mark.parametrize(("optimizer", "option"), [pair for pair in FROM_ZERO if pair[0] in FUSED_OPTIMIZERS])
def test_an_option_of_zero(impl, optimizer, option):
    """An option of tables that is given as 0 acts like a tiny value, or is refused; it is not left out."""
    trained = []
    for given in zero_and_tiny(option):
        try:
            module = collection(impl, optimizer, given, tables=ONE_TABLE)
        except ValueError:
            return
        for step in (1, 2):
            train_rows(module, [0, 3], [[0.5, -1.0, 0.25, step], [2.0, 0.125, -step, 1.0]])
        trained.append(tables_of(module)["t"].detach())
    expect_near(*trained, f"the table with {option} = 0")


@pytest.mark.clause("FUSED-105")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "EmbeddingBagCollection.{way}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("way", ["number", "tensor_rate"])
def test_a_rate_of_zero(impl, optimizer, way):
    """With a learning rate of 0, which Ftrl divides by, an update changes no table, or raises ValueError."""
    rate: Any = torch.tensor(0.1) if way == "tensor_rate" else 0.1  # on the CPU, on every device
    more = {"momentum": 0.0} if optimizer == "LarsSGD" else {}  # its momentum contains the former rate
    module = collection(impl, optimizer, {"lr": rate, **more}, tables=ONE_TABLE)
    train_rows(module, [0, 3], [[0.5, -1.0, 0.25, 1.0], [2.0, 0.125, -1.0, 1.0]])
    module.fused_optimizer.param_groups[0]["lr"] = rate.zero_() if way == "tensor_rate" else 0.0
    module.fused_optimizer.step()  # by which some tables take the new rate
    before = snapshot(tables_of(module))
    with contextlib.suppress(ValueError):
        train_rows(module, [0, 1], [[0.5, -1.0, 0.25, 1.0], [2.0, 0.125, -1.0, 1.0]])
    expect_unchanged(before, snapshot(tables_of(module)), "the tables")


def expect_other_rows_unchanged(module: Any) -> None:
    """Train, and expect rows that are not looked up to stay unchanged."""
    fit(module, jagged(BAGS), steps=2)
    with torch.no_grad():
        for table in tables_of(module).values():
            table.mul_(4)  # so that max_norm has an effect
    before = snapshot(tables_and_state(module))
    one = {"f": [[0, 1, 1], []], "g": [[], [1]], "h": [[3], []]}
    fit(module, jagged(one), steps=3)
    for name, rows in (("t", [2, 3, 4, 5]), ("u", [0, 1, 2, 4])):
        expect_bits(tables_of(module)[name].detach()[rows], before["tables"][name][rows], f"rows of {name}")
        state = tables_and_state(module)["state"][f"{name}.weight"]
        for key, value in state.items():
            if len(value) > 1:
                expect_bits(value[rows], before["state"][f"{name}.weight"][key][rows], f"rows of {key}")


@pytest.mark.clause("FUSED-039")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_two_forwards_one_backward(impl, optimizer):
    """One backward pass through two forward passes is one step with the summed gradient."""
    module, other = (
        collection(impl, optimizer, tables=ONE_TABLE),
        collection(impl, optimizer, tables=ONE_TABLE),
    )
    start = snapshot(tables_of(module)["t"])
    grads = arange(16.0).reshape(4, 4) / 8 - 1
    for _ in range(2):
        first = module(jagged({"f": [[0, 1], [1]]}))["f"]
        second = module(jagged({"f": [[1], [4]]}))["f"]
        ((first * grads[:2]).sum() + (second * grads[2:]).sum()).backward()
        (other(jagged({"f": [[0, 1], [1], [1], [4]]}))["f"] * grads).sum().backward()
    expect_same_way(tables_of(module)["t"], tables_of(other)["t"], start, "the table", steps=2)


@pytest.mark.clause("FUSED-040")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_two_backwards(impl, optimizer):
    """Two forward passes and then two backward passes are two steps, each with its own gradient."""
    module, other = collection(impl, optimizer), collection(impl, optimizer)
    losses = [lookups(module, jagged(BAGS), seed) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    fit(other, jagged(BAGS), steps=2)
    expect_unchanged(snapshot(tables_and_state(other)), tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-041")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"])
def test_features_of_a_table(impl, optimizer):
    """Several features of one table update it once, as if they were one feature."""
    module = collection(impl, optimizer, tables=(("t", 6, 4, ("f", "g")),))
    other = collection(impl, optimizer, tables=ONE_TABLE)
    outputs = module(jagged({"f": [[0, 1], [1]], "g": [[1], [4]]}))
    joined = other(jagged({"f": [[0, 1], [1], [1], [4]]}))["f"]
    grads = arange(16.0).reshape(4, 4) / 8 - 1
    ((outputs["f"] * grads[:2]).sum() + (outputs["g"] * grads[2:]).sum()).backward()
    (joined * grads).sum().backward()
    expect_close(
        tables_of(module)["t"].detach(), tables_of(other)["t"].detach().double(), "the table", ulps=4
    )


@pytest.mark.clause("FUSED-042")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_table_outside_the_loss(impl, optimizer):
    """A table that the loss does not use keeps its bits, and so do rows of an unused output."""
    module = collection(impl, optimizer)
    before = snapshot(tables_of(module))
    outputs = module(jagged(BAGS))
    outputs["f"].sum().backward()
    expect_bits(tables_of(module)["u"].detach(), before["u"], "the table outside the loss")
    expect_bits(tables_of(module)["t"].detach()[5], before["t"][5], "the row that only g looks up")


@pytest.mark.clause("FUSED-042")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.frozen_tables")
def test_frozen_table(impl):
    """A table with requires_grad=False is looked up but never updated; the others are updated."""
    module = collection(impl, "Adam")
    tables_of(module)["t"].requires_grad_(False)
    before = snapshot(tables_and_state(module))
    fit(module, jagged(BAGS), steps=2)
    expect_bits(tables_of(module)["t"].detach(), before["tables"]["t"], "the frozen table")
    expect_unchanged(before["state"]["t.weight"], tables_and_state(module)["state"]["t.weight"], "its state")
    expect(
        not torch.equal(tables_of(module)["u"].detach(), before["tables"]["u"]), "the other updated", "not"
    )


@pytest.mark.clause("FUSED-051")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_order_of_lookups(impl, optimizer):
    """The order of bags, with their gradients, affects the result only by rounding."""
    module, other = (
        collection(impl, optimizer, tables=ONE_TABLE),
        collection(impl, optimizer, tables=ONE_TABLE),
    )
    start = snapshot(tables_of(module)["t"])
    rows = [0, 3, 3, 1, 3, 0]
    grads = [[float((7 * i + 3 * d) % 11 - 5) for d in range(4)] for i in range(6)]
    for _ in range(2):
        train_rows(module, rows, grads)
        train_rows(other, rows[::-1], grads[::-1])
    expect_same_way(tables_of(module)["t"], tables_of(other)["t"], start, "the table", steps=2)


@pytest.mark.clause("FUSED-052")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_split_table(impl, optimizer):
    """A table, and the two tables into which it is split by rows, train equally."""
    whole = collection(impl, optimizer, tables=ONE_TABLE)
    halves = collection(impl, optimizer, tables=(("a", 3, 4, ("f",)), ("b", 3, 4, ("g",))))
    full = tables_of(whole)["t"].detach()
    start = full.clone()
    with torch.no_grad():
        tables_of(halves)["a"].copy_(full[:3])
        tables_of(halves)["b"].copy_(full[3:])
    for step in range(3):
        grads = arange(16.0).reshape(4, 4) / 8 - 1 + step
        (whole(jagged({"f": [[0], [2], [3], [5]]}))["f"] * grads).sum().backward()
        outputs = halves(jagged({"f": [[0], [2]], "g": [[0], [2]]}))
        ((outputs["f"] * grads[:2]).sum() + (outputs["g"] * grads[2:]).sum()).backward()
    joined = torch.cat([tables_of(halves)[name].detach() for name in ("a", "b")])
    expect_same_way(joined, full, start, "the halves")


@pytest.mark.clause("FUSED-078")
@pytest.mark.needs("EmbeddingBagCollection", "RowWiseAdagrad", "RowWiseAdagrad.decay")
@pytest.mark.parametrize("decay", ["l2", "decoupled"])
def test_weight_decay(impl, decay):
    """Weight decay of row-wise Adagrad, in the selected mode, is part of the update."""
    lr, strength, grad = 0.25, 0.5, [1.0, -2.0, 0.5, 3.0]
    options = {"lr": lr, "eps": 1e-8, "weight_decay": strength, "decay": decay}
    module = collection(impl, "RowWiseAdagrad", options, ONE_TABLE)
    table = tables_of(module)["t"]
    before = table.detach().double()[1].tolist()
    train_rows(module, [1, 1], [[0.5 * a for a in grad]] * 2)  # decay applies once per row, not per lookup
    g = [a + strength * w for a, w in zip(grad, before, strict=True)] if decay == "l2" else grad
    root = (sum(a * a for a in g) / 4) ** 0.5 + 1e-8
    beside = lr * strength if decay == "decoupled" else 0.0
    wanted = [w - lr * a / root - beside * w for w, a in zip(before, g, strict=True)]
    expect_close(
        table.detach()[1], torch.tensor(wanted, dtype=torch.float64), "the row after one step", ulps=8
    )


@pytest.mark.clause("FUSED-079")
@pytest.mark.needs("EmbeddingBagCollection", "RowWiseAdagrad", "RowWiseAdagrad.max_norm")
def test_max_norm(impl):
    """With max_norm, the norm of every updated row is at most max_norm after the step."""
    expect_limited(impl, "RowWiseAdagrad")


@pytest.mark.clause("FUSED-079")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.max_norm")
@pytest.mark.parametrize("optimizer", ["PartialRowWiseAdam", "PartialRowWiseLAMB"])
def test_max_norm_of_partial_algorithms(impl, optimizer):
    """The partial row-wise algorithms limit the norm of updated rows as RowWiseAdagrad does."""
    expect_limited(impl, optimizer)


def expect_limited(impl: Any, optimizer: str) -> None:
    """Expect max_norm to limit the updated rows, and only these."""
    module = collection(impl, optimizer, {"max_norm": 0.5}, tables=(("t", 6, 36, ("f",)),))
    before = tables_of(module)["t"].detach().norm(dim=1)
    train_rows(module, [0, 1, 2], [[1.0, -2.0, 0.5, 3.0] * 9] * 3)
    norms = tables_of(module)["t"].detach().norm(dim=1)
    expect((norms[:3] <= 0.5 + 1e-6).all(), "updated rows of norm at most 0.5", norms)
    expect_bits(norms[3:], before[3:], "the norms of other rows")
