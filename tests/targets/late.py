"""Embedding modules that report invalid lookups late on an accelerator, ``late:sound``, or wrongly.

A lookup of invalid contents sets a flag on the device, which is copied to the host without synchronizing. The
first forward pass that finds the flag on the host raises the error.
"""

from typing import Any

import torch

from keyedopt import reference
from keyedopt.conformance.targets.implementation import Implementation

#: The errors of invalid lookups, each with its flag on the host.
PENDING: list[tuple[torch.Tensor, ValueError]] = []
#: What the messages of errors say that a kernel finds.
FOUND_BY_KERNELS = ("must be row numbers", "must go from 0", "must not fall")


class Late(reference.EmbeddingBagCollection):
    """Reports late on an accelerator."""

    def forward(self, features: Any) -> Any:
        """Look up; raise the error of an earlier lookup whose flag has arrived."""
        if PENDING and PENDING[0][0].item():
            raise PENDING.pop(0)[1]
        try:
            return super().forward(features)
        except ValueError as error:
            if self.at_once(error):
                raise
            self.note(error)
            return self.outputs(features)

    def at_once(self, error: ValueError) -> bool:
        """Return whether the host finds the error."""
        late = any(text in str(error) for text in FOUND_BY_KERNELS)
        return not late or self._device().type == "cpu"

    def note(self, error: ValueError) -> None:
        """Set the flag of an error on the device, and copy it to the host."""
        flag = torch.zeros(1, dtype=torch.int32)
        flag.copy_(torch.ones(1, dtype=torch.int32, device=self._device()), non_blocking=True)
        PENDING.append((flag, error))

    def outputs(self, features: Any) -> Any:
        """Return outputs of zeros, whose backward pass updates nothing."""
        tables = self.embedding_bag_configs()
        names = [name for table in tables for name in table.feature_names]
        return {
            name if names.count(name) == 1 else f"{name}@{table.name}": torch.zeros(
                max(len(features[name][1]) - 1, 0),
                table.embedding_dim,
                device=self._device(),
                requires_grad=True,
            )
            for table in tables
            for name in table.feature_names
        }

    def _device(self) -> torch.device:
        return next(iter(self.parameters())).device


class Silent(Late):
    """Never reports what a kernel finds."""

    def note(self, error: ValueError) -> None:
        """Forget the error."""


class Writing(Late):
    """Updates a row of a table in the backward pass of an invalid lookup."""

    def outputs(self, features: Any) -> Any:
        """Return outputs whose backward pass writes."""
        table = next(iter(self.parameters()))

        def write(_: torch.Tensor) -> None:
            table.data[0].add_(1.0)

        outputs = super().outputs(features)
        for output in outputs.values():
            output.register_hook(write)
        return outputs


class Unsynchronized(Late):
    """Reports late on the CPU too."""

    def at_once(self, error: ValueError) -> bool:
        """Return whether the host finds the error."""
        return not any(text in str(error) for text in FOUND_BY_KERNELS)


class Leaving(Late):
    """Leaves an error behind if it is looked up in eval mode."""

    def forward(self, features: Any) -> Any:
        """Look up."""
        outputs = super().forward(features)
        if not self.training and not PENDING:
            self.note(ValueError("a lookup in eval mode"))
        return outputs


class Losing(Late):
    """Ends all work on the device at an invalid lookup, as an assertion of a kernel does on CUDA."""

    def note(self, error: ValueError) -> None:
        """Let every later synchronization fail."""

        def fail(*_: Any) -> None:
            raise RuntimeError("device-side assert triggered")

        torch.accelerator.synchronize = fail


def __getattr__(name: str) -> Implementation:
    if name not in ("sound", "silent", "writing", "unsynchronized", "leaving", "losing"):
        raise AttributeError(name)
    kind = "Late" if name == "sound" else name.capitalize()
    return Implementation(
        name=f"late-{name}",
        root="keyedopt.reference",
        names={"EmbeddingBagCollection": f"late:{kind}"},
        areas=("fused",),
        absent=("EmbeddingCollection", "EmbeddingBagCollection.keyed_jagged_tensors"),
        devices=("cpu", "npu"),
    )
