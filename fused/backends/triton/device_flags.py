"""The error flag of each device, on the host; `error_flag` has the device functions."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing, current_id, on_cuda, stream_of
from keyedopt.fused.backends.triton.streams import TOO_SOON, StreamTensors

#: The meaning of the bits of the flag.
ERRORS = {1: "values must be row numbers of their table", 2: "offsets must go from 0 to the number of values"}


@cache
def _memory(device: torch.device) -> StreamTensors:
    """Return the flag, the other flag, the increment, and the part of the flag that the host reads."""
    if capturing(device):  # the memory would belong to the graph, and every replay would clear the flag
        raise RuntimeError(TOO_SOON)
    memory = torch.zeros(4, dtype=torch.int64, device=device)
    memory[1:2] = 1  # a slice is filled without a copy from the host, which would synchronize
    flags = memory.view(torch.int32)
    return StreamTensors.record(flags[:3], flags[4:7], memory[1:2], flags[:1])


def error_flag(device: torch.device, reported: bool = True) -> Tensor:
    """Return the error flag of a device, int32, of which the first is 0 while all lookups were valid.

    Kernels that set it write `step_increment`, too, which is the third.

    Args:
        device: of the tables.
        reported: whether `check` reads the flag. If False, the result is another flag, which no one reads:
            for a kernel whose lookups `forward.pool` checks, too, and which may run after `check`, or after
            the memory of its input was reused.
    """
    return _memory(device).on_current_stream()[0 if reported else 1]


def step_increment(device: torch.device) -> Tensor:
    """Return what a step adds to step counts, (1,) int64 on the device: 1; 0 once the error flag is set."""
    return _memory(device).on_current_stream()[2]


@dataclass(frozen=True)
class _Copy:
    """The flag on its way to the host: pinned memory, and an event after the copy."""

    host: Tensor
    event: Any


#: The copy of the flag of each device that was begun last, and one that has arrived, for the next.
_COPIES: dict[torch.device, _Copy] = {}
_SPARE: dict[torch.device, _Copy] = {}


def send_flag(device: torch.device) -> None:
    """Begin to copy the flag to the host, unless a copy is on its way; on the CPU, raise what was wrong."""
    if not on_cuda(device):
        check(device)
        return
    stream = current_id(device)
    if device in _COPIES or stream is None or capturing(device):
        return
    copy = _SPARE.pop(device, None)
    if copy is None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copy = _Copy(torch.empty(1, dtype=torch.int32, pin_memory=True), event)
    copy.host.copy_(_memory(device).on_current_stream()[3], non_blocking=True)
    stream_of(stream).record_event(copy.event)
    _COPIES[device] = copy  # the memory stays there until the copy has ended


def check_arrived(device: torch.device) -> None:
    """Raise what was wrong with earlier lookups, if that is known on the host; does not synchronize.

    Raises:
        ValueError: says what was wrong; no table was updated since.
    """
    copy = _COPIES.get(device)
    if copy is None or capturing(device) or not copy.event.query():
        return
    wrong = bool(copy.host.item())
    if _COPIES.pop(device, None) is copy:  # else another thread has it
        _SPARE[device] = copy
    if wrong:
        check(device)


def check(device: torch.device) -> None:
    """Synchronize, raise what was wrong since the last call, and clear the flag.

    Raises:
        ValueError: says what was wrong; no table was updated since.
    """
    if on_cuda(device):  # all streams: another one could set the flag just before it is cleared
        torch.cuda.synchronize(device)
    _COPIES.pop(device, None)
    flag = _memory(device).on_current_stream()[3]
    bits = int(flag.item())
    if bits:
        flag.zero_()
        step_increment(device).fill_(1)
        if on_cuda(device):  # a step in another stream could still see the flag, and would write nothing
            torch.cuda.synchronize(device)
        wrong = [what for bit, what in ERRORS.items() if bits & bit]
        raise ValueError(
            f"invalid lookups on {device}: {'; '.join(wrong)}; no table was updated since then. A module "
            "made with strict=True raises the error at once, and names the feature"
        )
