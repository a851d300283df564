"""The gradients of an unfinished window of accumulation, each row once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.sums import sum_listed, sum_rows
from keyedopt.reference import window

#: Row numbers and their gradients, several times.
Parts = list[tuple[Tensor, Tensor]]


class Window(window.Window):
    """The sums of the micro-batches of an unfinished window; follows PyTorch's stateful protocol.

    Each row is stored once, with its sum in float64: so memory grows with the distinct rows, not with the
    lookups, and N micro-batches equal one batch of their sum up to the rounding of float64. Loaded state may
    list a row more than once, as the reference's does; the next micro-batch sums it.

    Args:
        weight: the table, (R, …).
        dtype: of the sums; by default float64.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(weight)
        self._dtype = self.gradients.dtype
        self.gradients = self.gradients.to(dtype)
        self._has_every_row = False  # and they are in order
        self._later: Parts = []

    def _sums(self, rows: Tensor | None, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows (U,) of the window and these, and the sums (U, …) in float64."""
        gradients = gradients.detach()
        width = math.prod(self._shape[1:])
        if rows is None:
            gradients = gradients.reshape(self._shape).to(torch.float64, copy=True)
            rows = torch.arange(self._shape[0], device=gradients.device)
            if self._has_every_row:
                return rows, gradients.add_(self.gradients)
        else:
            rows, sums = sum_listed(rows, gradients.reshape(len(rows), width))
            gradients = sums.reshape(len(rows), *self._shape[1:])
        if not len(self.rows):
            return rows, gradients
        rows, gradients = torch.cat([self.rows, rows]), torch.cat([self.gradients, gradients])
        distinct, sums = sum_rows(rows, gradients.reshape(len(rows), width))
        return distinct, sums.reshape(len(distinct), *self._shape[1:])

    def total(self, rows: Tensor | None, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows (U,) of the window and these, and the sums of their gradients."""
        distinct, sums = self._sums(rows, gradients)
        return distinct, sums.to(self._dtype)

    def add(self, rows: Tensor | None, gradients: Tensor) -> None:
        """Add the gradients of one micro-batch to the sums."""
        self.rows, self.gradients = self._sums(rows, gradients)
        self._has_every_row = rows is None
        self.count += 1

    def parts(self) -> Parts:
        """Return the stored sums in parts, each of distinct rows: row numbers (U,) and gradients (U, …)."""
        first: Parts = [(self.rows, self.gradients)] if len(self.rows) else []
        return first + self._later

    def keep(self, rows: Tensor, gradients: Tensor, merge: Callable[[Parts], tuple[Tensor, Tensor]]) -> None:
        """Store the sums of one micro-batch as a part, and merge the parts before they are too many.

        Parts are merged when those that came later have as many rows as the first: so a gradient is rounded
        in few sums, and at most twice the distinct rows are stored, beside the last micro-batch.

        Args:
            rows: (U,), distinct.
            gradients: (U, …).
            merge: returns the sums of parts.
        """
        self._later.append((rows, gradients.to(self.gradients.dtype)))
        self.count += 1
        if sum(len(part) for part, _ in self._later) >= len(self.rows):
            parts = self.parts()
            self.rows, self.gradients = parts[0] if len(parts) == 1 else merge(parts)
            self._later = []

    def clear(self) -> None:
        """Drop the sums, to begin the next window."""
        super().clear()
        self._has_every_row = False
        self._later = []

    def state_dict(self) -> dict[str, Any]:
        """Return the row numbers (N,), their sums (N, …), and the number of micro-batches."""
        if self._later:
            rows, gradients = zip(*self.parts(), strict=True)
            self.rows, self.gradients, self._later = torch.cat(rows), torch.cat(gradients), []
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state by a copy of another window's; see `keyedopt.reference`."""
        super().load_state_dict(state_dict)
        self._later = []
        every = torch.arange(self._shape[0], device=self.rows.device)
        self._has_every_row = len(self.rows) == len(every) and torch.equal(self.rows, every)

    def to(self, device: torch.device) -> None:
        """Move to the device of the table."""
        super().to(device)
        self._later = [(rows.to(device), gradients.to(device)) for rows, gradients in self._later]
