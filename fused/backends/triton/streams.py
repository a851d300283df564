"""CUDA streams: memory that one stream fills and others use, and a side stream for the sort."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import StreamId, capturing, current_id, stream_of

#: The error of a capture that needs memory which a graph cannot allocate.
TOO_SOON = "take a step of the same kind before you capture one in a CUDA graph"
#: The environment variable: "1" sorts in a side stream, not in that of the forward pass. Off by default: on
#: an H100 a step with dense layers took 2 to 4 % longer with it, for 8 thousand to 2 million values.
OVERLAP = "KEYEDOPT_OVERLAP"


class StreamTensors(NamedTuple):
    """Tensors of a device; on CUDA also the stream that fills them, and an event after that."""

    tensors: tuple[Tensor, ...]
    stream: StreamId | None = None
    event: Any = None

    @classmethod
    def record(cls, *tensors: Tensor, event: bool = True) -> "StreamTensors":
        """Return tensors that the work in the current stream fills.

        Args:
            tensors: of one device.
            event: whether to record the event now. Otherwise another stream that uses the tensors waits for
                all that is in the stream by then: for tensors that seldom cross streams.
        """
        stream = current_id(tensors[0].device)
        if stream is None or capturing(tensors[0].device):  # events of a graph are not valid outside of it
            return cls(tensors)
        return cls(tensors, stream, stream_of(stream).record_event() if event else None)

    def on_current_stream(self) -> tuple[Tensor, ...]:
        """Return the tensors for use in the current stream; another stream waits for the event first.

        In a capture no wait is needed: torch synchronizes all streams before a capture.
        """
        if self.stream is None:
            return self.tensors
        device = self.tensors[0].device
        now = current_id(device)
        if now is not None and now != self.stream and not capturing(device):
            stream = stream_of(now)
            stream.wait_event(stream_of(self.stream).record_event() if self.event is None else self.event)
            for tensor in self.tensors:
                tensor.record_stream(stream)  # otherwise the memory could be reused too early
        return self.tensors


def side_stream(device: torch.device, given: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context for work in a side stream, which starts after the present work of the current stream.

    Without `OVERLAP` the body runs in the current stream.

    Only users of the results wait for them, see `StreamTensors`; results may also be dropped. Memory that the
    body allocates belongs to the side stream. The caller may free `given` at once; its memory stays until it
    has been read. If someone writes to it meanwhile, wrong numbers are read, and the backward pass raises an
    error.

    Which tensors cross streams: the given ones (`record_stream` here), the results (an event, and
    `record_stream`, in `StreamTensors`), buffers of `device_buffers` and the error flag (the same), and
    gradients (`fused.embedding.backward.ForwardGradients`). The memory of a sort belongs to one stream.

    In the capture of a CUDA graph the body runs in the captured stream. A graph may end with the forward
    pass, and the captured stream would have to wait for the side stream. Uncaptured work of another thread in
    the side stream must not get into the graph.

    Args:
        device: if it has no streams, the body is run as it is.
        given: the tensors that the body reads.
    """
    now = current_id(device)
    if now is None or not overlaps() or capturing(device):
        return nullcontext()
    side = _side_stream(device)
    side.wait_stream(stream_of(now))
    for tensor in {one.untyped_storage().data_ptr(): one for one in given}.values():
        tensor.record_stream(side)
    return torch.cuda.stream(side)


@cache
def _side_stream(device: torch.device) -> Any:
    """Return the side stream of a device, with high priority: lookups may fill the device."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def overlaps() -> bool:
    """Return whether sorts run in a side stream, see `OVERLAP`."""
    asked = os.environ.get(OVERLAP, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{OVERLAP} must be 0 or 1, not {asked!r}")
    return asked == "1"
