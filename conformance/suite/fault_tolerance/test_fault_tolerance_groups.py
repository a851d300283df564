"""Fault tolerance with torchft's own managers: replica groups that are killed, hang, return and heal."""

import functools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_equal
from keyedopt.conformance.suite.support.replica_groups import (
    FIRST_WEIGHTS,
    Groups,
    contents_of,
    expect_together,
    need_torchft,
)

pytestmark = pytest.mark.cpu_only("its replica groups are forks that communicate by gloo")


def every_wrapper(impl: Any, param: Any) -> Any:
    """Return Adam in each wrapper that there is; counters, window and schedule show a step too many."""

    def has(name: str) -> bool:
        return getattr(impl, name, None) is not None

    adam = functools.partial(torch.optim.Adam, lr=0.1)
    if has("AccumulateAdam"):
        adam = functools.partial(impl.AccumulateAdam, lr=0.1, use_accumulate=True, accumulate_step=2)
    if not has("KeyedOptimizerWrapper"):
        return adam([param])
    optimizer = impl.KeyedOptimizerWrapper({"p": param}, adam)
    if has("CombinedOptimizer"):
        optimizer = impl.CombinedOptimizer([("a", optimizer)])
    if has("OptimizerWrapper"):
        optimizer = impl.OptimizerWrapper(optimizer)
    if has("GradientClippingOptimizer"):
        optimizer = impl.GradientClippingOptimizer(optimizer, impl.GradientClipping.NORM, 1.0)
    if has("WarmupOptimizer"):
        stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=20, value=0.1)
        optimizer = impl.WarmupOptimizer(optimizer, [stage], lr=0.3)
    optimizer.init_state()  # so that a group that returns can load in place
    return optimizer


@pytest.mark.clause("FT-036")
@pytest.mark.needs("FaultTolerantOptimizer")
def test_replica_groups(impl: Any) -> None:
    """Of three groups one is killed in a step and one hangs; one is killed as it heals, and one returns."""
    need_torchft()
    build = functools.partial(every_wrapper, impl)
    with Groups(impl, build) as groups:
        one, two, three = groups.start(3)
        attempts = groups.ask(("run", 2), one, two, three)[0]
        expect_together(attempts, 3)
        groups.send(("die",), three)
        attempts += groups.ask(("run", 4), one, two)[0]
        (falls,) = groups.start()
        groups.send(("fall",), falls)
        while groups.lives(falls):
            attempts += groups.ask(("run", len(steps_of(attempts)) + 1), one, two)[0]
        groups.send(("hang",), two)
        attempts += groups.ask(("run", len(steps_of(attempts)) + 2), one)[0]
        (back,) = groups.start()
        groups.send(("meet", 2), back)
        attempts += groups.ask(("meet", 2), one)[0]
        (returned,) = groups.answers([back])
        healed, _ = groups.ask(("run", len(steps_of(attempts)) + 2), one, back)
        expect_together(healed, 2)
        attempts += healed
        seen, other = groups.ask(("contents",), one, back)
    failed = [attempt for attempt in attempts if not attempt["committed"]]
    expect(any(attempt["healed"] for attempt in returned), "a group that heals", returned)
    expect(bool(failed), "an attempt that fails with a group", "none")
    for attempt in failed:
        expect(attempt["unchanged"] and attempt["kept"], "the gradients and all else as before", attempt)
    expect_equal(steps_of(attempts), list(range(len(steps_of(attempts)))), "committed steps")
    expect_equal(other, seen, "contents of the group that returned")
    expect_equal(seen, trained_without_groups(build, attempts), "contents")


def steps_of(attempts: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the committed steps."""
    return [attempt["step"] for attempt in attempts if attempt["committed"]]


def trained_without_groups(build: Any, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the contents after steps with the committed gradients, without a manager."""
    param = torch.nn.Parameter(torch.tensor(FIRST_WEIGHTS))
    optimizer = build(param)
    for attempt in attempts:
        if attempt["committed"]:
            param.grad = attempt["grad"]
            optimizer.step()
    return contents_of(param, optimizer)
