"""Gradient clipping between the backward pass and the step of a keyed optimizer."""

import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from keyedopt.reference.backward_clip import BackwardClip, clip_in_backward
from keyedopt.reference.fused import fused_parameters
from keyedopt.reference.gradients import distinct_parts, gradient_parts, rounded
from keyedopt.reference.keyed import KeyedOptimizer, OptimizerWrapper
from keyedopt.reference.norms import p_norm
from keyedopt.reference.process_groups import shared_groups
from keyedopt.reference.spread_norm import SpreadNorm


@enum.unique
class GradientClipping(enum.Enum):
    """How to clip gradients.

    >>> import torch
    >>> from keyedopt.reference import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    >>> weight.grad = torch.tensor([3.0, -4.0])
    >>> GradientClippingOptimizer(sgd, GradientClipping.NORM, max_gradient=1.0).step()
    >>> [round(one, 4) for one in weight.tolist()]
    [-0.6, 0.8]
    """

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clip the gradients of all parameters, then let the wrapped optimizer take its step.

    With g all gradients taken as one vector and c the bound::

        NORM    g ← g · min(1, c / (‖g‖ₚ + 1e-6))
        VALUE   g ← min(max(g, -c), c)              element by element

    The wrapped optimizer gets a closure that evaluates and then clips, so every gradient that it uses is
    bounded. Gradients may have any layout and dtype. A parameter in two groups counts once. Parameters
    without a gradient, or on the meta device, do not count. If a gradient contains NaN or inf, the norm is
    NaN or inf: as in torch, NORM then leaves no usable gradient. `last_total_grad_norm` shows this.

    Args:
        optimizer: keyed optimizer to wrap.
        clipping: how to clip gradients.
        max_gradient: the bound c, at least 0.
        norm_type: exponent p of the norm, above 0; ``"inf"`` or infinity for the largest element.
        enable_global_grad_clip: take the norm over the process groups of ``param_to_pgs``.
        param_to_pgs: the process groups over which the shards of a parameter are spread. A `DTensor` is
            spread over its own mesh. All other parameters are replicated, and count once. Every rank passes a
            mapping, which is empty on a rank without such a parameter; without a mapping the norm is local.
        track_grad_norm: measure the norm also with VALUE (before clipping) and NONE. With VALUE, tables count
            with the gradients of their last backward pass before the step.
        process_group: the ranks that pass a mapping and take part in every step; None is the default group.

    Raises:
        ValueError: an argument is out of range; or `optimizer` is a `FusedOptimizer` with parameters, whose
            gradients never reach ``step``. If only some of the combined optimizers are fused, the others are
            clipped, with a warning.

    keyedopt's own embedding modules clip in their backward pass, before the update: each by VALUE, and by
    NORM if no other gradients are clipped. If there are others, one norm covers all, which is known after the
    backward pass. The module then defers its update to the `step` of this optimizer. Deferred gradients are
    like ``.grad``: backward passes add up, `zero_grad` drops them, and no checkpoint or copy has them. If the
    norm is inf or NaN, their finite elements become 0. Another clipping optimizer around the same module
    replaces this one, unless it wraps this one.

    Source: torchrec.optim.clipping.GradientClippingOptimizer.

    >>> import torch
    >>> from keyedopt.reference import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    >>> optimizer = GradientClippingOptimizer(sgd, GradientClipping.VALUE, max_gradient=0.5)
    >>> weight.grad = torch.tensor([3.0, -0.25])
    >>> optimizer.step()
    >>> weight.tolist()
    [-0.5, 0.25]
    """

    _backward_clip: ClassVar[type[BackwardClip]] = BackwardClip
    _norm = staticmethod(p_norm)

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Sequence[Any]] | None = None,
        track_grad_norm: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(optimizer)
        if not isinstance(clipping, GradientClipping):
            raise ValueError(f"clipping must be a member of GradientClipping, not {clipping!r}")
        self._clipping = clipping
        self._max_gradient = float(max_gradient)
        if clipping is not GradientClipping.NONE and not self._max_gradient >= 0:
            raise ValueError(f"max_gradient must be at least 0, not {max_gradient!r}")
        self._norm_type = float(norm_type)
        if not self._norm_type > 0:
            raise ValueError(f"norm_type must be above 0, not {norm_type!r}")
        self._pgs = shared_groups(param_to_pgs if enable_global_grad_clip else None)
        self._joins = enable_global_grad_clip and param_to_pgs is not None
        self._spread_norm = SpreadNorm(self._pgs, self._joins, process_group)
        self._track_grad_norm = track_grad_norm
        self._last_total_grad_norm: torch.Tensor | None = None
        self._install_backward_clipping()

    def _install_backward_clipping(self) -> None:
        """Let fused modules clip in their backward pass; raise or warn about parameters that cannot clip."""
        kind, track = self._clipping.value, self._track_grad_norm
        bound = self._backward_clip(kind, self._max_gradient, self._norm_type, track)
        listed = self._pgs if not self._joins else self.params.values()
        self._module_clips = clip_in_backward(self._optimizer, bound, {id(param) for param in listed})
        if self._clipping is GradientClipping.NONE and not self._track_grad_norm:
            return
        unmeasured = self._module_clips.unmeasured() if self._track_grad_norm else 0
        if unmeasured and self._clipping is GradientClipping.VALUE:
            warnings.warn(
                f"{unmeasured} parameters of fused optimizers are spread over ranks: their gradients are "
                "clipped by value, but are not part of last_total_grad_norm",
                stacklevel=3,
            )
        fused = fused_parameters(self._optimizer) - self._module_clips.bounded
        if not fused:
            return
        dense = {id(param) for group in self.param_groups for param in group["params"]} - fused
        if not dense and self._clipping is not GradientClipping.NONE:
            text = "a fused optimizer uses its gradients up in the backward pass, so they cannot be clipped"
            raise ValueError(f"{text} before the step: wrap the dense optimizers only")
        warnings.warn(
            f"{len(fused)} parameters belong to fused optimizers, which use their gradients up in "
            "the backward pass: only the gradients of the other parameters are clipped and measured",
            stacklevel=3,
        )

    def step(self, closure: Any = None) -> Any:
        """Clip, then step; with a closure, clip after each of its evaluations.

        Returns:
            The result of the wrapped optimizer's ``step``.
        """
        if closure is None:
            self._clip()
            return self._optimizer.step(closure=None)

        def evaluate_and_clip() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._clip()
            return loss

        return self._optimizer.step(closure=evaluate_and_clip)

    @property
    def last_total_grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before they were clipped in the most recent step.

        None before the first step, if the norm is not measured, and for parameters on the meta device.
        """
        return self._last_total_grad_norm

    def compute_total_grad_norm(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the norm of all gradients, and their parts on this rank; nothing is clipped.

        The norm includes the gradients that fused modules have measured in their last backward pass, if they
        clip in it; the parts do not.
        """
        norm, parts = self._measure()
        tables = self._module_clips.norm()
        if tables is not None:  # of an update in the backward pass
            both = [norm.reshape(1), tables.reshape(1).to(norm)]
            norm = self._norm(both, self._norm_type, norm.device)
        return rounded(norm, parts), parts

    @torch.no_grad()
    def clip_grad_norm_(self) -> torch.Tensor:
        """Clip all gradients by their norm, whatever ``clipping`` is, and return the norm."""
        norm, parts = self._measure()
        factor = (self._max_gradient / (norm + 1e-6)).clamp(max=1.0)
        for part in parts:
            # Multiplied in the dtype of the factor: in float16 a small factor would become 0.
            wide = torch.promote_types(part.dtype, factor.dtype)
            part.copy_(part.to(wide) * factor.to(part.device))
        self._module_clips.scale(norm)
        return rounded(norm, parts)

    def _clip(self) -> None:
        self._module_clips.clip_deferred()
        real = self._real_parameters()
        self._last_total_grad_norm = None
        if not real and self._module_clips.separate and not self._module_clips.joint:
            self._last_total_grad_norm = self._module_clips.norm()
            self._module_clips.forget()
            return
        if not real and _on_meta(self.param_groups) and not self._spread_norm.joined:
            return
        if self._clipping is GradientClipping.NORM:
            self._last_total_grad_norm = self.clip_grad_norm_()
            return
        if self._track_grad_norm:
            self._last_total_grad_norm, _ = self.compute_total_grad_norm()
            self._module_clips.forget()
        if self._clipping is GradientClipping.VALUE:
            with torch.no_grad():
                for part in distinct_parts(real):
                    part.clamp_(-self._max_gradient, self._max_gradient)

    @torch.no_grad()
    def _measure(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the norm in full precision, and each distinct part of a gradient once."""
        real, deferred = self._real_parameters(), self._module_clips.deferred()
        device = next((one.device for one in (*real, *(grad for _, grad in deferred))), None)
        parts = [(param, gradient_parts(param)) for param in real]
        parts += [(weight, [grad]) for weight, grad in deferred]
        norm = self._spread_norm.norm(parts, self._norm, self._norm_type, device, self.params)
        return norm, distinct_parts(real)

    def _real_parameters(self) -> list[torch.Tensor]:
        """Return each parameter that can be clipped, once, from the current groups."""
        fused = fused_parameters(self._optimizer)
        listed = [param for group in self.param_groups for param in group["params"]]
        distinct = {id(param): param for param in listed if id(param) not in fused}
        return [param for param in distinct.values() if param.device.type != "meta"]


def _on_meta(groups: Any) -> bool:
    return any(param.device.type == "meta" for group in groups for param in group["params"])
