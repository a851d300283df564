"""Clipping where gradients reach no step: in the backward pass of our embedding modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.fused import leaves
from keyedopt.fused.norms import p_norm
from keyedopt.fused.scaling import clamp_all, factor_of, scale_all


@dataclass(eq=False)
class BackwardClip:
    """A bound that a fused module applies to its gradients before it updates.

    Args:
        kind: ``"norm"``, ``"value"``, or ``"none"`` to measure alone.
        bound: the largest norm, or element.
        norm_type: the exponent of the norm.
        measure: whether to keep the norm where it does not clip.
    """

    kind: str
    bound: float
    norm_type: float = 2.0
    measure: bool = False
    #: The norm of the last step, before it was clipped.
    last_norm: Tensor | None = None

    def apply(self, grads: Sequence[Tensor]) -> None:
        """Clip in place; together these are the gradient of all tables, each row once.

        Where the norm is not finite, what is finite becomes 0: it has no direction to trust.
        """
        self.last_norm = None
        if self.kind == "norm" or self.measure:
            device = grads[0].device if grads else torch.device("cpu")
            norm = p_norm(grads, self.norm_type, device)
            double = not grads or grads[0].dtype is torch.float64
            self.last_norm = norm if double else norm.to(torch.float32)
        if self.kind == "norm":
            scale_all(grads, torch.where(norm.isfinite(), factor_of(norm, self.bound), 0.0))
        elif self.kind == "value":
            clamp_all(grads, self.bound)


def clip_in_backward(optimizer: Any, bound: BackwardClip) -> tuple[list[BackwardClip], set[int]]:
    """Hand a bound to the fused modules in a tree of optimizers that clip by themselves.

    A norm is one of all gradients: a module can bound it only where there are no others, for those of dense
    parameters and of other modules may come later.

    Returns:
        The bounds that modules have taken, and the ids of the parameters that they are for.
    """
    everything = {id(param) for group in optimizer.param_groups for param in group["params"]}
    taken: list[BackwardClip] = []
    bounded: set[int] = set()
    for leaf in leaves(optimizer):
        if not hasattr(leaf, "clip_in_backward"):
            continue
        own = set(map(id, leaf.params.values()))
        alone = own == everything
        if own and (alone or bound.kind == "value"):
            taken.append(replace(bound, measure=bound.measure and alone))
            leaf.clip_in_backward(taken[-1], inside=_taken_inside(optimizer))
            bounded |= own
    return taken, bounded


def _taken_inside(optimizer: Any) -> list[BackwardClip]:
    """Return the bounds of the clipping optimizers inside: they hold beside the new one, others no more."""
    parts = [part for _, part in getattr(optimizer, "optimizers", ())]
    parts += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    own = list(getattr(optimizer, "_backward_clips", ()))
    return own + [clip for part in parts for clip in _taken_inside(part)]
