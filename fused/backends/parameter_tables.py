"""Parameters of any shape and layout as the tables that backends accept."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import ROW_STATE, Table


class ParameterTable:
    """A parameter and its state as a `Table`: views of their memory, or copies where no view is possible.

    Args:
        algorithm: a key of `ALGORITHMS`.
        param: of any shape.
        state: its state by name.
        names: the state tensors, in the order of `ALGORITHMS`.
        listing_dims: how many of the first dimensions list the rows of the table.

    Attributes:
        table: the parameter as (R, D), and its state.
        is_strided: whether there are gaps between the elements of a tensor, which no kernel accepts.
    """

    def __init__(
        self,
        algorithm: str,
        param: Tensor,
        state: Mapping[str, Any],
        names: Sequence[str],
        listing_dims: int = 1,
    ) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        row_state = ROW_STATE.get(algorithm)
        states = [
            state[name].view(-1) if index == row_state else self._as_matrix(state[name], listing_dims)
            for index, name in enumerate(names)
        ]
        counts = state.get("step")
        if not isinstance(counts, Tensor) or not counts.ndim:
            counts = None
        else:  # torch's optimizers count in floats, backends in int64
            self._copies.append((counts, counts.long()))
            counts = self._copies[-1][1]
        self.table = Table(self._as_matrix(param, listing_dims), tuple(states), counts)
        self.is_strided = not all(tensor.is_contiguous() for tensor in (self.table.weight, *states))

    def _as_matrix(self, tensor: Tensor, listing_dims: int) -> Tensor:
        """Return a tensor as (R, D)."""
        if tensor.ndim == 2 and listing_dims == 1:
            return tensor
        tensor = tensor.detach()
        if not tensor.is_contiguous():
            self._copies.append((tensor, tensor.contiguous()))
            tensor = self._copies[-1][1]
        rows = tensor.shape[:listing_dims].numel()
        return tensor.view(rows, tensor.shape[listing_dims:].numel())

    def write_back(self) -> None:
        """Write copies back to the tensors they were made of, and tell autograd what a kernel has written."""
        torch.autograd.graph.increment_version([self.table.weight, *self.table.states])
        for tensor, copied in self._copies:
            tensor.copy_(copied)


class PackedRows:
    """Copies of some rows of a strided table, as a contiguous table that every backend accepts.

    Args:
        table: the strided table.
        values: (N,) int64, row numbers, in any order and with repetitions.

    Attributes:
        rows: (U,) int64, the distinct row numbers, ascending.
        places: (N,) int64, the index in `rows` of each value.
        table: those rows.
    """

    def __init__(self, table: Table, values: Tensor) -> None:
        self.rows, self.places = torch.unique(values, return_inverse=True)
        copies = [tensor.detach().index_select(0, self.rows).contiguous() for tensor in table.tensors]
        self._pairs = list(zip(table.tensors, copies, strict=True))
        states = tuple(copies[1 : 1 + len(table.states)])
        self.table = Table(copies[0], states, None if table.row_counter is None else copies[-1])

    def write_back(self) -> None:
        """Write the rows back to the strided table."""
        for tensor, copied in self._pairs:
            tensor.index_copy_(0, self.rows, copied)
