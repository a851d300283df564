"""Where the host waited for the pretend device."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_recordings: list[list["Synchronization"]] = []


@dataclass(frozen=True)
class Synchronization:
    """One wait of the host: the operator, and the file and line outside torch that ran it."""

    operator: str
    place: str


@contextmanager
def synchronizations() -> Iterator[list[Synchronization]]:
    """Give a list to which each wait of the host for the device is appended, in any thread."""
    found: list[Synchronization] = []
    _recordings.append(found)
    try:
        yield found
    finally:
        # By identity: two empty lists are equal.
        del _recordings[next(i for i, other in enumerate(_recordings) if other is found)]


def note(operator: str) -> None:
    """Record that an operator makes the host wait for the device."""
    if _recordings:
        record = Synchronization(operator, _place(sys._getframe(1)))
        for recording in _recordings:
            recording.append(record)


def _place(frame: FrameType | None) -> str:
    """Return the file and line of the first frame that belongs neither to torch nor to the device."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OURS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward pass of torch"
