"""Gradient clipping between the backward pass and the step of a keyed optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.dense.fused_clipping import Folding, fold_norm, fold_plain_norm, fold_value
from keyedopt.fused.dense.norms import Groups, mesh_groups, p_norm, parts_of, plain_norm
from keyedopt.fused.dense.scaling import clamp_all, factor_of, scale_all
from keyedopt.fused.embedding.backward_clip import BackwardClip, Reach, clip_in_backward
from keyedopt.fused.fused import fused_parameters
from keyedopt.fused.keyed import KeyedOptimizer, OptimizerWrapper
from keyedopt.reference.clipping import GradientClipping

__all__ = ["GradientClipping", "GradientClippingOptimizer"]


class GradientClippingOptimizer(OptimizerWrapper):
    """Clip the gradients of all parameters, then let the wrapped optimizer step.

    With g all gradients as one vector and c the bound::

        NORM    g ← g · min(1, c / (‖g‖ₚ + 1e-6))
        VALUE   g ← min(max(g, -c), c)              element by element

    A closure is handed on as one that evaluates, then clips. A parameter counts once, whatever groups it is
    in. Norm and factor stay on the device. Where everything inside is a fused optimizer of torch, clipping is
    a part of its step, and gradients are read once for the norm and once for the step. On the CPU a kernel of
    ours then does the step, and ``.grad`` keeps what the backward pass left there; other steps write what is
    clipped to ``.grad``.

    Args:
        optimizer: the keyed optimizer to wrap.
        clipping: how to clip.
        max_gradient: the bound c, at least 0.
        norm_type: the exponent p, above 0; ``"inf"`` or infinity for the largest element.
        enable_global_grad_clip: take the norm over the process groups of `param_to_pgs`.
        param_to_pgs: the process groups over which the shards of a parameter are spread. All others count
            as replicated; a `DTensor` is spread over its own mesh.
        track_grad_norm: keep the norm with VALUE (before clipping) and NONE, too.

    Raises:
        ValueError: an argument out of its range; or all parameters belong to fused optimizers, which use
            their gradients up in the backward pass. If only some do, a warning says so.

    Our embedding modules clip in their backward pass by VALUE, and by NORM where there is nothing else. Where
    there are other gradients, the norm is one of all, which is known when all have come: from now on such a
    module does not update in its backward pass, but in the `step` of this optimizer, with the options of
    then. Until then its gradients are like ``.grad``: several backward passes add up, `zero_grad` drops them,
    and neither a checkpoint nor a copy has them. What is finite in them becomes 0 by a norm that is not.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Sequence[Any]] | None = None,
        track_grad_norm: bool = False,
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
        spread = (param_to_pgs or {}) if enable_global_grad_clip else {}
        self._pgs = {param: _Shared(groups) for param, groups in spread.items() if groups}
        self._track_grad_norm = track_grad_norm
        self._last_total_grad_norm: Tensor | float | None = None
        self._reach = self._look_for_fused()

    def _look_for_fused(self) -> Reach:
        bound = BackwardClip(self._clipping.value, self._max_gradient, self._norm_type, self._track_grad_norm)
        reach = clip_in_backward(self._optimizer, bound, set(map(id, self._pgs)))
        out_of_reach = fused_parameters(self._optimizer) - reach.bounded
        clips = self._clipping is not GradientClipping.NONE
        if not out_of_reach or not (clips or self._track_grad_norm):
            return reach
        listed = {id(param) for group in self.param_groups for param in group["params"]}
        if clips and not listed - out_of_reach:
            raise ValueError(
                "a fused optimizer uses its gradients up in the backward pass, so they cannot be clipped "
                "before the step: wrap the dense optimizers only"
            )
        warnings.warn(
            f"{len(out_of_reach)} parameters belong to fused optimizers, which use their gradients up in "
            "the backward pass: only the gradients of the other parameters are clipped and measured",
            stacklevel=3,
        )
        return reach

    def step(self, closure: Any = None) -> Any:
        """Clip, then step; with a closure, clip after each evaluation.

        Args:
            closure: evaluates the model and returns the loss.

        Returns:
            What the wrapped optimizer returns.
        """
        if closure is None:
            with self._clip(in_step=True):
                return self._optimizer.step(closure=None)

        def evaluate_and_clip() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._clip()
            return loss

        return self._optimizer.step(closure=evaluate_and_clip)

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm of all gradients before they were clipped in the last step; None if not measured."""
        if isinstance(self._last_total_grad_norm, float):  # a tensor of it only for who asks
            self._last_total_grad_norm = torch.tensor(self._last_total_grad_norm, dtype=torch.float32)
        return self._last_total_grad_norm

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Return the norm of all gradients, and their parts on this rank; clip nothing."""
        norm, parts, held = self._measure(self._real_parameters())
        return _rounded(norm, parts + held), parts + held

    def clip_grad_norm_(self) -> Tensor:
        """Clip all gradients by their norm, whatever `clipping` is, and return the norm."""
        norm, parts, held = self._measure(self._real_parameters())
        scale_all(parts, factor_of(norm, self._max_gradient))
        self._scale_held(held, norm)
        return _rounded(norm, parts + held)

    def _scale_held(self, held: list[Tensor], norm: Tensor) -> None:
        # Rows that are not finite must not spoil the others: what has no direction to trust becomes 0.
        scale_all(held, torch.where(norm.isfinite(), factor_of(norm, self._max_gradient), 0.0))

    def _clip(self, in_step: bool = False) -> Folding:
        """Clip and measure; what is returned has to be around the step, if there is one."""
        self._last_total_grad_norm = None
        self._reach.clip_held()
        real, nothing = self._listed_parameters(), Folding()
        if not real and not self._reach.joint:
            if self._reach.taken:
                self._last_total_grad_norm = self._reach.taken[0][1].last_norm
                return nothing
            if any(group["params"] for group in self.param_groups):
                return nothing
        by_norm = self._clipping is GradientClipping.NORM
        if by_norm or self._track_grad_norm:
            plain = self._plain_norm(real)
            if plain is not None and by_norm and in_step:
                self._last_total_grad_norm = plain[0]
                folding = fold_plain_norm(self._optimizer, real, plain[0], self._max_gradient)
                if folding is not None:
                    return folding
            real = _material(real)
            norm, parts, held = self._measure(real, plain)
            self._last_total_grad_norm = _rounded(norm, parts + held)
            if by_norm:
                self._scale_held(held, norm)
                folding = fold_norm(self._optimizer, real, norm, self._max_gradient) if in_step else None
                if folding is not None:
                    return folding
                scale_all(parts, factor_of(norm, self._max_gradient))
        if self._clipping is GradientClipping.VALUE:
            real = _material(real)
            folding = fold_value(self._optimizer, real, self._max_gradient) if in_step else None
            if folding is not None:
                return folding
            clamp_all(_distinct(real), self._max_gradient)
        return nothing

    def _plain_norm(self, real: list[Tensor]) -> tuple[float, list[Tensor]] | None:
        """Return the norm of all gradients, and these, if they are as they mostly are on the CPU."""
        if self._norm_type != 2.0 or self._pgs or self._reach.joint:
            return None
        return plain_norm(real)

    @torch.no_grad()
    def _measure(
        self, real: list[Tensor], plain: tuple[float, list[Tensor]] | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the norm in full precision, and each part of a gradient once: dense ones, and held ones."""
        plain = plain or self._plain_norm(real)
        if plain is not None:
            return torch.tensor(plain[0], dtype=torch.float64), plain[1], []
        held = self._reach.held()
        device = next((each.device for each in (*real, *(grad for _, grad in held))), torch.device("cpu"))
        # A rank that holds no shard of a parameter still takes part in its reductions.
        spread: dict[Groups, list[Tensor]] = {groups: [] for groups in self._pgs.values()}
        for param in real:
            groups = self._pgs[param] if self._pgs and param in self._pgs else mesh_groups(param)
            spread.setdefault(groups, []).extend(parts_of(param))
        for weight, grad in held:
            spread.setdefault(self._pgs.get(weight, ()), []).append(grad)
        norms = [p_norm(some, self._norm_type, device, groups) for groups, some in spread.items()]
        norm = norms[0] if len(norms) == 1 else p_norm(norms, self._norm_type, device)
        return norm, _distinct(real), [grad for _, grad in held]

    def _real_parameters(self) -> list[Tensor]:
        """Return each parameter that can be clipped once, from the groups as they are now."""
        return _material(self._listed_parameters())

    def _listed_parameters(self) -> list[Tensor]:
        fused = fused_parameters(self._optimizer)
        distinct = {id(param): param for group in self.param_groups for param in group["params"]}
        for key in fused:
            distinct.pop(key, None)
        return list(distinct.values())


class _Shared(tuple[Any, ...]):
    """Process groups, which a copy of the optimizer shares with the original."""

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


def _material(params: list[Tensor]) -> list[Tensor]:
    return [param for param in params if not param.is_meta]


def _distinct(params: list[Tensor]) -> list[Tensor]:
    """Return the parts of all gradients; those of a tensor that two parameters have as theirs, once."""
    grads = {id(param.grad): param for param in params}
    return [part for param in grads.values() for part in parts_of(param)]


def _rounded(norm: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the norm in float64 where a gradient is, else in float32: float16 would overflow."""
    double = any(part.dtype in (torch.float64, torch.complex128) for part in parts)
    return norm.to(torch.float64 if double else torch.float32)
