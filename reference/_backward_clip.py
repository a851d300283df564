"""Clipping where gradients never reach a step: in the backward pass of our own fused modules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from keyedopt.reference._norm import p_norm
from keyedopt.reference.fused import leaves


@dataclass(eq=False)
class BackwardClip:
    """A bound on the gradients of a fused module, applied in the backward pass, before the update.

    Args:
        kind: ``"norm"``, ``"value"``, or ``"none"`` to measure only.
        bound: the largest norm, or element.
        norm_type: exponent of the norm, above 0 or infinity.
        measure: whether the norm is wanted though it does not clip.
    """

    kind: str
    bound: float
    norm_type: float = 2.0
    measure: bool = False
    #: The norm of the gradients of the most recent step, before they were clipped.
    last_norm: torch.Tensor | None = None

    def apply(self, grads: Sequence[torch.Tensor]) -> None:
        """Clip in place; together these are the gradient of all tables, each row once.

        Where the norm is not finite all rows get a gradient of zero but those that are not finite
        themselves: the others have no direction to trust, and must not catch it.
        """
        self.last_norm = None
        if self.kind == "norm" or self.measure:
            device = grads[0].device if grads else torch.device("cpu")
            norm = p_norm(grads, self.norm_type, device)
            self.last_norm = norm.to(
                torch.promote_types(torch.float32, grads[0].dtype) if grads else norm.dtype
            )
        if self.kind == "norm":
            factor = torch.where(norm.isfinite(), (self.bound / (norm + 1e-6)).clamp(max=1.0), 0.0)
            for grad in grads:
                grad.copy_(grad.double() * factor)
        elif self.kind == "value":
            for grad in grads:
                grad.clamp_(-self.bound, self.bound)


def clip_in_backward(optimizer: Any, bound: BackwardClip) -> tuple[list[BackwardClip], set[int]]:
    """Have the fused modules in a tree of optimizers clip in their backward pass, those that can.

    A norm is of all gradients, so a module can clip by it only where there is nothing else: neither dense
    parameters nor another module, whose backward pass may not have run yet.

    Returns:
        What was asked of them, and the ids of the parameters that are bounded or measured that way.
    """
    everything = {id(param) for group in optimizer.param_groups for param in group["params"]}
    asked: list[BackwardClip] = []
    done: set[int] = set()
    for leaf in leaves(optimizer):
        own = {id(param) for param in leaf.params.values()} if hasattr(leaf, "clip_in_backward") else set()
        if own and (bound.kind == "value" or own == everything):
            clip = replace(bound, measure=bound.measure and own == everything)
            leaf.clip_in_backward(clip, inside=_inner_clips(optimizer))
            asked.append(clip)
            done |= own
    return asked, done


def _inner_clips(optimizer: Any) -> list[BackwardClip]:
    """Return what the clipping optimizers inside have asked of fused modules."""
    inside = [part for _, part in optimizer.optimizers] if hasattr(optimizer, "optimizers") else []
    inside += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    found = list(getattr(optimizer, "_backward_clips", ()))
    return found + [clip for part in inside for clip in _inner_clips(part)]
