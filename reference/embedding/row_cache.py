"""The rows of one table that a device holds, while the whole table is in the memory of the host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.embedding.config import EmbeddingConfig


class RowCache:
    """Keeps recently used rows of a table, and of its state by row, on a device.

    The row that was used longest ago leaves first, and is written back if it was updated. Beside the rows,
    the device has 4 bytes for each row of the table, and 17 for each row that it can hold.

    Args:
        name: of the table.
        host: the table (R, D), and each state by row (R, …), on the host.
        device: the same for C rows, (C, …), on the device.

    Attributes:
        row_of: the row in each place on the device, (C,) int64; -1 in a free one.
        changes: how often places were freed for other rows.
        used, loaded: how many distinct rows were looked up, and how many of these came from the host.
    """

    def __init__(self, name: str, host: Sequence[Tensor], device: Sequence[Tensor]) -> None:
        self.name, self._host, self._device = name, list(host), list(device)
        (rows, *_), (places, *_) = host[0].shape, device[0].shape
        where = device[0].device
        self._place_of = torch.full((rows,), -1, dtype=torch.int32, device=where)
        self.row_of = torch.full((places,), -1, dtype=torch.int64, device=where)
        self._last_use = torch.full((places,), -1, dtype=torch.int64, device=where)
        self._updated = torch.zeros(places, dtype=torch.bool, device=where)
        self._versions = self._versions_of_host()
        self._clock = self.changes = self.used = self.loaded = 0

    def load(self, rows: Tensor, in_use: Iterable[Tensor]) -> Tensor:
        """Return the places of distinct rows on the device; those that are missing come from the host.

        Args:
            rows: (U,) int64, on the device.
            in_use: places of rows that must stay, too.

        Raises:
            ValueError: more rows must be on the device at once than it can hold; nothing is changed.
            RuntimeError: the table on the host was written while newer rows were on the device.
        """
        self._check_host()
        places = self._place_of[rows]
        missing = rows[places < 0]
        if len(missing):
            free = self._free(len(missing), [places[places >= 0].long(), *in_use])
            self._evict(free)
            here = missing.cpu()
            for host, device in zip(self._host, self._device, strict=True):
                device.data[free] = _gathered(host, here, device.device)
            self.row_of[free] = missing
            self._place_of[missing] = free.int()
            places = self._place_of[rows]
        found = places.long()
        self._clock += 1
        self._last_use[found] = self._clock
        self.used, self.loaded = self.used + len(rows), self.loaded + len(missing)
        return found

    def places(self, rows: Tensor) -> Tensor:
        """Return the places of rows that are on the device."""
        return self._place_of[rows].long()

    def mark_updated(self, places: Tensor) -> None:
        """Note that rows differ from those on the host."""
        self._updated[places] = True

    def explain(self) -> str:
        """Return how many rows the device holds, and how many of those looked up came from the host."""
        return (
            f"{self.name}: {len(self.row_of)} of {len(self._place_of)} rows on {self.row_of.device}; "
            f"of {self.used} distinct rows in all batches {self.loaded} came from the host"
        )

    def write_back(self) -> None:
        """Copy the rows that were updated to the host."""
        self._write_back(self._updated.nonzero()[:, 0])

    def _write_back(self, places: Tensor) -> None:
        rows = self.row_of[places].cpu()
        if len(rows):
            for host, device in zip(self._host, self._device, strict=True):
                host.data[rows] = device.data[places].cpu()  # `data` does not count as a write by others
            self._updated[places] = False

    def _versions_of_host(self) -> list[tuple[int, int, torch.Size]]:
        """Return what changes if a tensor on the host is written, or gets other memory through ``data``."""
        return [(tensor._version, tensor.data_ptr(), tensor.shape) for tensor in self._host]

    def _check_host(self) -> None:
        """Forget all rows if the table or its state was written on the host, for example by a load."""
        versions = self._versions_of_host()
        if versions == self._versions:
            return
        for host, (*_, size) in zip(self._host, self._versions, strict=True):
            if host.shape != size:
                raise RuntimeError(
                    f"table {self.name!r} or its state is {tuple(host.shape)} on the host, and was "
                    f"{tuple(size)}: a table of another size needs a new module"
                )
        if bool(self._updated.any()):
            raise RuntimeError(
                f"table {self.name!r} or its state was written on the host while newer rows of it were on "
                "the device: call flush() before writing"
            )
        self._evict(torch.arange(len(self.row_of), device=self.row_of.device))
        self._versions = versions

    def _free(self, count: int, in_use: Sequence[Tensor]) -> Tensor:
        """Return places of rows that were used longest ago, without any that are in use."""
        last_use = self._last_use.clone()
        last_use[torch.cat(list(in_use))] = self._clock + 1
        places = torch.topk(last_use, min(count, len(last_use)), largest=False).indices
        if len(places) < count or int(last_use[places[-1]]) > self._clock:
            needed = count + int((last_use > self._clock).sum())
            raise ValueError(
                f"{needed} rows of table {self.name!r} must be on the device at once, for this forward pass "
                f"and those that wait for their update, but cached_rows is {len(self.row_of)}: give more"
            )
        return places

    def _evict(self, places: Tensor) -> None:
        """Write updated rows back, then free their places, so that a load that fails leaves no wrong row."""
        self._write_back(places[self._updated[places]])
        rows = self.row_of[places]
        self._place_of[rows[rows >= 0]] = -1
        self.row_of[places], self._last_use[places] = -1, -1
        self.changes += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = self._versions_of_host()


def _gathered(host: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return rows of a tensor on the host as a tensor on the device, through pinned memory to CUDA."""
    if device.type != "cuda":
        return host.data[rows].to(device)
    staged = torch.empty((len(rows), *host.shape[1:]), dtype=host.dtype, pin_memory=True)
    torch.index_select(host.data, 0, rows, out=staged)
    return staged.to(device, non_blocking=True)


def places_by_table(
    tables: Sequence[EmbeddingConfig], cached_rows: int | Mapping[str, int]
) -> dict[str, int]:
    """Return the number of rows of each table that the device holds."""
    given = cached_rows if isinstance(cached_rows, Mapping) else {one.name: cached_rows for one in tables}
    names = [table.name for table in tables]
    if sorted(given) != sorted(names):
        raise ValueError(f"cached_rows must be one number, or one for each of {names}, not for {list(given)}")
    for name, count in given.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"cached_rows of table {name!r} must be an integer of at least 1, not {count!r}")
    return {table.name: min(given[table.name], table.num_embeddings) for table in tables}
