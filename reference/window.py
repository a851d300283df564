"""The gradients of an unfinished window of accumulation."""

from collections.abc import Mapping
from typing import Any

import torch

from keyedopt.reference.rules.rows import coalesce


class Window:
    """The gradients of the micro-batches of an unfinished window; follows PyTorch's stateful protocol.

    Gradients are stored without summing, and are summed when the window is full. So N micro-batches equal one
    batch of their sum, rounded once. The state (``rows``, ``gradients`` and ``count``) grows with the window,
    so a load replaces its tensors.

    Args:
        weight: the table, (R, …).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._shape = tuple(weight.shape) or (1,)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.rows = torch.zeros(0, dtype=torch.int64, device=weight.device)
        self.gradients = torch.zeros(0, *self._shape[1:], dtype=dtype, device=weight.device)
        self.count = 0

    @property
    def is_meta(self) -> bool:
        """Whether the window is on the device "meta", where tensors have no memory."""
        return self.rows.is_meta

    def fits(self, weight: torch.Tensor) -> bool:
        """Return whether the window is of a table of this shape."""
        return self._shape == (tuple(weight.shape) or (1,))

    def with_batch(
        self, rows: torch.Tensor | None, gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored rows and gradients, followed by those of a micro-batch; store nothing.

        Args:
            rows: (N,) row numbers, in any order; None for every row.
            gradients: (N, …) their gradients.
        """
        if rows is None:
            rows = torch.arange(self._shape[0], device=gradients.device)
            gradients = gradients.reshape(self._shape)
        rows, gradients = rows.to(self.rows), gradients.to(self.gradients)
        return torch.cat([self.rows, rows]), torch.cat([self.gradients, gradients])

    def total(self, rows: torch.Tensor | None, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct rows (U,) of the window and a micro-batch, and the sums of their gradients."""
        return coalesce(*self.with_batch(rows, gradients))

    def add(self, rows: torch.Tensor | None, gradients: torch.Tensor) -> None:
        """Store the gradients of one micro-batch."""
        self.rows, self.gradients = self.with_batch(rows, gradients)
        self.count += 1

    def clear(self) -> None:
        """Drop the gradients, to begin the next window."""
        self.rows, self.gradients, self.count = self.rows[:0].clone(), self.gradients[:0].clone(), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the row numbers (N,), their gradients (N, …), and the number of micro-batches."""
        return {"rows": self.rows, "gradients": self.gradients, "count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state by a copy of another window's.

        Raises:
            ValueError: the state is malformed, or of another table. Nothing is replaced.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"rows", "gradients", "count"}:
            raise ValueError("the state of a window must be a mapping with rows, gradients and count")
        rows, gradients = (torch.as_tensor(state_dict[name]) for name in ("rows", "gradients"))
        count = state_dict["count"]
        if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
            raise ValueError(f"rows must be int64 of shape (N,), not {rows.dtype} of {tuple(rows.shape)}")
        if bool(((rows < 0) | (rows >= self._shape[0])).any()):
            raise ValueError(f"rows must be from 0 to {self._shape[0] - 1}")
        wanted = (len(rows), *self._shape[1:])
        if tuple(gradients.shape) != wanted or not gradients.is_floating_point():
            raise ValueError(f"gradients must be floats of shape {wanted}, not {tuple(gradients.shape)}")
        if int(count) != float(count) or int(count) < (1 if len(rows) else 0):
            raise ValueError(f"count must be the number of micro-batches in the window, not {count}")
        self.rows = rows.detach().to(self.rows, copy=True)
        self.gradients = gradients.detach().to(self.gradients, copy=True)
        self.count = int(count)

    def to(self, device: torch.device) -> None:
        """Move to the device of the table."""
        self.rows, self.gradients = self.rows.to(device), self.gradients.to(device)
