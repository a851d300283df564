"""What semi-synchronous training needs for its steps: the global one, the parameters, the scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class GlobalStep:
    """The global optimizer as `initialize` looks at it: its step is the global one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.params, self.state = optimizer.params, optimizer.state
        self.param_groups = optimizer.param_groups

    def _bare_step(self) -> None:
        with torch.no_grad():
            find_global_step(self.optimizer)(torch.zeros((), dtype=torch.int64), None)


def find_global_step(optimizer: Any) -> Callable[[Tensor, Any], object]:
    """Return ``global_step`` of an optimizer or of the one it wraps; deeper, it would pass a schedule by."""
    for holder in (optimizer, getattr(optimizer, "_optimizer", None)):
        method: Any = getattr(holder, "global_step", None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    raise ValueError(
        "global_optimizer, or the optimizer that it wraps, must have a method "
        f"global_step(step, closure), which {type(optimizer).__name__} has not"
    )


def listed(given: Any) -> list[Tensor]:
    """List parameters that come alone, as (key, parameter), or in groups."""
    if given is None or isinstance(given, str | Tensor):
        raise ValueError(f"global_params must be parameters or groups of them, not {given!r}")
    items = list(given)
    if not items:
        raise IndexError("global_params is empty: there is nothing to synchronize")
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, tuple) and len(item) == 2:
            item = item[1]
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, Mapping) and "params" in item:
            inside = item["params"]
            found += listed([inside] if isinstance(inside, Tensor) else inside)
        else:
            raise ValueError(f"global_params must be parameters or groups of them, not {type(item).__name__}")
    return found


def unscale(optimizer: Any) -> bool:
    """Divide every gradient once by the scale of a `GradScaler`; False where a step is to be left out."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return True
    if optimizer.grad_scale is None:
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "GradScaler.unscale_ has divided the gradients of parameters that both optimizers have twice: "
            "call it with the local optimizer, or leave it to GradScaler.step"
        )
    if float(found_inf):
        return False
    inverse = optimizer.grad_scale.double().reciprocal().float()
    for param in {id(param): param for group in optimizer.param_groups for param in group["params"]}.values():
        if param.grad is not None:
            param.grad.mul_(inverse.to(param.grad.device))
    return True
