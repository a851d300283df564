"""Clipping as a part of the step: torch's fused kernels divide gradients by a scale as they read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_pre_hooks

from keyedopt.fused import optimizers
from keyedopt.fused.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from keyedopt.fused.warmup import WarmupOptimizer

#: Ours, which take one too, with the same kernels where they are exact.
_OURS = (optimizers.Adam, optimizers.SGD, optimizers.Adagrad)
#: Their kernels take a ``grad_scale`` and write the scaled gradient back.
_KERNELS = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # ours may divide halves in half precision


class Folding:
    """A context in which optimizers divide their gradients by a scale; without any it does nothing.

    Args:
        optimizers: optimizers of torch, as `fold` finds them.
        scale: float32, on any device.
    """

    def __init__(self, optimizers: Sequence[Any] = (), scale: Tensor | None = None) -> None:
        self._optimizers, self._scale = optimizers, scale

    def __enter__(self) -> None:
        for optimizer in self._optimizers:
            optimizer.grad_scale = self._scale

    def __exit__(self, *error: object) -> None:
        for optimizer in self._optimizers:
            del optimizer.grad_scale


def fold(optimizer: Any, params: Sequence[Tensor], norm: Tensor, bound: float) -> Folding | None:
    """Return the context that clips by norm in the step of an optimizer, or None where that cannot be.

    The scale is ``max(1, (norm + 1e-6) / bound)``. Everything inside has to be ours or a fused one of torch,
    nobody may look at the gradients before its kernel does, and the kernel may read each of them only once.
    """
    inside = _kernels(optimizer)
    if not inside or _global_optimizer_pre_hooks:
        return None
    groups = [group for one in inside for group in one.param_groups]
    if not all(_reads_once(one, group) for one in inside for group in one.param_groups):
        return None
    if sum(len(group["params"]) for group in groups) != len(params):
        return None  # a parameter in two groups, or on the meta device
    grads = [param.grad for param in params if param.grad is not None]
    if len(set(map(id, grads))) != len(grads):
        return None
    dtypes = _DTYPES[:1] if any(type(one) in _OURS for one in inside) else _DTYPES
    if not all(_is_ordinary(grad, dtypes) for grad in grads):
        return None
    scale = ((norm + 1e-6) / bound if bound else norm * torch.inf).clamp(min=1.0).to(torch.float32)
    if scale.device.type == "cpu":
        if scale == 1.0:
            return Folding()
        if not scale < 1e30:  # too large for the dtype of the kernel, or NaN
            return None
    return Folding(inside, scale)


def _kernels(optimizer: Any) -> list[Any]:
    """Return the optimizers of torch inside, or none if anything else happens in a step."""
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or "step" in vars(optimizer):
        return []
    if type(optimizer) in (*_KERNELS, *_OURS):
        return [] if hasattr(optimizer, "grad_scale") else [optimizer]
    if type(optimizer) in (KeyedOptimizerWrapper, OptimizerWrapper, WarmupOptimizer):
        return _kernels(optimizer._optimizer)
    found: list[Any] = []
    if type(optimizer) is CombinedOptimizer:
        for _, part in optimizer.optimizers:
            inside = _kernels(part)
            if not inside:
                return []
            found += inside
    return found


def _reads_once(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether the step divides gradients as it reads them."""
    if type(optimizer) in _OURS:
        return bool(group["rows"] != "nonzero")
    return bool(group.get("fused")) and not group.get("differentiable")


def _is_ordinary(grad: Tensor, dtypes: Sequence[torch.dtype]) -> bool:
    return (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.dtype in dtypes
        and grad.device.type in _DEVICES
    )
