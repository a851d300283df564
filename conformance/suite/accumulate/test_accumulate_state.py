"""The window of accumulated gradients: its checkpoints, and windows of backward passes."""

import copy
import pickle
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import (
    ACCUMULATING,
    expect_near,
    fixed_table,
    gradient_of_step,
    make_accumulating,
    train_window,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import as_tensor, full, tensor
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.warmup import poly_ramp


@pytest.mark.clause("ACC-007")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_checkpoint_in_a_window(impl, kind, layout, at):
    """A checkpoint in the middle of a window is complete: training resumes from it bit by bit."""
    mine, other = fixed_table(), fixed_table()
    optimizer, loaded = make_accumulating(impl, kind, [mine]), make_accumulating(impl, kind, [other])
    train_window(optimizer, mine, range(at), layout)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    with torch.no_grad():
        other.copy_(mine)
    loaded.load_state_dict(saved)
    train_window(optimizer, mine, range(at, 7), layout)
    train_window(loaded, other, range(at, 7), layout)
    expect_bits(other.detach(), mine.detach(), "the parameter that was loaded")


@pytest.mark.clause("ACC-007")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_a_loaded_window_is_a_copy(impl, kind, layout):
    """A checkpoint that changes after it was loaded does not change the window."""
    mine, other = fixed_table(), fixed_table()
    optimizer, loaded = make_accumulating(impl, kind, [mine]), make_accumulating(impl, kind, [other])
    train_window(optimizer, mine, range(2), layout)
    saved = snapshot(optimizer.state_dict())
    loaded.load_state_dict(saved)
    for holder, name in parts_of_window(impl, saved["state"][0]):
        if isinstance(holder[name], torch.Tensor):
            holder[name].zero_()
    train_window(optimizer, mine, range(2, 5), layout)
    train_window(loaded, other, range(2, 5), layout)
    expect_bits(other.detach(), mine.detach(), "the parameter that was loaded")


@pytest.mark.clause("ACC-008")
@pytest.mark.needs("KeyedOptimizerWrapper")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_keyed_checkpoint_in_a_window(impl, kind):
    """A keyed optimizer saves and loads the window with the rest of the state, whatever its length."""

    def make() -> tuple[Any, Any]:
        param = fixed_table()
        return param, impl.KeyedOptimizerWrapper(
            {"p": param}, lambda listed: make_accumulating(impl, kind, listed)
        )

    (mine, optimizer), (other, loaded) = make(), make()
    train_window(optimizer, mine, range(5), "sparse")
    saved = snapshot(optimizer.state_dict())
    train_window(loaded, other, range(1), "sparse")
    loaded.load_state_dict(saved)
    with torch.no_grad():
        other.copy_(mine)
    train_window(optimizer, mine, range(5, 9), "sparse")
    train_window(loaded, other, range(5, 9), "sparse")
    expect_bits(other.detach(), mine.detach(), "the parameter that was loaded")


AROUND = {
    "CombinedOptimizer": lambda impl, inner: impl.CombinedOptimizer([("part", inner)]),
    "GradientClippingOptimizer": lambda impl, inner: impl.GradientClippingOptimizer(
        inner, impl.GradientClipping.NORM, 0.5
    ),
    "WarmupOptimizer": poly_ramp,
}


@pytest.mark.clause("ACC-008")
@pytest.mark.needs("KeyedOptimizerWrapper", "AccumulateAdam", "{wrapper}")
@pytest.mark.parametrize("wrapper", AROUND)
@pytest.mark.parametrize("at", [1, 2])
def test_wrapped_checkpoint_in_a_window(impl, wrapper, at):
    """What is around a keyed optimizer saves and loads the windows of its parameters, too."""
    inside = "AccumulateAdam"

    def make() -> tuple[list[Any], Any]:
        params = [fixed_table() for _ in range(2)]
        keyed = impl.KeyedOptimizerWrapper(
            dict(zip("pq", params, strict=True)), lambda listed: make_accumulating(impl, inside, listed)
        )
        return params, AROUND[wrapper](impl, keyed)

    def micro_batch(params: list[Any], optimizer: Any, step: int) -> None:
        for number, param in enumerate(params):
            param.grad = gradient_of_step(step + number) if step % 3 < 2 or number else None
        optimizer.step()

    (mine, optimizer), (others, loaded) = make(), make()
    for step in range(at):
        micro_batch(mine, optimizer, step)
    micro_batch(others, loaded, 7)  # a keyed optimizer loads into the state that it has
    loaded.load_state_dict(snapshot(optimizer.state_dict()))
    for step in range(at, at + 9):
        with torch.no_grad():
            for other, param in zip(others, mine, strict=True):
                other.copy_(param)
        micro_batch(mine, optimizer, step)
        micro_batch(others, loaded, step)
        for number, (other, param) in enumerate(zip(others, mine, strict=True)):
            expect_bits(other.detach(), param.detach(), f"parameter {number} after step {step}")


def parts_of_window(impl: Any, entry: Any) -> list[tuple[Any, str]]:
    """Return the mappings and keys that a saved window consists of, whatever their names.

    These are the entries that the state of an optimizer without accumulation lacks.
    """
    table = fixed_table()
    plain = impl.AccumulateAdam([table], lr=0.125)
    train_window(plain, table, range(1), "sparse")
    (known,) = plain.state_dict()["state"].values()
    found: list[tuple[Any, str]] = []
    holders = [(entry, [name for name in entry if name not in known])]
    for holder, names in holders:
        for name in names:
            if isinstance(holder[name], dict):
                holders.append((holder[name], list(holder[name])))
            else:
                found.append((holder, name))
    return found


def invalid_part(value: Any, wrong: str) -> Any:
    """Return an invalid part of a window: rows outside the table, narrow gradients, or a bad count."""
    tensor = as_tensor(value)
    whole = tensor.dtype in (torch.int32, torch.int64)
    if wrong == "rows" and whole and tensor.ndim == 1 and len(tensor) > 1:
        return value + 100
    if wrong == "next row" and whole and tensor.ndim == 1 and len(tensor) > 1 and int(tensor.max()) < 6:
        return value - value.max() + 6  # of a table of six
    if wrong == "fractions" and whole and tensor.ndim == 1 and len(tensor) > 1:
        return value + 0.5
    if wrong == "gradients" and tensor.ndim == 2:
        return value[:, :2]
    if wrong == "count" and tensor.numel() == 1 and tensor.dtype is not torch.bool:
        return value * 0 - 1
    return None


@pytest.mark.clause("ACC-009")
@pytest.mark.parametrize("wrong", ["rows", "next row", "fractions", "gradients", "count", "missing"])
def test_bad_window(impl, wrong):
    """Loading a window that does not fit its parameter raises an error and changes nothing."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, "AccumulateAdam", [mine])
    train_window(optimizer, mine, range(4), "sparse")
    before = snapshot(optimizer.state_dict())
    (entry,) = before["state"].values()
    leaves = parts_of_window(impl, entry)
    expect(bool(leaves), "a window in the checkpoint", list(entry))
    for number in range(len(leaves)):
        saved = snapshot(optimizer.state_dict())
        saved["param_groups"][0]["lr"] *= 2  # nothing else of the checkpoint is loaded either
        (entry,) = saved["state"].values()
        holder, name = parts_of_window(impl, entry)[number]
        value = holder.pop(name)
        if wrong != "missing":
            holder[name] = invalid_part(value, wrong)
            if holder[name] is None:
                continue
        expect_raises(
            lambda saved=saved: optimizer.load_state_dict(saved),
            ValueError,
            expected=f"a ValueError for a window with bad {wrong} ({name})",
        )
        expect_unchanged(before, snapshot(optimizer.state_dict()), "state and options")


@pytest.mark.clause("ACC-010")
def test_window_for_one_without(impl):
    """An optimizer that does not accumulate raises an error for accumulated gradients in a checkpoint."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine])
    train_window(optimizer, mine, range(2))
    saved = optimizer.state_dict()
    saved["param_groups"] = [{**group, "use_accumulate": False} for group in saved["param_groups"]]
    other = impl.AccumulateSGD([fixed_table()], lr=0.125)
    expect_raises(
        lambda: other.load_state_dict(saved),
        ValueError,
        expected="a ValueError for a window that would be dropped",
    )


@pytest.mark.clause("ACC-012")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, kind, how):
    """A deep or pickled copy that is made within a window continues like the original, independently."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, kind, [mine])
    train_window(optimizer, mine, range(4))
    both = (mine, optimizer)
    other, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    other = copied.param_groups[0]["params"][0]
    train_window(copied, other, range(4, 8))
    train_window(optimizer, mine, range(4, 8))
    expect_bits(other.detach(), mine.detach(), "the copied parameter")


@pytest.mark.clause("ACC-021")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_embedding_module(impl, kind):
    """An embedding module updates once per window, in the last backward pass, with the sum of gradients."""
    options = {"use_accumulate": True, "accumulate_step": 3}
    module = collection(impl, kind, options)
    other = collection(impl, kind.removeprefix("Accumulate"))
    rows = (BAGS, {"f": [[2], [0, 4, 5]], "g": [[3, 3], []], "h": [[1, 4], [3]]}, {**BAGS, "g": [[4], [1]]})
    for window in range(2):
        before = snapshot(tables_of(module))
        for step in range(3):
            expect_unchanged(before, tables_of(module), "the tables within a window")
            fit(module, jagged(rows[step]), seed=3 * window + step)
        sum(lookups(other, jagged(rows[step]), 3 * window + step) for step in range(3)).backward()
        for name, table in tables_of(module).items():
            expect_near(table, tables_of(other)[name], f"table {name} after window {window}")


@pytest.mark.clause("ACC-022")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_embedding_checkpoint(impl, kind):
    """A module that loads a checkpoint from within a window goes on like the one that saved it."""
    options = {"use_accumulate": True, "accumulate_step": 3}
    module, other = collection(impl, kind, options), collection(impl, kind, options)
    fit(module, jagged(BAGS), steps=4)
    saved = snapshot(tables_and_state(module))
    with torch.no_grad():
        for name, table in tables_of(other).items():
            table.copy_(saved["tables"][name])
    other.fused_optimizer.load_state_dict({"state": pickle.loads(pickle.dumps(saved["state"]))})
    fit(module, jagged(BAGS), steps=4, seed=7)
    fit(other, jagged(BAGS), steps=4, seed=7)
    expect_unchanged(
        snapshot(tables_and_state(module)), tables_and_state(other), "the module that was loaded"
    )


@pytest.mark.clause("ACC-023")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_evaluation_does_not_count(impl, kind):
    """Forward passes in eval mode, or without a backward pass, do not count as steps of a window."""
    options = {"use_accumulate": True, "accumulate_step": 2}
    module, other = collection(impl, kind, options), collection(impl, kind, options)
    for step in range(4):
        module.eval()
        module(jagged(BAGS))
        module.train()
        module(jagged(BAGS))
        fit(module, jagged(BAGS), seed=step)
    fit(other, jagged(BAGS), steps=4, seed=0)
    expect_unchanged(
        snapshot(tables_and_state(other)), tables_and_state(module), "the module that was evaluated"
    )


@pytest.mark.clause("ACC-024")
@pytest.mark.needs("apply_optimizer_in_backward")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_in_backward(impl, kind):
    """With apply_optimizer_in_backward each backward pass is a step of the window and leaves no gradient."""
    table, other = fixed_table(), fixed_table()
    options = {"lr": 0.125, "use_accumulate": True, "accumulate_step": 2}
    impl.apply_optimizer_in_backward(getattr(impl, kind), [table], options)
    explicit = make_accumulating(impl, kind, [other], 2)
    rows = tensor([0, 3, 3])
    for step in range(4):
        factor = full((3, 4), 0.25 + step)
        before = table.detach().clone()
        (torch.nn.functional.embedding(rows, table, sparse=True) * factor).sum().backward()
        expect(table.grad is None, "no gradient left", table.grad)
        if step % 2 == 0:
            expect_bits(table.detach(), before, "the table within a window")
        (torch.nn.functional.embedding(rows, other, sparse=True) * factor).sum().backward()
        explicit.step()
        other.grad = None
    expect_near(table, other, "the table")


@pytest.mark.clause("ACC-007")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_checkpoint_before_a_window(impl, kind):
    """A load drops the gradients of a window that the checkpoint does not have."""
    mine, other = fixed_table(), fixed_table()
    optimizer, fresh = (make_accumulating(impl, kind, [table], 3) for table in (mine, other))
    start = pickle.loads(pickle.dumps(optimizer.state_dict()))
    train_window(optimizer, mine, range(2), "dense")
    optimizer.load_state_dict(start)
    for each, table in ((optimizer, mine), (fresh, other)):
        train_window(each, table, range(2, 6), "dense")
    expect_bits(mine.detach(), other.detach(), "the parameter of which a run was given up")


@pytest.mark.clause("ACC-007")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_windows_of_all_parameters_are_resumed(impl, kind):
    """A checkpoint within the windows of several parameters contains all of them."""
    tables, others = [fixed_table() for _ in range(3)], [fixed_table() for _ in range(3)]
    optimizer, resumed = make_accumulating(impl, kind, tables), make_accumulating(impl, kind, others)
    for step in range(5):
        for index, table in enumerate(tables):
            table.grad = gradient_of_step(step + index)
        optimizer.step()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    for index, (table, other) in enumerate(zip(tables, others, strict=True)):
        with torch.no_grad():
            other.copy_(table)
        table.grad, other.grad = (gradient_of_step(9 + index) for _ in range(2))
    optimizer.step()
    resumed.step()
    for index, (table, other) in enumerate(zip(tables, others, strict=True)):
        expect_near(other, table, f"parameter {index}")
