"""The error flag of each device, on the host; `error_flag` has the device functions."""

from functools import cache

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing
from keyedopt.fused.backends.triton.streams import TOO_SOON, StreamTensors

#: The meaning of the bits of the flag.
ERRORS = {1: "values must be row numbers of their table", 2: "offsets must go from 0 to the number of values"}


@cache
def _memory(device: torch.device) -> StreamTensors:
    if capturing(device):  # the memory would belong to the graph, and every replay would clear the flag
        raise RuntimeError(TOO_SOON)
    memory = torch.zeros(4, dtype=torch.int64, device=device)
    memory[1:2] = 1  # a slice is filled without a copy from the host, which would synchronize
    return StreamTensors.record(memory)


def error_flag(device: torch.device, reported: bool = True) -> Tensor:
    """Return the error flag of a device, (1,) int32; 0 while all lookups were valid.

    Args:
        device: of the tables.
        reported: whether `check` reads the flag. If False, the result is another flag, which no one reads:
            for a kernel whose lookups `forward.pool` checks, too, and which may run after `check`, or after
            the memory of its input was reused.
    """
    (memory,) = _memory(device).on_current_stream()
    return memory[0 if reported else 2 :].view(torch.int32)[:1]


def step_increment(device: torch.device) -> Tensor:
    """Return what a step adds to step counts, (1,) int64 on the device: 1; 0 once the error flag is set."""
    (memory,) = _memory(device).on_current_stream()
    return memory[1:2]


def check(device: torch.device) -> None:
    """Synchronize, raise what was wrong since the last call, and clear the flag.

    Raises:
        ValueError: says what was wrong; no table was updated since.
    """
    if device.type == "cuda":  # all streams: another one could set the flag just before it is cleared
        torch.cuda.synchronize(device)
    flag = error_flag(device)
    bits = int(flag)
    if bits:
        flag.zero_()
        step_increment(device).fill_(1)
        wrong = [what for bit, what in ERRORS.items() if bits & bit]
        raise ValueError(f"invalid lookups on {device}: {'; '.join(wrong)}; no table was updated since then")
