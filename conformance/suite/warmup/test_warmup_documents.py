"""Warmup: what the documents say about gradients."""

import pytest

from keyedopt.conformance.suite.support.assertions import expect, expect_bits
from keyedopt.conformance.suite.support.inputs import adam, parameters, set_wide_grads
from keyedopt.conformance.suite.support.warmup import linear_ramp


@pytest.mark.clause("WARM-078")
def test_a_step_does_not_modify_gradients(impl):
    """After a step each .grad is the same tensor with the same values, at every learning rate."""
    params = parameters(2)
    optimizer = linear_ramp(impl, adam(impl, params))
    for _ in range(6):
        set_wide_grads(params)
        given = [param.grad for param in params.values()]
        before = [grad.clone() for grad in given]
        optimizer.step()
        for param, grad, old in zip(params.values(), given, before, strict=True):
            expect(param.grad is grad, "the same tensor as gradient", param.grad)
            expect_bits(grad, old, "the gradient after a step")
