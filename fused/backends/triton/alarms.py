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


def check(device: torch.device) -> None:
    """Wait for the device, and raise what was wrong since the last time, once.

    Raises:
        ValueError: says what; nothing was written since.
    """
    alarm = alarm_of(device)
    bits = int(alarm)
    if bits:
        alarm.zero_()
        wrong = [what for bit, what in WRONG.items() if bits & bit]
        raise ValueError(
            f"what was looked up on {device} was wrong: {'; '.join(wrong)}; no table was updated since"
        )
