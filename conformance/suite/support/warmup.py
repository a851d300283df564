"""Helpers for cases of warmup: two ramps whose learning rates identify the iteration."""

from typing import Any

from keyedopt.conformance.suite.support.assertions import expect_close
from keyedopt.conformance.suite.support.inputs import warmup_stages

# A ramp from 0 with a second stage: every iteration up to its end has a different learning rate.
POLY_RAMP = [
    {"policy": "LINEAR", "max_iters": 4, "value": 0.0},
    {"policy": "POLY", "max_iters": 8, "value": 1.0, "decay_iters": 10},
]
POLY_RATES = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.4, 0.3, 0.2, 1.0, 1.0]

# Every iteration has a different learning rate, with lr = 1: 0, 0.25, … 1, then i / 20 up to 12.
LINEAR_RAMP = [
    {"policy": "LINEAR", "max_iters": 4, "value": 0.0},
    {"policy": "LINEAR", "max_iters": 12, "value": 0.0, "lr_scale": 0.6},
]
LINEAR_RATES = [0.0, 0.25, 0.5, 0.75, 1.0, *(iteration / 20 for iteration in range(5, 13)), 1.0, 1.0]


def poly_ramp(impl: Any, inner: Any, **options: Any) -> Any:
    """Wrap an optimizer in a ramp that ends in a polynomial, with lr = 1."""
    return impl.WarmupOptimizer(inner, warmup_stages(impl, POLY_RAMP), **{"lr": 1.0, **options})


def linear_ramp(impl: Any, inner: Any, **options: Any) -> Any:
    """Wrap an optimizer in a ramp of two lines, with lr = 1."""
    return impl.WarmupOptimizer(inner, warmup_stages(impl, LINEAR_RAMP), **{"lr": 1.0, **options})


def expect_poly_rate(optimizer: Any, iteration: int, name: str = "lr") -> None:
    """Expect every group to have the learning rate of an iteration of the polynomial ramp."""
    for group in optimizer.param_groups:
        expect_close(group[name], POLY_RATES[iteration], f"{name} at iteration {iteration}", ulps=8)
