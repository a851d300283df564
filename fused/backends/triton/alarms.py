"""The alarm of each device, on the host: see `alarm`."""

from functools import cache

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing
from keyedopt.fused.backends.triton.streams import TOO_SOON, Filled

#: What the bits of the word mean.
WRONG = {1: "values must be row numbers of their table", 2: "offsets must go from 0 to the number of values"}


@cache
def _memory(device: torch.device) -> Filled:
    if capturing(device):  # it would be the graph's, and every replay would call off the alarm
        raise RuntimeError(TOO_SOON)
    memory = torch.zeros(4, dtype=torch.int64, device=device)
    memory[1:2] = 1  # filled, for a list would be copied, and waited for
    return Filled.by_now(memory)


def alarm_of(device: torch.device, heard: bool = True) -> Tensor:
    """Return the word of a device, (1,) int32; 0 as long as nothing was wrong.

    Not `heard`, it is another that nobody asks for: for a kernel whose lookups are those of `forward.pool`,
    which raises the alarm, and which may run so late that the host has asked already, or that its memory is
    used for something else.
    """
    (memory,) = _memory(device).here()
    return memory[0 if heard else 2 :].view(torch.int32)[:1]


def sound_of(device: torch.device) -> Tensor:
    """Return a number on the device, (1,) int64: 1 as long as nothing was wrong, then 0."""
    (memory,) = _memory(device).here()
    return memory[1:2]


def check(device: torch.device) -> None:
    """Wait for the device, and raise what was wrong since the last time, once.

    Raises:
        ValueError: says what; nothing was written since.
    """
    if device.type == "cuda":  # all its streams: an alarm of another one could be called off unheard
        torch.cuda.synchronize(device)
    alarm = alarm_of(device)
    bits = int(alarm)
    if bits:
        alarm.zero_()
        sound_of(device).fill_(1)
        wrong = [what for bit, what in WRONG.items() if bits & bit]
        raise ValueError(
            f"what was looked up on {device} was wrong: {'; '.join(wrong)}; no table was updated since"
        )
