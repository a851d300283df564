"""Semi-synchronous training: local and global steps, counters, closures and gradients."""

import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, tensor
from keyedopt.conformance.suite.support.doubles import Recorder
from keyedopt.conformance.suite.support.inputs import adam, parameters, set_grads, train, values
from keyedopt.conformance.suite.support.replicas import GLOBAL_COUNTER, LOCAL_COUNTER, Outer, semisync


class Failing(torch.optim.SGD):
    """An optimizer that can be set to fail."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        """Step, or raise before anything has changed."""
        if self.fail:
            raise RuntimeError("out of memory")
        return super().step(closure)


def train_separately(
    impl: Any, params: Any, steps: int, every: int = 3, seed: int = 1, **outer_options: Any
) -> None:
    """Train with the two optimizers manually, without the SemisyncOptimizer."""
    local, outer = adam(impl, params), Outer([*params.values()], **outer_options)
    for step in range(steps):
        set_grads(params, seed=seed + step)
        local.step()
        if (step + 1) % every == 0:
            outer.zero_grad()
            outer.global_step(tensor(step + 1))


@pytest.mark.clause("SEMI-005")
def test_local_steps(impl, dtype):
    """Between global steps it equals the local optimizer used on its own, bit by bit."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, local, outer = semisync(impl, params, every=10)
    bare = adam(impl, others)
    train(optimizer, params, 9)
    train(bare, others, 9)
    expect_equal(outer.counts, [], "global steps")
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(snapshot(bare.state_dict()), local.state_dict(), "state of the local optimizer")


@pytest.mark.clause("SEMI-006")
@pytest.mark.parametrize(("every", "steps"), [(1, 3), (2, 5), (3, 9), (4, 4)])
def test_global_steps(impl, every, steps, dtype):
    """A global step follows every `num_local_steps`-th local step and receives the number of local steps."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, _, outer = semisync(impl, params, every=every)
    train(optimizer, params, steps)
    train_separately(impl, others, steps, every=every)
    expect_equal(outer.counts, [*range(every, steps + 1, every)], "local steps at each global step")
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("SEMI-006")
def test_parameters_of_one_optimizer_alone(impl):
    """Each optimizer changes its own parameters, shared with the other or not."""
    params = parameters(3)
    both = {"p0": params["p0"], "p1": params["p1"]}
    optimizer, _, outer = semisync(
        impl, params, every=2, local=adam(impl, both), outer_params={"p1": params["p1"], "p2": params["p2"]}
    )
    others = parameters(3)
    bare = adam(impl, {"p0": others["p0"], "p1": others["p1"]})
    by_hand = Outer([others["p1"], others["p2"]])
    train(optimizer, both, 2)
    train(bare, {"p0": others["p0"], "p1": others["p1"]}, 2)
    by_hand.global_step(tensor(2))
    expect_unchanged(values(others), values(params), "parameters")
    expect_equal(outer.counts, [2], "local steps at each global step")


@pytest.mark.clause("SEMI-023")
def test_local_step_that_fails(impl):
    """A local step that raises is not counted: the distance to the next global step is unchanged."""
    params = parameters()
    made: list[Failing] = []

    def factory(listed: Any) -> Failing:
        made.append(Failing(listed, lr=0.1))
        return made[0]

    optimizer, _, outer = semisync(impl, params, every=3, local=impl.KeyedOptimizerWrapper(params, factory))
    train(optimizer, params, 2)
    made[0].fail = True
    before = values(params)
    expect_raises(optimizer.step, RuntimeError, mentions=["out of memory"], expected="the optimizer's error")
    expect_equal(outer.counts, [], "global steps after two local ones")
    expect_unchanged(before, values(params), "parameters")
    made[0].fail = False
    train(optimizer, params, 1)
    expect_equal(outer.counts, [3], "local steps at each global step")


@pytest.mark.clause("SEMI-023")
def test_global_step_that_fails(impl):
    """A global step that raises is not counted."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=2)
    outer.fail = True
    train(optimizer, params, 1)
    set_grads(params)
    expect_raises(optimizer.step, RuntimeError, mentions=["regions"], expected="the optimizer's error")
    entry = optimizer.state_dict()["state"]["p0"]
    counted = int(entry[GLOBAL_COUNTER])
    expect_equal(counted, 0, "global steps that are counted")


