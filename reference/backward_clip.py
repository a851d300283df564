"""Clipping where gradients never clips a step: in the backward pass of our own fused modules."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from keyedopt.reference.fused import leaves
from keyedopt.reference.norms import p_norm


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
            norm = self.norm(grads)
            self.last_norm = norm.to(
                torch.promote_types(torch.float32, grads[0].dtype) if grads else norm.dtype
            )
        if self.kind == "norm":
            self.scale(grads, norm)
        elif self.kind == "value":
            self.clamp(grads)

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all of these together, in float64."""
        return p_norm(grads, self.norm_type, grads[0].device if grads else torch.device("cpu"))

    def clamp(self, grads: Sequence[torch.Tensor]) -> None:
        """Clamp the elements in place."""
        for grad in grads:
            grad.clamp_(-self.bound, self.bound)

    def scale(self, grads: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Multiply in place by what makes the norm no larger than the bound; by 0 if it is not finite."""
        factor = torch.where(norm.isfinite(), (self.bound / (norm + 1e-6)).clamp(max=1.0), 0.0)
        for grad in grads:
            grad.copy_(grad.double() * factor.to(grad.device))


@dataclass(eq=False)
class FusedModuleClips:
    """The fused modules that a clipping optimizer reaches.

    Args:
        shared: the bound by which they know who asked them to hold their updates.
        taken: their optimizers, with the bound that each applies to its own gradients by itself.
        joint: their optimizers that hold their updates, to be bounded together with all other gradients.
        bounded: the ids of the parameters of both.
    """

    shared: BackwardClip
    separate: list[tuple[Any, BackwardClip]] = field(default_factory=list)
    joint: list[Any] = field(default_factory=list)
    bounded: set[int] = field(default_factory=set)

    def scale(self, norm: torch.Tensor) -> None:
        """Scale what is held by what makes the norm of all gradients no larger than the bound."""
        self.shared.scale([grad for _, grad in self.deferred_gradients()], norm)

    def clip_deferred(self) -> None:
        """Have each bounded by itself whose updates are held for another clipping optimizer."""
        for optimizer, clip in self.separate:
            optimizer.deferred.clip(clip)

    def deferred_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tables, and the gradients (U, D), that are to be bounded with all others."""
        return [pair for optimizer in self.joint for pair in optimizer.deferred.gradients()]


def clip_in_backward(optimizer: Any, bound: BackwardClip, spread: Collection[int]) -> FusedModuleClips:
    """Have the fused modules in a tree of optimizers bound their gradients, those that can.

    A norm is of all gradients. A module that has them all clips in its backward pass. Where there are others,
    of dense parameters, of another module or on other ranks, a module holds its update until the step.

    Args:
        optimizer: the tree.
        bound: how to clip.
        spread: the ids of parameters of whose gradients other ranks have a part.
    """
    everything = {id(param) for group in optimizer.param_groups for param in group["params"]}
    clips, inside = FusedModuleClips(replace(bound)), _inner_clips(optimizer)
    for leaf in leaves(optimizer):
        own = {id(param) for param in leaf.params.values()} if hasattr(leaf, "clip_in_backward") else set()
        alone = own == everything and not own & set(spread)
        if own and (bound.kind == "value" or alone):
            clip = replace(bound, measure=bound.measure and alone)
            leaf.clip_in_backward(clip, inside=inside)
            clips.separate.append((leaf, clip))
            clips.bounded |= own
        elif own and bound.kind == "norm":
            leaf.defer_updates(clips.shared, inside=inside)
            clips.joint.append(leaf)
            clips.bounded |= own
    return clips


def _inner_clips(optimizer: Any) -> list[BackwardClip]:
    """Return what the clipping optimizers inside have asked of fused modules."""
    inside = [part for _, part in optimizer.optimizers] if hasattr(optimizer, "optimizers") else []
    inside += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    clips = getattr(optimizer, "_module_clips", None)
    found = [clips.shared, *(clip for _, clip in clips.separate)] if isinstance(clips, FusedModuleClips) else []
    return found + [clip for part in inside for clip in _inner_clips(part)]
