"""What the streams of a device are about; of one without streams, nothing."""

from typing import Any

import torch


def current(device: torch.device) -> Any:
    """Return the current stream of a device; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def capturing(device: torch.device) -> bool:
    """Whether what the current stream of a device is told to do is put into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
