"""Embedding modules: options and step counts of tables in several groups, and tables that differ by name."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward

REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)


def two_groups(impl: Any, kind: str, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Make a module whose table u has a group of its own, with the second options."""
    module = collection(impl, kind, first)
    apply_in_backward(impl, getattr(torch.optim, kind), [tables_of(module)["u"]], second)
    return module


def group_of(module: Any, name: str) -> Any:
    """Return the options of a table."""
    weight = tables_of(module)[name]
    groups = module.fused_optimizer.param_groups
    return next(group for group in groups if any(weight is one for one in group["params"]))


def spoil(module: Any, name: str) -> torch.Tensor:
    """Look up, and return a loss with a NaN gradient for one element of a table."""
    outputs = module(jagged(BAGS))
    spoiled = "f" if name == "t" else "h"
    scale = torch.ones_like(outputs[spoiled])
    scale[0, 1] = float("nan")
    return sum(((output * scale) if key == spoiled else output).sum() for key, output in outputs.items())


def expect_trained(module: Any, before: dict[str, torch.Tensor]) -> None:
    """Expect both tables to have changed."""
    for name in ("t", "u"):
        trained = not same_bits(tables_of(module)[name].detach(), before[name])
        expect(trained, f"an update of table {name}", "none")


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}.error_if_nonfinite", "apply_optimizer_in_backward")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("where", ["t", "u", "both"])
def test_error_if_nonfinite_set_in_a_group(impl, where, optimizer):
    """error_if_nonfinite that is set in a group applies to the tables of the group, or raises an error."""
    module = two_groups(impl, optimizer, {"lr": 0.5}, {"lr": 0.25})
    chosen = ("t", "u") if where == "both" else (where,)
    groups = [group_of(module, name) for name in chosen]
    if any("error_if_nonfinite" not in group for group in groups):
        return
    fit(module, jagged(BAGS))
    try:
        for group in groups:
            group["error_if_nonfinite"] = True
    except REFUSALS:
        return
    for name in chosen:
        before, loss = snapshot(tables_and_state(module)), spoil(module, name)
        expect_raises(loss.backward, *REFUSALS, expected=f"an error for the gradient of table {name}")
        expect_unchanged(before, tables_and_state(module), f"tables and state after a NaN for table {name}")
    fit(module, jagged(BAGS))
    for group in groups:
        group["error_if_nonfinite"] = False
    before = snapshot(tables_of(module))
    for name in ("t", "u"):
        spoil(module, name).backward()
    expect_trained(module, before)


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "SGD.error_if_nonfinite", "apply_optimizer_in_backward")
@pytest.mark.parametrize("where", ["t", "u"])
def test_error_if_nonfinite_of_another_group(impl, where):
    """error_if_nonfinite in one group raises no error for the gradients of another group."""
    module = two_groups(impl, "SGD", {"lr": 0.5}, {"lr": 0.25})
    group, other = group_of(module, where), "u" if where == "t" else "t"
    if "error_if_nonfinite" not in group:
        return
    fit(module, jagged(BAGS))
    try:
        group["error_if_nonfinite"] = True
    except REFUSALS:
        return
    before = snapshot(tables_of(module))
    spoil(module, other).backward()
    expect_trained(module, before)


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "Adam", "Adam.betas", "apply_optimizer_in_backward")
@pytest.mark.parametrize(
    "given",
    [[{"beta1": 0.25}], [{"beta2": 0.375}], [{"beta1": 0.25}, {"beta2": 0.375}], [{"lr": 0.125}]],
    ids=["beta1", "beta2", "beta1 then beta2", "lr"],
)
def test_options_of_several_groups_are_set(impl, given):
    """update_hyper_parameters sets an option in each group; each keeps its value of every other option."""
    options = [{"lr": 0.5, "betas": (0.75, 0.875)}, {"lr": 0.25, "betas": (0.5, 0.625)}]
    new = {name: value for one in given for name, value in one.items()}
    expected = [
        {
            "lr": new.get("lr", one["lr"]),
            "betas": (new.get("beta1", one["betas"][0]), new.get("beta2", one["betas"][1])),
        }
        for one in options
    ]
    module, other = two_groups(impl, "Adam", *options), two_groups(impl, "Adam", *expected)
    for one in given:
        module.fused_optimizer.update_hyper_parameters(one)
    for each in (module, other):
        fit(each, jagged(BAGS), steps=2)
    for name in ("t", "u"):
        expect_bits(tables_of(module)[name].detach(), tables_of(other)[name].detach(), f"table {name}")


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "Adam", "Adam.betas")
@pytest.mark.parametrize("given", [{"beta1": 0.25}, {"beta2": 0.375}], ids=" ".join)
def test_a_beta_of_a_group_is_kept(impl, given):
    """A beta that update_hyper_parameters does not set keeps the value of the group, not the default."""
    betas = given.get("beta1", 0.75), given.get("beta2", 0.875)
    module = collection(impl, "Adam", {"lr": 0.5, "betas": (0.75, 0.875)})
    other = collection(impl, "Adam", {"lr": 0.5, "betas": betas})
    module.fused_optimizer.update_hyper_parameters(given)
    for each in (module, other):
        fit(each, jagged(BAGS), steps=2)
    for name in ("t", "u"):
        expect_bits(tables_of(module)[name].detach(), tables_of(other)[name].detach(), f"table {name}")


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer")
def test_a_tensor_rate_is_filled(impl):
    """update_hyper_parameters writes the rate into a learning rate that is a tensor, or raises an error."""
    rate = torch.tensor(0.5)
    try:
        module = collection(impl, options={"lr": rate})
        module.fused_optimizer.update_hyper_parameters({"lr": 0.25})
    except REFUSALS:
        return
    groups = module.fused_optimizer.param_groups
    for group in groups:
        expect_equal(float(group["lr"]), 0.25, "the learning rate of a group")
        expect(isinstance(group["lr"], torch.Tensor), "a learning rate that is still a tensor", group["lr"])
        group["lr"].fill_(0.125)  # as a scheduler does
    other = collection(impl, options={"lr": 0.125})
    for each in (module, other):
        fit(each, jagged(BAGS))
    for name in ("t", "u"):
        expect_bits(tables_of(module)[name].detach(), tables_of(other)[name].detach(), f"table {name}")


