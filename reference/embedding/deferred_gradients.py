"""Gradients of tables that wait for a step, as those of dense parameters do in ``.grad``."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from keyedopt.reference.backward_clip import BackwardClip

#: A table, and its gradient: distinct rows (U,), and values (U, D).
Sum = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class Held:
    """What the backward passes since the last step have given, each row once, and for whom.

    A copy, as of ``.grad``, has no gradients. Who asked for them is referred to weakly, so when nobody who
    could scale them is left, nothing is held any more.
    """

    def __init__(self) -> None:
        #: The summed gradient of each table that has one: distinct rows (U,), and values (U, D).
        self.sums: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        self._asking: list[weakref.ref[BackwardClip]] = []
        self._due: list[BackwardClip] = []

    def wanted(self) -> bool:
        """Whether gradients are to be held."""
        return any(clip() is not None for clip in self._asking)

    def ask(self, clip: BackwardClip) -> None:
        """Hold gradients, as long as there is this bound."""
        self._asking.append(weakref.ref(clip))

    def keep(self, inside: Sequence[BackwardClip]) -> None:
        """Forget all who asked but for these."""
        self._asking = [clip for clip in self._asking if clip() in inside]

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tables, and their gradients (U, D), to change in place."""
        return [(weight, grads) for weight, (_, grads) in self.sums.items()]

    def put(self, sums: Sequence[Sum], clips: Sequence[BackwardClip]) -> None:
        """Take the gradients of some tables, to which these bounds are to be applied before the step."""
        self.sums.update(sums)
        self._due = list(clips)

    def clip(self, clip: BackwardClip) -> None:
        """Apply a bound, unless that is done."""
        if clip in self._due:
            self._due.remove(clip)
            clip.apply([grads for _, grads in self.sums.values()])

    def bounded(self) -> list[Sum]:
        """Return the gradients, all bounds applied, where the tables are now."""
        for weight, (rows, grads) in self.sums.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.sums[weight] = rows.to(weight.device), grads.to(weight.device, dtype)
        for clip in list(self._due):
            self.clip(clip)
        return list(self.sums.items())

    def drop(self) -> None:
        """Forget the gradients."""
        self.sums, self._due = {}, []

    def __getstate__(self) -> list[Any]:
        asking = [clip() for clip in self._asking]
        return [clip for clip in asking if clip is not None]

    def __setstate__(self, clips: list[Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for clip in clips:
            self.ask(clip)
