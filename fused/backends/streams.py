"""The current stream of a device, and whether it is captured, also for devices without streams."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def on_cuda(device: torch.device) -> bool:
    """Return whether this is a CUDA device; cached, because `device.type` builds a string."""
    return device.type == "cuda"


def current(device: torch.device) -> Any:
    """Return the current stream of a device; None if the device has no streams."""
    return torch.cuda.current_stream(device) if on_cuda(device) else None


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured in a CUDA graph."""
    if not on_cuda(device):
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_NOTHING = nullcontext()


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one, on which Triton launches."""
    return torch.cuda.device(device) if on_cuda(device) else _NOTHING
