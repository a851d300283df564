"""Keyed optimizers: further methods of inner optimizers that wrappers and combinations pass on."""

import functools

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_equal, outcome
from keyedopt.conformance.suite.support.device import ones
from keyedopt.conformance.suite.support.inputs import parameters, sgd, warmup_stages


class Spare(torch.optim.SGD):
    """An optimizer with the further methods that some fused optimizers have."""

    def __init__(self, listed):
        super().__init__(listed, lr=0.1)
        self.told = []
        self.buffer = ones(2)

    def set_optimizer_step(self, step):
        """Record a step count."""
        self.told.append(step)

    def update_hyper_parameters(self, params_dict):
        """Record hyper-parameters."""
        self.told.append(params_dict)

    def scratch_buffers(self):
        """Return working memory."""
        return (self.buffer,)

    def global_step(self, count, closure=None):
        """Do nothing; a semi-synchronous optimizer requires this method of its global optimizer."""


class Plain(torch.optim.SGD):
    """A global optimizer without working memory."""

    def global_step(self, count, closure=None):
        """Do nothing."""


@pytest.mark.clause("KEYED-097")
def test_further_methods_reach_the_inner_optimizer(impl):
    """set_optimizer_step and update_hyper_parameters reach an inner optimizer that has them."""
    made = []

    def factory(listed):
        made.append(Spare(listed))
        return made[0]

    optimizer = impl.KeyedOptimizerWrapper(parameters(1), factory)
    optimizer.set_optimizer_step(7)
    optimizer.update_hyper_parameters({"lr": 0.5})
    expect_equal(made[0].told, [7, {"lr": 0.5}], "calls that reached the inner optimizer")


@pytest.mark.clause("KEYED-097")
def test_further_methods_are_no_error_where_there_are_none(impl):
    """Both methods do nothing around an optimizer without them."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    optimizer.set_optimizer_step(7)
    optimizer.update_hyper_parameters({"lr": 0.5})
    expect_equal(optimizer.param_groups[0]["lr"], 0.1, "the learning rate")


@pytest.mark.clause("KEYED-098")
@pytest.mark.parametrize("inner", ["with", "without"])
def test_scratch_buffers(impl, inner):
    """Observe what scratch_buffers returns around an optimizer with and without working memory."""
    factory = Spare if inner == "with" else functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = impl.KeyedOptimizerWrapper(parameters(1), factory)
    return outcome(lambda: len(optimizer.scratch_buffers()))


@pytest.mark.clause("KEYED-112")
@pytest.mark.needs("{owner}")
@pytest.mark.parametrize(
    "owner",
    [
        *("KeyedOptimizerWrapper", "CombinedOptimizer", "SemisyncOptimizer"),
        *("OptimizerWrapper", "WarmupOptimizer", "GradientClippingOptimizer"),
    ],
)
def test_buffers_are_listed(impl, owner):
    """The buffers of all inner optimizers are listed in order; the list is empty if there are none."""
    if not hasattr(getattr(impl, owner), "scratch_buffers"):
        getattr(impl, f"{owner}.scratch_buffers")  # raises MissingName, so the case is unsupported
    buffers = []

    def spare(listed):
        made = Spare(listed)
        buffers.append(made.buffer)
        return made

    def around(kinds):
        params = [parameters(1) for _ in kinds]
        inside = [impl.KeyedOptimizerWrapper(one, kind) for one, kind in zip(params, kinds, strict=True)]
        if owner == "KeyedOptimizerWrapper":
            return inside[0]
        if owner == "CombinedOptimizer":
            bare = impl.KeyedOptimizer({}, {}, [])
            return impl.CombinedOptimizer([bare, *((f"part{at}", one) for at, one in enumerate(inside))])
        if owner == "SemisyncOptimizer":
            outer = impl.KeyedOptimizerWrapper(params[0], spare if spare in kinds else Plain)
            return impl.SemisyncOptimizer(list(params[0].values()), inside[0], outer)
        stages = [warmup_stages(impl, [{"policy": "NONE"}])] if owner == "WarmupOptimizer" else []
        return getattr(impl, owner)(inside[0], *stages)

    listed = list(around([spare, torch.optim.SGD, spare]).scratch_buffers())
    many = {"CombinedOptimizer": buffers, "SemisyncOptimizer": buffers[::2]}
    wanted = many.get(owner, buffers[:1])
    expect_equal([*map(id, listed)], [*map(id, wanted)], "the buffers, by identity")
    plain = around([functools.partial(torch.optim.SGD, lr=0.1)] * 2)
    expect_equal(list(plain.scratch_buffers()), [], "what is listed without any")
