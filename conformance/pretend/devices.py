"""The indices of the pretend device, and the current one of a thread."""

import ctypes
from functools import cache
from types import TracebackType
from typing import Any

import torch

NAME = "npu"
#: The number of pretend devices: ``npu:0`` and ``npu:1``.
COUNT = 2


_threads = ctypes.PyDLL(None)
_threads.pthread_getspecific.restype = ctypes.c_ssize_t
_key = ctypes.c_uint32()
_threads.pthread_key_create(ctypes.byref(_key), None)
#: Where C keeps the current index of each thread, so that it can be set while Python must not run.
KEY = _key.value
#: The address of the function that sets it.
SET = ctypes.cast(_threads.pthread_setspecific, ctypes.c_void_p).value or 0


@cache
def is_pretend(device: torch.device) -> bool:
    """Return whether this is a pretend device; cached, because `device.type` builds a string."""
    return device.type == NAME


def device_of(device: Any = None) -> torch.device:
    """Return a device with its index; without a device or an index it is the current one.

    Raises:
        RuntimeError: there is no such device.
    """
    if device is None or device == -1:
        return _device(current_device())
    found: Any = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    if found.type == NAME and found.index is None:
        return _device(current_device())
    if found.type != NAME or found.index >= COUNT:
        raise RuntimeError(f"there is no device {str(found)!r} here: use {NAME}:0 to {NAME}:{COUNT - 1}")
    return found


@cache
def _device(index: int) -> torch.device:
    return torch.device(NAME, index)


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return int(_threads.pthread_getspecific(KEY))


def set_device(device: Any) -> None:
    """Make a device the current one of this thread."""
    exchange_device(device_of(device).index)


def exchange_device(index: int) -> int:
    """Make the device of an index the current one of this thread; return the index of the last one."""
    outer = current_device()
    _threads.pthread_setspecific(KEY, index)
    return outer


class on_device:  # noqa: N801 - named as in torch.cuda, where it is `torch.cuda.device`
    """Make a device the current one inside a ``with`` block."""

    def __init__(self, device: Any) -> None:
        self.idx = device_of(device).index
        self._outer: list[int] = []

    def __enter__(self) -> None:
        self._outer.append(exchange_device(self.idx))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        exchange_device(self._outer.pop())
