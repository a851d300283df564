"""Clipping as a part of the step: fused kernels scale or limit gradients as they read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from keyedopt.fused import optimizers
from keyedopt.fused.dense.cpu_dense_steps import Clip
from keyedopt.fused.dense.scaling import clamp_all
from keyedopt.fused.dense.torch_fused_steps import TORCH_OPTIMIZERS, check_shapes, replacement_step
from keyedopt.fused.fused import FusedOptimizer
from keyedopt.fused.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from keyedopt.fused.warmup import WarmupOptimizer

#: keyedopt's optimizers with a ``grad_scale``, as torch's fused optimizers have.
_KEYEDOPT = (optimizers.Adam, optimizers.AdamW, optimizers.SGD, optimizers.Adagrad)
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # keyedopt's kernels may divide in half precision


class StepOverrides:
    """A context in which optimizers have other attributes, so that their step clips.

    Args:
        overrides: each optimizer, with values of attributes that it does not have. Without any the context
            has no effect.
    """

    def __init__(self, overrides: Sequence[tuple[Any, dict[str, Any]]] = ()) -> None:
        self._overrides = overrides

    def __enter__(self) -> None:
        for optimizer, values in self._overrides:
            vars(optimizer).update(values)

    def __exit__(self, *error: object) -> None:
        for optimizer, values in self._overrides:
            for name in values:
                del vars(optimizer)[name]


def clip_norm_in_step(
    optimizer: Any, params: Sequence[Tensor], norm: Tensor, bound: float
) -> StepOverrides | None:
    """Return a context in which the step of an optimizer clips by norm, or None if this is impossible.

    The step divides gradients by ``max(1, (norm + 1e-6) / bound)``. All optimizers inside must be keyedopt's
    or fused optimizers of torch, no hook may read the gradients before the kernel, and the kernel must read
    each gradient only once. Optimizers that update in the backward pass are not affected: their parameters
    are not in `params`.
    """
    inside = _clippable_optimizers(optimizer, params)
    if not inside:
        return None
    if norm.device.type == "cpu":
        return _scale_in_step(inside, float(norm), bound)
    for one in inside:
        if type(one) in TORCH_OPTIMIZERS:  # keyedopt's own steps check
            check_shapes(one)
    scale = ((norm + 1e-6) / bound if bound else norm * torch.inf).clamp(min=1.0).to(torch.float32)
    return StepOverrides([(one, {"grad_scale": scale}) for one in inside])


def clip_known_norm_in_step(
    optimizer: Any, params: Sequence[Tensor], norm: float, bound: float
) -> StepOverrides | None:
    """Return the context of `clip_norm_in_step` for gradients that `dense_cpu_norm` has already checked."""
    inside = _clippable_optimizers(optimizer, params, checked=True)
    return _scale_in_step(inside, norm, bound) if inside else None


def _scale_in_step(inside: Sequence[Any], norm: float, bound: float) -> StepOverrides | None:
    scale = max(1.0, (norm + 1e-6) / bound) if bound else math.inf
    if not scale < 1e30 or norm != norm:  # too large for the dtype of the kernel, or NaN
        return None
    clip = Clip(factor=bound / (norm + 1e-6)) if scale > 1.0 else Clip()
    given: list[tuple[Any, dict[str, Any]]] = []
    for one in inside:
        if type(one) in TORCH_OPTIMIZERS:
            given.append((one, {"step": replacement_step(one, clip, partial(_scaled_step, one, scale))}))
        elif scale > 1.0:
            given.append((one, {"grad_scale": torch.tensor(scale, dtype=torch.float32)}))
    return StepOverrides(given)


def _scaled_step(optimizer: Any, scale: float) -> Any:
    """Step with torch's kernel, which divides gradients by the scale."""
    check_shapes(optimizer)
    values = {"grad_scale": torch.tensor(scale, dtype=torch.float32)} if scale > 1.0 else {}
    with StepOverrides([(optimizer, values)]):
        return type(optimizer).step(optimizer)


def clip_value_in_step(optimizer: Any, params: Sequence[Tensor], bound: float) -> StepOverrides | None:
    """Return a context in which the steps of torch optimizers limit gradients by value, or None."""
    inside = _clippable_optimizers(optimizer, params)
    grads = [param.grad for param in params if param.grad is not None]
    if not inside or not all(type(one) in TORCH_OPTIMIZERS for one in inside):
        return None
    if not all(grad.device.type == "cpu" and grad.is_contiguous() for grad in grads):
        return None
    return StepOverrides(
        [
            (one, {"step": replacement_step(one, Clip(limit=bound), partial(_clamp, one, bound))})
            for one in inside
        ]
    )


def _clamp(optimizer: Any, bound: float) -> Any:
    check_shapes(optimizer)
    listed = [param.grad for group in optimizer.param_groups for param in group["params"]]
    clamp_all([grad for grad in listed if grad is not None], bound)
    return type(optimizer).step(optimizer)


def _clippable_optimizers(optimizer: Any, params: Sequence[Tensor], checked: bool = False) -> list[Any]:
    """Return the optimizers inside, or an empty list if the step of one cannot clip.

    Args:
        optimizer: the outermost optimizer inside the clipping optimizer.
        params: the parameters to clip.
        checked: whether `dense_cpu_norm` has checked the types of the gradients.
    """
    inside = _innermost_optimizers(optimizer)
    if not inside or _global_optimizer_pre_hooks:
        return []
    groups = [group for one in inside for group in one.param_groups]
    if not all(_reads_once(one, group) for one in inside for group in one.param_groups):
        return []
    if sum(len(group["params"]) for group in groups) != len(params):
        return []  # a parameter in two groups, or on the meta device
    if checked:
        return inside
    grads = [param.grad for param in params if param.grad is not None]
    if len(set(map(id, grads))) != len(grads):
        return []
    dtypes = _DTYPES[:1] if any(type(one) in _KEYEDOPT for one in inside) else _DTYPES
    kinds = {(type(grad), grad.layout, grad.dtype, grad.device.type) for grad in grads}
    return inside if all(_is_ordinary(*kind, dtypes) for kind in kinds) else []


def _innermost_optimizers(optimizer: Any) -> list[Any] | None:
    """Return the innermost optimizers, or None if a step runs any other code."""
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or "step" in vars(optimizer):
        return None
    if type(optimizer) in (*TORCH_OPTIMIZERS, *_KEYEDOPT):
        return None if hasattr(optimizer, "grad_scale") else [optimizer]
    if isinstance(optimizer, FusedOptimizer):
        return []
    if type(optimizer) in (KeyedOptimizerWrapper, OptimizerWrapper, WarmupOptimizer):
        return _innermost_optimizers(optimizer._optimizer)
    if type(optimizer) is not CombinedOptimizer:
        return None
    found: list[Any] = []
    for _, part in optimizer.optimizers:
        inside = _innermost_optimizers(part)
        if inside is None:
            return None
        found += inside
    return found


def _reads_once(optimizer: Any, group: dict[str, Any]) -> bool:
    """Return whether the step divides gradients as it reads them."""
    if type(optimizer) in _KEYEDOPT:
        return bool(group["rows"] != "nonzero")
    return bool(group.get("fused")) and not group.get("differentiable")


def _is_ordinary(kind: type, layout: Any, dtype: Any, device: str, dtypes: Sequence[torch.dtype]) -> bool:
    return kind is Tensor and layout is torch.strided and dtype in dtypes and device in _DEVICES
