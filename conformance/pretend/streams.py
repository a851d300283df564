"""The current device, streams and events, and the copies that the host sees only after it synchronizes.

Operators run at once. A copy to the host with ``non_blocking=True`` fills its target with poison; the numbers
arrive when the host waits for the stream, for an event after the copy, or for the device.
"""

import threading
import time
from functools import cache
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from keyedopt.conformance.pretend.devices import COUNT, NAME, current_device, device_of, set_device
from keyedopt.conformance.pretend.memory import CPU_KERNEL
from keyedopt.conformance.pretend.synchronizations import note

_copy = torch.ops.aten.copy_.default.redispatch
_numbers = count(1)


class _Current(threading.local):
    """The stream of a thread for each device."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


class _Copy(NamedTuple):
    """A copy that the host does not see yet."""

    number: int
    stream: int
    to: torch.Tensor
    numbers: torch.Tensor


#: The copies of each device that the host does not see yet, oldest first.
_late: list[list[_Copy]] = [[] for _ in range(COUNT)]


def copy_late(to: torch.Tensor, numbers: torch.Tensor, device: torch.device) -> None:
    """Deliver numbers to a CPU tensor when the host waits for the current stream of a device."""
    kind = to.dtype
    if kind.is_floating_point or kind.is_complex:
        to.fill_(float("nan"))
    elif kind == torch.bool:
        torch.logical_not(numbers, out=to)
    else:
        to.fill_(torch.iinfo(kind).max - 1)
    _late[device.index].append(_Copy(next(_numbers), current_stream(device).stream_id, to, numbers))


def deliver(device: torch.device, streams: dict[int, float] | None = None) -> bool:
    """Deliver the copies of a device, or of streams up to a number each; return whether there were any."""
    found: list[_Copy] = []
    kept: list[_Copy] = []
    for copy in _late[device.index]:
        ready = streams is None or copy.number <= streams.get(copy.stream, 0)
        (found if ready else kept).append(copy)
    _late[device.index] = kept
    for copy in found:
        _copy(CPU_KERNEL, copy.to, copy.numbers)
    return bool(found)


def wait(device: torch.device, operator: str) -> None:
    """Let the host wait for the current stream of a device."""
    note(operator)
    if _late[device.index]:
        current_stream(device).deliver()


class Stream:
    """A queue of work of a device."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device_of(device)
        self.priority = priority
        self.stream_id = next(_numbers)
        # For each stream that this one waits for, the number of the last piece of work.
        self._after: dict[int, float] = {}
        self._outer: list[tuple[int, Stream]] = []

    @property
    def device_index(self) -> int:
        """Return the index of the device."""
        return self.device.index

    def reached(self) -> dict[int, float]:
        """Return for each stream the number up to which its work is done when this stream is done."""
        return {**self._after, self.stream_id: next(_numbers)}

    def deliver(self) -> bool:
        """Deliver the copies of the stream; return whether there were any."""
        return deliver(self.device, self.reached())

    def synchronize(self) -> None:
        """Let the host wait for the work of the stream."""
        note("Stream.synchronize")
        self.deliver()

    def query(self) -> bool:
        """Return whether the work was done. A host that asks again has waited."""
        return not self.deliver()

    def wait_event(self, event: "Event") -> None:
        """Let later work of the stream wait for an event, on the device."""
        for stream, number in event.reached.items():
            self._after[stream] = max(number, self._after.get(stream, 0))

    def wait_stream(self, stream: "Stream") -> None:
        """Let later work of the stream wait for the work of another one, on the device."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        self._outer.append((current_device(), current_stream(self.device)))
        set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        index, stream = self._outer.pop()
        set_stream(stream)
        set_device(index)

    def __repr__(self) -> str:
        return f"<torch.{NAME}.Stream {self.stream_id} of {self.device}>"


class Event:
    """A mark in a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self.reached: dict[int, float] = {}
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the event in a stream, or in the current one."""
        stream = stream or current_stream()
        self.device, self.reached, self._time = stream.device, stream.reached(), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of a stream, or of the current one, wait for the event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the work before the event was done. A host that asks again has waited."""
        return self.device is None or not deliver(self.device, self.reached)

    def synchronize(self) -> None:
        """Let the host wait for the work before the event."""
        note("Event.synchronize")
        self.query()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two recorded events.

        Raises:
            ValueError: one of the events does not measure time, or is not recorded.
        """
        for event in (self, end):
            if not event.enable_timing or event.device is None:
                raise ValueError("elapsed_time needs two recorded events that have enable_timing=True")
        return (end._time - self._time) * 1000


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device."""
    found = device_of(device)
    return _current.streams.get(found.index) or _default_stream(found)


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device on which work runs by default."""
    return _default_stream(device_of(device))


@cache
def _default_stream(device: torch.device) -> Stream:
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Make a stream the current one, and its device the current one."""
    _current.streams[stream.device_index] = stream
    set_device(stream.device_index)


def synchronize(device: Any = None) -> None:
    """Let the host wait for all work of a device."""
    note("synchronize")
    deliver(device_of(device))


_current = _Current()