@pytest.mark.clause("FUSED-097")
@pytest.mark.needs("EmbeddingBagCollection", "Adam", "apply_optimizer_in_backward")
@pytest.mark.parametrize("count", [0, 9])
def test_step_counts_of_several_groups_are_set(impl, count):
    """set_optimizer_step sets the step count of the tables of every group."""
    module = two_groups(impl, "Adam", {"lr": 0.5}, {"lr": 0.25})

    def train(row: int) -> None:
        sum(output.sum() for output in module(jagged({name: [[row]] for name in BAGS})).values()).backward()

    for _ in range(3):
        train(1)
    module.fused_optimizer.set_optimizer_step(count)
    before = snapshot(tables_of(module))
    train(0)
    mean, square = 0.1 / (1 - 0.9 ** (count + 1)), 0.001 / (1 - 0.999 ** (count + 1))
    for name, rate in (("t", 0.5), ("u", 0.25)):
        taken = float((before[name] - tables_of(module)[name].detach())[0, 0])
        expect_equal(round(taken, 4), round(rate * mean / square**0.5, 4), f"decrease of row 0 of {name}")


@pytest.mark.clause("FUSED-097")
@pytest.mark.needs("EmbeddingBagCollection", "Adam")
@pytest.mark.parametrize("count", [-1, 0.5])
def test_bad_step_counts(impl, count):
    """set_optimizer_step refuses what is not a whole number of at least 0, and changes nothing."""
    module = collection(impl, "Adam")
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    expect_raises(
        lambda: module.fused_optimizer.set_optimizer_step(count),
        ValueError,
        TypeError,
        expected=f"an error for the step count {count}",
    )
    expect_unchanged(before, snapshot(tables_and_state(module)), "tables and state")


@pytest.mark.clause("FUSED-097")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.bias_correction")
@pytest.mark.parametrize("optimizer", ["Adam", "PartialRowWiseAdam"])
def test_step_counts_of_rows_are_kept(impl, optimizer):
    """set_optimizer_step leaves counts of rows as they are, or raises an error."""
    module, other = (collection(impl, optimizer, {"bias_correction": "per_row"}) for _ in range(2))
    for each in (module, other):
        fit(each, jagged(BAGS))
    try:
        module.fused_optimizer.set_optimizer_step(9)
    except REFUSALS:
        return
    for each in (module, other):
        fit(each, jagged({name: [[0, 1], [2]] for name in BAGS}), seed=5)
    seen, wanted = tables_and_state(module), snapshot(tables_and_state(other))
    for name in ("t", "u"):
        expect_unchanged(wanted["tables"][name], seen["tables"][name], f"table {name}")
        key = f"{name}.weight"
        expect_unchanged(wanted["state"][key], seen["state"][key], f"state of table {name}")


#: Two tables of one name, and perhaps another table between them.
UNLIKE = {
    "rows": (("t", 6, 4, ("f",)), ("t", 5, 4, ("g",))),
    "width": (("t", 6, 4, ("f",)), ("t", 6, 8, ("g",))),
    "pooling": (("t", 6, 4, ("f",), "SUM"), ("t", 6, 4, ("g",), "MEAN")),
    "dtype": (("t", 6, 4, ("f",), "SUM", "float32"), ("t", 6, 4, ("g",), "SUM", "float64")),
}


@pytest.mark.clause("FUSED-033")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.errors_name_arguments")
@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("between", [False, True], ids=["neighbours", "apart"])
@pytest.mark.parametrize("turned", [False, True], ids=["as listed", "the other way round"])
def test_unlike_tables_of_one_name(impl, unlike, between, turned):
    """Two tables of one name that differ in size, pooling or dtype raise ValueError."""
    first, second = UNLIKE[unlike][::-1] if turned else UNLIKE[unlike]
    tables = [first, ("u", 5, 8, ("h",)), second] if between else [first, second]
    expect_raises(lambda: collection(impl, tables=tables), ValueError, expected="ValueError")