@pytest.mark.clause("SEMI-022")
@pytest.mark.parametrize("kind", ["torch", "without enable_grad"])
def test_closure(impl, kind):
    """Both steps receive the closure; the local step evaluates it with gradients enabled."""
    params, others = parameters(1), parameters(1)
    seen: list[bool] = []

    class Plain(torch.optim.Optimizer):
        """An optimizer that does not change the gradient mode."""

        def step(self, closure: Any = None) -> Any:
            """Evaluate the closure and step."""
            loss = closure()
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad, alpha=0.1)
            return loss

    def factory(listed: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(listed, lr=0.1) if kind == "torch" else Plain(listed, {})

    optimizer, _, outer = semisync(impl, params, every=2, local=impl.KeyedOptimizerWrapper(params, factory))

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        params["p0"].grad = None
        loss = (params["p0"] * arange(3.0)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expect_equal(seen, [True], "gradients enabled at each evaluation")
    others["p0"].grad = arange(3.0)
    torch.optim.SGD([others["p0"]], lr=0.1).step()
    expect_close(params["p0"], others["p0"].detach(), "parameter", ulps=1)
    outer.evaluates = True
    optimizer.step(closure)
    expect_equal(seen, [True] * 3, "gradients enabled at each evaluation, the last one in a global step")
    expect_equal(outer.counts, [2], "local steps at each global step")


@pytest.mark.clause("SEMI-024")
def test_what_step_returns_and_leaves(impl):
    """Observe what step returns with a closure, and which gradients steps leave."""
    params = parameters(1)
    optimizer, _, outer = semisync(impl, params, every=2)

    def closure() -> float:
        set_grads(params)
        return 3.0

    seen = []
    for _ in range(2):
        seen.append(outcome(lambda: optimizer.step(closure)))
        seen.append("gradient" if params["p0"].grad is not None else "no gradient")
    return [*seen, "gradient" if outer.gradients[0] is not None else "no gradient"]


@pytest.mark.clause("SEMI-021")
@pytest.mark.parametrize("arguments", [[], [True], [False]])
def test_zero_grad(impl, arguments):
    """zero_grad sets both optimizers' gradients to None, by default too, and to zero or None with False."""
    params = parameters(3)
    local = adam(impl, {"p0": params["p0"], "p1": params["p1"]})
    optimizer = semisync(impl, params, local=local, outer_params={"p1": params["p1"], "p2": params["p2"]})[0]
    set_grads(params)
    params["p0"].grad.fill_(math.inf)
    optimizer.zero_grad(**({"set_to_none": arguments[0]} if arguments else {}))
    for key, param in params.items():
        # torchrec's keyed optimizers always remove gradients; a KEYED clause covers this.
        if param.grad is not None:
            expect(arguments == [False], f"no gradient of {key}", param.grad)
            expect_bits(param.grad, torch.zeros(3), f"gradient of {key}")


@pytest.mark.clause("SEMI-035")
@pytest.mark.parametrize("value", ["nan", "inf", "sparse", "missing"])
def test_gradients_reach_the_local_optimizer_as_they_are(impl, value):
    """Non-finite, sparse and missing gradients arrive unchanged."""
    params = parameters(2, (3, 2))
    recorder: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        recorder.append(Recorder(listed))
        return recorder[0]

    local = impl.KeyedOptimizerWrapper(params, factory)
    optimizer = semisync(impl, params, local=local)[0]
    set_grads(params)
    if value == "sparse":
        params["p0"].grad = params["p0"].grad.to_sparse()
    elif value == "missing":
        params["p0"].grad = None
    else:
        params["p0"].grad[1] = float(value)
    before = [None if param.grad is None else param.grad.clone() for param in params.values()]
    optimizer.step()
    expect_unchanged(before, recorder[0].received[0], "gradients that were received")


@pytest.mark.clause("SEMI-006", "SEMI-012")
@pytest.mark.parametrize("every", [1, 3, 4])
def test_counters(impl, every):
    """The counters count the local and the global steps, whatever happens in between."""
    params = parameters()
    optimizer, _, _ = semisync(impl, params, every=every)
    train(optimizer, params, 9)
    entry = optimizer.state_dict()["state"]["p0"]
    seen = [int(entry[LOCAL_COUNTER]), int(entry[GLOBAL_COUNTER])]
    expect_equal(seen, [9, 9 // every], "local and global steps")


@pytest.mark.clause("SEMI-006")
@pytest.mark.plain_only("it counts gradients")
def test_gradients_are_released_for_a_global_step(impl):
    """At a global step the gradients of the local steps are released."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=2)
    train(optimizer, params, 4)
    expect_equal(outer.gradients, [None] * 4, "gradients at the global steps")
