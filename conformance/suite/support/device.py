"""The device under test, and tensors on it.

Every tensor that a case gives to an implementation is on this device: a case makes it with a function of this
file or of `inputs`. Tensors made by ``torch`` are expected values: they are computed and compared on the CPU.
"""

import functools
from typing import Any

import torch

_CHOSEN = [torch.device("cpu")]


def the_device() -> torch.device:
    """Return the device under test."""
    return _CHOSEN[0]


def choose_device(device: str | torch.device) -> None:
    """Set the device under test."""
    _CHOSEN[0] = torch.device(device)


def synchronize() -> None:
    """Wait for all work on the device under test; on the CPU and on ``meta`` there is nothing to wait for."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == the_device().type:
        torch.accelerator.synchronize(the_device())


def seed_torch(number: int) -> None:
    """Seed torch on the CPU, and on accelerators if there are any.

    Without accelerators, `torch.manual_seed` queues a call with its stack for each kind of them, which takes
    milliseconds.
    """
    if _has_accelerators():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@functools.cache
def _has_accelerators() -> bool:
    return torch.accelerator.is_available()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy of a tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def tensor(data: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.tensor`, on the device under test."""
    return torch.tensor(data, device=the_device(), **options)


def as_tensor(data: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.as_tensor`, on the device under test."""
    return torch.as_tensor(data, device=the_device(), **options)


def zeros(*shape: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.zeros`, on the device under test."""
    return torch.zeros(*shape, device=the_device(), **options)


def ones(*shape: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.ones`, on the device under test."""
    return torch.ones(*shape, device=the_device(), **options)


def full(shape: Any, value: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.full`, on the device under test."""
    return torch.full(shape, value, device=the_device(), **options)


def arange(*limits: Any, **options: Any) -> torch.Tensor:
    """Make a tensor like `torch.arange`, on the device under test."""
    return torch.arange(*limits, device=the_device(), **options)


def linear(inputs: int, outputs: int, **options: Any) -> torch.nn.Linear:
    """Make a module like `torch.nn.Linear`, on the device under test."""
    return torch.nn.Linear(inputs, outputs, device=the_device(), **options)
