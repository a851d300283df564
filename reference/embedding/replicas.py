"""Tables that are replicated over ranks: the exchange of row gradients, and a check for data parallelism.

The update of a table never passes through ``.grad``, so DistributedDataParallel cannot reduce its gradients.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Row numbers (U,) and their gradients (U, D).
RowGradients = tuple[torch.Tensor, torch.Tensor]


class Replicas:
    """The ranks that have a replica of the same tables; a copy shares the process group.

    Args:
        process_group: these ranks.
    """

    def __init__(self, process_group: Any) -> None:
        self._group = process_group

    def __deepcopy__(self, memo: Any) -> "Replicas":
        return self

    @torch.no_grad()
    def make_equal(self, tables: Iterable[torch.Tensor]) -> None:
        """Give all replicas the rows of the first rank."""
        source = dist.get_process_group_ranks(self._group)[0]
        for table in tables:
            if not table.is_meta:
                dist.broadcast(table.detach(), source, group=self._group)

    def exchange(
        self, tables: Sequence[torch.Tensor], given: Mapping[torch.Tensor, RowGradients]
    ) -> dict[torch.Tensor, RowGradients]:
        """Return the mean over the ranks of the gradients of all tables, with rows repeated.

        All ranks get the same numbers in the same order. The number of bytes is proportional to the rows.

        Args:
            tables: all tables, in the same order on all ranks.
            given: the gradients on this rank: distinct rows of the tables that its backward pass reaches.
        """
        size, device = dist.get_world_size(self._group), tables[0].device
        here = [len(given[table][0]) if table in given else -1 for table in tables]
        counts = torch.stack(self._gather(torch.tensor(here, device=device), size)).tolist()
        found: dict[torch.Tensor, RowGradients] = {}
        for dtype in dict.fromkeys(_gradient_dtype(table) for table in tables):
            chosen = [index for index, table in enumerate(tables) if _gradient_dtype(table) is dtype]
            widths = [tables[index].shape[1] for index in chosen]
            numbers = [[max(each[index], 0) for index in chosen] for each in counts]
            mine = [given[tables[index]] for index in chosen if tables[index] in given]
            no_rows, no_grads = (torch.empty(0, dtype=one, device=device) for one in (torch.int64, dtype))
            rows = self._gather_parts([no_rows, *(rows for rows, _ in mine)], [1] * len(chosen), numbers)
            scaled = [no_grads, *((grads / size).to(dtype) for _, grads in mine)]
            grads = self._gather_parts(scaled, widths, numbers)
            for place, index in enumerate(chosen):
                if any(each[index] >= 0 for each in counts):
                    found[tables[index]] = rows[place].flatten(), grads[place]
        return found

    def _gather_parts(
        self,
        mine: Sequence[torch.Tensor],
        widths: Sequence[int],
        numbers: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Return the rows of each table from all ranks, in the order of the ranks.

        Args:
            mine: the rows of the tables on this rank; the first tensor is empty.
            widths: of the rows of each table.
            numbers: how many rows each rank has of each table.
        """
        sizes = [[n * width for n, width in zip(each, widths, strict=True)] for each in numbers]
        flat = torch.cat([part.flatten() for part in mine])
        padded = flat.new_zeros(max(map(sum, sizes)))
        padded[: len(flat)] = flat
        parts = [
            torch.split(each[: sum(lengths)], lengths)
            for each, lengths in zip(self._gather(padded, len(numbers)), sizes, strict=True)
        ]
        return [
            torch.cat(of_table).reshape(-1, width) for *of_table, width in zip(*parts, widths, strict=True)
        ]

    def _gather(self, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
        everywhere = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(everywhere, tensor, group=self._group)
        return everywhere


def check_replication(tables: Mapping[str, torch.Tensor], replicated: bool) -> None:
    """Raise RuntimeError if DistributedDataParallel reduces tables that are updated in the backward pass."""
    ddp: Any = DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    reduced = {id(param) for param in ddp._module_parameters if param.requires_grad}
    names = [name for name, table in tables.items() if id(table) in reduced]
    if names:
        first = "" if replicated else "pass process_group=... to the embedding module, and "
        raise RuntimeError(
            f"DistributedDataParallel cannot reduce the gradients of table {names[0]!r}, which is updated in "
            f"the backward pass, so its replicas would drift apart: {first}before wrapping the model call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) with the "
            "names of the parameters of its tables, or give DistributedModelParallel a "
            "DefaultDataParallelWrapper(params_to_ignore=names)"
        )


def _gradient_dtype(table: torch.Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)
