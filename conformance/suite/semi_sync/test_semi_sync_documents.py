"""Semi-synchronous training: what the docstring says about memory."""

import pytest

from keyedopt.conformance.suite.support.assertions import expect_equal
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, train
from keyedopt.conformance.suite.support.replicas import semisync


@pytest.mark.clause("SEMI-042")
def test_offloaded_parameters(impl):
    """With offloading, a parameter that only the global optimizer has is in CPU memory after each step."""
    params, extra = parameters(), parameter(4, seed=9)
    options = {"offload_global_model": True}
    every = {**params, "x": extra}
    local = adam(impl, params)
    made = semisync(impl, params, every=2, local=local, outer_params=every, options=options, stateless=True)
    for _ in range(5):
        train(made[0], params, 1)
        expect_equal(extra.device.type, "cpu", "device of a parameter that only the global optimizer has")
