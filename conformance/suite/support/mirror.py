"""Several ranks in one process: a process group whose other ranks have the same data as this one.

Every collective therefore has a known result: a sum over n ranks is n times the local value, a maximum is the
local value, and a gather is n copies of it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.sharded import process_group

MIRROR = "mirror"
# Base classes of process groups and of their results; the types differ between builds.
_AnyWork: Any = torch.distributed._Work  # type: ignore[attr-defined]
_ProcessGroup: Any = torch.distributed.ProcessGroup


class _MirrorWork(_AnyWork):  # type: ignore[misc]
    """Work that is complete at once."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the given result."""
        return self._result

    def get_future(self) -> Any:
        """Return a completed future."""
        return self._future


class Mirror(_ProcessGroup):  # type: ignore[misc]
    """Rank 0 of ``size`` ranks that all have the same data."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._count = size
        self._called = MIRROR

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's names
        """Store the name."""
        self._called = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name."""
        return self._called

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return MIRROR

    def name(self) -> str:
        """Return the name of the backend."""
        return MIRROR

    def size(self) -> int:
        """Return the number of ranks."""
        return self._count

    def rank(self) -> int:
        """Return 0."""
        return 0

    def allreduce(self, tensors: Any, options: Any) -> _MirrorWork:
        """Reduce over ranks that have the same data."""
        for tensor in tensors:
            if options.reduceOp == torch.distributed.ReduceOp.SUM:
                tensor.mul_(self._count)
            elif options.reduceOp == torch.distributed.ReduceOp.PRODUCT:
                tensor.pow_(self._count)
        return _MirrorWork(tensors)

    def allreduce_coalesced(self, tensors: Any, options: Any) -> _MirrorWork:
        """Reduce over ranks that have the same data."""
        return self.allreduce(tensors, options)

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> _MirrorWork:
        """Return a copy for each rank."""
        for copies, tensor in zip(outputs, tensors, strict=True):
            for copy in copies:
                copy.copy_(tensor)
        return _MirrorWork(outputs)

    def _allgather_base(self, output: Any, tensor: Any, options: Any = None) -> _MirrorWork:
        output.copy_(torch.cat([tensor.reshape(-1)] * self._count).reshape(output.shape))
        return _MirrorWork([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, options: Any = None) -> _MirrorWork:
        """Return a copy for each rank."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self._allgather_base(output, tensor)
        return _MirrorWork(outputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> _MirrorWork:
        """Return the part of this rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0])
        return _MirrorWork(outputs)

    def broadcast(self, tensors: Any, options: Any = None) -> _MirrorWork:
        """Change nothing."""
        return _MirrorWork(tensors)

    def barrier(self, options: Any = None) -> _MirrorWork:
        """Return at once."""
        return _MirrorWork([])


def _make_mirror(store: Any, rank: int, size: int, timeout: Any) -> Mirror:
    return Mirror(rank, size)


@contextlib.contextmanager
def mirrored_ranks(size: int = 2) -> Iterator[None]:
    """Set up torch.distributed with ranks that all have the data of this one, rank 0."""
    if not hasattr(torch.distributed.Backend, MIRROR.upper()):
        torch.distributed.Backend.register_backend(MIRROR, _make_mirror, devices=["cpu"])
    kinds = dict.fromkeys(["cpu", the_device().type])
    backends = ",".join(f"{kind}:{MIRROR}" for kind in kinds)
    with process_group(backends, size):
        yield
