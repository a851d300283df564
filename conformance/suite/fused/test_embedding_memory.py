"""Tables and states that were replaced by smaller tensors: no memory outside of them is written.

The smaller tensors are views of larger buffers, so a kernel that writes beyond the end of one writes to
memory of the case, where it is seen.
"""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_bits, same_bits
from keyedopt.conformance.suite.support.buffers import Buffers
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.late_errors import drop_pending_error

FEATURES = {"f": BAGS["f"], "g": BAGS["g"]}
TABLE = (("t", 6, 4, ("f", "g")),)


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
