"""Gradient clipping: the class of the reference, with faster norms and clipping inside the step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from keyedopt import reference
from keyedopt.fused.dense.fused_clipping import (
    StepOverrides,
    clip_known_norm_in_step,
    clip_norm_in_step,
    clip_value_in_step,
)
from keyedopt.fused.dense.norms import dense_cpu_norm, p_norm
from keyedopt.fused.dense.scaling import clamp_all, clipping_factor, scale_all
from keyedopt.fused.embedding.backward_clip import BackwardClip
from keyedopt.fused.fused import fused_parameters
from keyedopt.reference.clipping import GradientClipping
from keyedopt.reference.gradients import distinct_parts, rounded

__all__ = ["GradientClipping", "GradientClippingOptimizer"]


class GradientClippingOptimizer(reference.GradientClippingOptimizer):
    """Clip the gradients of all parameters, then step; see `keyedopt.reference.GradientClippingOptimizer`.

    Norm and factor stay on the device. If all optimizers inside are keyedopt's or fused optimizers of torch,
    their step clips, so gradients are read once for the norm and once for the step. On the CPU the step then
    uses keyedopt's kernel, and ``.grad`` keeps the values of the backward pass. In all other cases ``.grad``
    contains the clipped gradients.
    """

    _backward_clip: ClassVar[Any] = BackwardClip
    _norm = staticmethod(p_norm)
    _last_total_grad_norm: Any

    def step(self, closure: Any = None) -> Any:
        """Clip, then step; with a closure, clip after each evaluation; see the reference."""
        if closure is not None:
            return super().step(closure)
        with self._clip_now_or_in_step(in_step=True):
            return self._optimizer.step(closure=None)

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm of all gradients before they were clipped in the last step; None if not measured."""
        if isinstance(self._last_total_grad_norm, float):  # create the tensor only when it is read
            self._last_total_grad_norm = torch.tensor(self._last_total_grad_norm, dtype=torch.float32)
        norm: Tensor | None = self._last_total_grad_norm
        return norm

    def clip_grad_norm_(self) -> Tensor:
        """Clip all gradients by their norm, whatever `clipping` is, and return the norm."""
        norm, parts = self._measure()
        return self._scale(norm, parts)

    def _scale(self, norm: Tensor, parts: list[Tensor]) -> Tensor:
        scale_all(parts, clipping_factor(norm, self._max_gradient))
        self._module_clips.scale(norm)
        return rounded(norm, parts)

    def _clip(self) -> None:
        self._clip_now_or_in_step(in_step=False)

    def _clip_now_or_in_step(self, in_step: bool) -> StepOverrides:
        """Clip and measure, or with `in_step` return a context in which the caller's step clips."""
        self._last_total_grad_norm = None
        self._module_clips.clip_deferred()
        listed, nothing = self._listed_parameters(), StepOverrides()
        if not (listed or self._module_clips.joint or self._spread_norm.joined):
            if self._module_clips.separate:
                self._last_total_grad_norm = self._module_clips.norm()
                self._module_clips.forget()
                return nothing
            if any(group["params"] for group in self.param_groups):
                return nothing
        if self._clipping is GradientClipping.NORM:
            return self._clip_by_norm(listed, in_step)
        if self._track_grad_norm:
            self._last_total_grad_norm, _ = self.compute_total_grad_norm()
            self._module_clips.forget()
        if self._clipping is GradientClipping.VALUE:
            real = _without_meta(listed)
            overrides = clip_value_in_step(self._optimizer, real, self._max_gradient) if in_step else None
            if overrides is not None:
                return overrides
            clamp_all(distinct_parts(real), self._max_gradient)
        return nothing

    def _clip_by_norm(self, listed: list[Tensor], in_step: bool) -> StepOverrides:
        measured = self._dense_cpu_norm(listed)
        if measured is not None and in_step:
            self._last_total_grad_norm = measured[0]
            overrides = clip_known_norm_in_step(self._optimizer, listed, measured[0], self._max_gradient)
            if overrides is not None:
                return overrides
        norm, parts = super()._measure() if measured is None else _as_tensors(measured)
        overrides = None
        if in_step:
            overrides = clip_norm_in_step(self._optimizer, _without_meta(listed), norm, self._max_gradient)
        if overrides is None:
            self._last_total_grad_norm = self._scale(norm, parts)
            return StepOverrides()
        self._last_total_grad_norm = rounded(norm, parts)
        self._module_clips.scale(norm)
        return overrides

    def _dense_cpu_norm(self, listed: list[Tensor]) -> tuple[float, list[Tensor]] | None:
        """Return the 2-norm of all gradients, and the gradients, if all are dense float32 on the CPU."""
        if self._norm_type != 2.0 or not self._spread_norm.alone or self._module_clips.joint:
            return None
        return dense_cpu_norm(listed)

    def _measure(self) -> tuple[Tensor, list[Tensor]]:
        measured = self._dense_cpu_norm(self._listed_parameters())
        return super()._measure() if measured is None else _as_tensors(measured)

    def _listed_parameters(self) -> list[Tensor]:
        """Return each parameter outside fused optimizers, once, also on the meta device."""
        fused = fused_parameters(self._optimizer)
        distinct = {id(param): param for group in self.param_groups for param in group["params"]}
        for key in fused:
            distinct.pop(key, None)
        return list(distinct.values())


def _as_tensors(measured: tuple[float, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    return torch.tensor(measured[0], dtype=torch.float64), measured[1]


def _without_meta(params: list[Tensor]) -> list[Tensor]:
    return [param for param in params if not param.is_meta]
