"""Parameters of any shape as the tables that backends take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Table

#: The state tensors of an algorithm with one number for each row, by index.
ROW_STATES = {"rowwise_adagrad": (0,), "partial_rowwise_adam": (1,), "partial_rowwise_lamb": (1,)}


class TableViews:
    """A parameter and its state as a `Table`: views of their memory, or copies if not contiguous.

    Args:
        algorithm: a key of `ALGORITHMS`.
        param: of any shape; its first dimensions list the rows.
        state: its state by name.
        names: the state tensors, in order.
        sparse: the number of dimensions that list rows.
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
        else:  # torch's optimizers count in floats, backends in int64
            self._copies.append((counts, counts.long()))
            counts = self._copies[-1][1]
        self.table = Table(self._rows(param, sparse), tuple(states), counts)
        #: Whether a tensor is not contiguous, so that no kernel supports the table.
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
        """Write copies back, and increment the versions of tensors that kernels have written."""
        torch.autograd.graph.increment_version([self.table.weight, *self.table.states])
        for tensor, copied in self._copies:
            tensor.copy_(copied)


class PackedRows:
    """Contiguous copies of rows of a table that is not contiguous: a table that every backend supports.

    Args:
        table: whose rows are copied; `write_back` writes them back.
        values: (N,) int64, row numbers, in any order, with repetitions.

    Attributes:
        rows: (U,) int64, the distinct row numbers, ascending.
        places: (N,) int64, the index in `rows` of each value.
        table: of only those rows.
    """

    def __init__(self, table: Table, values: Tensor) -> None:
        self.rows, self.places = torch.unique(values, return_inverse=True)
        whole = [table.weight, *table.states, *([] if table.row_counter is None else [table.row_counter])]
        copies = [tensor.detach().index_select(0, self.rows).contiguous() for tensor in whole]
        self._pairs = list(zip(whole, copies, strict=True))
        states = tuple(copies[1 : 1 + len(table.states)])
        self.table = Table(copies[0], states, None if table.row_counter is None else copies[-1])

    def write_back(self) -> None:
        """Write the rows back."""
        for tensor, copied in self._pairs:
            tensor.index_copy_(0, self.rows, copied)
