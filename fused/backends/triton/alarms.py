"""The alarm of each device, on the host: see `alarm`."""

from functools import cache

import torch
from torch import Tensor

#: What the bits of the word mean.
WRONG = {1: "values must be row numbers of their table", 2: "offsets must go from 0 to the number of values"}


@cache
def alarm_of(device: torch.device) -> Tensor:
    """Return the word of a device, (1,) int32; 0 as long as nothing was wrong."""
    return torch.zeros(1, dtype=torch.int32, device=device)
