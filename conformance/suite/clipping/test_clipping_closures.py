"""Clipping with closures and hooks: the gradients that reach the wrapped optimizer are clipped."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_close, expect_equal, outcome
from keyedopt.conformance.suite.support.device import ones, tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping, recording
from keyedopt.conformance.suite.support.inputs import sgd


def one_parameter(*values: float) -> dict[str, Any]:
    """Make one parameter with these values."""
    return {"p": torch.nn.Parameter(tensor(values))}


@pytest.mark.clause("CLIP-019")
@pytest.mark.parametrize(
    ("kind", "wanted"), [("NORM", [0.6, 0.8]), ("VALUE", [1.0, 1.0]), ("NONE", [30.0, 40.0])]
)
def test_gradients_of_a_closure_are_clipped(impl: Any, kind: str, wanted: list[float]) -> None:
    """The gradients that a closure computes are clipped."""
    params = one_parameter(0.0, 0.0)
    optimizer, recorder = clipping(impl, params, kind, 1.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (params["p"] * tensor([30.0, 40.0])).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expect_close(recorder.received[0][0], torch.tensor(wanted), "received gradient")


@pytest.mark.clause("CLIP-020")
@pytest.mark.parametrize("evaluations", [1, 3])
def test_every_evaluation_is_clipped(impl: Any, evaluations: int) -> None:
    """The gradients are clipped after every evaluation of the closure by the wrapped optimizer."""
    params = one_parameter(0.0, 0.0)
    keyed, recorder = recording(impl, params, evaluations=evaluations)
    optimizer = impl.GradientClippingOptimizer(keyed, impl.GradientClipping.NORM, 1.0)
    scales: list[float] = []

    def closure() -> Any:
        scales.append(10.0 ** (len(scales) + 1))
        optimizer.zero_grad()
        loss = (params["p"] * tensor([3.0, 4.0])).sum() * scales[-1]
        loss.backward()
        return loss

    optimizer.step(closure)
    expect_equal(len(scales), evaluations, "evaluations of the closure")
    for received in recorder.received:
        expect_close(received[0], torch.tensor([0.6, 0.8]), "received gradient", ulps=8)


@pytest.mark.clause("CLIP-020")
def test_lbfgs_sees_clipped_gradients(impl: Any) -> None:
    """LBFGS, which evaluates its closure several times, uses clipped gradients."""
    params = one_parameter(0.0)
    keyed = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.LBFGS(listed, lr=1.0, max_iter=3, tolerance_change=0.0)
    )
    optimizer = impl.GradientClippingOptimizer(keyed, impl.GradientClipping.VALUE, 0.5)
    calls: list[float] = []

    def closure() -> Any:
        calls.append(float(params["p"].detach()))
        optimizer.zero_grad()
        loss = (params["p"] * 1000.0).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    # LBFGS's first move is min(1, 1/|g|₁)·lr·g; with |g| = 0.5 that is 0.5, without clipping 1.
    expect(len(calls) > 1, "several evaluations", calls)
    expect_close(torch.tensor(calls[1]), torch.tensor(-0.5), "position after the first move")


@pytest.mark.clause("CLIP-021")
def test_closure_that_accumulates(impl: Any) -> None:
    """A gradient from before the closure is clipped once, together with what the closure adds."""
    params = one_parameter(0.0, 0.0)
    params["p"].grad = tensor([0.0, 40.0])
    optimizer, recorder = clipping(impl, params, "NORM", 1.0)

    def closure() -> Any:
        loss = params["p"][0] * 30.0
        loss.backward()
        return loss

    optimizer.step(closure)
    expect_close(recorder.received[0][0], torch.tensor([0.6, 0.8]), "received gradient")


@pytest.mark.clause("CLIP-022")
def test_closure_under_no_grad(impl: Any) -> None:
    """A closure can call backward, also if gradients are disabled around the step."""
    params = one_parameter(0.0, 0.0)
    optimizer = impl.GradientClippingOptimizer(sgd(impl, params, lr=1.0), impl.GradientClipping.NONE, 1.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (params["p"] * tensor([3.0, 4.0])).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        optimizer.step(closure)
    expect_close(params["p"].detach(), torch.tensor([-3.0, -4.0]), "parameter after the step")


@pytest.mark.clause("CLIP-023")
def test_what_step_returns(impl: Any) -> dict[str, str]:
    """Observe what step returns, with a closure and without."""
    params = one_parameter(0.0)
    params["p"].grad = ones(1)
    optimizer = impl.GradientClippingOptimizer(sgd(impl, params, lr=0.0), impl.GradientClipping.NORM, 1.0)
    return {
        "without a closure": outcome(optimizer.step),
        "with a closure": outcome(lambda: optimizer.step(lambda: tensor(7.0))),
    }


@pytest.mark.clause("CLIP-024")
def test_failing_closure(impl: Any) -> None:
    """A step raises an error of its closure, and updates no parameter."""
    params = one_parameter(1.0, 2.0)
    params["p"].grad = tensor([3.0, 4.0])
    optimizer = impl.GradientClippingOptimizer(sgd(impl, params, lr=1.0), impl.GradientClipping.NORM, 1.0)

    def closure() -> Any:
        raise KeyError("no batch left")

    try:
        optimizer.step(closure)
    except KeyError:
        expect_equal(params["p"].tolist(), [1.0, 2.0], "parameter after the failed step")
        return
    expect(False, "the KeyError of the closure", "no error")


@pytest.mark.clause("CLIP-025")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_pre_hook_cannot_pass_the_bound(impl: Any, kind: str) -> None:
    """Gradients that a step pre-hook of the clipping optimizer writes are clipped."""
    params = one_parameter(0.0, 0.0)
    params["p"].grad = zeros(2)
    optimizer, recorder = clipping(impl, params, kind, 1.0)

    def unscale(*_: Any) -> None:
        params["p"].grad = tensor([0.0, 40.0])

    optimizer.register_step_pre_hook(unscale)
    optimizer.step()
    expect_close(recorder.received[0][0], torch.tensor([0.0, 1.0]), "received gradient", ulps=32)


@pytest.mark.clause("CLIP-026")
def test_step_hooks_fire_once(impl: Any) -> None:
    """Step hooks of the clipping optimizer run once per step, the post-hook after the update."""
    params = one_parameter(0.0, 0.0)
    params["p"].grad = tensor([3.0, 4.0])
    optimizer = impl.GradientClippingOptimizer(sgd(impl, params, lr=1.0), impl.GradientClipping.VALUE, 1.0)
    events: list[tuple[str, list[float]]] = []
    optimizer.register_step_pre_hook(lambda *_: events.append(("pre", params["p"].tolist())))
    optimizer.register_step_post_hook(lambda *_: events.append(("post", params["p"].tolist())))
    optimizer.step()
    expect_equal(events, [("pre", [0.0, 0.0]), ("post", [-1.0, -1.0])], "events of one step")
