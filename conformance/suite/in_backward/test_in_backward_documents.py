"""Optimizers in the backward pass: what the document says about failures."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_raises
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import parameter


@pytest.mark.clause("INBW-052")
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("own", [False, True])
def test_accumulation_of_a_class_that_does_not_accumulate(impl, name, own):
    """use_accumulate for a class that does not accumulate raises an error."""
    kind = getattr(impl if own else torch.optim, name)
    options = {"lr": 0.25, "use_accumulate": True, "accumulate_step": 2}
    expect_raises(
        lambda: apply_in_backward(impl, kind, [parameter(4, 3)], options),
        Exception,
        expected=f"an error: {name} does not accumulate",
    )


@pytest.mark.clause("INBW-053")
@pytest.mark.parametrize("wrong", ["class", "module class", "kwargs"])
def test_failures_are_exceptions(impl, wrong):
    """An argument of another kind raises an exception."""
    kind = {"class": "SGD", "module class": torch.nn.Linear}.get(wrong, torch.optim.SGD)
    options = 0.1 if wrong == "kwargs" else {"lr": 0.25}
    expect_raises(
        lambda: apply_in_backward(impl, kind, [parameter(4, 3)], options),
        Exception,
        expected=f"an error for a wrong {wrong}",
    )
