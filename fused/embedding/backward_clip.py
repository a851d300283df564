"""Clipping in the backward pass of embedding modules, with the fused norms."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyedopt.fused.dense.norms import p_norm
from keyedopt.fused.dense.scaling import clamp_all, clipping_factor, scale_all
from keyedopt.reference import backward_clip
from keyedopt.reference.backward_clip import FusedModuleClips, clip_in_backward

__all__ = ["BackwardClip", "FusedModuleClips", "clip_in_backward"]


@dataclass(eq=False)
class BackwardClip(backward_clip.BackwardClip):
    """The reference's bound on the gradients of a fused module, with own arithmetic."""

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of all of these together."""
        return p_norm(grads, self.norm_type, grads[0].device if grads else torch.device("cpu"))

    def scale(self, grads: Sequence[Tensor], norm: Tensor) -> None:
        """Multiply in place by min(1, bound / norm); if the norm is inf or NaN, finite gradients become 0."""
        scale_all(grads, torch.where(norm.isfinite(), clipping_factor(norm, self.bound), 0.0))

    def clamp(self, grads: Sequence[Tensor]) -> None:
        """Clamp the elements in place."""
        clamp_all(grads, self.bound)
