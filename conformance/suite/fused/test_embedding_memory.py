"""Tables and states that were replaced by smaller tensors, and freed memory: nothing outside is touched.

The smaller tensors are views of larger buffers, so a kernel that writes beyond the end of one writes to
memory of the case, where it is seen. A kernel that reads freed memory may end the process of the case.
"""

import gc
import weakref
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.buffers import Buffers
from keyedopt.conformance.suite.support.described import CannotRun
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
)
from keyedopt.conformance.suite.support.late_errors import drop_pending_error

FEATURES = {"f": BAGS["f"], "g": BAGS["g"]}
TABLE = (("t", 6, 4, ("f", "g")),)
#: One feature of one table, which a target may pass to its kernels as it is.
ONE_FEATURE = {"f": BAGS["f"]}


def expect_confined(module: Any, replaced: list[torch.Tensor]) -> None:
    """Expect a step with smaller tensors to write nothing behind them, and to raise if it uses them."""
    buffers = Buffers()
    for value in replaced:
        value.data = buffers.view(value.detach(), 2)
    behind, before = buffers.behind(), [value.detach().clone() for value in replaced]
    error: Exception | None = None
    try:
        fit(module, jagged(FEATURES), seed=2)
    except Exception as raised:
        error = raised
    found = buffers.behind()
    unused = all(same_bits(value.detach(), old) for value, old in zip(replaced, before, strict=True))
    drop_pending_error(module, jagged({"f": [[0]], "g": [[0]]}))  # rows behind the end are invalid
    for seen, wanted in zip(found, behind, strict=True):
        expect_bits(seen, wanted, "the memory behind a tensor")
    expect(error is not None or unused, "an error, or no use of the smaller tensor", "it was updated")


@pytest.mark.clause("FUSED-099")
@pytest.mark.needs("{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_smaller_tables(impl: Any, optimizer: str) -> None:
    """A table that was replaced by one with fewer rows is not updated behind its end."""
    module = collection(impl, optimizer, tables=TABLE)
    fit(module, jagged(FEATURES))
    expect_confined(module, list(tables_of(module).values()))


@pytest.mark.clause("FUSED-099")
@pytest.mark.needs("{optimizer}")
@pytest.mark.parametrize("optimizer", [kind for kind in FUSED_OPTIMIZERS if kind not in ("SGD", "LarsSGD")])
def test_smaller_states(impl: Any, optimizer: str) -> None:
    """A state that was replaced by one with fewer rows is not updated behind its end."""
    module = collection(impl, optimizer, tables=TABLE)
    fit(module, jagged(FEATURES))
    (entry,) = tables_and_state(module)["state"].values()
    tensors = [value for value in entry.values() if type(value) is torch.Tensor]
    expect_confined(module, [value for value in tensors if value.shape[:1] == (6,)])


#: The tables whose states are replaced, one at a time: those of the last table.
PAIR = (("t", 6, 4, ("f",)), ("u", 6, 4, ("g",)))


def replace_memory(buffers: Buffers, value: torch.Tensor, how: str) -> None:
    """Replace the memory of a state by that of fewer rows or columns, or of a tensor elsewhere."""
    narrow = value.detach()[:, :2] if how == "columns" else value.detach()
    value.data = buffers.view(narrow, 2 if how == "rows" else len(narrow))


@pytest.mark.clause("FUSED-099")
@pytest.mark.needs("{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam", "Ftrl"])
@pytest.mark.parametrize("how", ["rows", "columns", "moved"])
@pytest.mark.parametrize("late", [False, True], ids=["before the lookup", "before the backward pass"])
def test_one_state_is_replaced(impl: Any, late: bool, how: str, optimizer: str) -> None:
    """A state of one table that was replaced, or moved, is not updated behind its end or where it was."""
    other = collection(impl, optimizer, tables=PAIR)
    fit(other, jagged(FEATURES), steps=2)
    shapes = tables_and_state(other)["state"]["u.weight"]
    for key, shape in shapes.items():
        if type(shape) is not torch.Tensor or shape.ndim < (2 if how == "columns" else 1):
            continue
        module, buffers = collection(impl, optimizer, tables=PAIR), Buffers()
        fit(module, jagged(FEATURES))
        value = tables_and_state(module)["state"]["u.weight"][key]
        if len(value) != 6:
            continue  # a step count
        old, loss = value.detach(), lookups(module, jagged(FEATURES), 2) if late else None
        replace_memory(buffers, value, how)
        if tables_and_state(module)["state"]["u.weight"][key].data_ptr() != value.data_ptr():
            continue  # the module does not use that tensor
        behind, before = buffers.behind(), [old.clone(), value.detach().clone()]
        error = ""
        try:
            (lookups(module, jagged(FEATURES), 2) if loss is None else loss).backward()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found, table = [*buffers.behind(), old.clone()], tables_of(module)["u"].detach().clone()
        unused = same_bits(value.detach(), before[1])
        drop_pending_error(module, jagged({"f": [[0]], "g": [[0]]}))
        for seen, wanted in zip(found, [*behind, before[0]], strict=True):
            expect_bits(seen, wanted, f"memory that {key} does not have")
        if how != "moved":
            expect(error or unused, f"an error, or no use of the smaller {key}", "it was updated")
        elif not error:
            expect_bits(table, tables_of(other)["u"].detach(), "the updated table")


