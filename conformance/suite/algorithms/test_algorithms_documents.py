"""The algorithms: what docstrings say in words and not in a formula."""

import pytest

from keyedopt.conformance.suite.support.algorithms import exact_dtype
from keyedopt.conformance.suite.support.assertions import expect_close
from keyedopt.conformance.suite.support.inputs import parameter, set_grads


@pytest.mark.clause("ALGO-098")
@pytest.mark.needs("RowWiseAdagrad")
def test_rowwise_adagrad_weight_decay_is_l2(impl):
    """A step with weight decay equals a step with the gradient of the loss and its L2 penalty."""
    decayed, plain = (parameter(4, 3, dtype=exact_dtype(impl)) for _ in range(2))
    with_decay = impl.RowWiseAdagrad([decayed], lr=0.1, weight_decay=0.25)
    without = impl.RowWiseAdagrad([plain], lr=0.1)
    for step in range(3):
        set_grads([decayed], seed=step + 1)
        plain.grad = decayed.grad + 0.25 * plain.detach()
        with_decay.step()
        without.step()
    expect_close(decayed.detach(), plain.detach(), "the table after three steps", ulps=256)
