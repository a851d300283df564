"""Helpers for cases of warmup: two ramps whose learning rates identify the iteration."""

from collections.abc import Mapping
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect_close
from keyedopt.conformance.suite.support.described import MissingName, State, documented_state
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


def _entries(impl: Any, saved: Any, key: str) -> State:
    entries = saved["state"].get(key)
    if not isinstance(entries, Mapping):
        raise MissingName(f"WarmupOptimizer has no state under {key}", name="WarmupOptimizer.state")
    return documented_state(impl, "WarmupOptimizer", entries)


def schedule_state(impl: Any, saved: Any, key: str = "__warmup") -> torch.Tensor:
    """Return the tensor of a schedule in a state dict.

    Only WARM-040 and WARM-041 say where it is, and fail if it is elsewhere.

    Raises:
        MissingName: the state has another name, so the case is unsupported.
    """
    state: torch.Tensor = _entries(impl, saved, key)["warmup"]
    return state


def set_schedule_state(impl: Any, saved: Any, value: torch.Tensor, key: str = "__warmup") -> None:
    """Replace the tensor of a schedule in a state dict; see `schedule_state`."""
    saved["state"][key][_entries(impl, saved, key).own("warmup")] = value
