"""Embedding modules: a joint clipped step that raises an error."""

import pytest

from keyedopt.conformance.suite.support.assertions import error_of, expect_bits, expect_close
from keyedopt.conformance.suite.support.embedding import tables_of
from keyedopt.conformance.suite.support.joint_clipping import backpropagate, mixed_tree


@pytest.mark.clause("FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_a_joint_step_that_raises(impl):
    """A joint step that raises an error keeps the table gradients: the next step uses them, once."""
    module, dense, whole, warned = mixed_tree(impl)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    before = table.detach().clone()
    backpropagate(module, dense, [2], [[0.25, 0.0, 0.0, 0.0]], [0.125, 0.0, 0.0])
    groups = module.fused_optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = -1.0
    if error_of(whole.step) is None:  # options are not checked
        return
    expect_bits(table.detach(), before, "a table after a step that raised")
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    whole.step()
    expect_close(float((before - table.detach())[2, 0]), 0.25, "the step of the table", ulps=2**34)
    after = table.detach().clone()
    whole.step()
    expect_bits(table.detach(), after, "a table after another step")