def free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor, as FSDP and offloading do; the tensor keeps its shape.

    Raises:
        CannotRun: torch cannot free memory of this device, so the case is unsupported.
    """
    try:
        tensor.untyped_storage().resize_(0)
    except NotImplementedError as error:
        raise CannotRun(f"torch cannot free memory on {tensor.device.type}") from error


@pytest.mark.clause("FUSED-103")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("steps", [0, 2])
def test_lookup_in_a_freed_table(impl: Any, kind: str, steps: int) -> None:
    """A lookup in a table whose memory was freed raises an error, whatever was looked up before."""
    module = collection(impl, "SGD", tables=ONE_TABLE, kind=kind)
    fit(module, jagged(ONE_FEATURE), steps=steps)
    free(tables_of(module)["t"])
    expect_raises(lambda: lookups(module, jagged(ONE_FEATURE)), Exception, expected="an error of the lookup")


@pytest.mark.clause("FUSED-103")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("what", ["row numbers", "offsets"])
def test_freed_inputs(impl: Any, kind: str, what: str) -> None:
    """A lookup by row numbers or offsets whose memory was freed raises an error."""
    module, features = collection(impl, "SGD", tables=ONE_TABLE, kind=kind), jagged(ONE_FEATURE)
    free(features["f"][what == "offsets"])
    expect_raises(lambda: lookups(module, features), Exception, expected="an error of the lookup")


@pytest.mark.clause("FUSED-103")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("what", ["row numbers", "offsets"])
def test_inputs_freed_before_the_backward(impl: Any, kind: str, what: str) -> None:
    """A backward pass after its row numbers or offsets were freed raises an error, or does not need them."""
    module, other = (collection(impl, "Adagrad", tables=ONE_TABLE, kind=kind) for _ in range(2))
    features = jagged(ONE_FEATURE)
    loss, before = lookups(module, features), snapshot(tables_and_state(module))
    free(features["f"][what == "offsets"])
    try:
        loss.backward()
    except Exception:
        expect_unchanged(before, tables_and_state(module), "tables and state after the error")
        return
    fit(other, jagged(ONE_FEATURE))
    expect_bits(tables_of(module)["t"].detach(), tables_of(other)["t"].detach(), "the updated table")


@pytest.mark.clause("FUSED-103")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("what", ["row numbers", "offsets", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_inputs_of_int32_freed_before_the_backward(impl: Any, weighted: bool, what: str, kind: str) -> None:
    """The same holds for row numbers and offsets in int32, with weights in float64, in two features."""
    module, other = (
        collection(impl, "Adagrad", tables=TABLE, kind=kind, weighted=weighted) for _ in range(2)
    )
    weights = {name: [[row + 0.5 for row in bag] for bag in bags] for name, bags in FEATURES.items()}
    made = jagged(FEATURES, weights if weighted else None)
    features = {
        name: (parts[0].int(), parts[1].int(), *(one.double() for one in parts[2:]))
        for name, parts in made.items()
    }
    loss, before = lookups(module, features), snapshot(tables_and_state(module))
    for values, offsets, *_ in features.values():
        for one in {"row numbers": [values], "offsets": [offsets], "both": [values, offsets]}[what]:
            free(one)
    try:
        loss.backward()
    except Exception:
        expect_unchanged(before, tables_and_state(module), "tables and state after the error")
        return
    fit(other, made)
    expect_near(tables_of(module)["t"], tables_of(other)["t"], "the updated table")


@pytest.mark.clause("FUSED-108")
@pytest.mark.plain_only("it is about the life of objects")
@pytest.mark.needs("{kind}", "Adagrad")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
@pytest.mark.parametrize("trained", [False, True])
def test_freed(impl, kind, trained):
    """A module without references is freed with its tables and their state, whether it was trained or not."""
    module = collection(impl, "Adagrad", kind=kind)
    if trained:
        fit(module, jagged(BAGS))
    state = [one for entry in module.fused_optimizer.state.values() for one in entry.values()]
    weak = [
        weakref.ref(one) for one in (module, *tables_of(module).values(), *filter(torch.is_tensor, state))
    ]
    del module, state
    gc.collect()
    there = [type(one()).__name__ for one in weak if one() is not None]
    expect_equal(there, [], "what is still there of a module without references")


@pytest.mark.clause("FUSED-108")
@pytest.mark.plain_only("it is about the life of objects")
@pytest.mark.needs("{kind}", "SGD")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_an_output_outlives_its_module(impl, kind):
    """The backward pass of an output trains tables that the caller keeps, although the module is gone."""
    module, other = (collection(impl, kind=kind) for _ in range(2))
    kept, expected, output = tables_of(module), tables_of(other), module(jagged(BAGS))
    del module
    gc.collect()
    for outputs in (output, other(jagged(BAGS))):
        sum(one.sum() for one in outputs.values()).backward()
    expect_unchanged(snapshot(expected), kept, "the tables of a module that is gone")
