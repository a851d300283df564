"""A table in the memory of the host, whose newest rows may be on a device."""

from typing import Any

from keyedopt.reference.embedding.row_cache import RowCache
from keyedopt.reference.embedding.table_collection import Table


class HostTable(Table):
    """A table on the host. Reading ``weight``, saving and loading first write its newer rows back."""

    cache: RowCache | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.cache is not None:
            self.cache.write_back()
        return super().__getattr__(name)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.get_parameter("weight")
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError(f"{prefix}weight is filled in place: call load_state_dict without assign=True")
        self.get_parameter("weight")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def state_on_host(key: str, value: Any, table: HostTable) -> Any:
    """Return the host's tensor for a new state; the state itself if it is not by row, as `<table>.iter`."""
    if key.endswith(".window"):
        raise ValueError(
            "optimizer_kwargs must not accumulate: a window has rows that would leave the device"
        )
    if key.endswith(".iter"):
        return value
    return value[:1].cpu().expand(len(table.get_parameter("weight")), *value.shape[1:]).contiguous()
