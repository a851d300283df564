"""Gradients that wait until the window is full in which they are accumulated, each row once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.sums import sum_listed, sum_rows

#: Row numbers and their gradients, several times.
Parts = list[tuple[Tensor, Tensor]]


class Window:
    """The sums of the micro-batches of an unfinished window; it follows PyTorch's stateful protocol.

    A row is kept once, however often it comes, with its sum in float64: so the memory is bounded by the
    distinct rows, and N micro-batches equal one batch of their sum up to the rounding of that. The state,
    ``rows`` (U,), ``gradients`` (U, …) and ``count``, grows with the window, so it is replaced, not filled.
    What is loaded may have a row more than once, as the reference's has; it is summed with what comes next.

    Args:
        weight: the table, (R, …).
        dtype: of the sums; by default float64.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self._shape = tuple(weight.shape) or (1,)
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        self.rows = torch.zeros(0, dtype=torch.int64, device=weight.device)
        self.gradients = torch.zeros(0, *self._shape[1:], dtype=dtype, device=weight.device)
        self.count = 0
        self._every = False  # whether the rows are all of them, in order
        self._later: Parts = []

    def joined(self, rows: Tensor | None, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of all that waits and of this, (U,) and (U, …) in float64, without keeping them.

        Args:
            rows: (N,), which may come more than once; None for all.
            gradients: (N, …).
        """
        gradients = gradients.detach()
        width = math.prod(self._shape[1:])
        if rows is None:
            gradients = gradients.reshape(self._shape).to(torch.float64, copy=True)
            rows = torch.arange(self._shape[0], device=gradients.device)
            if not len(self.rows):
                return rows, gradients
            if self._every:
                return rows, gradients.add_(self.gradients)
        else:
            rows, sums = sum_listed(rows, gradients.reshape(len(rows), width))
            gradients = sums.reshape(len(rows), *self._shape[1:])
            if not len(self.rows):
                return rows, gradients
        rows, gradients = torch.cat([self.rows, rows]), torch.cat([self.gradients, gradients])
        distinct, sums = sum_rows(rows, gradients.reshape(len(rows), width))
        return distinct, sums.reshape(len(distinct), *self._shape[1:])

    def parts(self) -> Parts:
        """Return what waits, in parts of distinct rows: row numbers (U,) and gradients (U, …)."""
        first: Parts = [(self.rows, self.gradients)] if len(self.rows) else []
        return first + self._later

    def keep(self, rows: Tensor, gradients: Tensor, merge: Callable[[Parts], tuple[Tensor, Tensor]]) -> None:
        """Keep the sums of one micro-batch as a part, and merge the parts before they are too many.

        Each is merged with what is larger than all that came after it: so a gradient is rounded in few
        sums, and what is kept is at most twice the distinct rows, beside the last micro-batch.

        Args:
            rows: (U,), distinct.
            gradients: (U, …).
            merge: returns the sums of parts.
        """
        self._later.append((rows, gradients.to(self.gradients.dtype)))
        self._every = False
        self.count += 1
        if sum(len(part) for part, _ in self._later) >= len(self.rows):
            parts = self.parts()
            self.rows, self.gradients = parts[0] if len(parts) == 1 else merge(parts)
            self._later = []

    def rounded(self, rows: Tensor | None, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `joined` does, in the dtype in which an update takes it."""
        distinct, sums = self.joined(rows, gradients)
        return distinct, sums.to(self._dtype)

    def add(self, rows: Tensor | None, gradients: Tensor) -> None:
        """Keep the gradients of one micro-batch: (N,), (N, …)."""
        every = rows is None and (self._every or not len(self.rows))
        self.rows, self.gradients = self.joined(rows, gradients)
        self._every = every
        self.count += 1

    def clear(self) -> None:
        """Begin the next window."""
        self._every = False
        self._later = []
        self.rows, self.gradients, self.count = self.rows.new_zeros(0), self.gradients.new_zeros(0), 0
        self.gradients = self.gradients.reshape(0, *self._shape[1:])

    def state_dict(self) -> dict[str, Any]:
        """Return the row numbers (U,), their sums (U, …), and the count of micro-batches."""
        if self._later:
            parts = self.parts()
            self.rows = torch.cat([rows for rows, _ in parts])
            self.gradients = torch.cat([gradients for _, gradients in parts])
            self._later = []
        return {"rows": self.rows, "gradients": self.gradients, "count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take another window's state.

        Raises:
            ValueError: it is not the state of a window of this table; nothing is taken.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"rows", "gradients", "count"}:
            raise ValueError("a window has rows, gradients and count")
        rows, gradients = (torch.as_tensor(state_dict[name]).detach() for name in ("rows", "gradients"))
        if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
            raise ValueError(f"rows must be int64 of shape (N,), not {rows.dtype} of {tuple(rows.shape)}")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self._shape[0]:
            raise ValueError(f"rows must be from 0 to {self._shape[0] - 1}")
        wanted = (len(rows), *self._shape[1:])
        if tuple(gradients.shape) != wanted or not gradients.is_floating_point():
            raise ValueError(f"gradients must be numbers of shape {wanted}, not {tuple(gradients.shape)}")
        count = state_dict["count"]
        if int(count) != float(count) or int(count) < (1 if len(rows) else 0):
            raise ValueError(f"count must be the number of micro-batches in the window, not {count}")
        self.rows, self.gradients = rows.to(self.rows, copy=True), gradients.to(self.gradients, copy=True)
        self.count = int(count)
        self._later = []
        every = torch.arange(self._shape[0], device=self.rows.device)
        self._every = len(rows) == len(every) and torch.equal(self.rows, every)

    def to(self, device: torch.device) -> None:
        """Follow the table to a device."""
        self.rows, self.gradients = self.rows.to(device), self.gradients.to(device)
        self._later = [(rows.to(device), gradients.to(device)) for rows, gradients in self._later]
