"""Agreement between ranks that share state: a load writes on all of them or on none.

Before anything is written, each rank adds its result of the checks to one all-reduce of three numbers. Only
if a rank refuses, the ranks exchange texts.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Agreement:
    """The agreement of the ranks in some process groups, which are the dimensions of one mesh."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def accept(self, plan: object) -> None:
        """Accept a load on this rank.

        Args:
            plan: what this rank is about to do in collectives; the plans of all ranks must be equal.

        Raises:
            ValueError: another rank refuses, or has another plan.
        """
        text = repr(plan)
        digest = zlib.crc32(text.encode())
        refusals, most, least = self._reduce([0, digest, -digest])
        if refusals:
            self._raise({})
        if most != -least:
            self._raise({dist.get_rank(): f"the state has other placements than on other ranks: {text}"})

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ValueError on all ranks, with the rank and the reason of each refusal."""
        self._reduce([1, 0, 0])
        self._raise({dist.get_rank(): str(error)}, error)

    def _reduce(self, numbers: list[int]) -> list[int]:
        device = dist.distributed_c10d._get_object_coll_device(self._groups[0])
        vote = torch.tensor(numbers, device=device)
        for group in self._groups:
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        result: list[int] = vote.tolist()
        return result

    def _raise(self, reasons: dict[int, str], error: Exception | None = None) -> NoReturn:
        for group in self._groups:
            everywhere: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everywhere, reasons, group=group)
            reasons = {rank: text for each in everywhere for rank, text in each.items()}
        texts = [f"rank {rank}: {reasons[rank]}" for rank in sorted(reasons)]
        raise ValueError(f"Nothing was loaded on any rank: {'; '.join(texts)}") from error


_ALONE = contextlib.nullcontext()


def shared_refusal(agreement: Agreement | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns an error of this rank into a refusal on all ranks."""
    return _ALONE if agreement is None else _refusal_on_all_ranks(agreement)


@contextlib.contextmanager
def _refusal_on_all_ranks(agreement: Agreement) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        agreement.refuse(error)


def agreement(process_group: Any, params: Iterable[Any], state: Iterable[Any]) -> Agreement | None:
    """Return the agreement of the ranks that share state, or None if this rank shares none.

    Args:
        process_group: these ranks. If it is None, they are the ranks over which parameters and state are
            sharded: the default group if there are several meshes, or if the mesh lacks some of the ranks.
        params: the parameters.
        state: their entries.
    """
    if not dist.is_initialized():
        return None
    if process_group is not None:
        return Agreement([process_group]) if dist.get_world_size(process_group) > 1 else None
    if dist.get_world_size() == 1:
        return None
    meshes: dict[Any, None] = {}
    for value in (*params, *_leaves(state)):
        if isinstance(value, DTensor):
            meshes[value.device_mesh] = None
        elif isinstance(value, ShardedTensor):
            meshes[value._process_group] = None
    if not meshes:
        return None
    mesh = next(iter(meshes))
    if len(meshes) > 1 or (isinstance(mesh, DeviceMesh) and _may_lack_ranks(mesh)):
        return Agreement([dist.group.WORLD])
    return Agreement(mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [mesh])


def _may_lack_ranks(mesh: Any) -> bool:
    """Return whether ranks outside a mesh may list its tensors; those of a slice have their own slice."""
    return bool(mesh._get_root_mesh().size() < dist.get_world_size())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _leaves(value.values())
        else:
            yield value
