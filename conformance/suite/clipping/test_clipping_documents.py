"""Clipping: what the documents say about names and about the kinds of clipping."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_close, expect_equal, p_norm
from keyedopt.conformance.suite.support.clipping import expect_scaled
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, sgd


@pytest.mark.clause("CLIP-006")
@pytest.mark.parametrize("bound", [1.0, 5, 0.01])
def test_norm_is_one_factor(impl, bound, dtype):
    """NORM multiplies all gradients by one factor, so that the norm of all is the bound."""
    grads = [[3.0, -4.0], [12.0], [0.0, 84.0]]
    params = {}
    for index, grad in enumerate(grads):
        params[f"p{index}"] = torch.nn.Parameter(zeros(len(grad), dtype=getattr(torch, dtype)))
        params[f"p{index}"].grad = tensor(grad, dtype=getattr(torch, dtype))
    optimizer, recorder = clipping(impl, params, "NORM", bound)
    optimizer.step()
    expect_scaled(recorder.received[0], grads, bound, p_norm([3.0, 4.0, 12.0, 84.0]))


@pytest.mark.clause("CLIP-082")
def test_names_of_arguments(impl):
    """The arguments can be given as optimizer, clipping and max_gradient, and the closure as closure."""
    params = parameters(1)
    set_grads(params)
    before, grad = params["p0"].detach().clone(), params["p0"].grad.clone()
    kind = impl.GradientClipping(value="value")
    optimizer = impl.GradientClippingOptimizer(
        max_gradient=0.25, clipping=kind, optimizer=sgd(impl, params, lr=1.0)
    )
    optimizer.step(closure=None)
    expect_close(
        params["p0"].detach(), (before - grad.clamp(-0.25, 0.25)).double(), "the parameter after a step"
    )
    optimizer.zero_grad(set_to_none=True)
    expect_equal(params["p0"].grad, None, "the gradient after zero_grad(set_to_none=True)")
