"""Parameters of any shape as the tables that backends take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Table

#: Which state tensors of an algorithm are one number a row.
ROW_STATES = {"rowwise_adagrad": (0,), "partial_rowwise_adam": (1,), "partial_rowwise_lamb": (1,)}


class TableViews:
    """A parameter and its state as a `Table`: views of their memory, or copies where it has too many strides.

    Args:
        algorithm: a key of `ALGORITHMS`.
        param: of any shape; what is listed in its first dimensions are the rows.
        state: its state by name.
        names: the state tensors, in order.
        sparse: how many of its dimensions list rows.
    """

    def __init__(
        self, algorithm: str, param: Tensor, state: Mapping[str, Any], names: Sequence[str], sparse: int = 1
    ) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        per_row = ROW_STATES.get(algorithm, ())
        states = [
            state[name].view(-1) if index in per_row else self._rows(state[name], sparse)
            for index, name in enumerate(names)
        ]
        counts = state.get("step")
        if not isinstance(counts, Tensor) or not counts.ndim:
            counts = None
        else:  # torch's optimizers count in floats, backends in integers
            self._copies.append((counts, counts.long()))
            counts = self._copies[-1][1]
        self.table = Table(self._rows(param, sparse), tuple(states), counts)
        #: Whether no kernel takes it as it is, because there are strides between its elements.
        self.unusual = not all(tensor.is_contiguous() for tensor in (self.table.weight, *states))

    def _rows(self, tensor: Tensor, sparse: int) -> Tensor:
        """Return a tensor as (R, D)."""
        if tensor.ndim == 2 and sparse == 1:
            return tensor
        tensor = tensor.detach()
        if not tensor.is_contiguous():
            self._copies.append((tensor, tensor.contiguous()))
            tensor = self._copies[-1][1]
        rows = tensor.shape[:sparse].numel()
        return tensor.view(rows, tensor.shape[sparse:].numel())

    def write_back(self) -> None:
        """Bring copies back to where they came from; let autograd know of what a kernel has written."""
        torch.autograd.graph.increment_version([self.table.weight, *self.table.states])
        for tensor, copied in self._copies:
            tensor.copy_(copied)


class PackedRows:
    """Rows of a table with strides between its elements, copied together: a table that every backend takes.

    Args:
        table: whose rows they are; a copy of them comes back to it by `write_back`.
        values: (N,) int64, row numbers, in any order and as often as they like.

    Attributes:
        rows: (U,) int64, the distinct ones, ascending.
        places: (N,) int64, where in `rows` each value is.
        table: those rows alone.
    """

    def __init__(self, table: Table, values: Tensor) -> None:
        self.rows, self.places = torch.unique(values, return_inverse=True)
        whole = [table.weight, *table.states, *([] if table.row_counter is None else [table.row_counter])]
        copies = [tensor.detach().index_select(0, self.rows).contiguous() for tensor in whole]
        self._pairs = list(zip(whole, copies, strict=True))
        states = tuple(copies[1 : 1 + len(table.states)])
        self.table = Table(copies[0], states, None if table.row_counter is None else copies[-1])

    def write_back(self) -> None:
        """Bring the rows back to where they came from."""
        for tensor, copied in self._pairs:
            tensor.index_copy_(0, self.rows, copied)
