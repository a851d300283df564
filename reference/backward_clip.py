"""Clipping in the backward pass of keyedopt's fused modules, whose gradients never reach a step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from keyedopt.reference.fused import leaves
from keyedopt.reference.norms import p_norm


@dataclass(eq=False)
class BackwardClip:
    """A bound on the gradients of a fused module. The backward pass applies it before the update.

    Args:
        kind: ``"norm"``, ``"value"``, or ``"none"`` to measure only.
        bound: the largest norm, or the largest absolute value of an element.
        norm_type: exponent of the norm, above 0 or infinity.
        measure: measure the norm even if `kind` is not ``"norm"``.
    """

    kind: str
    bound: float
    norm_type: float = 2.0
    measure: bool = False
    #: The norm of the gradients of the most recent step, before they were clipped.
    last_norm: torch.Tensor | None = None

    def apply(self, grads: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of all tables in place; each row occurs once.

        If the norm is inf or NaN, finite gradients become 0, so that one bad row does not change the others.
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
        """Return the joint norm of all gradients, in float64."""
        return p_norm(grads, self.norm_type, grads[0].device if grads else torch.device("cpu"))

    def clamp(self, grads: Sequence[torch.Tensor]) -> None:
        """Clamp the elements in place."""
        for grad in grads:
            grad.clamp_(-self.bound, self.bound)

    def scale(self, grads: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Multiply in place by min(1, bound / norm); if the norm is inf or NaN, by 0."""
        factor = torch.where(norm.isfinite(), (self.bound / (norm + 1e-6)).clamp(max=1.0), 0.0)
        for grad in grads:
            grad.copy_(grad.double() * factor.to(grad.device))


@dataclass(eq=False)
class FusedModuleClips:
    """The optimizers of the fused modules inside a clipping optimizer, and how each is clipped.

    Args:
        shared: the clip for which the optimizers in `joint` defer their updates.
        separate: optimizers that clip their own gradients, each with its clip.
        joint: optimizers that defer their updates, because one norm covers their and other gradients.
        bounded: the ids of the parameters of all these optimizers.
    """

    shared: BackwardClip
    separate: list[tuple[Any, BackwardClip]] = field(default_factory=list)
    joint: list[Any] = field(default_factory=list)
    bounded: set[int] = field(default_factory=set)

    def scale(self, norm: torch.Tensor) -> None:
        """Scale the deferred gradients in `joint` by min(1, bound / norm)."""
        if self.joint:  # scaling an empty list would launch kernels
            self.shared.scale([grad for _, grad in self.deferred()], norm)

    def norm(self) -> torch.Tensor | None:
        """Return the norm of what `separate` has measured since `forget`; None without a measurement."""
        norms = [clip.last_norm for _, clip in self.separate if clip.last_norm is not None]
        if len(norms) < 2:
            return norms[0] if norms else None
        return self.shared.norm(norms).to(norms[0].dtype)

    def forget(self) -> None:
        """Drop the norms that a step has reported, so that the next step does not report them again."""
        for _, clip in self.separate:
            clip.last_norm = None

    def unmeasured(self) -> int:
        """Return the number of parameters in `separate` whose norm is not measured."""
        return sum(len(optimizer.params) for optimizer, clip in self.separate if not clip.measure)

    def clip_deferred(self) -> None:
        """Clip the gradients in `separate` that are deferred for another clipping optimizer."""
        for optimizer, clip in self.separate:
            optimizer.deferred.clip(clip)

    def deferred(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tables in `joint`, and their deferred gradients (U, D)."""
        return [pair for optimizer in self.joint for pair in optimizer.deferred.gradients()]


def clip_in_backward(optimizer: Any, bound: BackwardClip, spread: Collection[int]) -> FusedModuleClips:
    """Install clipping in the fused modules of a tree of optimizers that support it.

    A norm covers all gradients. If one module has all gradients, it clips in its backward pass. If there are
    other gradients (of dense parameters, of another module, or on other ranks), a module defers its update to
    the step.

    Args:
        optimizer: the outermost optimizer of the tree.
        bound: how to clip.
        spread: the ids of the parameters whose gradients are spread over ranks.
    """
    everything = {id(param) for group in optimizer.param_groups for param in group["params"]}
    clips, inside = FusedModuleClips(replace(bound)), _inner_clips(optimizer)
    for leaf in leaves(optimizer):
        own = {id(param) for param in leaf.params.values()} if hasattr(leaf, "clip_in_backward") else set()
        alone = own == everything and not own & set(spread)
        if own and (bound.kind == "value" or alone):
            clip = replace(bound, measure=bound.measure and not own & set(spread))
            leaf.clip_in_backward(clip, inside=inside)
            clips.separate.append((leaf, clip))
            clips.bounded |= own
        elif own and bound.kind == "norm":
            leaf.defer_updates(clips.shared, inside=inside)
            clips.joint.append(leaf)
            clips.bounded |= own
    return clips


def _inner_clips(optimizer: Any) -> list[BackwardClip]:
    """Return the clips that clipping optimizers inside have installed in fused modules."""
    inside = [part for _, part in optimizer.optimizers] if hasattr(optimizer, "optimizers") else []
    inside += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    clips = getattr(optimizer, "_module_clips", None)
    found = (
        [clips.shared, *(clip for _, clip in clips.separate)] if isinstance(clips, FusedModuleClips) else []
    )
    return found + [clip for part in inside for clip in _inner_clips(part)]
