"""Errors for invalid lookups, which a device that runs asynchronously may report late.

On the CPU the call raises the error. On another device the call need not synchronize: the error comes at the
latest from the next forward pass after torch has synchronized the device, and nothing is written until then.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect_raises, expect_unchanged, snapshot
from keyedopt.conformance.suite.support.device import synchronize, the_device
from keyedopt.conformance.suite.support.embedding import (
    MADE,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
)


def expect_lookup_error(
    module: Any,
    features: Any,
    valid: Any,
    *kinds: type[BaseException],
    mentions: Sequence[str] = (),
    expected: str,
) -> None:
    """Expect a lookup of invalid features to raise an error, late at most on other devices than the CPU.

    Tables and state must be unchanged, also by the backward pass of the invalid lookup.

    Args:
        module: an embedding module.
        features: invalid features.
        valid: valid features, for the forward pass that raises a late error.
        kinds: the errors that are expected.
        mentions: texts in the message of the error.
        expected: the expectation in words.
    """
    before = snapshot(tables_and_state(module))
    if the_device().type == "cpu":
        expect_raises(lambda: module(features), *kinds, mentions=mentions, expected=expected)
    else:
        late = functools.partial(_until_reported, module, features, valid, before["tables"])
        synchronize()  # no earlier report is on its way
        try:
            expect_raises(late, *kinds, mentions=mentions, expected=f"{expected}, late at most")
        except Exception:
            drop_pending_error(module, valid)
            raise
    expect_unchanged(before, tables_and_state(module), "the module")


def _until_reported(module: Any, features: Any, valid: Any, tables: Any) -> Any:
    """Look up invalid features and train with the outputs, synchronize, then look up valid features."""
    outputs = module(features)
    _train(outputs)
    synchronize()
    expect_unchanged(tables, tables_of(module), "tables, before the error for invalid features,")
    module(valid)
    return outputs


def _train(outputs: Any) -> None:
    """Run the backward pass of the outputs of an embedding module of any kind."""
    listed = outputs.values()
    if isinstance(listed, torch.Tensor):  # a KeyedTensor
        listed = [listed]
    tensors = [one if isinstance(one, torch.Tensor) else one.values() for one in listed]
    losses = [one.sum() for one in tensors if one.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()


def drop_pending_error(module: Any, valid: Any) -> None:
    """Drop an error that the device may not have reported yet: train, synchronize and look up."""
    if the_device().type == "cpu":
        return
    for action in (functools.partial(fit, module), module):
        with contextlib.suppress(Exception):
            action(valid)
        with contextlib.suppress(Exception):
            synchronize()


def pending_error(impl: Any) -> Exception | None:
    """Return the error of an earlier lookup that a new embedding module raises; None if there is none.

    Modules may share an error flag on a device that runs asynchronously. The new module trains, and looks up
    after the device was synchronized. If a second one raises an error too, modules cannot run here.
    """
    made, MADE[0] = MADE[0], False
    if not made or the_device().type == "cpu":
        return None
    found = _error_of_training(impl)
    again = _error_of_training(impl) if found is not None else None
    MADE[0] = False
    return found if again is None else None


def _error_of_training(impl: Any) -> Exception | None:
    features: Mapping[str, Any] = jagged({"f": [[0, 1], [2]]})
    try:
        module = collection(impl, tables=ONE_TABLE)
        fit(module, features)
        synchronize()
        module(features)
    except Exception as error:
        return error
    return None
