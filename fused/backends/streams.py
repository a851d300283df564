"""The current stream of a device, and whether it is captured, also for devices without streams.

Every launch asks for the stream. On the host of a GPU torch's public functions took a quarter of the time of
a step of 8 tables, because each checks its argument and builds an object; the functions below them do not.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

#: The number of a stream among those of its device, the index of the device, and the number of its type.
StreamId = tuple[int, int, int]


@cache
def on_cuda(device: torch.device) -> bool:
    """Return whether this is a CUDA device; cached, because `device.type` builds a string."""
    return device.type == "cuda"


def current_id(device: torch.device) -> StreamId | None:
    """Return what identifies the current stream of a device; None if the device has no streams."""
    if not on_cuda(device):
        return None
    index = device.index
    return torch._C._cuda_getCurrentStream(torch.cuda.current_device() if index is None else index)


def stream_of(identity: StreamId) -> Any:
    """Return the stream that `current_id` identifies."""
    number, index, kind = identity
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured in a CUDA graph."""
    if not on_cuda(device):
        return False
    if torch._C._cuda_getDevice() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_NOTHING = nullcontext()


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one, on which Triton launches."""
    if not on_cuda(device) or torch._C._cuda_getDevice() == device.index:
        return _NOTHING
    return torch.cuda.device(device)
