"""Tensors with memory of the case behind them, in which writes beyond their end are seen."""

import torch

#: Rows of a buffer: more than the elements of any tensor that a case of sizes gives.
BUFFER_ROWS = 64


class Buffers:
    """Views of the first rows of larger buffers."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, int]] = []

    def view(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a copy of the first rows of a tensor, or of all and new ones, with a buffer behind it."""
        buffer = tensor.new_full((BUFFER_ROWS, *tensor.shape[1:]), 7)
        common = min(rows, len(tensor))
        buffer[:common] = tensor[:common]
        self._made.append((buffer, rows))
        return buffer[:rows]

    def behind(self) -> list[torch.Tensor]:
        """Return copies of what is behind each view."""
        return [buffer[rows:].clone() for buffer, rows in self._made]
