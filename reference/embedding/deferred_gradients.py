"""Gradients of tables that are deferred to ``step``, as those of dense parameters are in ``.grad``."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.reference.backward_clip import BackwardClip

#: A table, and its gradient: distinct rows (U,), and values (U, D).
Sum = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class DeferredGradients:
    """The gradients of the backward passes since the last step, each row once, and the clips that defer them.

    A copy has no gradients, as a copy of a parameter has no ``.grad``. Clips are referred to weakly:
    gradients are no longer deferred when every clip that could scale them is gone.
    """

    def __init__(self) -> None:
        #: The summed gradient of each table that has one: distinct rows (U,), and values (U, D).
        self.sums: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        self._requests: list[weakref.ref[BackwardClip]] = []
        self._pending_clips: list[BackwardClip] = []

    def requested(self) -> bool:
        """Return whether updates are deferred."""
        return any(clip() is not None for clip in self._requests)

    def request(self, clip: BackwardClip) -> None:
        """Defer updates as long as this clip exists."""
        self._requests.append(weakref.ref(clip))

    def retain_requests(self, clips: Sequence[BackwardClip]) -> None:
        """Drop all requests except those of these clips."""
        self._requests = [clip for clip in self._requests if clip() in clips]

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tables, and their gradients (U, D), to change in place."""
        return [(weight, grads) for weight, (_, grads) in self.sums.items()]

    def add(self, sums: Sequence[Sum], clips: Sequence[BackwardClip]) -> None:
        """Store the gradients of some tables; `clips` are applied to them before the step."""
        self.sums.update(sums)
        self._pending_clips = list(clips)

    def clip(self, clip: BackwardClip) -> None:
        """Apply a clip, unless it has been applied."""
        if clip in self._pending_clips:
            self._pending_clips.remove(clip)
            clip.apply([grads for _, grads in self.sums.values()])

    def clipped(self) -> list[Sum]:
        """Return the gradients with all clips applied, on the present devices of the tables."""
        for weight, (rows, grads) in self.sums.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.sums[weight] = rows.to(weight.device), grads.to(weight.device, dtype)
        for clip in list(self._pending_clips):
            self.clip(clip)
        return list(self.sums.items())

    def replaced(self, moved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Move gradients to the parameters that replaced others: ``moved[old]`` is the new one."""
        self.sums = {moved[weight]: gradient for weight, gradient in self.sums.items()}

    def clear(self) -> None:
        """Drop the gradients."""
        self.sums, self._pending_clips = {}, []

    def __getstate__(self) -> list[Any]:
        requests = [clip() for clip in self._requests]
        return [clip for clip in requests if clip is not None]

    def __setstate__(self, clips: list[Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for clip in clips:
            self.request(clip)
