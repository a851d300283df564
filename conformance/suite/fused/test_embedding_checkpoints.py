"""Embedding modules: state and checkpoints."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_raises,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.device import as_tensor, tensor
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
from keyedopt.conformance.suite.support.inputs import adam, parameters, set_grads

#: Names of the unfused optimizers' state, by what follows the table's name in the fused keys.
UNFUSED = {
    "Adagrad": {"momentum1": "sum"},
    "RowWiseAdagrad": {"momentum1": "sum"},
    "LarsSGD": {"momentum1": "momentum_buffer"},
    "SGD": {"momentum1": "momentum_buffer"},
    "Ftrl": {"momentum1": "accumulator", "linear": "linear"},
}


ADAM = {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq", "iter": "step", "row_counter": "step"}


def unfused(impl: Any, optimizer: str, table: torch.Tensor, options: Any) -> tuple[Any, torch.nn.Parameter]:
    """Make the unfused optimizer for a copy of a table."""
    weight = torch.nn.Parameter(table.detach().clone())
    return getattr(impl, optimizer)([weight], **options), weight


def train_unfused(chosen: Any, weight: torch.nn.Parameter, steps: list[Any]) -> None:
    """Train with sparse gradients: rows, with repetitions, and the gradient of each."""
    for rows, grads in steps:
        weight.grad = torch.sparse_coo_tensor(
            tensor([rows]), tensor(grads), weight.shape, check_invariants=True
        )
        chosen.step()


def train_fused(module: Any, steps: list[Any]) -> None:
    """Train with the same gradients."""
    for rows, grads in steps:
        train_rows(module, rows, grads)


def gradients_of_three_steps(seed: int) -> list[Any]:
    """Make gradients for three steps."""
    steps = []
    for step in range(seed, seed + 3):
        rows = [(step * (i + 1)) % 5 for i in range(4)]
        grads = [[((3 * step + 5 * i + 7 * d) % 13 - 6) / 4 for d in range(4)] for i in range(4)]
        if step % 5:  # a row without a gradient, which has had one from step 5 on
            rows, grads = [*rows, 0], [*grads, [0.0] * 4]
        steps.append((rows, grads))
    return steps


@pytest.mark.clause("FUSED-067")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_state_is_live(impl, optimizer):
    """The tensors in params and state_dict are those that the backward pass writes."""
    module = collection(impl, optimizer)
    shown = tables_and_state(module)
    before = snapshot(shown)
    fit(module, jagged(BAGS))
    expect(
        not same_bits(shown["tables"]["t"], before["tables"]["t"]),
        "the table changes with the shown tensor",
        "no change",
    )
    for key, value in shown["state"]["t.weight"].items():
        expect(
            not same_bits(value, before["state"]["t.weight"][key]),
            f"{key} changes with the shown tensor",
            "no change",
        )


@pytest.mark.clause("FUSED-068")
@pytest.mark.needs("{kind}", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_checkpoint(impl, optimizer, kind):
    """A checkpoint that is loaded into a fresh or trained module continues on the same trajectory."""
    module, other = collection(impl, optimizer, kind=kind), collection(impl, optimizer, kind=kind)
    fit(module, jagged(BAGS), steps=3)
    saved = snapshot(tables_and_state(module))
    fit(module, jagged(BAGS), steps=2, seed=9)
    for order in (reversed, list):  # state is matched by name, not by order
        with torch.no_grad():
            for name, table in tables_of(other).items():
                table.copy_(saved["tables"][name])
        other.fused_optimizer.load_state_dict({"state": dict(order(saved["state"].items()))})
        fit(other, jagged(BAGS), steps=2, seed=9)
        expect_unchanged(
            snapshot(tables_and_state(module)), tables_and_state(other), "the module that was loaded"
        )


@pytest.mark.clause("FUSED-069")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])
@pytest.mark.parametrize("wrong", ["shape", "missing", "too many", "kind"])
def test_bad_checkpoint(impl, optimizer, wrong):
    """Loading a checkpoint that does not fit raises ValueError and leaves the module unchanged."""
    module = collection(impl, optimizer)
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    state = snapshot(module.fused_optimizer.state_dict()["state"])
    entry = state["u.weight"]
    if wrong == "shape":
        entry["u.momentum1"] = entry["u.momentum1"][:-1]
    elif wrong == "missing":
        del entry["u.momentum1"]
    elif wrong == "too many":
        entry["u.momentum9"] = entry["u.momentum1"]
    else:
        entry["u.momentum1"] = 3.0
    expect_raises(
        lambda: module.fused_optimizer.load_state_dict({"state": state}),
        ValueError,
        mentions=["u."],
        expected="ValueError",
    )
    expect_unchanged(before, tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-070")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}.step", "{optimizer}.{variant}")
@pytest.mark.parametrize(
    ("optimizer", "variant", "options"),
    [
        ("SGD", "plain", {}),
        ("SGD", "momentum", {"momentum": 0.9}),
        ("Adagrad", "plain", {"eps": 1e-8}),
        ("Adagrad", "lr_decay", {"lr_decay": 0.1}),
        ("RowWiseAdagrad", "plain", {"eps": 1e-8}),
        ("Adam", "plain", {}),
        ("Adam", "bias_correction", {"bias_correction": "per_row"}),
        ("Adam", "rows", {"rows": "all"}),
        ("Adam", "rows", {"rows": "nonzero"}),
        ("SparseAdam", "plain", {}),
        ("PartialRowWiseAdam", "plain", {}),
        ("LAMB", "plain", {"weight_decay": 0.01}),
        ("PartialRowWiseLAMB", "plain", {}),
        ("LarsSGD", "plain", {"momentum": 0.5}),
        ("Ftrl", "plain", {}),
    ],
)
@pytest.mark.parametrize("way", ["to unfused", "to fused"])
def test_unfused_checkpoint(impl, optimizer, variant, options, way):
    """A checkpoint moves between fused and unfused optimizers, and training continues equally."""
    options = {"lr": 0.125, **options}
    module = collection(impl, optimizer, options, tables=ONE_TABLE)
    table = tables_of(module)["t"]
    chosen, weight = unfused(impl, optimizer, table, options)
    names = UNFUSED.get(optimizer, ADAM)
    names = names | ({"iter": "step"} if "lr_decay" in options else {})
    if way == "to unfused":
        train_fused(module, gradients_of_three_steps(1))
        train_unfused(chosen, weight, gradients_of_three_steps(1))
        fused = snapshot(module.fused_optimizer.state_dict()["state"]["t.weight"])
        state = chosen.state[weight]
        for key, value in fused.items():
            name = names[key.removeprefix("t.")]
            if isinstance(state[name], torch.Tensor):
                state[name].copy_(value.reshape(state[name].shape))
            else:  # a count that is a Python number
                state[name] = int(value)
        with torch.no_grad():
            weight.copy_(table)
    else:
        train_unfused(chosen, weight, gradients_of_three_steps(1))
        with torch.no_grad():
            table.copy_(weight)
        state = module.fused_optimizer.state_dict()["state"]["t.weight"]
        for key, value in state.items():
            held = as_tensor(chosen.state[weight][names[key.removeprefix("t.")]])
            value.copy_(held.reshape(value.shape))
    train_fused(module, gradients_of_three_steps(5))
    train_unfused(chosen, weight, gradients_of_three_steps(5))
    error = float((table.detach() - weight.detach()).abs().max())  # after six steps of values around 1
    expect(error <= 2e-6, "the fused and the unfused table within 2e-6", error)


@pytest.mark.clause("FUSED-071")
@pytest.mark.needs("EmbeddingBagCollection", "CombinedOptimizer")
def test_combined_checkpoint(impl):
    """In a combination with a dense optimizer, fused state is saved and loaded under its keys."""

    def make() -> tuple[Any, Any, Any]:
        module, params = collection(impl, "Adam"), parameters()
        whole = impl.CombinedOptimizer([("sparse", module.fused_optimizer), ("dense", adam(impl, params))])
        return module, params, whole

    module, params, whole = make()
    fit(module, jagged(BAGS), steps=2)
    set_grads(params)
    whole.step()
    saved = snapshot(whole.state_dict())
    expect("t.momentum1" in saved["state"]["sparse.t.weight"], "sparse.t.weight", list(saved["state"]))
    other, _, loaded = make()
    loaded.init_state()
    loaded.load_state_dict(saved)
    expect_unchanged(saved["state"], loaded.state_dict()["state"], "the loaded state")
    expect_unchanged(
        snapshot(tables_and_state(module)["state"]),
        tables_and_state(other)["state"],
        "the state of the module",
    )


@pytest.mark.clause("FUSED-077")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer")
def test_init_state(impl):
    """init_state of the fused optimizer changes no table, no state and no count."""
    module = collection(impl, "Adam")
    fit(module, jagged(BAGS))
    before = snapshot(tables_and_state(module))
    module.fused_optimizer.init_state()
    expect_unchanged(before, tables_and_state(module), "the module")
    other = collection(impl, "Adam")
    for each in (module, other):
        fit(each, jagged(BAGS), seed=4)
    expect_bits(
        tables_of(module)["u"].detach()[[1, 2, 4]],
        tables_of(other)["u"].detach()[[1, 2, 4]],
        "rows without lookups",
    )


@pytest.mark.clause("FUSED-109")
@pytest.mark.needs("{kind}", "{kind}.without_optimizer")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("how", ["parameter", "assign"])
def test_replaced_tables_without_optimizer(impl, kind, how):
    """The lookup after the last table was replaced reads the new one and gives it a gradient."""
    module = collection(impl, None, kind=kind)
    outputs = module(jagged(BAGS))["h"].detach()
    replaced = tables_of(module)["u"]
    name = next(name for name, weight in module.named_parameters() if weight is replaced)
    weight = torch.nn.Parameter(2.0 * replaced.detach())
    if how == "assign":
        module.load_state_dict({**module.state_dict(), name: weight}, assign=True)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, weight)
    found = module(jagged(BAGS))["h"]
    expect_bits(found.detach(), 2.0 * outputs, "the outputs of a table of twice the values")
    found.sum().backward()
    expect(tables_of(module)["u"].grad is not None, "a gradient of the new table", None)
    expect(replaced.grad is None, "no gradient of the old table", replaced.grad)
