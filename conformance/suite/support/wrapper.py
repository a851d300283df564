"""Helpers for cases of wrappers and combinations: plain wrappers, copies, recording hooks."""

import copy
import io
from typing import Any

import torch

from keyedopt.conformance.suite.support.inputs import adam, parameter, train


def wrap_plainly(impl: Any, optimizer: Any, depth: int = 1) -> Any:
    """Put plain wrappers around an optimizer."""
    for _ in range(depth):
        optimizer = impl.OptimizerWrapper(optimizer)
    return optimizer


def wrapped_adam(
    impl: Any, dtype: str = "float32", steps: int = 0, depth: int = 1
) -> tuple[Any, Any, list[Any]]:
    """Wrap Adam over parameters ``p`` and ``q``, and train."""
    params = [parameter(3, dtype=dtype, seed=1), parameter(2, 2, dtype=dtype, seed=2)]
    inner = adam(impl, {"p": params[0], "q": params[1]})
    wrapper = wrap_plainly(impl, inner, depth)
    train(wrapper, params, steps)
    return wrapper, inner, params


def copy_optimizer(optimizer: Any, how: str) -> Any:
    """Copy an optimizer by deepcopy, or through torch.save and torch.load."""
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def count_call(optimizer: Any, *_: Any) -> None:
    """A hook that counts calls on the optimizer that calls it."""
    optimizer.counted = getattr(optimizer, "counted", 0) + 1


def record_load(optimizer: Any, key: str, name: str, calls: list[Any]) -> None:
    """Register load hooks: load nines as one tensor, and record the entry "note" and the loaded nines."""

    def before(own: Any, given: Any) -> Any:
        calls.append(given.get("note"))
        nines = torch.full_like(given["state"][key][name], 9.0)
        entry = {**given["state"][key], name: nines}
        return {**given, "state": {**given["state"], key: entry}}

    def after(own: Any) -> None:
        calls.append(f"loaded {float(own.state[own.params[key]][name].reshape(-1)[0])}")

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
