"""Combined optimizers: keys with a common prefix, and errors of a step."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_bits, expect_equal, expect_raises, snapshot
from keyedopt.conformance.suite.support.inputs import (
    adam,
    parameter,
    parameters,
    set_grads,
    sgd,
    train,
    values,
)


@pytest.mark.clause("COMB-002", "COMB-011")
@pytest.mark.parametrize(
    "layout",
    [
        [["a", "b.w"], ["a.b", "v"]],
        [["a.b", "v"], ["a", "b.w"]],
        [["a", "w"], ["ab", "w"]],
        [["ab", "w"], ["a", "w"]],
        [["a", "a.w"], ["b", "a.w"]],
        [["", "a.w"], ["a", "v"]],
        [["a", "v"], ["", "a.w"]],
        [["a", "x.a.w"], ["x", "a.w"]],
        [["a", "w"], ["a", "v"]],
        [["a", "v.w"], ["a", "v"]],
    ],
)
def test_keys_that_begin_alike(impl: Any, layout: list[list[str]]) -> None:
    """State and groups are loaded into their optimizer, also if one key is a prefix of another."""

    def make() -> tuple[Any, list[Any]]:
        params = [parameter(3, seed=index) for index in range(2)]
        inner = [adam(impl, {name: param}) for (_, name), param in zip(layout, params, strict=True)]
        combined = impl.CombinedOptimizer([(key, one) for (key, _), one in zip(layout, inner, strict=True)])
        combined.save_param_groups(True)
        return combined, params

    combined, params = make()
    other, others = make()
    next(iter(combined.param_groups))["lr"] = 0.25
    train(combined, params, 2)
    train(other, others, 1, seed=5)
    saved = combined.state_dict()
    keys = {".".join(filter(None, pair)) for pair in layout}
    expect_equal(set(saved["state"]), keys, "keys of the state")
    other.load_state_dict(snapshot(saved))
    with torch.no_grad():
        for mine, its in zip(others, params, strict=True):
            mine.copy_(its)
    train(combined, params, 2, seed=9)
    train(other, others, 2, seed=9)
    for index in range(2):
        expect_bits(others[index].detach(), params[index].detach(), f"parameter {index}")


class Failing(torch.optim.SGD):
    """An optimizer whose step raises."""

    def step(self, closure: Any = None) -> Any:
        """Raise an error."""
        raise RuntimeError("out of memory")


@pytest.mark.clause("COMB-027")
@pytest.mark.parametrize("at", [0, 1])
def test_an_error_of_a_step_comes_out(impl: Any, at: int) -> None:
    """A step raises the error of an optimizer that fails."""
    params = parameters(2)
    failing = impl.KeyedOptimizerWrapper({"p0": params["p0"]}, lambda listed: Failing(listed, lr=0.1))
    inner = [sgd(impl, {"p1": params["p1"]})]
    inner.insert(at, failing)
    combined = impl.CombinedOptimizer(inner)
    set_grads(params)
    before = values(params)
    expect_raises(combined.step, RuntimeError, mentions=("out of memory",), expected="the error of the step")
    expect_bits(params["p0"].detach(), before[0], "the parameter of the optimizer that failed")
