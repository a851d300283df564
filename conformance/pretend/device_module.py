"""``torch.npu``: what torch and programs ask of the module of a device."""

from typing import Any

import torch

from keyedopt.conformance.pretend.devices import COUNT, current_device, device_of, on_device, set_device
from keyedopt.conformance.pretend.generators import (
    default_generators,
    get_rng_state,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed_all,
    set_rng_state,
)
from keyedopt.conformance.pretend.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    synchronize,
)
from keyedopt.conformance.pretend.synchronizations import synchronizations

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronizations",
    "synchronize",
]


#: The context in which a device is the current one.
device = on_device


def stream(stream: Stream) -> Stream:
    """Return a context in which a stream is the current one."""
    return stream


def device_count() -> int:
    """Return the number of devices."""
    return COUNT


def is_available() -> bool:
    """Return True: the device needs no hardware."""
    return True


def is_initialized() -> bool:
    """Return True: there is nothing to initialize."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def get_device_name(device: Any = None) -> str:
    """Return the name of a device."""
    return f"pretend accelerator {device_of(device).index}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast takes."""
    return [torch.float16, torch.bfloat16]
