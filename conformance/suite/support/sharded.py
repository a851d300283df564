"""Helpers for cases of several ranks: distributed tensors, and what each rank did."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.device import on_host, the_device
from keyedopt.conformance.suite.support.inputs import _numbers

#: The meshes of the process group of all ranks, by their shape and ranks.
_MESHES: dict[Any, Any] = {}
#: The ways in which a table (rows, columns) may be spread over ranks.
PLACEMENTS = ("row", "column", "replicated", "row of two dimensions")


def rank() -> int:
    """Return the number of this rank."""
    return int(torch.distributed.get_rank())


def size() -> int:
    """Return the number of ranks."""
    return int(torch.distributed.get_world_size())


def one_by_one(optimizer: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a factory of torch's optimizer; its foreach kernels refuse DTensors beside plain tensors."""
    return functools.partial(optimizer, foreach=False, **options)


def everyone() -> Any:
    """Return the process group of all ranks."""
    return torch.distributed.group.WORLD


def mesh_of(numbers: torch.Tensor) -> Any:
    """Return the mesh of these ranks: all cases of a process group share it.

    A mesh makes process groups, whose threads wake up all the time.
    """
    from torch.distributed.device_mesh import DeviceMesh

    key = tuple(numbers.shape), tuple(numbers.flatten().tolist())
    if key not in _MESHES:
        _MESHES[key] = DeviceMesh(the_device().type, numbers)
    return _MESHES[key]


@contextlib.contextmanager
def process_group(backend: str, size: int, store: Any = None) -> Iterator[None]:
    """Set up torch.distributed with this process as rank 0 of ``size``, by default with a store in memory.

    The meshes of a case end with its group. A fork that inherited one would crash when it drops the mesh: the
    destructor of a gloo group joins threads that the fork does not have.
    """
    store = store or torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=size)
        try:
            yield
        finally:
            _MESHES.clear()
            torch.distributed.destroy_process_group()


def distributed(whole: torch.Tensor, placement: str, ranks: Sequence[int] | None = None) -> Any:
    """Return a DTensor with these values, on a mesh of all ranks or of the given ones.

    With ``"row of two dimensions"`` the mesh is (n, 1), or (n / 2, 2), and rows are on its second dimension.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    numbers = torch.tensor(range(size()) if ranks is None else ranks)
    kinds: dict[str, list[Any]] = {"row": [Shard(0)], "column": [Shard(1)], "replicated": [Replicate()]}
    if placement == "row of two dimensions":
        numbers = numbers.reshape(-1, 2 if len(numbers) % 2 == 0 else 1)
        return distribute_tensor(whole, mesh_of(numbers), [Replicate(), Shard(0)])
    return distribute_tensor(whole, mesh_of(numbers), kinds[placement])


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a DTensor or a tensor, detached, on the CPU."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return on_host(found)


def local_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors on this rank of a DTensor or a ShardedTensor, or the tensor itself."""
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()]


def table(rows: int, columns: int = 4, seed: int = 0) -> torch.Tensor:
    """Return fixed values in (-1, 1), the same on each rank, on its device."""
    return _numbers((rows, columns), seed).to(the_device(), torch.float32)


def everywhere(value: Any) -> list[Any]:
    """Return a value of each rank."""
    found: list[Any] = [None] * size()
    torch.distributed.all_gather_object(found, value)
    return found
