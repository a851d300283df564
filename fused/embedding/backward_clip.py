"""Clipping where gradients reach no step of torch: those of our embedding modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.dense.norms import p_norm
from keyedopt.fused.dense.scaling import clamp_all, factor_of, scale_all
from keyedopt.fused.fused import leaves


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


@dataclass(eq=False)
class Reach:
    """The fused modules that a clipping optimizer reaches.

    Args:
        taken: their optimizers, with the bound that each applies to its own gradients by itself.
        joint: their optimizers that hold their update, so that it is bounded with all other gradients.
        asking: the bound by which they know who asked them to hold.
        bounded: the ids of the parameters of both.
    """

    taken: list[tuple[Any, BackwardClip]]
    joint: list[Any]
    asking: BackwardClip
    bounded: set[int]

    def bounds(self) -> list[BackwardClip]:
        """Return what modules know this clipping optimizer by."""
        return [clip for _, clip in self.taken] + ([self.asking] if self.joint else [])

    def clip_held(self) -> None:
        """Bound, each by itself, the gradients that modules hold for another clipping optimizer."""
        for optimizer, clip in self.taken:
            optimizer.clip_held(clip)

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Return the weights, and the gradients of their rows, that are to be bounded with all others."""
        return [pair for optimizer in self.joint for pair in optimizer.held_gradients()]


def clip_in_backward(optimizer: Any, bound: BackwardClip, spread: Collection[int] = ()) -> Reach:
    """Hand a bound to the fused modules in a tree of optimizers that clip by themselves.

    A norm is one of all gradients. A module that has them all bounds it in its backward pass; where there are
    others, of dense parameters, of other modules or on other ranks, it holds its update until the step.

    Args:
        optimizer: the tree.
        bound: how to clip.
        spread: the ids of parameters whose gradients other ranks have a part of.
    """
    everything = {id(param) for group in optimizer.param_groups for param in group["params"]}
    reach = Reach([], [], replace(bound), set())
    inside = _taken_inside(optimizer)
    for leaf in leaves(optimizer):
        if not hasattr(leaf, "clip_in_backward"):
            continue
        own = set(map(id, leaf.params.values()))
        alone = own == everything and own.isdisjoint(spread)
        if own and (alone or bound.kind == "value"):
            reach.taken.append((leaf, replace(bound, measure=bound.measure and alone)))
            leaf.clip_in_backward(reach.taken[-1][1], inside=inside)
            reach.bounded |= own
        elif own and bound.kind == "norm" and hasattr(leaf, "hold"):
            reach.joint.append(leaf)
            leaf.hold(reach.asking, inside=inside)
            reach.bounded |= own
    return reach


def _taken_inside(optimizer: Any) -> list[BackwardClip]:
    """Return the bounds of the clipping optimizers inside: they hold beside the new one, others no more."""
    parts = [part for _, part in getattr(optimizer, "optimizers", ())]
    parts += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    reach = getattr(optimizer, "_reach", None)
    own = reach.bounds() if isinstance(reach, Reach) else []
    return own + [clip for part in parts for clip in _taken_inside(part)]
