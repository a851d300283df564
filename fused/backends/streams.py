"""The current stream of a device, and whether it is captured, also for devices without streams."""

from typing import Any

import torch


def current(device: torch.device) -> Any:
    """Return the current stream of a device; None if the device has no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
